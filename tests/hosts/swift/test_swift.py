"""ms-swift's own program and trainer on a CPU: scores are the front door's, even credit is plain GRPO, and what is refused.

Stand-ins: responses are scripted in `_rollout`, except in the last test; `worker.py` says how FSDP2 runs on a CPU.
"""

import json
import re
import sys
from pathlib import Path

import pytest
from swift.trainers import TrainerFactory

from oar_plugin.config import OarConfigError
from oar_plugin.credit.answer import Segment
from oar_plugin.hosts import swift
from oar_plugin.hosts.swift import trainer as host
from oar_plugin.page.sources import read
from oar_plugin.token_credit import TokenCredit
from tests.hosts.siblings import EVEN, SIBLINGS, logged, same_weights
from tests.hosts.swift import tiny, worker
from tests.hosts.swift.tiny import Oar, Plain, train, weights
from tests.processes import ranks, run

TWO = {"per_device_train_batch_size": 2, "steps_per_generation": 2, "gradient_accumulation_steps": 2}


@pytest.fixture
def folder(tmp_path):
    tiny.files(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("oar", "flags"),
    [
        ({}, TWO),
        ({"importance": "oar_g", "sigma": 0.1, "seed": 3}, {"temperature": 0.7}),
        ({"importance": "oar_p", "perturbation.replacement": "pad"}, {"gradient_checkpointing": "true"}),
        ({}, {"tuner_type": "lora", "target_modules": ["q_proj", "v_proj"], "gradient_checkpointing": "true"}),
        ({}, {"bf16": "true", "torch_dtype": "bfloat16"}),
        ({}, {"scale_rewards": "gdpo", "reward_funcs": ["none", "paid"]}),
        ({}, {"advantage_estimator": "rloo", "beta": 0.1}),
        ({}, {"dynamic_sample": "true", "per_device_train_batch_size": 8}),
        (
            {},
            {
                "per_device_train_batch_size": 1,
                "steps_per_generation": 8,
                "gradient_accumulation_steps": 4,
                "max_steps": 4,
            },
        ),
        ({}, {"split_dataset_ratio": 0.2, "eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4}),
    ],
    ids=lambda value: "-".join(map(str, value.values())) or "fisher",
)
def test_scores_equal_the_front_doors(folder, oar, flags):
    trained = train(Oar, folder, oar, **flags)
    assert trained.error < 1e-5
    assert min(logged(trained, "oar/scored")) > 0


@pytest.mark.parametrize("overlong", ["false", "true"])
def test_the_masks_of_an_environment_and_of_cut_off_responses(folder, monkeypatch, overlong):
    monkeypatch.setattr(tiny.Scripted, "masks", True)
    trained = train(Oar, folder, overlong_filter=overlong)
    assert trained.error < 1e-5
    assert logged(trained, "oar/fallback/truncated") == [0.25, 0.25]
    for _, segments_BL, _ in trained.seen:
        assert (segments_BL == Segment.REASONING).any(-1).tolist() == [True, True, False, False]
    batch, segments_BL, _ = trained.seen[0]
    assert not batch.own_BL.all(-1).any()
    assert ((segments_BL != Segment.OUTSIDE) <= batch.own_BL).all()


def test_weights_multiply_advantages_and_dumps_can_be_read(folder):
    trained = train(Oar, folder, {"dump.dir": "credit", "dump.every": 1})
    plain = train(Plain, folder)
    assert max((weights(trained)[name] - one).abs().max() for name, one in weights(plain).items()) > 1e-4
    found = read([folder / "out" / "credit"]).items
    assert [(item.step, item.group, item.truth) for item in found] == [(n, "0", "5") for n in (1, 2) for _ in range(4)]
    assert ["".join(item.tokens) for item in found[:4]] == SIBLINGS
    assert found[0].prompt in [prompt + " so" * n for prompt in tiny.PROMPTS for n in range(8)]
    assert max(found[0].weights) > 1 > min(found[0].weights) > 0
    assert found[3].weights == [1.0] * len(found[3].tokens)


@pytest.mark.parametrize(
    ("flags", "bad", "scored"),
    [
        ({"reward_funcs": "none"}, 0.25, [0.5, 0.5]),
        ({"reward_funcs": "infinite"}, 1.0, [0, 0]),
        ({"reward_funcs": "equal"}, 0.0, [0, 0]),
        ({"reward_funcs": "equal", "kl_in_reward": "true", "beta": 0.5}, 0.0, [0, 0.75]),  # from the first update on
    ],
)
def test_bad_rewards_fall_back_and_are_counted(folder, flags, bad, scored):
    trained = train(Oar, folder, **flags)
    assert logged(trained, "oar/fallback/bad_reward") == [bad, bad]
    assert logged(trained, "oar/scored") == scored


def test_the_pass_takes_no_more_memory_than_the_hosts_own_forwards(folder, monkeypatch):
    asked, importance = [], TokenCredit.importance

    def watched(*given, **how):
        asked.append((given[2], how))
        return importance(*given, **how)

    monkeypatch.setattr(TokenCredit, "importance", watched)
    train(Oar, folder, gradient_checkpointing="true")
    assert all(how["max_tokens"] == 4 * int(batch.mask_BT.sum(1).max()) for batch, how in asked[::2]), (
        "every other call is the front door's"
    )
    assert all(how["checkpoint_activations"] for _, how in asked[::2])


@pytest.mark.parametrize(
    "flags",
    [
        {},
        TWO | {"num_iterations": 2, "gradient_checkpointing": "true"},
        {"loss_type": "dapo", "beta": 0.1},
        {"loss_type": "cispo", "importance_sampling_level": "sequence"},
    ],
    ids=lambda flags: "-".join(map(str, flags.values())) or "defaults",
)
def test_constant_importance_is_plain_grpo_bit_for_bit(folder, monkeypatch, flags):
    monkeypatch.setattr(tiny.Scripted, "drawn", True)
    plain, even = (weights(train(kind, folder, {"importance": EVEN}, **flags)) for kind in (Plain, Oar))
    assert max(logged(tiny.Scripted.last, "oar/fallback/constant")) > 0
    assert same_weights(plain, even)


def test_a_run_goes_on_from_its_checkpoint(folder, monkeypatch):
    monkeypatch.setattr(tiny.Scripted, "drawn", True)
    oar, long = {"importance": "oar_g"}, {"max_steps": 4, "num_iterations": 2}
    whole = weights(train(Oar, folder, oar, **long, save_strategy="steps", save_steps=2))
    (folder / "out" / "checkpoint-4").rename(folder / "whole")
    resumed = train(Oar, folder, oar, **long, resume_from_checkpoint=folder / "out" / "checkpoint-2")
    assert same_weights(whole, weights(resumed))
    assert resumed.state.global_step == 4


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            {"advantage_reweight": "rlsd", "dataset": "teacher.jsonl"},
            r"advantage_reweight=rlsd: two credits .* one of them",
        ),
        ({"sdar_loss_coef": 0.1, "dataset": "teacher.jsonl"}, r"sdar_loss_coef=0\.1: two credits"),
        ({"dataset": "teacher.jsonl"}, "a teacher, or a column teacher_prompt: .* allowed: none"),
        ({"loss_type": "fipo"}, "loss_type=fipo: two credits"),
        ({"loss_type": "real"}, "loss_type=real: .* allowed: another loss_type"),
        ({"off_policy_sequence_mask_delta": 0.1}, r"off_policy_sequence_mask_delta=0\.1: .* allowed: unset"),
        ({"importance_sampling_level": "sequence"}, "importance_sampling_level=sequence with loss_type=grpo: .*cispo"),
        ({"torch_compile": "true"}, "torch_compile=True: .* allowed: False"),
        ({"steps_per_generation": 1, "gradient_accumulation_steps": 2}, "steps_per_generation=1, .* a multiple of"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_work_is_refused_at_the_start(folder, flags, said):
    if flags.get("dataset"):
        flags = flags | {"dataset": folder / flags["dataset"]}
    with pytest.raises(OarConfigError) as raised:
        train(Oar, folder, **flags)
    assert any(re.match(said, line) for line in str(raised.value).splitlines()), raised.value


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("beta2: 1", r"oar\.beta2=1: unknown key"),
        ("[fisher]", r"oar=\['fisher'\]: must be a mapping"),
        ("{", "OAR_SETTINGS=.*; allowed: a YAML file"),
        (None, "OAR_SETTINGS=.*No such file.*; allowed: a YAML file"),
    ],
)
def test_a_file_of_settings_that_cannot_work(tmp_path, monkeypatch, text, said):
    monkeypatch.setenv(swift.VARIABLE, str(tmp_path / "oar.yaml"))
    if text is not None:
        (tmp_path / "oar.yaml").write_text(text)
    with pytest.raises(OarConfigError, match=said):
        swift.settings()


def test_only_the_plugin_changes_ms_swifts_table_and_not_for_megatron(monkeypatch):
    monkeypatch.setattr(TrainerFactory, "TRAINER_MAPPING", dict(TrainerFactory.TRAINER_MAPPING))
    path, table = Path(swift.__file__).with_name("plugin.py"), dict(TrainerFactory.TRAINER_MAPPING)
    assert "oar" not in str(table), "the host's modules are imported"
    exec(path.read_text(), {})
    assert table | {"grpo": f"{host.__name__}.OarGRPOTrainer"} == TrainerFactory.TRAINER_MAPPING
    monkeypatch.setitem(sys.modules, "swift.megatron", swift)
    with pytest.raises(OarConfigError, match=r"megatron rlhf: .* allowed: swift rlhf"):
        exec(path.read_text(), {})


@pytest.mark.slow
@pytest.mark.parametrize("layout", worker.LAYOUTS)
def test_two_processes_score_as_one_and_stay_plain_where_credit_is_even(folder, layout):
    for error, scored, plain, even in ranks(worker.__name__, layout, folder, DS_ACCELERATOR="cpu"):
        assert error < 1e-5
        assert scored == [0.75, 0.75]
        assert same_weights(plain, even)


@pytest.mark.slow
def test_the_command_of_the_document(folder):
    """Here the model writes the responses, which have no answers."""
    (folder / "oar.yaml").write_text("importance: fisher")
    reward = folder / "reward.py"
    reward.write_text("from tests.hosts.swift import tiny")
    plugins = [reward, Path(swift.__file__).with_name("plugin.py")]
    command = ["-m", "swift.cli.main", "rlhf", *tiny.words(folder, external_plugins=plugins)]
    run(command, folder / "log", 300, OAR_SETTINGS=str(folder / "oar.yaml"))
    lines = [json.loads(line) for line in (folder / "out" / "logging.jsonl").read_text().splitlines()]
    assert [line["oar/scored"] for line in lines if "oar/scored" in line] == [0, 0]
