"""verl's reward function: paid is an answer that equals the ground truth, and nothing stalls training."""

import asyncio
import logging
import time
from types import SimpleNamespace

import pytest

from oar_plugin.hosts.verl import reward
from oar_plugin.hosts.verl.reward import compute_score
from tests.real_data import MATH_RESPONSES, read_lines

KEYS = {"score", "acc", "no_answer", "unparsed", "failed"}

# Ground truths that the file's grader did not recognise in another notation (10000).
GRADER_IS_WRONG = {"10{,}000"}


@pytest.fixture(scope="module", autouse=True)
def one_pool():
    compute_score("test", r"\boxed{2 + 2}", "4", timeout_s=2.0, processes=1)
    yield
    reward._pool.close()
    reward._pool = None


@pytest.mark.parametrize(
    ("response", "truth", "flags"),
    [
        (r"\boxed{72}", "72", {"score", "acc"}),
        (r"\boxed{7 2}", 72, {"score", "acc"}),
        (r"\boxed{\frac{144}{2}}", "72", {"score", "acc"}),
        ("#### 72", "72", {"score", "acc"}),
        (r"\boxed{71}", "72", set()),
        (r"\boxed{72} or rather \boxed{71}", "72", set()),
        ("It is 72", "72", {"no_answer"}),
        (r"\boxed{72", "72", {"no_answer"}),
        ("", "72", {"no_answer"}),
        (r"\boxed{" + "1+" * 400 + "1}", "401", {"unparsed"}),
    ],
)
def test_each_row_has_every_key_and_says_why_it_got_nothing(response, truth, flags):
    row = compute_score("test", response, truth)
    assert set(row) == KEYS
    assert {key for key, value in row.items() if value == 1.0} == flags
    assert set(row.values()) <= {0.0, 1.0}


def test_an_answer_that_takes_for_ever_pays_nothing_in_bounded_time_and_is_flagged(caplog):
    caplog.set_level(logging.WARNING, logger="oar_plugin")
    started = time.monotonic()
    row = compute_score("test", r"\boxed{9^{9^{9^{9}}}}", "7")
    assert time.monotonic() - started < 120, "its ten seconds, and the start of new processes on a busy machine"
    assert (row["score"], row["failed"]) == (0.0, 1.0)
    assert "it pays 0" in caplog.text
    assert compute_score("test", r"\boxed{14/2}", "7")["score"] == 1.0


@pytest.mark.skipif(not MATH_RESPONSES.is_file(), reason="no responses of a real model here")
def test_on_real_responses_it_agrees_with_their_grader():
    rows = read_lines(MATH_RESPONSES)
    assert rows
    for row in rows:
        paid = compute_score("test", row["response"], row["ground_truth"])["score"] == 1.0
        assert paid is row["correct"] or row["ground_truth"] in GRADER_IS_WRONG


def test_verl_loads_and_calls_it():
    pytest.importorskip("verl")
    import numpy as np
    import torch
    from omegaconf import OmegaConf
    from verl import DataProto
    from verl.experimental.reward_loop.reward_manager.naive import NaiveRewardManager
    from verl.trainer.ppo.reward import get_custom_reward_fn

    tokenizer = SimpleNamespace(decode=lambda ids, **_: bytes(ids.tolist()).decode())
    function = {
        "path": "pkg://oar_plugin.hosts.verl.reward",
        "name": "compute_score",
        "reward_kwargs": {"timeout_s": 2.0},
    }
    config = OmegaConf.create({"reward": {"custom_reward_function": function}})
    response = list(rb"so \boxed{\frac{6}{2}}")
    data = DataProto.from_dict(
        tensors={
            "responses": torch.tensor([response]),
            "attention_mask": torch.ones(1, len(response) + 3, dtype=torch.long),
        },
        non_tensors={
            "data_source": np.array(["gsm8k"]),
            "reward_model": np.array([{"ground_truth": "3"}], dtype=object),
            "extra_info": np.array([{}], dtype=object),
        },
    )

    async def score():
        return await NaiveRewardManager(config, tokenizer, get_custom_reward_fn(config)).run_single(data)

    result = asyncio.run(score())
    assert result["reward_score"] == 1.0
    assert set(result["reward_extra_info"]) == KEYS
