import dataclasses

import pytest
import torch

from benchmarks.tiny import warm_start
from benchmarks.tiny.model import build_model, sample
from benchmarks.tiny.tasks import TASKS
from benchmarks.tiny.warm_start import WarmStart, accuracy, batches, learned_model, warm_model
from benchmarks.tiny.words import EOS, PAD, VOCABULARY


@pytest.fixture(scope="module")
def model():
    return build_model(0, hidden=32)


@pytest.fixture(scope="module")
def prompts():
    return torch.randint(0, 40, (3, 11), generator=torch.Generator().manual_seed(0))


def test_most_likely_tokens_are_those_of_the_models_own_generate(model, prompts):
    ours = sample(model, prompts, 2, 12, None)
    theirs = model.generate(prompts, attention_mask=torch.ones_like(prompts), do_sample=False, max_new_tokens=12)
    theirs = theirs[:, prompts.shape[1] :].repeat_interleave(2, 0)
    assert torch.equal(ours, theirs[:, : ours.shape[1]])


def test_samples_follow_the_models_distribution(model, prompts):
    """Second tokens, given the first, from many copies of one prompt."""
    copies = 4000
    drawn = sample(model, prompts[:1], copies, 2, torch.Generator().manual_seed(1))
    first = int(drawn[:, 0].mode().values)
    seconds = drawn[drawn[:, 0] == first, 1]
    with torch.no_grad():
        row = model(torch.cat([prompts[0], torch.tensor([first])])[None]).logits[0, -1].softmax(-1)
    share = torch.bincount(seconds, minlength=len(VOCABULARY)) / len(seconds)
    assert (share - row).abs().max() < 5 * (0.25 / len(seconds)) ** 0.5


def test_noise_is_shared_by_policies_that_agree(model, prompts):
    again = [sample(model, prompts, 4, 10, torch.Generator().manual_seed(7)) for _ in range(2)]
    assert torch.equal(*again)
    assert not torch.equal(again[0], sample(model, prompts, 4, 10, torch.Generator().manual_seed(8)))


def test_nothing_but_padding_follows_the_end(model, prompts):
    drawn = sample(model, prompts, 50, 40, torch.Generator().manual_seed(0))
    behind = (drawn == EOS).cumsum(1).roll(1, 1)
    behind[:, 0] = 0
    assert behind.any()
    assert (drawn[behind > 0] == PAD).all()


def test_labels_are_the_response():
    task = TASKS["chain"]
    token_BL, label_BL = next(batches(task, 4, 0, None))
    assert (label_BL[:, : task.prompt_length] == PAD).all()
    labelled = label_BL != PAD
    assert torch.equal(label_BL[labelled], token_BL[labelled])
    assert (label_BL == EOS).sum() == 4


def test_model_is_taken_from_disk_only_for_the_same_training(tmp_path):
    task = TASKS["parallel"]
    settings = WarmStart(hidden=16, layers=1, short_steps=2, full_steps=1, batch=2)
    steps = []
    first = warm_model(task, 0, settings, tmp_path, lambda done, total, loss: steps.append((done, total)))
    assert steps == [(1, 3), (2, 3), (3, 3)]
    again = warm_model(task, 0, settings, tmp_path, lambda *_: pytest.fail("trained again"))
    for ours, theirs in zip(first.parameters(), again.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        assert theirs.requires_grad
    warm_model(task, 1, settings, tmp_path)
    warm_model(dataclasses.replace(task, error_rate=0.5), 0, settings, tmp_path)
    assert len(list((tmp_path / "reasoning").glob("*.pt"))) == 3
    assert 0 <= accuracy(first, task, 4, greedy=False) <= 1


def test_models_that_did_not_learn_their_task_are_passed_over(monkeypatch):
    """Seeds 1 and 3 learn; the model is stood for by its seed."""
    module = "benchmarks.tiny.warm_start"
    monkeypatch.setattr(f"{module}._learned_seed", warm_start._learned_seed.__wrapped__)  # nothing is remembered
    monkeypatch.setattr(f"{module}.warm_model", lambda task, seed, *_: seed)
    monkeypatch.setattr(f"{module}.accuracy", lambda model, *_, greedy: 1.0 if model in (1, 3) else 0.1)
    task = TASKS["chain"]
    assert [learned_model(task, number) for number in (0, 1)] == [1, 3]
    with pytest.raises(ValueError, match="chain: of 9 warm models 2 learned it"):
        learned_model(task, 2)
