"""What cannot work is refused at construction, with key, value and what is allowed."""

import re
from types import SimpleNamespace

import pytest
from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy

from oar_plugin.config import OarConfigError
from oar_plugin.hosts.trl import OarGRPOTrainer
from oar_plugin.passes.taps import UnsupportedModelError
from tests.asked import GONE
from tests.hosts.trl import tiny

ALL = [
    "oar.perturbation.backend=rollout: TRL's engines score no copies; allowed: actor",
    r"oar\.base_estimator=rloo: the advantage is TRL's own, .* allowed: grpo",
    "importance_sampling_level=sequence with loss_type=dapo: .* allowed: token",
]


@pytest.mark.parametrize(
    ("oar", "said"),
    [
        ({"importance": "oar_p", "perturbation": {"backend": "rollout"}, "base_estimator": "rloo"}, ALL),
        ({"beta2": 1}, [r"oar\.beta2=1: unknown key; did you mean oar\.beta\?"]),
        ("fisher", ["oar='fisher': must be a mapping"]),
        ({"answer_patterns": ["boxed", "x"]}, [r"oar\.answer_patterns\[1\]='x': "]),
        *((given, [r"oar\..*: was removed in oar_plugin 0\.4\.0: "]) for given in GONE),
    ],
)
def test_all_faults_of_the_settings_are_told_at_once_at_construction(tmp_path, oar, said):
    with pytest.raises(OarConfigError) as raised:
        tiny.make(OarGRPOTrainer, tmp_path, oar=oar, loss_type="dapo", importance_sampling_level="sequence")
    lines = str(raised.value).splitlines()
    assert [bool(re.match(*pair)) for pair in zip(said, lines, strict=True)] == [True] * len(said)


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    return tiny.make(OarGRPOTrainer, tmp_path_factory.mktemp("run"))


@pytest.mark.parametrize(
    ("where", "name", "value", "said"),
    [
        ("args", "use_liger_kernel", True, "use_liger_kernel=True: .* allowed: False"),
        ("args", "torch_compile", True, "torch_compile=True: .* allowed: False"),
        ("args", "parallelism_config", SimpleNamespace(tp_size=2), r"parallelism_config\.tp_size=2: .* allowed: 1"),
        ("args", "gradient_accumulation_steps", 3, "steps_per_generation=1, .* allowed: a multiple of .*_steps=3"),
        ("model", "hf_device_map", {"a": 0, "b": 1}, "device_map over 2 devices: .* allowed: one"),
        ("config", "logits_soft_cap", 30.0, r"logits_soft_cap=30\.0 in the model's config: .* allowed: models without"),
        ("trainer", "_is_vlm", True, "model=Qwen2ForCausalLM: .* allowed: text models"),
        ("state", "fsdp_plugin", SimpleNamespace(cpu_offload=CPUOffload(True)), "fsdp_config.offload_params=True"),
        ("state", "fsdp_plugin", SimpleNamespace(cpu_offload=CPUOffloadPolicy()), "fsdp_config.offload_params=True"),
    ],
)
def test_a_setting_of_trl_that_cannot_work(trainer, monkeypatch, where, name, value, said):
    """Set on a finished trainer: TRL itself compiles, and wants Liger installed and processes or GPUs for the others."""
    state = trainer.accelerator.state
    model = trainer.model
    owners = {"args": trainer.args, "model": model, "config": model.config, "trainer": trainer, "state": state}
    owner = owners[where]
    assert not list(trainer._faults())
    monkeypatch.setattr(owner, name, value, raising=False)
    (fault,) = trainer._faults()
    assert re.match(said, fault)


def test_a_model_whose_logits_cannot_be_read(tmp_path):
    model = tiny.make_model()
    model.get_output_embeddings = lambda: None
    with pytest.raises(UnsupportedModelError, match="get_output_embeddings"):
        tiny.make(OarGRPOTrainer, tmp_path, model=model)
