"""Masked copies in a plain HuggingFace model: published numbers, batched = one by one, shared prefix = whole copies."""

import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from oar_plugin.credit.noise import position_seeds, response_seeds
from oar_plugin.credit.perturbation import sample_replacements
from oar_plugin.credit.probe import PROBES
from oar_plugin.passes.masked_copies import Candidate, MaskedCopies, Replacements
from tests.credit.test_golden import FILES, load

VOCABULARY, PAD = 90, 0


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
@pytest.mark.parametrize("probe", PROBES)
@pytest.mark.parametrize("max_copies", [None, 1, 3])
def test_scores_agree_with_the_published_numbers(path, probe, max_copies):
    """To 1e-5 of the response's largest score, batched and one by one.

    A drop of log-probability is a difference of two float32 numbers, in the reference too, and carries their rounding: where
    a response has one small drop (0.09 nats of 4) a float64 model is 2e-5 of it away. There the scale is the number itself.
    """
    reference, _, model = load(path)
    for index, case in enumerate(reference["cases"]):
        ids = torch.tensor(case["before"] + case["reasoning"] + case["conclude"] + case["answer"])
        start = len(case["before"])
        candidate = Candidate(ids, start, len(ids) - len(case["answer"]))
        copies = MaskedCopies(model, probe, Replacements(case["pad_token_id"]), 4096, max_copies)
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
@pytest.mark.parametrize(("max_tokens", "max_copies"), [(10_000, None), (100, None), (1, None), (10_000, 2)])
def test_any_grouping_gives_what_single_copies_give(llama, candidate, probe, max_tokens, max_copies):
    copies = MaskedCopies(llama, probe, Replacements(PAD), max_tokens, max_copies)
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


def test_nothing_is_left_on_the_model(llama, candidate):
    before = {n: p.requires_grad for n, p in llama.named_parameters()}
    MaskedCopies(llama, "answer_mean", Replacements(PAD), 100).run(candidate, UNITS)
    assert {n: p.requires_grad for n, p in llama.named_parameters()} == before
    assert all(p.grad is None for p in llama.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in llama.modules())
