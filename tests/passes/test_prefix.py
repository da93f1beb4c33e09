"""Masked copies in a plain HuggingFace model: published numbers, batched = one by one, shared prefix = whole copies, and the
importance that follows."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.nn.functional import pad
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig

from oar_plugin.credit.answer import Segment
from oar_plugin.credit.perturbation import importance_of_units, units
from oar_plugin.credit.probe import PROBES
from oar_plugin.passes import prefix, rows
from oar_plugin.passes.plain import batch_importance
from tests.asked import asked
from tests.credit.test_golden import every_file, load
from tests.hosts.engine.world import Candidate, drawn, one_by_one, outcome
from tests.passes.batch import SIZE, padded, positions, random_model, unpadded

every_probe = pytest.mark.parametrize("probe", PROBES)


def run(model, responses, max_tokens=10_000, probe="answer_mean", max_over_ranks=int, **request):
    """Importance of each row. `responses`: `(ids, segments)` each."""
    batch, request = padded(responses), asked("oar_p", probe, **{"replacement_token": 0, **request})
    return unpadded(batch_importance(model, request, *batch, max_tokens, max_over_ranks=max_over_ranks), batch[2])


@every_file
@every_probe
@pytest.mark.parametrize("max_tokens", [4096, 1, 150])
def test_scores_agree_with_the_published_numbers(path, probe, max_tokens):
    """To 1e-5 of the response's largest score, batched and one by one. A drop of log-probability carries the rounding of two
    float32 numbers, in the reference too: there the scale is that of these numbers."""
    reference, _, model = load(path)
    parts = {"before": Segment.OUTSIDE, "reasoning": Segment.REASONING, "conclude": Segment.CONCLUDE}
    for index, case in enumerate(reference["cases"]):
        ids = torch.tensor([token for name in (*parts, "answer") for token in case[name]])
        named = (parts | {"answer": Segment.ANSWER}).items()
        segments = torch.tensor([int(segment) for name, segment in named for _ in case[name]])
        (got,) = run(model, [(ids, segments)], max_tokens, probe, replacement_token=case["pad_token_id"])
        want = torch.tensor(case[f"perturbation_{probe}"], dtype=torch.float64).clamp_min(0.0)
        scale = want.abs().max().item()
        if probe == "answer_joint":
            with torch.no_grad():
                scale = max(scale, -outcome(model, ids, Candidate.of(ids, segments), probe).item())
        assert (got[segments == Segment.REASONING] - want).abs().max().item() / scale < 1e-5, f"case {index}"


# ---- against a whole forward for each copy


def made(prompt, **lengths):
    """Tokens of prompt and response, and their segments. Tokens 4 and 5 of the reasoning are not the model's own."""
    torch.manual_seed(lengths["REASONING"])
    segments = torch.tensor([Segment[name] for name, length in lengths.items() for _ in range(length)])
    segments[4:6] = Segment.OUTSIDE
    return torch.randint(1, SIZE["vocab_size"], (prompt + len(segments),)), pad(segments, (prompt, 0))


RESPONSES = [made(7, REASONING=12, CONCLUDE=1, ANSWER=1), made(5, REASONING=30, CONCLUDE=2, ANSWER=3, AFTER=4)]
RESPONSES.append((torch.tensor([3, 4, 5]), torch.zeros(3, dtype=torch.long)))  # has nothing to score


@pytest.fixture(scope="module")
def llama():
    return random_model(initializer_range=0.3).double()


def alone(model, probe="answer_mean", span=1, replacement=lambda ids: 0):
    want = []
    for ids, segments in RESPONSES[:2]:
        candidate, unit_list = Candidate.of(ids, segments), units((segments == Segment.REASONING).tolist(), span)
        scores = one_by_one(model, candidate, unit_list, probe, replacement(candidate.token_T))
        want.append(importance_of_units(unit_list, scores, len(ids)))
    return [*want, torch.zeros(3)]


def assert_equal(got, want):
    for got_T, want_T in zip(got, want, strict=True):
        torch.testing.assert_close(got_T, want_T, rtol=1e-5, atol=1e-7 * want_T.max().item())


@every_probe
@pytest.mark.parametrize(("max_tokens", "chunk", "span"), [(10_000, 3, 1), (10_000, 11, 4), (100, 256, 3), (1, 3, 1)])
@pytest.mark.parametrize("kind", [LlamaConfig, MistralConfig])
def test_any_grouping_gives_what_single_copies_give(monkeypatch, kind, probe, max_tokens, chunk, span):
    """Llama runs copies behind a cached prefix. Mistral, whose window does not keep all positions, runs them whole. A chunk has
    logits of a part of an answer, or of several answers."""
    monkeypatch.setattr(rows, "CHUNK", chunk)
    window = {"sliding_window": 16} if kind is MistralConfig else {}
    model = random_model(kind, initializer_range=0.3, **window).double()
    assert_equal(run(model, RESPONSES, max_tokens, probe, span=span), alone(model, probe, span))


class Renamed(LlamaForCausalLM):
    def forward(self, input_ids, cache=None, **named):  # as in transformers 5.24
        return super().forward(input_ids, past_key_values=cache, **named)


def test_a_cache_is_given_by_the_name_that_the_model_inside_an_adapter_has_for_it(llama):
    model = Renamed(llama.config).double()
    model.load_state_dict(llama.state_dict())
    model = get_peft_model(model, LoraConfig(target_modules=["q_proj"])).eval()
    assert_equal(run(model, RESPONSES), alone(llama))
    assert prefix.WORKS[model]


@pytest.fixture
def calls(llama):
    """The shape of the tokens of each forward."""
    run(llama, RESPONSES)  # the trials
    shapes = []
    handle = llama.get_input_embeddings().register_forward_hook(
        lambda module, args, output: shapes.append(args[0].shape)
    )
    yield shapes
    handle.remove()


@pytest.mark.parametrize("max_tokens", [1, 300, 2000])
def test_few_tokens_are_computed_that_the_prefix_has(llama, calls, max_tokens):
    segments = torch.tensor([0] * 7 + [Segment.REASONING] * 45 + [Segment.CONCLUDE] * 3 + [Segment.ANSWER] * 5)
    run(llama, [(torch.arange(1, 61), segments)], max_tokens)
    copies = [rows * length for rows, length in calls[2:]]  # after the read, and the forward that fills the cache
    needed = sum(60 - 7 - t for t in range(45))
    assert needed <= sum(copies) <= needed + len(copies) * max_tokens / 16
    assert (len(copies) < 45) == (sum(copies) > needed) == (max_tokens > 1)


@pytest.mark.parametrize(("max_tokens", "chunk"), [(1, 3), (10_000, 256)])
def test_sampled_replacements_come_from_the_models_own_prediction(monkeypatch, llama, max_tokens, chunk):
    """Also behind a first token that nothing predicts, which stands for itself."""
    monkeypatch.setattr(rows, "CHUNK", chunk)
    want, other = (alone(llama, replacement=lambda ids, s=s: drawn(llama, ids, s)) for s in (5, 6))
    got = run(llama, RESPONSES, max_tokens, replacement_token=None, seed=5)
    assert_equal(got, want)
    assert (got[1] - other[1]).abs().max() > 1e-3 * got[1].max()
    (bare,) = run(llama, [(ids[7:], segments[7:]) for ids, segments in RESPONSES[:1]], replacement_token=None, seed=5)
    assert bare[0] < 1e-12 < bare[1]


@pytest.mark.parametrize(("mine", "max_tokens"), [([2], 1), ([0], 1), ([1, 0], 60), ([1, 0], 10_000)])
def test_every_process_makes_as_many_forwards_as_the_busiest(llama, calls, mine, max_tokens):
    """As under FSDP: a process with fewer forwards idles, and this changes no score."""
    mine, asked_for = [RESPONSES[row] for row in mine], []
    want, made = run(llama, mine, max_tokens), len(calls)

    def max_over_ranks(count):
        asked_for.append(count)
        return max(count, 60)

    got = run(llama, mine, max_tokens, max_over_ranks=max_over_ranks)
    assert all(map(torch.equal, got, want))
    read, copies, forwards = asked_for
    assert (read + forwards, copies) == (made, sum(int((s == Segment.REASONING).sum()) for _, s in mine))
    assert len(calls) - made == 2 * 60


def test_a_copy_that_changes_nothing_has_a_score_of_zero_and_one_rank_may_have_no_rows(llama):
    """A copy with the token that stands there is its original. A rank without rows runs forwards for the others."""
    ids, segments = RESPONSES[0]
    same = ids.clone()
    same[positions(segments)[3]] = 0
    for max_tokens in (1, 10_000):
        (got,) = run(llama, [(same, segments)], max_tokens)
        assert ((got[positions(segments)] < 1e-12).nonzero()[:, 0] == 3).all()
    nothing = torch.zeros(0, 5, dtype=torch.long)
    request = asked("oar_p", replacement_token=0)
    assert batch_importance(
        llama, request, nothing, nothing, nothing.bool(), 80, max_over_ranks=lambda n: n or 3
    ).shape == (0, 5)


def test_ranks_agree_on_whole_copies():
    """One rank's trial of a prefix fails."""
    model, verdicts = random_model(initializer_range=0.3).double(), iter((0, 1))  # of the model, and of a prefix
    run(model, RESPONSES[:1], max_over_ranks=lambda count: count or next(verdicts))
    assert prefix.WORKS[model] is False
