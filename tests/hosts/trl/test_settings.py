"""What cannot work is refused at construction, with key, value and what is allowed."""

from types import SimpleNamespace

import pytest
from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy

from oar_plugin.config import OarConfigError
from oar_plugin.hosts.trl import OarGRPOTrainer
from oar_plugin.passes.taps import UnsupportedModelError
from tests.hosts.trl import tiny

SEQUENCE = {"importance_sampling_level": "sequence"}
ROLLOUT = {"importance": "oar_p", "perturbation": {"backend": "rollout"}}


@pytest.mark.parametrize(
    ("oar", "said"),
    [
        ({"beta2": 1}, "oar.beta2=1: unknown key; did you mean oar.beta?"),
        ({"dump": {"evry": 1}}, "oar.dump.evry=1: unknown key; did you mean oar.dump.every?"),
        ({"gate": "steep"}, "oar.gate='steep'"),
        ({"answer_patterns": []}, "allowed: probe=last"),
        (ROLLOUT, "oar.perturbation.backend=rollout: TRL's engines score no copies; allowed: actor"),
        ({"base_estimator": "rloo"}, "oar.base_estimator=rloo: the advantage is TRL's own"),
        ({"importance": "oar_p", "perturbation": {"span": 0}}, "oar.perturbation.span=0"),
    ],
)
def test_a_setting_of_oar_that_cannot_work(tmp_path, oar, said):
    with pytest.raises(OarConfigError, match=r"(?s)allowed|greater") as raised:
        tiny.make(OarGRPOTrainer, tmp_path, oar=oar)
    assert said in str(raised.value)


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    return tiny.make(OarGRPOTrainer, tmp_path_factory.mktemp("run"))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"use_liger_kernel": True}, "use_liger_kernel=True: .* allowed: False"),
        ({"torch_compile": True}, "torch_compile=True: .* allowed: False"),
        *(
            (
                {**SEQUENCE, "loss_type": loss},
                f"importance_sampling_level=sequence with loss_type={loss}: .* allowed: token",
            )
            for loss in ("grpo", "bnpo", "dr_grpo", "dapo", "sapo", "luspo")
        ),
        ({"parallelism_config": SimpleNamespace(tp_size=2)}, r"parallelism_config\.tp_size=2: .* allowed: 1"),
        (
            {"gradient_accumulation_steps": 3, "steps_per_generation": 2},
            "steps_per_generation=2, .* allowed: a multiple of gradient_accumulation_steps=3",
        ),
    ],
)
def test_a_setting_of_trl_that_cannot_work(trainer, monkeypatch, changes, said):
    """Set on the finished configuration: TRL itself wants Liger installed, processes for tensor parallelism, and compiles."""
    for name, value in changes.items():
        monkeypatch.setattr(trainer.args, name, value)
    (fault,) = trainer._faults()
    with pytest.raises(OarConfigError, match=said):
        raise OarConfigError(fault)


def test_all_faults_are_told_at_once_at_construction(tmp_path):
    with pytest.raises(OarConfigError) as raised:
        tiny.make(OarGRPOTrainer, tmp_path, oar=ROLLOUT, loss_type="dapo", **SEQUENCE)
    assert [line.partition("=")[0] for line in str(raised.value).splitlines()] == [
        "oar.perturbation.backend",
        "importance_sampling_level",
    ]


@pytest.mark.parametrize(
    ("where", "name", "value", "said"),
    [
        ("", "_is_vlm", True, "model=Qwen2ForCausalLM: .* allowed: text models"),
        ("model", "hf_device_map", {"a": 0, "b": 1}, "device_map over 2 devices: .* allowed: one"),
        ("state", "fsdp_plugin", SimpleNamespace(cpu_offload=CPUOffload(True)), "fsdp_config.offload_params=True"),
        ("state", "fsdp_plugin", SimpleNamespace(cpu_offload=CPUOffloadPolicy()), "fsdp_config.offload_params=True"),
    ],
)
def test_a_model_that_is_laid_out_otherwise(trainer, monkeypatch, where, name, value, said):
    """Said of this model: none of these can be had on one CPU."""
    if where == "state":
        monkeypatch.setitem(trainer.accelerator.state._shared_state, name, value)
    else:
        monkeypatch.setattr(trainer.model if where else trainer, name, value, raising=False)
    (fault,) = trainer._faults()
    with pytest.raises(OarConfigError, match=said):
        raise OarConfigError(fault)


def test_a_model_whose_logits_cannot_be_read(tmp_path):
    model = tiny.make_model()
    model.config.final_logit_softcapping = 30.0
    with pytest.raises(UnsupportedModelError, match="final_logit_softcapping=30"):
        tiny.make(OarGRPOTrainer, tmp_path, model=model)
