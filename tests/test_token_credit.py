"""The seam, through the host that docs/your-own-host.md shows: its code runs, on two ranks too, with the front door's scores.

Started by `ranks` with a folder, it is one of two ranks: a sharded model, with half of each group on each rank.
"""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import distributed
from torch.distributed.fsdp import fully_shard
from torch.nn.utils.rnn import pad_sequence
from transformers import Qwen2ForCausalLM

import oar_plugin
from oar_plugin import token_credit
from oar_plugin.cli.main import main
from oar_plugin.config import OarConfigError
from oar_plugin.page.dumps import Dumps
from oar_plugin.page.record import parse_header, parse_response
from oar_plugin.passes import prediction
from oar_plugin.token_credit import TokenCredit
from tests.hosts.engine import world
from tests.processes import ranks, worker

DOCUMENT = (Path(__file__).parents[1] / "docs/your-own-host.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", DOCUMENT, re.DOTALL)
SETTINGS = {"answer_patterns": ["hash"], "dump": {"dir": "credit", "every": 1}, "amortize": {"share": None}}
TOOL = 2  # responses start with so many tokens that the model did not write, in the batch of a tool
IMPORTANCES = ["fisher", "oar_p"]
SUM = distributed.ReduceOp.SUM
ROWS = range(len(world.ROWS))


def shown():
    names: dict[str, Any] = {}
    exec("\n".join(BLOCKS), names)
    return SimpleNamespace(**{name: names[name] for name in ("start", "credited")})


def batch_of(rows=ROWS):
    prompts, responses = zip(*(world.encode()[row] for row in rows), strict=True)
    advantages = torch.tensor([0.5 * world.ROWS[row][2] for row in rows])[:, None]
    return {
        "prompts": pad_sequence(list(prompts), True, world.PAD, "left"),
        "prompt_mask": pad_sequence([torch.ones(len(ids)).bool() for ids in prompts], True, False, "left"),
        "responses": pad_sequence(list(responses), True, world.PAD),
        "response_mask": (own := pad_sequence([torch.ones(len(ids)).bool() for ids in responses], True, False)),
        "own": own,
        "advantages": advantages.expand(own.shape),
        "rewards": [float(row % 4 == 0) for row in rows],
        "groups": ["aabbccdd"[row] for row in rows],
        "ids": [f"response {row}" for row in rows],
        "texts": [world.ROWS[row][0] for row in rows],
    }


@pytest.fixture(autouse=True)
def asked(monkeypatch):
    """The counts that a group of one process was asked to reduce."""
    numbers, reduce = [], distributed.all_reduce
    monkeypatch.setattr(
        distributed, "all_reduce", lambda x, op=SUM: (op is SUM or numbers.append(int(x)), reduce(x, op))
    )
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield numbers
    distributed.destroy_process_group()


def reshaped(model, batch, home, step=1, **settings):
    credit = shown().start(SETTINGS | settings, model, world.make_tokenizer(), home)
    return shown().credited(credit, model, batch, step, world.MAX_RESPONSE_LENGTH)


def read(home, step=1):
    header, *lines = (home / f"credit/step_{step:06d}.jsonl").read_text().splitlines()
    return parse_header(header), [parse_response(line) for line in lines]


@pytest.mark.parametrize("importance", IMPORTANCES)
def test_weights_are_the_front_doors_and_each_response_keeps_its_total(model, asked, monkeypatch, tmp_path, importance):
    for layer in model.model.layers:
        monkeypatch.setattr(layer.self_attn, "attention_dropout", 0.5)  # acts in train mode
    batch = batch_of()
    got, metrics = reshaped(model.train(), batch, tmp_path, importance=importance)
    assert all(module.training for module in model.modules())
    # The read, copies, and their forwards, or the gradient pass; 0 is the verdict of a trial.
    assert len([count for count in asked if count]) == (1 if importance == "fisher" else 3)
    assert not any(parameter.grad is not None for parameter in model.parameters())
    texts = {"prompts": [world.ROWS[n][0] for n in world.SCORED], "responses": [world.ROWS[n][1] for n in world.SCORED]}
    given = {"tokenizer": world.make_tokenizer(), "importance": importance, "answer_patterns": ["hash"]}
    want = oar_plugin.importance(model.eval(), **texts, **given)
    for place, row in enumerate(world.SCORED):
        response = world.encode()[row][1]
        whole = want.attention_mask[place].nonzero()[:, 0][-len(response) :]
        torch.testing.assert_close(got[row, : len(response)], 0.5 * want.weights[place, whole], atol=1e-5, rtol=0)
    others = [row for row in ROWS if row not in world.SCORED]
    assert torch.equal(got[others], batch["advantages"][others])
    torch.testing.assert_close((got * batch["own"]).sum(-1), (batch["advantages"] * batch["own"]).sum(-1))
    assert metrics["oar/scored"] == len(world.SCORED) / len(world.ROWS)
    assert metrics["oar/fallback/truncated"] == metrics["oar/fallback/no_reasoning"] == 1 / 7


def test_its_dump_is_read_by_the_inspector_and_what_a_tool_wrote_is_not_scored(model, tmp_path):
    batch = batch_of()
    batch["own"] = batch["own"].clone()
    batch["own"][:, :TOOL] = False
    assert reshaped(model, batch, tmp_path)[1]["oar/dump_failed"] == 0
    header, responses = read(tmp_path)
    assert header.config["importance"] == "oar_p"
    assert [(one.group, one.uid, one.status.upper()) for one in responses] == [
        (group, f"response {row}", world.STATUS[row]) for row, group in enumerate("aabbccdd") if group in "ac"
    ]
    assert {tuple(one.mask[: TOOL + 1]) for one in responses} == {(0, 0, 1)}
    assert not any(any(one.importance["oar_p"][:TOOL]) or set(one.weights[:TOOL]) != {1.0} for one in responses)
    assert any(any(one.importance["oar_p"][TOOL:]) for one in responses)


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor], ids=["python", "numpy", "torch"])
def test_ids_groups_and_rewards_of_its_dump_may_be_any_numbers(model, tmp_path, kind):
    numbers = {"groups": [row // 2 for row in ROWS], "ids": [*ROWS], "rewards": [row % 4 == 0 for row in ROWS]}
    given = {name: kind(values) for name, values in numbers.items()}
    assert reshaped(model, batch_of() | given, tmp_path)[1]["oar/dump_failed"] == 0
    want = [(str(row // 2), str(row), float(row % 4 == 0)) for row in ROWS if row // 2 in (0, 2)]
    assert [(one.group, one.uid, one.reward) for one in read(tmp_path)[1]] == want


def test_its_dump_and_the_terminal_say_which_responses_were_predicted(model, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(prediction, "ENOUGH", world.ENOUGH)
    settings = SETTINGS | {"importance": "fisher", "amortize.share": 0.5}
    credit = shown().start(settings, model, world.make_tokenizer(), tmp_path)
    for step in (1, 2):
        shown().credited(credit, model, batch_of(), step, world.MAX_RESPONSE_LENGTH)
        _, responses = read(tmp_path, step)
        assert ("fisher, predicted" in {name for one in responses for name in one.importance}) == (step == 2)
    assert main(["inspect", str(tmp_path / "credit"), "--format", "text"]) == 0
    predicted = [one.uid for one in responses if "fisher, predicted" in one.importance]
    heads = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert [uid for uid in predicted if any(f"{uid}  scored  fisher, predicted" in head for head in heads)] == predicted


def test_two_responses_with_one_id_are_counted(model, tmp_path):
    assert reshaped(model, batch_of() | {"ids": [0 for _ in ROWS]}, tmp_path)[1]["oar/dump_failed"] == 1


@pytest.mark.parametrize(
    ("where", "name", "fault"),
    [
        (Dumps, "write", OSError("no space left")),
        (token_credit, "choose", KeyError("a mistake of ours")),
        (TokenCredit, "record", KeyError("a mistake of ours")),
        (None, "rewards", None),
    ],
)
def test_a_dump_that_fails_is_counted_changes_no_number_and_leaves_no_file(
    model, tmp_path, monkeypatch, where, name, fault
):
    batch = batch_of()
    want = reshaped(model, batch, tmp_path / "undisturbed")[0]
    if where is None:
        batch[name] = fault
    else:
        monkeypatch.setattr(where, name, mock.Mock(side_effect=fault))
    got, metrics = reshaped(model, batch, tmp_path)
    assert metrics["oar/dump_failed"] == 1
    assert torch.equal(got, want)
    assert not torch.equal(got, batch["advantages"])
    assert not list((tmp_path / "credit").iterdir())


def test_engines_that_score_masked_copies_are_refused_where_a_host_has_none():
    with pytest.raises(OarConfigError, match=r"credit\.perturbation\.backend=rollout: .* allowed: actor"):
        TokenCredit({"importance": "oar_p", "perturbation": {"backend": "rollout"}}, world.make_tokenizer(), "credit")


# ---- two ranks


def steps(home):
    """On a rank: at step 1 every other row of the batch, at step 2 nothing to score on the second rank, whose dump fails."""
    home = Path(home)
    distributed.init_process_group("gloo")
    rank, results = distributed.get_rank(), {}
    for importance in IMPORTANCES:
        model = fully_shard(Qwen2ForCausalLM.from_pretrained(home / "model").eval())
        for step in (1, 2):
            batch = batch_of(ROWS[rank::2])
            if rank and step == 2:
                batch |= {"advantages": torch.zeros_like(batch["advantages"]), "texts": None}
            results[importance, step] = reshaped(model, batch, home / importance, step, importance=importance)
    return results


@pytest.mark.slow
def test_two_ranks_with_a_sharded_model_get_the_same_and_one_file(model, folder, tmp_path):
    (tmp_path / "model").symlink_to(folder)
    results = ranks("tests.test_token_credit", tmp_path)
    for importance in IMPORTANCES:
        home = tmp_path / "one" / importance
        want, second = (reshaped(model, batch_of(), home, step, importance=importance)[0] for step in (1, 2))
        for rank in (0, 1):
            got, metrics = results[rank][importance, 1]
            torch.testing.assert_close(got, want[rank::2, : got.shape[1]], atol=1e-5, rtol=0)
            assert metrics["oar/dump_failed"] == 0
        (_, whole), (_, shared) = read(home), read(tmp_path / importance)
        assert [one.uid for one in shared] == [one.uid for one in whole]
        for one, two in zip(whole, shared, strict=True):
            assert two.importance[importance] == pytest.approx(one.importance[importance], rel=1e-3, abs=1e-6)
        got = results[0][importance, 2][0]
        torch.testing.assert_close(got, second[::2, : got.shape[1]], atol=1e-5, rtol=0)
        assert not results[1][importance, 2][0].any()
        assert [results[rank][importance, 2][1]["oar/dump_failed"] for rank in (0, 1)] == [1, 1]
        assert {one.uid for one in read(tmp_path / importance, 2)[1]} <= {f"response {row}" for row in ROWS[::2]}


if __name__ == "__main__":
    worker(steps)
