"""`oar plan`: exit status, output and messages."""

import json

import pytest

from oar_plugin.cli.main import main

SMALL = "qwen2_5_7b_math"


def test_a_recipe_by_its_name(capsys):
    assert main(["plan", "qwen2_5_32b_megatron"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for text in (
        "Verdict: fits",
        "50% of the responses scored",
        "402 steps",
        "GPU-hours on 32 GPUs",
        "Assumed:",
        "No run",
    ):
        assert text in shown


def test_what_does_not_fit_is_said_by_the_exit_status_and_what_to_change(capsys):
    assert main(["plan", SMALL, "--gpu-memory", "27"]) == 1
    shown = capsys.readouterr().out
    assert "Verdict: does not fit" in shown
    assert "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192" in shown


def test_json_is_all_that_is_printed_and_overrides_may_stand_behind_options(capsys):
    words = ["--gpus", "16", "data.max_response_length=1024", "--json", "--gpu", "h200", "data.max_prompt_length=512"]
    assert main(["plan", SMALL, *words]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["projection"]
    assert values["gpus"] == 16
    assert values["gpu"]["name"].startswith("NVIDIA H200")
    assert (values["mean_prompt"], values["mean_response"]) == (128, 512)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "recipes: qwen2_5_14b_deepmath"),
        ([SMALL, "--gpu", "abacus"], "allowed: A100-40"),
        ([SMALL, "--gpus", "12"], "multiple of 8"),
        ([SMALL, "--response-length", "9999"], "--response-length 9999: must be above 0 and at most 2048"),
        ([SMALL, "actor_rollout_ref.actor.ppo_mini_batch_size=100"], "actor_rollout_ref.actor.ppo_mini_batch_size=100"),
        ([SMALL, "actor_rollout_ref.model.path=nobody/Model"], "--model DIR"),
        ([SMALL, "algorithm.oar.tau=2"], "algorithm.oar.tau=2: Input should be less than or equal to 1"),
        ([SMALL, "actor_rollout_ref.actor.use_dynamic_bsz=False"], "ppo_micro_batch_size_per_gpu"),
    ],
)
def test_wrong_input_is_named(arguments, message, capsys):
    assert main(["plan", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_stray_argument_is_refused(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["plan", SMALL, "--gpu", "H100-80", "--color"])
    assert exit_.value.code == 2
    assert "--color" in capsys.readouterr().err
