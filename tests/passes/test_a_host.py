"""The host that docs/your-own-host.md shows, on a small model: its code runs, and gives what the front door gives."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed
from torch.nn.utils.rnn import pad_sequence

import oar_plugin
from oar_plugin.page.record import parse_header, parse_response
from tests.hosts.engine import world

DOCUMENT = (Path(__file__).parents[2] / "docs/your-own-host.md").read_text()
SETTINGS = {"answer_patterns": ["hash"], "dump": {"dir": "credit"}}
TOOL = 2  # responses start with so many tokens that the model did not write, in the batch of a tool


@pytest.fixture(scope="module")
def shown():
    """What the document's code defines."""
    names: dict[str, Any] = {}
    exec("\n".join(re.findall(r"```python\n(.*?)```", DOCUMENT, re.DOTALL)), names)
    return SimpleNamespace(**{name: names[name] for name in ("TokenCredit", "Dumps", "dump")})


@pytest.fixture
def batch():
    prompts, responses = zip(*world.encode(), strict=True)
    advantages = torch.tensor([0.5 * needed for *_, needed in world.ROWS])[:, None]
    return {
        "prompts": pad_sequence(list(prompts), True, world.PAD, "left"),
        "prompt_mask": pad_sequence([torch.ones(len(ids)).bool() for ids in prompts], True, False, "left"),
        "responses": pad_sequence(list(responses), True, world.PAD),
        "response_mask": (own := pad_sequence([torch.ones(len(ids)).bool() for ids in responses], True, False)),
        "own": own,
        "advantages": advantages.expand(own.shape),
        "rewards": torch.tensor([1.0, 0, 0, 0, 1, 0, 0, 0]),
        "groups": list("aabbccdd"),
        "texts": [prompt for prompt, *_ in world.ROWS],
    }


@pytest.fixture
def asked(monkeypatch):
    """What a group of one process was asked to reduce."""
    numbers, reduce = [], distributed.all_reduce
    monkeypatch.setattr(distributed, "all_reduce", lambda x, op: (numbers.append(int(x)), reduce(x, op)))
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield numbers
    distributed.destroy_process_group()


def reshaped(shown, model, batch, folder=None, **settings):
    """A step of the host: what it got, and with a folder the dump."""
    credit = shown.TokenCredit(model, world.make_tokenizer(), SETTINGS | settings)
    parts = credit.of(batch, 1, world.MAX_RESPONSE_LENGTH)
    if folder is not None:
        dumps = shown.Dumps(credit.config.dump, folder, "credit")
        shown.dump(dumps, credit, batch, 1, *parts)
    return parts[0]


@pytest.mark.parametrize("importance", ["fisher", "hybrid"])
def test_its_weights_are_the_front_doors_and_each_response_keeps_its_total(
    shown, model, batch, asked, monkeypatch, importance
):
    for layer in model.model.layers:
        monkeypatch.setattr(layer.self_attn, "attention_dropout", 0.5)  # acts in train mode
    done = reshaped(shown, model.train(), batch, importance=importance)
    got = done.advantage_BL
    assert all(module.training for module in model.modules())
    assert len(asked) == (1 if importance == "fisher" else 2)  # the gradient pass, then the copies
    assert not any(parameter.grad is not None for parameter in model.parameters())
    texts = {"prompts": [world.ROWS[n][0] for n in world.SCORED], "responses": [world.ROWS[n][1] for n in world.SCORED]}
    want = oar_plugin.importance(
        model.eval(), **texts, tokenizer=world.make_tokenizer(), importance=importance, answer_patterns=["hash"]
    )
    for place, row in enumerate(world.SCORED):
        response = world.encode()[row][1]
        whole = want.attention_mask[place].nonzero()[:, 0][-len(response) :]
        torch.testing.assert_close(got[row, : len(response)], 0.5 * want.weights[place, whole], atol=1e-5, rtol=0)
    others = [row for row in range(len(world.ROWS)) if row not in world.SCORED]
    assert torch.equal(got[others], batch["advantages"][others])
    torch.testing.assert_close((got * batch["own"]).sum(-1), (batch["advantages"] * batch["own"]).sum(-1))
    assert done.metrics["scored"] == len(world.SCORED) / len(world.ROWS)
    assert done.metrics["fallback/truncated"] == done.metrics["fallback/no_reasoning"] == 1 / 7


def test_its_dump_is_read_by_the_inspector_and_what_a_tool_wrote_is_not_scored(shown, model, batch, tmp_path):
    batch["own"] = batch["own"].clone()
    batch["own"][:, :TOOL] = False
    assert "oar/dump_failed" not in reshaped(shown, model, batch, tmp_path).metrics
    header, *lines = (tmp_path / "credit/step_000001.jsonl").read_text().splitlines()
    assert parse_header(header).config["importance"] == "fisher"
    responses = [parse_response(line) for line in lines]
    assert [(one.group, one.status.upper()) for one in responses] == [
        (group, world.STATUS[row]) for row, group in enumerate("aabbccdd") if group in "ac"
    ]
    assert not any(any(one.importance["fisher"][:TOOL]) or set(one.weights[:TOOL]) != {1.0} for one in responses)
    assert any(any(one.importance["fisher"][TOOL:]) for one in responses)


def test_a_dump_that_fails_costs_a_metric(shown, model, batch, tmp_path):
    batch["rewards"] = None
    assert reshaped(shown, model, batch, tmp_path).metrics["oar/dump_failed"] == 1
