"""What stops a verl run at its start, and what the command line can say."""

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

pytest.importorskip("verl")

import verl
from verl.models.transformers.dense_common import forward_with_torch_backend

from oar_plugin.config import LEFT, OarConfig, OarConfigError
from oar_plugin.hosts.verl import settings
from oar_plugin.hosts.verl.fsdp import fused_fault
from oar_plugin.hosts.verl.hydra_conf import CheckAtStart, command_line, mentions_oar
from oar_plugin.hosts.verl.settings import resolve, switched_on
from tests.asked import GIVEN
from tests.limits import PROCESS_S
from tests.passes.batch import random_model

ON = "algorithm.adv_estimator=oar"
TRAINER_CONFIG = Path(verl.__file__).parent / "trainer" / "config"
ACTOR, ROLLOUT = "actor_rollout_ref__actor__", "actor_rollout_ref__rollout__"
MEGATRON = ACTOR + "megatron__"
COPIES = "algorithm__oar__perturbation__"
OFFLOAD = {"algorithm__oar__importance": "oar_p", COPIES + "backend": "rollout", ROLLOUT + "name": "vllm"}


def config(**changes):
    base = OmegaConf.create(
        {
            "algorithm": {"adv_estimator": "oar"},
            "critic": {"enable": None},
            "trainer": {"use_v1": True, "v1": {"trainer_mode": "sync"}},
            "actor_rollout_ref": {
                "actor": {"strategy": "fsdp2"},
                "model": {"use_fused_kernels": False, "fused_kernel_options": {"impl_backend": "liger"}},
                "rollout": {"agent": {"agent_loop_manager_class": None}, "scheduling_policy": "fcfs"},
            },
        }
    )
    for key, value in changes.items():
        OmegaConf.update(base, key.replace("__", "."), value, force_add=True)
    return base


def test_the_one_line_is_enough():
    assert switched_on(config())
    assert not switched_on(config(algorithm__adv_estimator="grpo"))
    resolved = resolve(config())
    assert (resolved.importance, resolved.amortize.share, resolved.amortize.units) == ("oar_p", 0.025, 8)


@pytest.mark.parametrize("case", GIVEN["limits"])
def test_a_response_ends_at_the_first_of_all_limits(case):
    changes = {ROLLOUT + name: value for name, value in case["rollout"].items()} | {"data__max_response_length": 16}
    response, total = settings.length_limits(config(**changes))
    assert [response, total if total < 100 else None] == case["limits"]
    assert settings.length_limits(config(**changes), 5)[1] == 5 - (case["rollout"].get("name") == "sglang")


@pytest.mark.parametrize("case", GIVEN["doubts"])
def test_what_verl_takes_but_not_as_meant_is_said_and_stops_only_what_would_end(case, monkeypatch, capsys):
    sizes = {"data__train_batch_size": 16, "data__max_prompt_length": 4, "data__max_response_length": 8}
    sizes |= {ACTOR + "ppo_mini_batch_size": 8, ROLLOUT + "max_model_len": 16}
    made, words = config(**sizes, algorithm__adv_estimator=case.get("estimator", "oar")), case.get("words", [])
    groups = {"actor": "actor_rollout_ref.actor", "rollout": "actor_rollout_ref.rollout"}
    for name, group in {"data": "data", "trainer": "trainer", **groups}.items():
        OmegaConf.update(made, group, case.get(name, {}), force_add=True)
    found = list(settings.doubts(made, words))
    for (_, ends, text), said in zip(found, case["said"], strict=True):
        assert (ends, bool(re.search(said.removeprefix("! "), text))) == (said.startswith("! "), True), text
    monkeypatch.setattr(sys, "argv", ["main_ppo", *words])
    if not switched_on(made):  # then of other keys nothing is said
        found = [one for one in found if one[0] == "estimator"]
    with pytest.raises(SystemExit, match="verl stops") if any(of[1] for of in found) else contextlib.nullcontext():
        CheckAtStart().on_run_start(made)
    assert [f"oar: warning: {text}" for _, ends, text in found if not ends] == capsys.readouterr().err.splitlines()


def assert_refused(changes, parts):
    with pytest.raises(OarConfigError) as error:
        resolve(config(**changes))
    for part in parts:
        assert part in str(error.value)


@pytest.mark.parametrize(("changes", "parts"), GIVEN["refused"])
def test_combinations_that_cannot_work_are_refused(changes, parts):
    assert_refused(changes, parts)


@pytest.mark.parametrize(("changes", "parts"), GIVEN["refused_offload"])
def test_what_the_offload_cannot_work_with_is_refused(changes, parts):
    assert resolve(config(**OFFLOAD)).offloads
    assert not resolve(
        config(**OFFLOAD | {ROLLOUT + "name": "sglang", "algorithm__oar__importance": "fisher"})
    ).offloads
    assert_refused(OFFLOAD | changes, parts)


def test_without_a_vllm_the_offload_is_refused_where_it_would_run_and_the_local_backend_is_named(monkeypatch):
    monkeypatch.setattr(settings, "installed", lambda: None)
    with pytest.raises(OarConfigError, match=r"backend=rollout: vLLM is not installed.*backend=actor"):
        resolve(config(**OFFLOAD), here=True)
    assert resolve(config(**OFFLOAD)).offloads, "a plan needs none"


@pytest.mark.parametrize(("changes", "parts"), GIVEN["refused_megatron"])
def test_what_megatron_does_not_serve_is_refused_there_and_only_there(changes, parts):
    assert_refused({ACTOR + "strategy": "megatron"} | changes, parts)
    assert resolve(config(**changes))


VIRTUAL = {
    ACTOR + "strategy": "megatron",
    MEGATRON + "pipeline_model_parallel_size": 2,
    MEGATRON + "virtual_pipeline_model_parallel_size": 2,
    MEGATRON + "tensor_model_parallel_size": 2,
    "trainer__nnodes": 2,
    "trainer__n_gpus_per_node": 8,
    ACTOR + "ppo_mini_batch_size": 12,
    ROLLOUT + "n": 2,
}
GROUP = MEGATRON + "override_transformer_config__microbatch_group_size_per_vp_stage"


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({}, None),  # 24 rows on 4 ranks, in groups of 2
        ({ACTOR + "ppo_mini_batch_size": 6}, ["ppo_mini_batch_size=6", "n=2", "4 data-parallel", "multiple of 4"]),
        ({ACTOR + "ppo_mini_batch_size": 6, MEGATRON + "virtual_pipeline_model_parallel_size": None}, None),
        ({GROUP: 4}, ["multiple of 4 rows", "ppo_mini_batch_size a multiple of 8"]),
        ({GROUP: 3}, None),
        ({MEGATRON + "context_parallel_size": 2, GROUP: 4}, None),
    ],
)
def test_a_virtual_pipeline_gets_rows_for_whole_groups_of_micro_batches(changes, parts):
    if parts is None:
        assert resolve(config(**VIRTUAL | changes))
    else:
        assert_refused(VIRTUAL | changes, parts)


def test_a_model_for_which_verl_has_no_fused_forward_is_refused(monkeypatch):
    model = random_model()
    assert fused_fault(model).startswith("LlamaForCausalLM: verl has no fused forward")
    monkeypatch.setattr(type(model), "forward", forward_with_torch_backend)
    assert fused_fault(model) == ""


def test_the_command_line_decides_whether_hydra_sees_our_keys():
    for words in ([ON], ["oar=published"], ["+oar=published"], ["++algorithm.oar.tau=0.3"]):
        assert mentions_oar(words)
    assert not any(mentions_oar(words) for words in (["algorithm.adv_estimator=grpo", "oar.x=1"], []))


def main_ppo(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    words = [sys.executable, "-m", "verl.trainer.main_ppo", *arguments]
    environment = {**os.environ, "HYDRA_FULL_ERROR": "0", **environment}
    return subprocess.run(words, capture_output=True, text=True, timeout=PROCESS_S, env=environment)


def settings_of(*overrides: str, name: str = "ppo_trainer", folder: Path = TRAINER_CONFIG) -> OarConfig:
    """What a run with these arguments would be set to."""
    with command_line(["--config-name", name, *overrides]), initialize_config_dir(str(folder), version_base=None):
        return resolve(compose(name, list(overrides)))


def test_with_nothing_but_the_estimator_every_setting_has_its_default():
    assert settings_of(ON) == OarConfig()


def test_a_configuration_of_ones_own_takes_the_same_words(tmp_path):
    """With and without our group in its defaults list, or in that of the file that it is built on."""
    plain = "defaults: [ppo_trainer, _self_]\nalgorithm: {adv_estimator: oar}\n"
    preset = plain.replace("ppo_trainer", "ppo_trainer, oar: default")
    files = {"plain": plain, "preset": preset, "built": "defaults: [part, _self_]\n"}
    for name, text in files.items():
        (tmp_path / f"{name}.yaml").write_text("hydra: {searchpath: [pkg://verl.trainer.config]}\n" + text)
    (tmp_path / "part.yaml").write_text(preset)
    for name in files:
        one = settings_of("oar=published", "algorithm.oar.tau=0.3", name=name, folder=tmp_path)
        assert (one.tau, one.importance, one.probe, one.warmup_steps) == (0.3, "oar_g", "answer_mean", 20), name


@pytest.mark.parametrize("setting", LEFT)
def test_who_uses_what_left_reads_what_to_write_instead(setting):
    word = setting if setting.startswith("oar=") else f"algorithm.oar.{setting}{'' if '=' in setting else '=0.3'}"
    with pytest.raises((OarConfigError, SystemExit), match=r"was removed in oar_plugin 0\.4\.0: "):
        settings_of(ON, word)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["+oar=published", "--cfg", "job"], ["write oar=published"]),
        (["algorithm.oar.tau=1.5", "algorithm.oar.seed=-1"], ["algorithm.oar.tau=1.5", "algorithm.oar.seed=-1"]),
    ],
)
def test_a_bad_setting_stops_the_run_before_anything_starts_and_says_what_to_write(arguments, parts):
    done = main_ppo(ON, *arguments)
    assert done.returncode == 1
    assert all(part in done.stderr for part in parts)
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_another_estimator_composes_the_same_configuration_with_and_without_the_plugin():
    words = "algorithm.adv_estimator=grpo", "--cfg", "job"
    with_plugin = main_ppo(*words)
    # verl by itself knows no platform "cpu", which somebody may have set.
    without = main_ppo(*words, VERL_USE_EXTERNAL_PLUGINS="none", VERL_PLATFORM="")
    assert with_plugin.stdout == without.stdout
    assert "oar" not in without.stdout.split("algorithm:")[1].split("trainer:")[0]
