"""Masked copies in a plain HuggingFace model: published numbers, batched = one by one, shared prefix = whole copies, and the
importance that follows."""

import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from oar_plugin.credit.answer import Segment
from oar_plugin.credit.noise import position_seeds, response_seeds
from oar_plugin.credit.perturbation import Search, sample_replacements, units
from oar_plugin.credit.probe import PROBES
from oar_plugin.passes.masked_copies import Candidate, MaskedCopies, Replacements, candidate_of, copies_importance
from oar_plugin.passes.request import Perturbation
from tests.credit.test_golden import FILES, load

VOCABULARY, PAD = 90, 0


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
@pytest.mark.parametrize("probe", PROBES)
@pytest.mark.parametrize("max_tokens", [4096, 1, 150])
def test_scores_agree_with_the_published_numbers(path, probe, max_tokens):
    """To 1e-5 of the response's largest score, batched and one by one.

    A drop of log-probability is a difference of two float32 numbers, in the reference too, and carries their rounding: where
    a response has one small drop (0.09 nats of 4) a float64 model is 2e-5 of it away. There the scale is the number itself.
    """
    reference, _, model = load(path)
    for index, case in enumerate(reference["cases"]):
        ids = torch.tensor(case["before"] + case["reasoning"] + case["conclude"] + case["answer"])
        start = len(case["before"])
        candidate = Candidate(ids, start, len(ids) - len(case["answer"]))
        copies = MaskedCopies(model, probe, Replacements(case["pad_token_id"]), max_tokens)
        got = copies.run(candidate, [(t,) for t in range(len(case["reasoning"]))])
        want = torch.tensor(case[f"perturbation_{probe}"], dtype=torch.float64)
        scale = want.abs().max().item()
        if probe == "answer_joint":
            scale = max(scale, log_probability(model, candidate))
        error = (torch.tensor(got) - want).abs().max().item() / scale
        print(json.dumps({"file": path.stem, "case": index, "probe": probe, "error": f"{error:.1e}"}))
        assert error < 1e-5


def log_probability(model, candidate):
    """Of the answer: how large the mean is, without its sign."""
    with torch.no_grad():
        log_prob = model(input_ids=candidate.token_T[None]).logits[0, candidate.answer_start - 1 : -1].log_softmax(-1)
    return -log_prob.gather(-1, candidate.token_T[candidate.answer_start :, None]).mean().item()


def make_llama(**more):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.3, **more,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval().double()


@pytest.fixture(scope="module")
def llama():
    return make_llama()


@pytest.fixture(scope="module")
def candidate():
    torch.manual_seed(1)
    return Candidate(torch.randint(1, VOCABULARY, (60,)), prompt_length=7, answer_start=55)


UNITS = [(0,), (3, 4, 5), (9,), (11,), (12, 13), (40,)]


def one_by_one(model, candidate, units, probe, replacement_T):
    """The plainest way: a whole forward for each copy, all logits."""
    rows = slice(candidate.answer_start - 1, candidate.answer_start if probe == "last" else len(candidate.token_T) - 1)
    scores = []

    def outcome(ids):
        with torch.no_grad():
            logits = model(input_ids=ids[None], use_cache=False).logits[0, rows]
        if probe == "answer_joint":
            return logits.log_softmax(-1).gather(-1, candidate.token_T[candidate.answer_start :, None]).mean()
        return logits.mean(0).log_softmax(-1)

    clean = outcome(candidate.token_T)
    for unit in units:
        ids = candidate.token_T.clone()
        at = torch.tensor(unit) + candidate.prompt_length
        ids[at] = replacement_T[at]
        masked = outcome(ids)
        scores.append(((clean - masked) if probe == "answer_joint" else (clean.exp() * (clean - masked)).sum()).item())
    return scores


@pytest.mark.parametrize("probe", PROBES)
@pytest.mark.parametrize("max_tokens", [10_000, 100, 1])
def test_any_grouping_gives_what_single_copies_give(llama, candidate, probe, max_tokens):
    copies = MaskedCopies(llama, probe, Replacements(PAD), max_tokens)
    got = copies.run(candidate, UNITS)
    assert got == pytest.approx(one_by_one(llama, candidate, UNITS, probe, torch.zeros(60, dtype=torch.long)), rel=1e-9)


def test_units_may_come_in_any_order(llama, candidate):
    copies = MaskedCopies(llama, "answer_mean", Replacements(PAD), 200)
    assert copies.run(candidate, UNITS[::-1]) == pytest.approx(copies.run(candidate, UNITS)[::-1], rel=1e-9)


def test_copies_compute_only_what_follows_their_first_masked_token(llama, candidate):
    copies = MaskedCopies(llama, "answer_mean", Replacements(PAD), 1)
    copies.run(candidate, [(10,), (40,)])
    assert copies.tokens == 59 + (59 - 17) + (59 - 47)


def test_a_model_without_a_plain_cache_gets_whole_copies(candidate):
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.3, sliding_window=16,
    )  # fmt: skip
    model = MistralForCausalLM(config).eval().double()
    copies = MaskedCopies(model, "answer_mean", Replacements(PAD), 10_000)
    got = copies.run(candidate, UNITS)
    assert copies.tokens == 59 * (1 + len(UNITS))
    want = one_by_one(model, candidate, UNITS, "answer_mean", torch.zeros(60, dtype=torch.long))
    assert got == pytest.approx(want, rel=1e-9)


def test_forwards_are_counted_before_they_are_made(llama, candidate):
    calls = []
    handle = llama.register_forward_hook(lambda *args: calls.append(1))
    for max_tokens in (1, 60, 130, 10_000):
        copies = MaskedCopies(llama, "answer_mean", Replacements(PAD), max_tokens)
        calls.clear()
        copies.run(candidate, UNITS)
        assert len(calls) == copies.forwards([(candidate, UNITS)])
        copies.idle()
        assert len(calls) == copies.forwards([(candidate, UNITS)]) + 1
    handle.remove()


@pytest.mark.parametrize("max_tokens", [1, 10_000])
def test_sampled_replacements_come_from_the_models_own_prediction(llama, candidate, max_tokens):
    with torch.no_grad():
        logits = llama(input_ids=candidate.token_T[None]).logits[0].double()
    seed = response_seeds(candidate.token_T, torch.zeros(60, dtype=torch.long), 1, 5)
    position = torch.arange(1, 60)
    drawn = torch.zeros(60, dtype=torch.long)
    drawn[1:] = sample_replacements(logits[:-1], candidate.token_T[1:], position_seeds(seed.expand(59), position))
    copies = MaskedCopies(llama, "answer_mean", Replacements(None, seed=5), max_tokens)
    want = one_by_one(llama, candidate, UNITS, "answer_mean", drawn)
    assert copies.run(candidate, UNITS) == pytest.approx(want, rel=1e-9)
    assert copies.run(candidate, UNITS) != pytest.approx(
        MaskedCopies(llama, "answer_mean", Replacements(None, seed=6), 100).run(candidate, UNITS), rel=1e-3
    )


def test_a_first_token_that_nothing_predicts_stands_for_itself(llama, candidate):
    bare = Candidate(candidate.token_T, prompt_length=0, answer_start=55)
    copies = MaskedCopies(llama, "answer_mean", Replacements(None, seed=5), 100)
    alone, with_others = copies.run(bare, [(0,)]), copies.run(bare, [(0,), (3, 4)])
    assert alone == pytest.approx([0.0], abs=1e-12)
    assert with_others[0] == pytest.approx(0.0, abs=1e-12)
    assert with_others[1:] == pytest.approx(copies.run(bare, [(3, 4)]), rel=1e-9)


def test_nothing_is_left_on_the_model(llama, candidate):
    before = {n: p.requires_grad for n, p in llama.named_parameters()}
    MaskedCopies(llama, "answer_mean", Replacements(PAD), 100).run(candidate, UNITS)
    assert {n: p.requires_grad for n, p in llama.named_parameters()} == before
    assert all(p.grad is None for p in llama.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in llama.modules())


# ---- from copies to importance


def response(prompt, reasoning, conclude, answer, after):
    """Tokens of prompt and response, and the response's segments; other tokens stand in the midst of the reasoning."""
    torch.manual_seed(reasoning)
    lengths = {"REASONING": reasoning, "CONCLUDE": conclude, "ANSWER": answer, "AFTER": after}
    segments = torch.tensor([Segment[name] for name, length in lengths.items() for _ in range(length)])
    segments[4:6] = Segment.OUTSIDE
    return torch.randint(1, VOCABULARY, (prompt + len(segments),)), segments


@pytest.fixture(scope="module")
def responses():
    return {3: response(5, 30, 2, 3, 4), 8: response(7, 12, 1, 1, 0)}


def plainly(model, token_T, segments_L, budget=1.0, span=1, gradient_L=None):
    """Importance of one response, each copy a forward of its own; and how many copies were asked for."""
    prompt = len(token_T) - len(segments_L)
    end = prompt + int((segments_L == Segment.ANSWER).nonzero()[-1]) + 1
    candidate = Candidate(token_T[:end], prompt, prompt + int((segments_L == Segment.ANSWER).nonzero()[0]))
    search = Search(units((segments_L == Segment.REASONING).tolist(), span), len(segments_L), budget, gradient_L)
    pad_T, asked = torch.zeros(end, dtype=torch.long), 0
    while search.wanted:
        asked += len(search.wanted)
        search.send(one_by_one(model, candidate, search.wanted, "answer_mean", pad_T))
    return search.importance.float(), asked


def test_a_candidate_ends_with_its_answer(responses):
    token_T, segments_L = responses[3]
    candidate = candidate_of(token_T, segments_L)
    assert torch.equal(candidate.token_T, token_T[: 5 + 35])
    assert (candidate.prompt_length, candidate.answer_start) == (5, 5 + 32)


@pytest.mark.parametrize("max_tokens", [1, 10_000])
@pytest.mark.parametrize(
    ("budget", "span", "chosen"),
    [(1.0, 1, None), (1.0, 4, None), (0.4, 1, None), (2.0, 3, None), (0.3, 1, "gradient"), (3.0, 2, "gradient")],
)
def test_importance_equals_single_copies(llama, responses, budget, span, chosen, max_tokens):
    """All units, spans, a budget that goes by blocks, and one that goes by gradient."""
    copies = MaskedCopies(llama, "answer_mean", Replacements(PAD), max_tokens)
    gradient = {row: torch.rand(len(segments)) for row, (_, segments) in responses.items()} if chosen else None
    got = copies_importance(copies, responses, Perturbation(budget, span, PAD), gradient)
    assert got.keys() == responses.keys()
    for row, (token_T, segments_L) in responses.items():
        chooser = gradient[row].tolist() if gradient else None
        want, asked = plainly(llama, token_T, segments_L, budget, span, chooser)
        assert (asked < len(units((segments_L == Segment.REASONING).tolist(), span))) == (budget != 1)
        assert got[row].dtype == torch.float32
        torch.testing.assert_close(got[row], want, rtol=1e-5, atol=1e-7 * want.max().item())
        assert (got[row][segments_L != Segment.REASONING] == 0).all()
        assert (got[row][segments_L == Segment.REASONING] > 0).all()


@pytest.mark.parametrize("mine", [{}, {8}, {3, 8}])
@pytest.mark.parametrize("budget", [1.0, 0.5])
def test_every_process_makes_as_many_forwards_as_the_busiest(llama, responses, budget, mine):
    """Under FSDP: a process without responses idles through all rounds, and idling changes no number."""
    most, calls, asked = 40, [], []

    def in_step(forwards):
        asked.append(forwards)
        return most

    wanted = {row: responses[row] for row in mine}
    copies = MaskedCopies(llama, "answer_mean", Replacements(PAD), 1)
    alone = copies_importance(copies, wanted, Perturbation(budget, 1, PAD))
    handle = llama.register_forward_hook(lambda *args: calls.append(1))
    got = copies_importance(copies, wanted, Perturbation(budget, 1, PAD), in_step=in_step)
    handle.remove()
    rounds = 1 if budget == 1 else 2
    assert len(asked) == rounds
    assert all(forwards < most for forwards in asked[1:])
    assert len(calls) == sum(max(most, forwards) for forwards in asked)
    assert got.keys() == alone.keys()
    assert all(torch.equal(got[row], alone[row]) for row in got)
