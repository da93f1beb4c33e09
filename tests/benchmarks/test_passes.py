"""The candidates of the benchmark do what they are said to do."""

import dataclasses

import pytest
import torch

from benchmarks.memory import LiveBytes, peak_bytes
from benchmarks.step.passes import Passes, _LogProb
from benchmarks.step.published import published_importance
from benchmarks.tiny.random_models import build_batch
from oar_plugin.credit.answer import Segment
from oar_plugin.credit.importance import IMPORTANCES, importance_of
from oar_plugin.passes.gradient import MicroBatchPass
from oar_plugin.passes.plain import packed_rows

WITHOUT_COPIES = [name for name, importance in IMPORTANCES.items() if importance.copies is None]
WITHOUT_COPIES.append("python:tests.own_importance:Saliency")
WITH_BACKWARDS = [name for name in WITHOUT_COPIES if importance_of(name).backwards]


def with_request(passes: Passes, **changes) -> Passes:
    passes.request = dataclasses.replace(passes.request, **changes)
    return passes


@pytest.mark.parametrize("importance", WITHOUT_COPIES)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_fused_log_probs_are_the_plain_ones(passes, importance, checkpointing):
    passes = with_request(passes, importance=importance)
    plain, fused = passes.log_prob(), passes.fused(checkpointing=checkpointing)
    for name in ("log_prob", "entropy"):
        want, have = torch.cat(getattr(plain, name)), torch.cat(getattr(fused, name))
        assert want.shape == passes.batch.token_BL.shape
        torch.testing.assert_close(have, want, rtol=1e-5, atol=1e-5)


def test_log_probs_and_entropy_are_those_of_log_softmax(passes):
    token_BL = passes.batch.token_BL
    log_prob_BLV = passes.model(input_ids=token_BL).logits.detach().log_softmax(-1)
    scores = passes.log_prob()
    want = log_prob_BLV[:, :-1].gather(-1, token_BL[:, 1:, None])[..., 0]
    torch.testing.assert_close(torch.cat(scores.log_prob)[:, :-1], want)
    torch.testing.assert_close(torch.cat(scores.entropy), -(log_prob_BLV.exp() * log_prob_BLV).sum(-1))


@pytest.mark.parametrize("importance", [name for name in WITHOUT_COPIES if not importance_of(name).noisy])
def test_importance_does_not_depend_on_the_pass(passes, importance):
    passes = with_request(passes, importance=importance)
    fused = torch.cat(passes.fused().importance)
    checkpointed = torch.cat(passes.fused(checkpointing=True).importance)
    alone = torch.cat(passes.importance_only().importance)
    reasoning = passes.segments_BL == Segment.REASONING
    assert (fused[reasoning] > 0).all()
    assert (fused[~reasoning] == 0).all()
    for other in (checkpointed, alone):
        torch.testing.assert_close(other, fused, rtol=1e-4, atol=1e-5 * fused.max().item())


@pytest.mark.parametrize("weight_gradients", [False, True])
def test_published_procedure_agrees_with_ours_for_the_same_noise(passes, weight_gradients):
    """In float64, where the KL's cancellation does not drown the comparison."""
    passes = with_request(passes, importance="oar_g")
    passes.model.double()
    ours = torch.cat(passes.importance_only().importance)
    for number, (token_L, segments_L) in enumerate(zip(passes.batch.token_BL, passes.segments_BL, strict=True)):
        one = MicroBatchPass(passes.request, *packed_rows(token_L[None], segments_L[None], None))
        embedding = passes.model.get_input_embeddings()(token_L).detach()
        reasoning, answer = ((segments_L == s).nonzero()[:, 0] for s in (Segment.REASONING, Segment.ANSWER))
        published = published_importance(
            passes.model,
            token_L,
            int(reasoning[0]),
            int(reasoning[-1]) + 1,
            int(answer[0]),
            int(answer[-1]) + 1,
            noise_RH=one.noise(0)(embedding)[reasoning],
            weight_gradients=weight_gradients,
        )
        torch.testing.assert_close(ours[number, reasoning].double(), published, rtol=1e-4, atol=1e-6 * published.max())


def test_importance_computes_no_weight_gradient_and_the_published_code_does(passes):
    seen = []
    for parameter in passes.model.parameters():
        parameter.register_hook(lambda gradient: seen.append(gradient.shape))
    for importance in WITH_BACKWARDS:
        with_request(passes, importance=importance)
        passes.fused()
        passes.importance_only(checkpointing=True)
    passes.published(1, weight_gradients=False)
    assert not seen
    assert all(p.grad is None and p.requires_grad for p in passes.model.parameters())
    passes.published(1)
    assert seen
    assert all(p.grad is None for p in passes.model.parameters())


def test_update_moves_the_weights_and_leaves_no_gradient(passes):
    before = [p.detach().clone() for p in passes.model.parameters()]
    passes.update()
    assert any((a != b).any() for a, b in zip(before, passes.model.parameters(), strict=True))
    assert all(p.grad is None for p in passes.model.parameters())


def test_checkpointing_does_not_change_the_update(passes):
    token_BL = passes.batch.token_BL
    passes.model.train()
    gradients = []
    for on in (False, True):
        passes._set_checkpointing(on)
        passes._loss(token_BL).backward()
        gradients.append([p.grad.clone() for p in passes.model.parameters()])
        passes.model.zero_grad()
    torch.testing.assert_close(*gradients)


def test_lean_log_prob_has_the_gradient_of_log_softmax():
    torch.manual_seed(0)
    logits, label = torch.randn(7, 11, requires_grad=True), torch.randint(0, 11, (7,))
    weight = torch.randn(7)
    want = logits.log_softmax(-1).gather(-1, label[:, None])[:, 0]
    (want_gradient,) = torch.autograd.grad((want * weight).sum(), logits)
    have = _LogProb.apply(logits * 1, label)
    (gradient,) = torch.autograd.grad((have * weight).sum(), logits)
    torch.testing.assert_close(have, want)
    torch.testing.assert_close(gradient, want_gradient)


def test_only_the_scored_share_is_scored(passes):
    passes.batch = dataclasses.replace(passes.batch, scored=1)
    scores = passes.fused()
    assert torch.cat(scores.importance).shape[0] == 1
    torch.testing.assert_close(torch.cat(scores.log_prob), torch.cat(passes.log_prob().log_prob), rtol=1e-5, atol=1e-5)
    assert len(passes.published().importance) == 1


def test_planted_answer_is_what_the_finder_finds():
    batch = build_batch(4, 8, 48, 5, 4, torch.device("cpu"), seed=1)
    assert batch.token_BL.shape == (4, 56)
    assert (batch.answer_BL.sum(-1) == 5).all()


def test_finder_segments_are_the_planted_ones(passes):
    assert torch.equal(passes.segments_BL == Segment.ANSWER, passes.batch.answer_BL)
    assert (passes.segments_BL[:, : passes.batch.prompt_length] == Segment.OUTSIDE).all()


def test_a_response_without_room_for_its_answer_is_refused():
    with pytest.raises(ValueError, match="no room"):
        build_batch(1, 8, 8, 8, 1, torch.device("cpu"), seed=0)


def test_live_bytes_follow_what_lives():
    size = 4 * 1000
    with LiveBytes() as counter:
        a = torch.ones(1000)
        view = a[:10]
        a.add_(1)
        assert counter.live == size
        del a
        assert counter.live == size, "the view keeps the storage"
        del view
        assert counter.live == 0
        torch.ones(1000) * 2
    assert counter.peak == 2 * size


def test_peak_counts_saved_activations_but_not_what_was_there_before():
    weight = torch.randn(100, 100, requires_grad=True)

    def work(grad: bool) -> int:
        def chain() -> None:
            with torch.set_grad_enabled(grad):
                x = weight * 1
                for _ in range(8):
                    x = x.exp()

        return peak_bytes(chain, torch.device("cpu"))

    one = 4 * 100 * 100
    assert work(grad=False) == 2 * one
    assert work(grad=True) == 8 * one  # exp keeps its result
