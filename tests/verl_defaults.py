"""verl's defaults for each engine, for `oar plan` where verl is absent; `python -m tests.verl_defaults` writes them."""

from pathlib import Path

import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from oar_plugin.hosts.verl import hydra_conf

FOLDER = Path(hydra_conf.__file__).parent / "conf_of_verl"
HEAD = """\
# @package _global_
# The configuration that verl 0.9.1 (Copyright 2024 Bytedance Ltd., Apache-2.0) composes: python -m tests.verl_defaults
"""
ENGINES = ("dp", "megatron")


def composed(folder, engine):
    with initialize_config_dir(str(folder), version_base=None):
        return OmegaConf.to_container(compose(hydra_conf.PRIMARY, [f"model_engine={engine}"]))


def shared(one, other):
    """The keys that have the same value in both."""
    groups = {key for key in one.keys() & other.keys() if isinstance(one[key], dict) and isinstance(other[key], dict)}
    same = {key for key in one.keys() & other.keys() if (type(one[key]), one[key]) == (type(other[key]), other[key])}
    return {
        key: shared(value, other[key]) if key in groups else value for key, value in one.items() if key in groups | same
    }


def without(group, known):
    """The keys that `known` lacks."""
    left = {
        key: without(value, known[key]) if isinstance(value, dict) and key in known else value
        for key, value in group.items()
    }
    return {key: value for key, value in left.items() if key not in known or (isinstance(value, dict) and value)}


def write():
    of = {engine: composed(hydra_conf.config_folder(), engine) for engine in ENGINES}
    both = shared(*of.values())
    defaults = {"defaults": [{"model_engine": ENGINES[0]}, "_self_"]}
    files = {hydra_conf.PRIMARY: defaults | both} | {
        f"model_engine/{name}": without(of[name], both) for name in ENGINES
    }
    for name, values in files.items():
        text = yaml.safe_dump(values, sort_keys=False, default_flow_style=None, width=118)
        (FOLDER / f"{name}.yaml").write_text(HEAD + text)


if __name__ == "__main__":
    write()
