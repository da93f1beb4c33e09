"""Masked copies in a plain HuggingFace model: published numbers, batched = one by one, shared prefix = whole copies, and the
importance that follows."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig

from oar_plugin.credit.answer import Segment
from oar_plugin.credit.perturbation import importance_of_units, units
from oar_plugin.credit.probe import PROBES
from oar_plugin.passes import masked_copies, rows
from oar_plugin.passes.masked_copies import Candidate, MaskedCopies
from tests.asked import asked
from tests.credit.test_golden import every_file, load
from tests.hosts.engine.world import drawn, one_by_one, outcome
from tests.passes.batch import SIZE, positions, random_model

UNITS = [(0,), (3, 4, 5), (9,), (11,), (12, 13), (40,)]
every_probe = pytest.mark.parametrize("probe", PROBES)


def copies_of(model, max_tokens, probe="answer_mean", importance="oar_p", replacement_token=0, **request):
    request = asked(importance, probe, replacement_token=replacement_token, **request)
    return MaskedCopies(model, request, max_tokens)


@every_file
@every_probe
@pytest.mark.parametrize("max_tokens", [4096, 1, 150])
def test_scores_agree_with_the_published_numbers(path, probe, max_tokens):
    """To 1e-5 of the response's largest score, batched and one by one. A drop of log-probability carries the rounding of two
    float32 numbers, in the reference too: there the scale is that of these numbers."""
    reference, _, model = load(path)
    for index, case in enumerate(reference["cases"]):
        ids = torch.tensor(case["before"] + case["reasoning"] + case["conclude"] + case["answer"])
        candidate = Candidate(ids, len(case["before"]), len(ids) - len(case["answer"]))
        copies = copies_of(model, max_tokens, probe, replacement_token=case["pad_token_id"])
        got = copies.run(candidate, [(t,) for t in range(len(case["reasoning"]))])
        want = torch.tensor(case[f"perturbation_{probe}"], dtype=torch.float64)
        scale = want.abs().max().item()
        if probe == "answer_joint":
            with torch.no_grad():
                scale = max(scale, -outcome(model, ids, candidate, probe).item())
        error = (torch.tensor(got) - want).abs().max().item() / scale
        assert error < 1e-5, f"case {index}"


# ---- against a whole forward for each copy


@pytest.fixture(scope="module")
def llama():
    return random_model(initializer_range=0.3).double()


@pytest.fixture(scope="module")
def candidate():
    torch.manual_seed(1)
    return Candidate(torch.randint(1, SIZE["vocab_size"], (60,)), prompt_length=7, answer_start=55)


@every_probe
@pytest.mark.parametrize(("max_tokens", "chunk"), [(10_000, 3), (10_000, 11), (200, 11), (100, 256), (1, 3)])
@pytest.mark.parametrize("kind", [LlamaConfig, MistralConfig])
def test_any_grouping_and_order_gives_what_single_copies_give(monkeypatch, candidate, kind, probe, max_tokens, chunk):
    """A model without a plain cache gets whole copies, another one only what follows their first masked token. A chunk has
    logits of a part of an answer, or of several answers."""
    monkeypatch.setattr(masked_copies, "CHUNK", chunk)
    window = {"sliding_window": 16} if kind is MistralConfig else {}
    model = random_model(kind, initializer_range=0.3, **window).double()
    want = one_by_one(model, candidate, UNITS, probe)
    copies = copies_of(model, max_tokens, probe)
    assert copies.run(candidate, UNITS) == pytest.approx(want, rel=1e-9)
    assert copies.run(candidate, UNITS[::-1]) == pytest.approx(want[::-1], rel=1e-9)


class Renamed(LlamaForCausalLM):
    def forward(self, input_ids, cache=None, **named):  # as in transformers 5.24
        return super().forward(input_ids, past_key_values=cache, **named)


def test_a_cache_is_given_by_the_name_that_the_model_inside_an_adapter_has_for_it(llama, candidate):
    model = Renamed(llama.config).double()
    model.load_state_dict(llama.state_dict())
    copies = copies_of(get_peft_model(model, LoraConfig(target_modules=["q_proj"])).eval(), 10_000)
    assert copies.run(candidate, UNITS) == pytest.approx(copies_of(llama, 10_000).run(candidate, UNITS))
    assert copies._shares_prefix


@pytest.mark.parametrize("max_tokens", [1, 300, 2000])
def test_few_tokens_are_computed_that_the_prefix_has(llama, candidate, max_tokens):
    copies, unit_list = copies_of(llama, max_tokens), [(t,) for t in range(45)]
    copies.run(candidate, unit_list)
    needed = 59 + sum(59 - 7 - t for (t,) in unit_list)
    forwards = copies.forwards([(candidate, unit_list)]) - 1
    assert needed <= copies.tokens <= needed + forwards * max_tokens / 16
    assert (forwards < 45) == (copies.tokens > needed) == (max_tokens > 1)


@pytest.mark.parametrize(("max_tokens", "chunk"), [(1, 3), (10_000, 256)])
def test_sampled_replacements_come_from_the_models_own_prediction(monkeypatch, llama, candidate, max_tokens, chunk):
    monkeypatch.setattr(rows, "CHUNK", chunk)
    want, other = (one_by_one(llama, candidate, UNITS, replacement=drawn(llama, candidate.token_T, s)) for s in (5, 6))
    got = copies_of(llama, max_tokens, replacement_token=None, seed=5).run(candidate, UNITS)
    assert got == pytest.approx(want, rel=1e-9)
    assert got != pytest.approx(other, rel=1e-3)


def test_a_first_token_that_nothing_predicts_stands_for_itself(llama, candidate):
    bare = Candidate(candidate.token_T, prompt_length=0, answer_start=55)
    copies = copies_of(llama, 100, replacement_token=None, seed=5)
    alone, with_others = copies.run(bare, [(0,)]), copies.run(bare, [(0,), (3, 4)])
    assert alone == pytest.approx([0.0], abs=1e-12)
    assert with_others[0] == pytest.approx(0.0, abs=1e-12)
    assert with_others[1:] == pytest.approx(copies.run(bare, [(3, 4)]), rel=1e-9)


# ---- from copies to importance


def made(prompt, **lengths):
    """Tokens of prompt and response, and segments; other tokens stand in the midst of the reasoning."""
    torch.manual_seed(lengths["REASONING"])
    segments = torch.tensor([Segment[name] for name, length in lengths.items() for _ in range(length)])
    segments[4:6] = Segment.OUTSIDE
    return torch.randint(1, SIZE["vocab_size"], (prompt + len(segments),)), segments


RESPONSES = {3: made(5, REASONING=30, CONCLUDE=2, ANSWER=3, AFTER=4), 8: made(7, REASONING=12, CONCLUDE=1, ANSWER=1)}


@pytest.mark.parametrize("max_tokens", [1, 10_000])
@pytest.mark.parametrize("span", [1, 4])
def test_importance_equals_single_copies(llama, span, max_tokens):
    got = copies_of(llama, max_tokens, span=span).importance(RESPONSES, int)
    assert got.keys() == RESPONSES.keys()
    for row, (token_T, segments_L) in RESPONSES.items():
        prompt, answer = len(token_T) - len(segments_L), positions(segments_L, Segment.ANSWER)
        candidate = Candidate(token_T[: prompt + answer[-1] + 1], prompt, prompt + int(answer[0]))
        all_units = units((segments_L == Segment.REASONING).tolist(), span)
        want = importance_of_units(all_units, one_by_one(llama, candidate, all_units), len(segments_L))
        assert got[row].dtype == torch.float32
        torch.testing.assert_close(got[row], want, rtol=1e-5, atol=1e-7 * want.max().item())
        assert ((got[row] > 0) == (segments_L == Segment.REASONING)).all()
        assert (got[row] >= 0).all()


@pytest.mark.parametrize(("mine", "max_tokens"), [({}, 1), ({8}, 1), ({3, 8}, 1), ({3, 8}, 60), ({3, 8}, 10_000)])
def test_every_process_makes_as_many_forwards_as_the_busiest(llama, mine, max_tokens):
    """Under FSDP: a process without responses idles, and idling changes no number."""
    most, asked, calls = 40, [], []

    def max_over_ranks(forwards):
        asked.append(forwards)
        return most

    wanted = {row: RESPONSES[row] for row in mine}
    copies = copies_of(llama, max_tokens)
    alone = copies.importance(wanted, int)
    hook = llama.register_forward_hook(lambda *_: calls.append(1))
    got = copies.importance(wanted, max_over_ranks)
    hook.remove()
    (forwards,) = asked
    assert len(calls) == max(most, forwards)
    assert got.keys() == alone.keys()
    assert all(torch.equal(got[row], alone[row]) for row in got)
