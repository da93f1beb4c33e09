"""Masked copies in a plain HuggingFace model: published numbers, batched = one by one, shared prefix = whole copies, and the
importance that follows."""

import pytest
import torch
from transformers import LlamaConfig, MistralConfig

from oar_plugin.credit.answer import Segment
from oar_plugin.credit.noise import position_seeds, response_seeds
from oar_plugin.credit.perturbation import Search, sample_replacements, units
from oar_plugin.credit.probe import PROBES
from oar_plugin.passes.masked_copies import Candidate, MaskedCopies, Replacements, candidate_of, copies_importance
from oar_plugin.passes.request import Perturbation
from tests.credit.test_golden import every_file, load
from tests.passes.batch import SIZE, positions, random_model

PAD = Replacements(0)
UNITS = [(0,), (3, 4, 5), (9,), (11,), (12, 13), (40,)]
every_probe = pytest.mark.parametrize("probe", PROBES)


@every_file
@every_probe
@pytest.mark.parametrize("max_tokens", [4096, 1, 150])
def test_scores_agree_with_the_published_numbers(path, probe, max_tokens):
    """To 1e-5 of the response's largest score, batched and one by one.

    A drop of log-probability is a difference of two float32 numbers, in the reference too, and carries their rounding: where
    a response has one small drop (0.09 nats of 4) a float64 model is 2e-5 of it away. There the scale is the number itself.
    """
    reference, _, model = load(path)
    for index, case in enumerate(reference["cases"]):
        ids = torch.tensor(case["before"] + case["reasoning"] + case["conclude"] + case["answer"])
        candidate = Candidate(ids, len(case["before"]), len(ids) - len(case["answer"]))
        copies = MaskedCopies(model, probe, Replacements(case["pad_token_id"]), max_tokens)
        got = copies.run(candidate, [(t,) for t in range(len(case["reasoning"]))])
        want = torch.tensor(case[f"perturbation_{probe}"], dtype=torch.float64)
        scale = want.abs().max().item()
        if probe == "answer_joint":
            with torch.no_grad():
                scale = max(scale, -outcome(model, ids, candidate, probe).item())
        error = (torch.tensor(got) - want).abs().max().item() / scale
        assert error < 1e-5, f"case {index}"


# ---- against a whole forward for each copy


def outcome(model, ids, candidate, probe):
    """Mean log-probability of the answer, or log-probabilities over the vocabulary; from all logits."""
    rows = slice(candidate.answer_start - 1, candidate.answer_start if probe == "last" else len(ids) - 1)
    logits = model(input_ids=ids[None], use_cache=False).logits[0, rows]
    if probe == "answer_joint":
        return logits.log_softmax(-1).gather(-1, candidate.token_T[candidate.answer_start :, None]).mean()
    return logits.mean(0).log_softmax(-1)


@torch.no_grad()
def one_by_one(model, candidate, units, probe="answer_mean", replacement_T=None):
    """The plainest way; padding stands in for tokens unless it is said what does."""
    clean, scores = outcome(model, candidate.token_T, candidate, probe), []
    for unit in units:
        ids, at = candidate.token_T.clone(), torch.tensor(unit) + candidate.prompt_length
        ids[at] = PAD.token if replacement_T is None else replacement_T[at]
        masked = outcome(model, ids, candidate, probe)
        scores.append(((clean - masked) if probe == "answer_joint" else (clean.exp() * (clean - masked)).sum()).item())
    return scores


@pytest.fixture(scope="module")
def llama():
    return random_model(initializer_range=0.3).double()


@pytest.fixture(scope="module")
def candidate():
    torch.manual_seed(1)
    return Candidate(torch.randint(1, SIZE["vocab_size"], (60,)), prompt_length=7, answer_start=55)


@every_probe
@pytest.mark.parametrize("max_tokens", [10_000, 200, 100, 1])
@pytest.mark.parametrize("kind", [LlamaConfig, MistralConfig])
def test_any_grouping_and_order_gives_what_single_copies_give(candidate, kind, probe, max_tokens):
    """A model without a plain cache gets whole copies, another one only what follows their first masked token."""
    whole = kind is MistralConfig
    model = random_model(kind, initializer_range=0.3, **({"sliding_window": 16} if whole else {})).double()
    want = one_by_one(model, candidate, UNITS, probe)
    copies = MaskedCopies(model, probe, PAD, max_tokens)
    assert copies.run(candidate, UNITS) == pytest.approx(want, rel=1e-9)
    assert copies.run(candidate, UNITS[::-1]) == pytest.approx(want[::-1], rel=1e-9)
    copies.tokens = 0
    copies.run(candidate, [(10,), (40,)])
    length = 55 if probe == "last" else 59
    if whole or max_tokens == 1:
        assert copies.tokens == (3 * length if whole else length + (length - 17) + (length - 47))


def test_forwards_are_counted_before_they_are_made(llama, candidate):
    calls = []
    handle = llama.register_forward_hook(lambda *args: calls.append(1))
    for max_tokens in (1, 60, 130, 10_000):
        copies = MaskedCopies(llama, "answer_mean", PAD, max_tokens)
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
    drawn = torch.zeros(60, dtype=torch.long)
    seeds = position_seeds(seed.expand(59), torch.arange(1, 60))
    drawn[1:] = sample_replacements(logits[:-1], candidate.token_T[1:], seeds)
    got, other = (
        MaskedCopies(llama, "answer_mean", Replacements(None, seed), tokens).run(candidate, UNITS)
        for seed, tokens in ((5, max_tokens), (6, 100))
    )
    assert got == pytest.approx(one_by_one(llama, candidate, UNITS, replacement_T=drawn), rel=1e-9)
    assert got != pytest.approx(other, rel=1e-3)


def test_a_first_token_that_nothing_predicts_stands_for_itself(llama, candidate):
    bare = Candidate(candidate.token_T, prompt_length=0, answer_start=55)
    copies = MaskedCopies(llama, "answer_mean", Replacements(None, seed=5), 100)
    alone, with_others = copies.run(bare, [(0,)]), copies.run(bare, [(0,), (3, 4)])
    assert alone == pytest.approx([0.0], abs=1e-12)
    assert with_others[0] == pytest.approx(0.0, abs=1e-12)
    assert with_others[1:] == pytest.approx(copies.run(bare, [(3, 4)]), rel=1e-9)


# ---- from copies to importance


def response(prompt, **lengths):
    """Tokens of prompt and response, and the response's segments; other tokens stand in the midst of the reasoning."""
    torch.manual_seed(lengths["REASONING"])
    segments = torch.tensor([Segment[name] for name, length in lengths.items() for _ in range(length)])
    segments[4:6] = Segment.OUTSIDE
    return torch.randint(1, SIZE["vocab_size"], (prompt + len(segments),)), segments


RESPONSES = {
    3: response(5, REASONING=30, CONCLUDE=2, ANSWER=3, AFTER=4),
    8: response(7, REASONING=12, CONCLUDE=1, ANSWER=1),
}


def test_a_candidate_ends_with_its_answer():
    token_T, segments_L = RESPONSES[3]
    candidate = candidate_of(token_T, segments_L)
    assert torch.equal(candidate.token_T, token_T[: 5 + 35])
    assert (candidate.prompt_length, candidate.answer_start) == (5, 5 + 32)


@pytest.mark.parametrize("max_tokens", [1, 10_000])
@pytest.mark.parametrize(
    ("budget", "span", "by_gradient"),
    [(1.0, 1, False), (1.0, 4, False), (0.4, 1, False), (2.0, 3, False), (0.3, 1, True), (3.0, 2, True)],
)
def test_importance_equals_single_copies(llama, budget, span, by_gradient, max_tokens):
    """All units, spans, a budget that goes by blocks, and one that goes by gradient."""
    copies = MaskedCopies(llama, "answer_mean", PAD, max_tokens)
    gradient = {row: torch.rand(len(segments)) for row, (_, segments) in RESPONSES.items()} if by_gradient else None
    got = copies_importance(copies, RESPONSES, Perturbation(budget, span, PAD.token), gradient)
    assert got.keys() == RESPONSES.keys()
    for row, (token_T, segments_L) in RESPONSES.items():
        prompt, answer, asked = len(token_T) - len(segments_L), positions(segments_L, Segment.ANSWER), 0
        candidate = Candidate(token_T[: prompt + answer[-1] + 1], prompt, prompt + int(answer[0]))
        all_units = units((segments_L == Segment.REASONING).tolist(), span)
        search = Search(all_units, len(segments_L), budget, gradient[row].tolist() if gradient else None)
        while search.wanted:
            asked += len(search.wanted)
            search.send(one_by_one(llama, candidate, search.wanted))
        want = search.importance.float()
        assert (asked < len(all_units)) == (budget != 1)
        assert got[row].dtype == torch.float32
        torch.testing.assert_close(got[row], want, rtol=1e-5, atol=1e-7 * want.max().item())
        assert ((got[row] > 0) == (segments_L == Segment.REASONING)).all()
        assert (got[row] >= 0).all()


@pytest.mark.parametrize("mine", [{}, {8}, {3, 8}])
@pytest.mark.parametrize(("budget", "rounds"), [(1.0, 1), (0.5, 2)])
def test_every_process_makes_as_many_forwards_as_the_busiest(llama, budget, rounds, mine):
    """Under FSDP: a process without responses idles through all rounds, and idling changes no number."""
    most, calls, asked = 40, [], []

    def in_step(forwards):
        asked.append(forwards)
        return most

    wanted = {row: RESPONSES[row] for row in mine}
    copies = MaskedCopies(llama, "answer_mean", PAD, 1)
    alone = copies_importance(copies, wanted, Perturbation(budget, 1, PAD.token))
    handle = llama.register_forward_hook(lambda *args: calls.append(1))
    got = copies_importance(copies, wanted, Perturbation(budget, 1, PAD.token), in_step=in_step)
    handle.remove()
    assert len(asked) == rounds
    assert all(forwards < most for forwards in asked[1:])
    assert len(calls) == sum(max(most, forwards) for forwards in asked)
    assert got.keys() == alone.keys()
    assert all(torch.equal(got[row], alone[row]) for row in got)
