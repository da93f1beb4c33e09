"""The front door: any way to hand in responses gives the same credit, the engines' own, and the model is left as it was."""

import doctest
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import Qwen2ForCausalLM

import oar_plugin
from oar_plugin import front_door
from oar_plugin.config import OarConfigError
from oar_plugin.credit.answer import Segment
from oar_plugin.credit.diagnostics import Status
from oar_plugin.credit.noise import step_seed
from tests.hosts.engine import world

ROWS = world.SCORED
HASH = {"answer_patterns": ["hash"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    world.make_model(path)
    return path


@pytest.fixture
def model(folder):
    return Qwen2ForCausalLM.from_pretrained(folder).eval()


@pytest.fixture(scope="module")
def tokenizer():
    return world.make_tokenizer()


@pytest.fixture(scope="module")
def pairs():
    encoded = world.encode()
    return [encoded[row] for row in ROWS]


def texts(index):
    return [world.ROWS[row][index] for row in ROWS]


def error(credit, want, pairs):
    errors = []
    for place, ((prompt, response), row) in enumerate(zip(pairs, ROWS, strict=True)):
        got = credit.importance[place, len(prompt) : len(prompt) + len(response)]
        errors.append(((got - want[row]).abs().max() / want[row].max()).item())
        assert credit.importance[place].count_nonzero() == got.count_nonzero()
    return max(errors)


@pytest.mark.parametrize(
    ("importance", "reference", "bound"),
    [
        ("fisher", "fisher", 1e-5),
        ("onward", "onward", 1e-5),
        ("entropy", "entropy", 1e-5),
        ("python:tests.own_importance:Saliency", "own", 1e-4),
    ],
)
def test_it_is_what_plain_autograd_says(model, tokenizer, folder, pairs, importance, reference, bound):
    credit = oar_plugin.importance(
        model, prompts=texts(0), responses=texts(1), tokenizer=tokenizer, importance=importance, temperature=0.7, **HASH
    )
    want = world.reference(folder, importance=reference, seed=step_seed(0, 1))
    assert error(credit, want, pairs) < bound
    assert credit.status == [Status.SCORED] * len(ROWS)


@pytest.mark.parametrize("importance", ["oar_p", "hybrid"])
def test_copies_are_what_single_forwards_say(model, tokenizer, folder, pairs, importance):
    settings = {"perturbation": {"budget": 0.3}} if importance == "hybrid" else {}
    credit = oar_plugin.importance(
        model, prompts=texts(0), responses=texts(1), tokenizer=tokenizer, importance=importance, **settings, **HASH
    )
    want = world.counterfactual(folder)
    if importance == "oar_p":
        assert error(credit, want, pairs) < 1e-5
    else:
        assert 1e-5 < error(credit, want, pairs) < 1


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("given", ["masks", "segments", "tokenizer", "ids"])
@pytest.mark.parametrize("max_tokens", [1, 8192])
def test_every_way_in_gives_the_same(model, tokenizer, pairs, side, given, max_tokens):
    want = oar_plugin.importance(model, prompts=texts(0), responses=texts(1), tokenizer=tokenizer, **HASH)
    length = max(len(prompt) + len(response) for prompt, response in pairs)
    token_BT = torch.full((len(pairs), length), tokenizer.pad_token_id)
    segments_BT, own_BT, mask_BT = (torch.zeros(len(pairs), length, dtype=torch.long) for _ in range(3))
    for row, (prompt, response) in enumerate(pairs):
        size = len(prompt) + len(response)
        at = slice(length - size, length) if side == "left" else slice(0, size)
        token_BT[row, at] = torch.cat([prompt, response])
        mask_BT[row, at] = 1
        own_BT[row, at] = (torch.arange(size) >= len(prompt)).long()
        segments_BT[row, at] = torch.cat([torch.zeros_like(prompt), world.segments_of(texts(1)[row])])
    arguments = {
        "masks": {"response_mask": own_BT, "attention_mask": mask_BT, "tokenizer": tokenizer},
        "segments": {"response_mask": own_BT, "attention_mask": mask_BT, "segments": segments_BT},
        "tokenizer": {"response_mask": own_BT, "tokenizer": tokenizer},
        "ids": {"prompts": [p.tolist() for p, _ in pairs], "responses": [r for _, r in pairs], "tokenizer": tokenizer},
    }[given]
    ids = () if given == "ids" else (token_BT,)
    got = oar_plugin.importance(model, *ids, **arguments, max_tokens=max_tokens, **HASH)
    torch.testing.assert_close(got.importance, want.importance, rtol=1e-4, atol=1e-5 * want.importance.max().item())
    assert torch.equal(got.segments, want.segments)
    assert torch.equal(got.attention_mask, want.attention_mask)
    assert torch.equal(got.input_ids * got.attention_mask, want.input_ids * want.attention_mask)
    torch.testing.assert_close(got.weights, want.weights)


def test_the_model_is_left_as_it_was(model, tokenizer):
    model.train()
    model.model.layers[0].eval()
    model.lm_head.weight.requires_grad_(False)

    def state():
        modules = dict(model.named_modules())
        return (
            {name: module.training for name, module in modules.items()},
            {name: len(module._forward_hooks) + len(module._forward_pre_hooks) for name, module in modules.items()},
            {name: (p.requires_grad, p.grad, p.detach().sum().item()) for name, p in model.named_parameters()},
            torch.get_rng_state().tolist(),
        )

    before = state()
    for importance in ("onward", "oar_g", "hybrid"):
        oar_plugin.importance(
            model, prompts=texts(0), responses=texts(1), tokenizer=tokenizer, importance=importance, **HASH
        )
    assert state() == before


def test_half_precision_is_close(model, tokenizer, folder, pairs):
    model.to(torch.bfloat16)
    credit = oar_plugin.importance(model, prompts=texts(0), responses=texts(1), tokenizer=tokenizer, **HASH)
    assert 1e-5 < error(credit, world.reference(folder, seed=step_seed(0, 1)), pairs) < 0.5


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gives_the_same(model, tokenizer, folder, pairs):
    credit = oar_plugin.importance(model.cuda(), prompts=texts(0), responses=texts(1), tokenizer=tokenizer, **HASH)
    assert error(credit, world.reference(folder, seed=step_seed(0, 1)), pairs) < 1e-4


def test_responses_that_cannot_be_scored_keep_even_credit(model, tokenizer):
    responses = ["no answer<eos>", "#### 4<eos>", texts(1)[0], ""]
    credit = oar_plugin.importance(model, prompts=["1+3="] * 4, responses=responses, tokenizer=tokenizer, **HASH)
    assert credit.status == [Status.NO_ANSWER, Status.NO_REASONING, Status.SCORED, Status.NO_ANSWER]
    assert (credit.weights[[0, 1, 3]] == 1).all()
    assert credit.weights[2].max() > 1
    assert credit.metrics["fallback/any"] == 0.75


def test_reshape_keeps_each_responses_total_and_takes_another_gate(model, tokenizer):
    credit = oar_plugin.importance(model, prompts=texts(0), responses=texts(1), tokenizer=tokenizer, **HASH)
    advantages = torch.linspace(-1, 1, len(ROWS))
    two = oar_plugin.reshape(advantages, credit)
    torch.testing.assert_close(two.weight_BL, credit.weights)
    torch.testing.assert_close(two.advantage_BL.sum(-1), advantages * credit.weights.shape[1])
    own = oar_plugin.reshape(advantages, credit, gate="python:tests.own_importance:upper_half")
    assert not torch.equal(own.weight_BL, two.weight_BL)
    torch.testing.assert_close(own.advantage_BL.sum(-1), two.advantage_BL.sum(-1))
    with pytest.raises(OarConfigError, match=r"oar_plugin.reshape.tauu=.*did you mean oar_plugin.reshape.tau"):
        oar_plugin.reshape(advantages, credit, tauu=0.5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_ids": torch.ones(1, 3, dtype=torch.long)}, "response_mask"),
        ({"prompts": ["a"]}, "as many responses"),
        ({"prompts": ["a"], "responses": ["b"]}, "tokenizer"),
        ({"prompts": [[1]], "responses": [[2]]}, "segments"),
        ({"input_ids": torch.ones(1, 3, dtype=torch.long), "response_mask": torch.ones(1, 3)}, "attention_mask"),
        ({"importance": "fishr"}, r"oar_plugin.importance.importance='fishr'.*allowed: fisher"),
        ({"importance": "oar_p", "perturbation": {"backend": "rollout"}}, "no rollout engines here"),
    ],
)
def test_what_is_missing_is_said(model, arguments, message):
    with pytest.raises(ValueError, match=message):
        oar_plugin.importance(model, **arguments)


@pytest.mark.parametrize("importance", ["fisher", "oar_p"])
def test_given_segments_without_an_answer_or_reasoning_keep_even_credit(model, importance):
    token_BT = torch.arange(3, 33).view(3, 10)
    segments_BT = torch.full((3, 10), int(Segment.REASONING))
    segments_BT[:, :3] = Segment.OUTSIDE
    segments_BT[1:, 8] = Segment.ANSWER
    segments_BT[2, 3:8] = Segment.OUTSIDE
    segments_BT[2, 9] = Segment.OUTSIDE
    mask_BT = torch.ones_like(token_BT)
    settings = {"importance": importance, "perturbation": {"replacement": "sampled"}}
    credit = oar_plugin.importance(
        model, token_BT, response_mask=segments_BT != 0, attention_mask=mask_BT, segments=segments_BT, **settings
    )
    assert credit.status == [Status.NO_ANSWER, Status.SCORED, Status.NO_REASONING]
    assert (credit.weights[[0, 2]] == 1).all()
    assert credit.segments[1, 9] == Segment.AFTER, "what stands behind the answer cannot have moved it"
    assert credit.weights[1, 9] == 1
    with pytest.raises(ValueError, match=r"segments are \(3, 9\), wanted \(3, 10\)"):
        oar_plugin.importance(
            model, prompts=[[1]] * 3, responses=[list(range(1, 10))] * 3, segments=segments_BT[:, :9], **settings
        )


def test_the_example_in_the_docstring(model, tokenizer):
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    (example,) = doctest.DocTestFinder(recurse=False).find(
        front_door.importance, globs={"model": model, "tokenizer": tokenizer}
    )
    said = []
    runner.run(example, out=said.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(said)
    assert len(example.examples) > 3


@pytest.mark.parametrize("document", ["README.md", "docs/how-it-works.md"])
def test_the_example_in_a_document(model, tokenizer, document):
    (block,) = re.findall(r"```python\n(.*?)```", (Path(__file__).parents[1] / document).read_text(), re.DOTALL)
    names = {"model": model, "tokenizer": tokenizer, "prompts": texts(0), "responses": texts(1)}
    exec(block, names | {"advantages": torch.ones(len(ROWS))})


def test_importing_the_package_imports_no_torch():
    code = "import oar_plugin, sys; assert 'torch' not in sys.modules; oar_plugin.importance; assert 'torch' in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_segments_are_numbers_of_the_enumeration(model, tokenizer):
    credit = oar_plugin.importance(model, prompts=texts(0)[:1], responses=texts(1)[:1], tokenizer=tokenizer, **HASH)
    assert set(credit.segments.unique().tolist()) >= {Segment.OUTSIDE, Segment.REASONING, Segment.ANSWER}
