"""The front door: any way to hand in responses gives the same credit, the engines' own, and the model is left as it was."""

import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from tokenizers.processors import TemplateProcessing

import oar_plugin
from oar_plugin.config import OarConfigError
from oar_plugin.credit.answer import Segment
from oar_plugin.credit.diagnostics import Status
from oar_plugin.credit.noise import step_seed
from oar_plugin.passes import prediction
from tests.hosts.engine import world
from tests.passes.batch import error, padded, rows_of, unpadded

ROOT = Path(__file__).parents[1]
PROMPTS, RESPONSES = ([world.ROWS[number][place] for number in world.SCORED] for place in (0, 1))
TOKENIZER = world.make_tokenizer()
OWN = "python:tests.own_importance:Saliency"
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def credit_of(model, responses=RESPONSES, **settings):
    given = {"prompts": PROMPTS, "responses": responses, "tokenizer": TOKENIZER, "answer_patterns": ["hash"]}
    return oar_plugin.importance(model, **given, **settings)


def error_of(credit, want):
    return error(unpadded(credit.importance.cpu(), credit.attention_mask.cpu().bool()), want)


@pytest.mark.parametrize(
    ("importance", "reference", "place", "least", "most"),
    [
        ("fisher", "fisher", "cpu", 0, 1e-5),
        ("entropy", "entropy", "cpu", 0, 1e-5),
        (OWN, "own", "cpu", 0, 1e-4),
        ("fisher", "fisher", torch.bfloat16, 1e-5, 0.5),
        pytest.param("fisher", "fisher", "cuda", 0, 1e-4, marks=GPU),
    ],
)
def test_it_is_what_plain_autograd_says(model, folder, importance, reference, place, least, most):
    credit = credit_of(model.to(place), importance=importance, temperature=0.7)
    assert least <= error_of(credit, world.reference(folder, importance=reference, seed=step_seed(0, 1))) < most
    assert credit.status == [Status.SCORED] * len(RESPONSES)
    assert credit.importance.dtype == torch.float32


def test_copies_are_what_single_forwards_say(model, folder):
    published = credit_of(model, **{"perturbation.replacement": "pad"})
    assert error_of(published, world.counterfactual(folder)) < 1e-5
    assert error_of(credit_of(model), world.counterfactual(folder)) > 0.1, "draws of the model's own"


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
@pytest.mark.parametrize("given", ["masks", "segments", "ids", "encoded", "tokenized", "each"])
@pytest.mark.parametrize("max_tokens", [1, 8192])
def test_every_way_in_gives_the_same(model, left, given, max_tokens):
    each = partial(TOKENIZER, add_special_tokens=False)
    padding = {"padding": True, "padding_side": "left" if left else "right", "return_tensors": "pt"}
    want, rows = credit_of(model), [world.encode()[number] for number in world.SCORED]
    token_BT, segments_BT, mask_BT = padded(rows_of(), left)
    own = [(torch.cat(row), torch.cat([torch.zeros_like(row[0]), torch.ones_like(row[1])])) for row in rows]
    masks = {"response_mask": padded(own, left)[1], "attention_mask": mask_BT.long()}
    arguments = {
        "masks": {"input_ids": token_BT, **masks},
        "segments": {"input_ids": token_BT, **masks, "segments": segments_BT},
        "ids": {"prompts": [prompt.tolist() for prompt, _ in rows], "responses": [own for _, own in rows]},
        "encoded": {"input_ids": {**masks, "input_ids": token_BT}, "response_mask": masks["response_mask"]},
        "tokenized": {"prompts": each(PROMPTS, **padding), "responses": {"input_ids": each(RESPONSES)["input_ids"]}},
        "each": {"prompts": [*map(each, PROMPTS)], "responses": [each(one, **padding) for one in RESPONSES]},
    }[given]
    arguments |= {"tokenizer": None if given == "segments" else TOKENIZER, "answer_patterns": ["hash"]}
    got = oar_plugin.importance(model, **arguments, max_tokens=max_tokens)
    torch.testing.assert_close(got.importance, want.importance, rtol=1e-4, atol=1e-5 * want.importance.max().item())
    assert torch.equal(got.segments, want.segments)
    assert torch.equal(got.segments, padded(rows_of())[1])
    assert torch.equal(got.attention_mask, want.attention_mask)
    assert torch.equal(got.input_ids * got.attention_mask, want.input_ids * want.attention_mask)
    torch.testing.assert_close(got.weights, want.weights)


@pytest.mark.parametrize("importance", ["fisher", "oar_g", "oar_p", "entropy", OWN])
def test_the_model_is_left_as_it_was(model, importance):
    model.train()
    model.model.layers[0].eval()
    model.lm_head.weight.requires_grad_(False)

    def state():
        return (
            [module.training for module in model.modules()],
            [(*m._forward_hooks, *m._forward_pre_hooks, *m._backward_hooks) for m in model.modules()],
            [(p.requires_grad, p.grad, p._version, id(p), p.detach().sum().item()) for p in model.parameters()],
            torch.get_rng_state().tolist(),
        )

    before = state()
    credit_of(model, importance=importance, num_draws=2)
    assert state() == before


def test_responses_that_cannot_be_scored_keep_even_credit_and_if_they_are_most_the_log_says_why(model, caplog):
    credit = credit_of(model, ["no answer<eos>", "#### 4<eos>", RESPONSES[0], ""])
    assert credit.status == [Status.NO_ANSWER, Status.NO_REASONING, Status.SCORED, Status.NO_ANSWER]
    assert (credit.weights[[0, 1, 3]] == 1).all()
    assert credit.weights[2].max() > 1
    assert credit.metrics["fallback/any"] == 0.75
    credit_of(model, ["no answer<eos>", "#### 4<eos>", *RESPONSES[:2]])  # half of them
    credit_of(model, ["no answer<eos>"] * len(PROMPTS), fallback_warning=1)
    (said,) = caplog.messages
    assert "75% of the responses that need credit fall back to plain GRPO: no_answer 50%, no_reasoning 25%." in said
    assert said.endswith("no_answer: set answer_patterns to what your reward reads as the answer")


def test_a_forward_has_fewer_tokens_if_the_model_is_larger(model):
    rows = []
    model.register_forward_pre_hook(lambda _, args, named: rows.append(len(named["input_ids"])), with_kwargs=True)
    for size, most in ((64, len(PROMPTS)), (2**22, 1)):
        model.config.hidden_size = size
        credit_of(model, importance="fisher")
        assert rows[-1] == most


def test_a_padding_token_that_ends_responses_is_said_once(model, caplog):
    given = {"prompts": PROMPTS[:1], "responses": RESPONSES[:1], "tokenizer": world.make_tokenizer()}
    given["tokenizer"].pad_token = given["tokenizer"].eos_token
    pad = {"perturbation.replacement": "pad"}
    for settings in (pad, pad, {"importance": "fisher", **pad}, {}):
        oar_plugin.importance(model, **given, **settings)
    (said,) = caplog.messages
    assert "importance.perturbation.replacement=pad: '<eos>' ends responses or separates documents." in said


@pytest.mark.parametrize("importance", ["fisher", "oar_p"])
def test_given_segments_without_an_answer_or_reasoning_keep_even_credit(model, importance):
    token_BT = torch.arange(3, 33).view(3, 10)
    segments_BT = torch.full((3, 10), int(Segment.REASONING))
    segments_BT[:, :3] = Segment.OUTSIDE
    segments_BT[1:, 8] = Segment.ANSWER
    segments_BT[2, [3, 4, 5, 6, 7, 9]] = Segment.OUTSIDE
    masks = {"response_mask": segments_BT != 0, "attention_mask": torch.ones_like(token_BT)}
    settings = {"importance": importance, "perturbation": {"replacement": "sampled"}}
    credit = oar_plugin.importance(model, token_BT, segments=segments_BT, **masks, **settings)
    assert credit.status == [Status.NO_ANSWER, Status.SCORED, Status.NO_REASONING]
    assert (credit.weights[[0, 2]] == 1).all()
    assert credit.segments[1, 9] == Segment.AFTER, "what stands behind the answer cannot have moved it"
    assert credit.weights[1, 9] == 1


def test_reshape_keeps_each_responses_total_and_takes_another_gate(model):
    credit = credit_of(model)
    advantages = torch.linspace(-1, 1, len(RESPONSES))
    two = oar_plugin.reshape(advantages, credit)
    torch.testing.assert_close(two.weight_BL, credit.weights)
    torch.testing.assert_close(two.advantage_BL.sum(-1), advantages * credit.weights.shape[1])
    own = oar_plugin.reshape(advantages, credit, gate="python:tests.own_importance:upper_half")
    assert not torch.equal(own.weight_BL, two.weight_BL)
    torch.testing.assert_close(own.advantage_BL.sum(-1), two.advantage_BL.sum(-1))
    with pytest.raises(OarConfigError, match=r"oar_plugin.reshape.tauu=.*did you mean oar_plugin.reshape.tau"):
        oar_plugin.reshape(advantages, credit, tauu=0.5)


ONES = torch.ones(1, 3, dtype=torch.long)
MASKS = {"response_mask": torch.tensor([[0, 1, 1]]), "attention_mask": ONES}
SEGMENTS = torch.tensor([[0, 1, 3]])
CHAT = [{"role": "user", "content": "3+4?"}]
IDS = r"token ids \[L\] or a tokenizer's output for one text"
NO_PROMPTS = [ONES, *CHAT, TOKENIZER(["a", "b"]), {"attention_mask": [1]}, {"input_ids": [1, 2], "attention_mask": [1]}]
NO_RESPONSES = [None, 5, 0.5, b"a", {1}, [1, None], ["a"], [1.5], [[1], [2, 3]], [2**70], CHAT]
TEXTS = {"prompts": ["a"], "responses": ["b"], "tokenizer": TOKENIZER}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_ids": ONES}, r"need a response_mask and an attention_mask \[B, T\]; or give prompts and responses"),
        ({"prompts": ["a"]}, "as many responses"),
        ({"prompts": ["a"], "responses": ["b"]}, "tokenizer"),
        ({"prompts": [[1]], "responses": [[2]]}, "segments"),
        ({"input_ids": ONES, "response_mask": ONES}, "need a response_mask and an attention_mask"),
        ({"input_ids": TOKENIZER(["a", "bc"]), **MASKS}, r"input_ids=.*: must be \[B, T\], token ids"),
        ({"importance": "fishr"}, r"oar_plugin.importance.importance='fishr'.*allowed: fisher"),
        ({"importance": "oar_p", "perturbation": {"backend": "rollout"}}, "no rollout engines here"),
        ({"input_ids": ONES[0], **MASKS}, r"input_ids=tensor.*: must be \[B, T\].*input_ids\[None\]"),
        ({"input_ids": [[1, None, 2]], **MASKS}, r"input_ids=\[\[1, None, 2\]\]: must be \[B, T\], token ids"),
        (
            {"input_ids": 10**9 * ONES, **MASKS, "tokenizer": TOKENIZER},
            "token id 1000000000 in response 0 or its prompt: the model has 0 to",
        ),
        (dict.fromkeys(("input_ids", "response_mask", "attention_mask"), ONES[:0]), "there is no response"),
        (TEXTS | {"prompts": [], "responses": []}, "there is no response"),
        (
            {"input_ids": ONES, **MASKS | {"attention_mask": ONES[:, 1:]}},
            r"attention_mask of shape \(1, 2\): must be \(1, 3\)",
        ),
        ({"input_ids": ONES, **MASKS | {"response_mask": ONES[0]}}, r"response_mask of shape \(3,\): must be \(1, 3\)"),
        ({"input_ids": ONES, **MASKS, "segments": SEGMENTS[:, 1:]}, r"segments of shape \(1, 2\)"),
        ({"input_ids": ONES, **MASKS, "segments": SEGMENTS * 9}, r"segments hold \[9\]: allowed: OUTSIDE 0.*ANSWER 3"),
        (TEXTS | {"prompts": "a"}, r"prompts='a': must be a list; for one response prompts=\[...\]"),
        (TEXTS | {"prompts": TOKENIZER("a")}, "prompts={.*must be a list"),
        *((TEXTS | {"prompts": [one]}, rf"\[0\]=.*: must be a text, a list of messages, {IDS}") for one in NO_PROMPTS),
        *((TEXTS | {"responses": [one]}, rf"responses\[0\]=.*: must be a text, {IDS}") for one in NO_RESPONSES),
        (TEXTS | {"responses": [[1, -1]]}, "token id -1 in response 0"),
        (TEXTS | {"prompts": ONES}, r"prompts=tensor\(.*must be a list"),
        (TEXTS | {"responses": TOKENIZER("a")}, r"responses=.*must be a list"),
        (TEXTS | {"dump": {"dir": "credit"}}, r"oar_plugin\.importance\.dump\.dir='credit': a call writes no files"),
        (TEXTS | {"prompts": [""], "responses": [""]}, "response 0: there is no token before"),
        (TEXTS | {"temperature": 0}, "temperature=0: must be above 0"),
        (TEXTS | {"prompts": {"input_ids": [[1, 2]]}}, "prompts={.*a tokenizer's output with its attention_mask"),
        ({"seed": None}, "seed=None: .*null is for verl only"),
        (TEXTS | {"model": "gpt2"}, "model='gpt2': give the loaded model"),
    ],
)
def test_what_is_missing_or_wrong_is_said(model, arguments, message):
    with pytest.raises(ValueError, match=message):
        oar_plugin.importance(**{"model": model} | arguments)


def test_inference_mode_changes_nothing(model):
    token_BT, segments_BT, mask_BT = padded(rows_of(), True)
    given = {"response_mask": segments_BT != Segment.OUTSIDE, "attention_mask": mask_BT, "segments": segments_BT}
    want = oar_plugin.importance(model, token_BT, **given)
    with torch.inference_mode():
        copies = {name: mask.clone() for name, mask in given.items()}
        got = oar_plugin.importance(model, token_BT.clone(), **copies)
    assert torch.equal(got.importance, want.importance)
    assert not got.importance.is_inference()


def test_a_chat_is_its_template_and_begins_once(model):
    """A template writes the token that begins a sequence, and such a tokenizer writes it again."""
    tokenizer = world.make_tokenizer()
    tokenizer.bos_token = "<eos>"
    template = TemplateProcessing(single="<eos> $A", special_tokens=[("<eos>", tokenizer.bos_token_id)])
    tokenizer.backend_tokenizer.post_processor = template
    tokenizer.chat_template = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"
    given = {"responses": RESPONSES[:1], "tokenizer": tokenizer, "answer_patterns": ["hash"]}
    text = tokenizer.apply_chat_template(CHAT, tokenize=False)
    encoded = tokenizer.apply_chat_template(CHAT, return_dict=True)
    prompts = [[CHAT], [text], ["3+4?"], [encoded], tokenizer.apply_chat_template([CHAT], return_dict=True)]
    credits = (oar_plugin.importance(model, prompts=prompt, **given) for prompt in prompts)
    ids = [credit.input_ids[0].tolist() for credit in credits]
    assert ids == [ids[0]] * len(prompts)
    assert ids[0][:2] == [tokenizer.bos_token_id, tokenizer("3", add_special_tokens=False)["input_ids"][0]]
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="chat_template is not set"):
        oar_plugin.importance(model, prompts=[CHAT], **given)


def test_advantages_of_another_shape_and_settings_of_importance_are_refused(model):
    credit = credit_of(model)
    for wrong in ([1.0], torch.ones(len(RESPONSES), 1), torch.tensor(1.0)):
        with pytest.raises(ValueError, match=r"advantages of shape .*: must be \(4,\) or \(4, "):
            oar_plugin.reshape(wrong, credit)
    for key in ("num_draws", "perturbation.span"):
        with pytest.raises(OarConfigError, match=rf"oar_plugin.reshape.{key}: .*allowed here: gate, tau, beta, floor"):
            oar_plugin.reshape(torch.ones(len(RESPONSES)), credit, **{key: 2})


def test_a_result_has_what_was_learned_for_the_next_call(model, monkeypatch, caplog):
    monkeypatch.setattr(prediction, "ENOUGH", world.ENOUGH)
    credit = partial(credit_of, model, importance="fisher", **{"amortize.share": world.SHARE})
    first = credit()
    second = credit(predictor=first.predictor)
    assert first.metrics["amortize/predicted"] == 0
    assert second.metrics["amortize/predicted"] == second.metrics["scored"] == second.predicted.float().mean() == 1
    assert {*first.status} == {Status.LEARNING}
    (said,) = caplog.messages
    assert "learning 100%. learning: too few labels; give a call of `oar_plugin.importance` the `predictor`" in said
    for name in ("fallback/learning", "amortize/learning_steps"):
        assert (first.metrics[name], second.metrics[name]) == (1, 0)
    assert (first.weights == 1).all()
    assert f"SCORED (predicted) {second.predicted.sum()}" in repr(second)
    assert f"{int(second.predicted.nonzero()[0])}: SCORED (predicted)</b>" in second._repr_html_()
    assert "predicted" not in repr(first)
    again = credit(predictor=first.predictor)
    assert torch.equal(again.importance, second.importance), "the call before has changed nothing"
    with pytest.raises(ValueError, match=r"predictor: nothing is predicted without amortize\.share"):
        credit_of(model, importance="random", predictor=first.predictor)


def test_a_credit_shows_itself(model):
    credit = credit_of(model, ["<script>no answer<eos>", *RESPONSES[1:]])
    shown = r"Credit\(4 responses: NO_ANSWER 1, SCORED 3; importance=oar_p, gate=two_level; weights .*\)"
    assert re.fullmatch(shown, repr(credit))
    page = credit._repr_html_()
    assert "<script>" not in page
    assert page.count("<p><b>") == 4
    assert f"title='weight {credit.weights.max():.2f}'" in page


def test_the_block_to_paste_in_the_readme(model, tmp_path):
    """But for the installation. A folder takes the place of the hub's name: SMOLLM2, of this model, or a tiny one's."""
    text = (ROOT / "README.md").read_text()
    ((block, result),) = re.findall(r"```bash\npip install \.\n(python .*?)```\n\n```text\n(.*?\n)```", text, re.DOTALL)
    [part.save_pretrained(tmp_path) for part in (model, TOKENIZER)]
    script = block.replace("HuggingFaceTB/SmolLM2-135M-Instruct", os.environ.get("SMOLLM2", str(tmp_path)))
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [env.get("PYTHONPATH")])])
    shown = subprocess.run(["bash", "-c", script], env=env, capture_output=True, timeout=300)
    result = result if "SMOLLM2" in os.environ else result.partition("weights")[0]
    assert shown.stdout.decode().startswith(result), shown.stderr


def test_the_example_in_a_document(model):
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/how-it-works.md").read_text(), re.DOTALL)
    names = {"model": model, "tokenizer": TOKENIZER, "prompts": PROMPTS, "responses": RESPONSES}
    exec(block, names | {"advantages": torch.ones(len(RESPONSES))})


def test_importing_the_package_imports_no_torch():
    code = "import oar_plugin as o, sys; assert {*o.__all__} < {*dir(o)}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
