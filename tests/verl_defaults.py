"""verl's defaults for each engine, for `oar plan` where verl is absent; `python -m tests.verl_defaults` writes them."""

from pathlib import Path

import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from oar_plugin.hosts.verl import hydra_conf
from oar_plugin.runs.recipe import flat

FOLDER = Path(hydra_conf.__file__).parent / "conf_of_verl"
HEAD = """\
# @package _global_
# The configuration that verl 0.9.1 (Copyright 2024 Bytedance Ltd., Apache-2.0) composes: python -m tests.verl_defaults
"""
ENGINES = ("dp", "megatron")


def composed(folder, engine):
    """`a.b.c` -> value."""
    with initialize_config_dir(str(folder), version_base=None):
        return dict(flat(OmegaConf.to_container(compose(hydra_conf.PRIMARY, [f"model_engine={engine}"]))))


def write(name, values):
    config = OmegaConf.create()
    for key, value in values.items():
        OmegaConf.update(config, key, value)
    text = yaml.safe_dump(OmegaConf.to_container(config), sort_keys=False, default_flow_style=None, width=118)
    (FOLDER / f"{name}.yaml").write_text(HEAD + text)


if __name__ == "__main__":
    one, other = (composed(hydra_conf.config_folder(), engine) for engine in ENGINES)
    shared = {key: value for key, value in one.items() if key in other and repr(other[key]) == repr(value)}
    write(hydra_conf.PRIMARY, {"defaults": [{"model_engine": ENGINES[0]}, "_self_"]} | shared)
    for engine, values in zip(ENGINES, (one, other), strict=True):
        write(f"model_engine/{engine}", {key: value for key, value in values.items() if key not in shared})
