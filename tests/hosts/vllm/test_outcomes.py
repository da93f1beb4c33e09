"""Which rows count, and what is made of them: against softmaxes of the whole prompt, whatever the engine's steps were."""

import math
import random
from dataclasses import asdict

import pytest
import torch

from oar_plugin.credit.perturbation import sample_replacements
from oar_plugin.credit.probe import PROBES
from oar_plugin.hosts.vllm import outcomes
from oar_plugin.hosts.vllm.outcomes import (
    MAX_REFERENCES,
    DrawSpec,
    OutcomeRecorder,
    OutcomeSpec,
    Scheduled,
    Spec,
    read_spec,
)

V, D, START, LENGTH = 50, 8, 11, 16
HEAD_DV = torch.randn(D, V, generator=torch.Generator().manual_seed(0))
JUNK_D = torch.full((D,), 1e3)


def project(hidden_RD):
    return hidden_RD @ HEAD_DV


class Prompt:
    """A prompt and its hidden states."""

    def __init__(self, seed: int, length: int = LENGTH) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.token_ids = torch.randint(0, V, (length,), generator=generator).tolist()
        self.hidden_LD = torch.randn(length, D, generator=generator)

    def outcome(self, probe: str) -> torch.Tensor:
        logits = project(self.hidden_LD)[START - 1 : -1].double()
        if probe == "answer_joint":
            at = torch.tensor(self.token_ids[START:])
            return logits.log_softmax(-1).gather(-1, at[:, None]).mean()
        return (logits[0] if probe == "last" else logits.mean(0)).log_softmax(-1)


REFERENCE, COPY = Prompt(1), Prompt(2)


def expected(copy: Prompt = COPY, probe: str = "answer_mean") -> object:
    p, q = REFERENCE.outcome(probe), copy.outcome(probe)
    return pytest.approx((p - q).item() if probe == "answer_joint" else (p.exp() * (p - q)).sum().item(), rel=1e-5)


def spec(role: str = "copy", key: str = "k", probe: str = "answer_mean") -> OutcomeSpec:
    return OutcomeSpec(key, role, probe, START)


def step(recorder: OutcomeRecorder, *parts: tuple[str, Spec, Prompt, int, int]) -> dict[str, list[float]]:
    """One step of an engine with other traffic between the parts `(request, spec, prompt, first, count)`."""
    rows, items = [JUNK_D], []
    for request, its_spec, prompt, first, count in parts:
        items.append(Scheduled(request, its_spec, prompt.token_ids, first, count, len(rows)))
        computed = list(prompt.hidden_LD[first : first + count])
        rows += [*computed, *[JUNK_D] * (count - len(computed)), JUNK_D]
    return {request: numbers.tolist() for request, numbers in recorder.step(torch.stack(rows), items).items()}


def whole(recorder: OutcomeRecorder, its_spec: Spec, prompt: Prompt = COPY) -> list[float]:
    return step(recorder, ("whole", its_spec, prompt, 0, len(prompt.token_ids)))["whole"]


def kept(recorder: OutcomeRecorder) -> dict[str, int]:
    return {"references": len(recorder._references), "requests": len(recorder._tallies)}


@pytest.fixture
def recorder():
    """Knows the reference of key `k` and the probe `answer_mean`."""
    made = OutcomeRecorder(project)
    whole(made, spec("reference"), REFERENCE)
    return made


@pytest.mark.parametrize("probe", PROBES)
class TestScore:
    def test_does_not_depend_on_the_steps(self, recorder, probe, monkeypatch):
        monkeypatch.setattr(outcomes, "_ROWS", 3)
        probe_rows = 1 if probe == "last" else LENGTH - START
        assert whole(recorder, spec("reference", probe=probe), REFERENCE) == [0.0, probe_rows]
        prompts = {f"c{i}": Prompt(10 + i) for i in range(6)}
        draw = random.Random(0)
        for _ in range(30):
            at, got = dict.fromkeys(prompts, 0), {}
            while at:
                chosen = draw.sample(sorted(at), draw.randint(1, len(at)))
                sizes = {c: draw.randint(1, LENGTH - at[c]) for c in chosen}
                found = step(recorder, *[(c, spec(probe=probe), prompts[c], at[c], sizes[c]) for c in chosen])
                assert set(found) == {c for c in chosen if at[c] + sizes[c] == LENGTH}
                got |= found
                for c in chosen:
                    if c in found:
                        del at[c]
                    elif draw.random() < 0.3:  # preempted: from the beginning, or from what the cache still has of it
                        at[c] = draw.choice([0, at[c]])
                    else:
                        at[c] += sizes[c]
            assert got == {name: [expected(prompt, probe), probe_rows] for name, prompt in prompts.items()}
        assert kept(recorder) == {"references": 1, "requests": 0}

    @pytest.mark.parametrize(
        ("before", "first"), [(0, START), (START - 1, START + 1), (START + 1, START + 2)], ids=["cached", "lost", "gap"]
    )
    def test_is_nan_where_a_row_came_from_the_cache(self, recorder, probe, before, first):
        """With the number of rows that were read before."""
        whole(recorder, spec("reference", probe=probe), REFERENCE)
        if before:
            step(recorder, ("c", spec(probe=probe), COPY, 0, before))
        (numbers,) = step(recorder, ("c", spec(probe=probe), COPY, first, LENGTH - first)).values()
        read = max(0, before - (START - 1))
        if probe == "last" and read:
            assert numbers == [expected(probe=probe), 1], "its one row was read"
        else:
            assert numbers == pytest.approx([math.nan, read], nan_ok=True)

    def test_is_nan_where_logits_are(self, recorder, probe):
        whole(recorder, spec("reference", probe=probe), REFERENCE)
        broken = Prompt(2)
        broken.hidden_LD[START - 1, 0] = math.nan
        rows = 1 if probe == "last" else LENGTH - START
        assert whole(recorder, spec(probe=probe), broken) == pytest.approx([math.nan, rows], nan_ok=True)
        assert math.isnan(whole(recorder, spec("reference", key="broken", probe=probe), broken)[0])


def test_a_prompt_that_ends_before_its_answer_scores_nan(recorder):
    assert math.isnan(whole(recorder, spec(), Prompt(2, START))[0])
    assert kept(recorder)["requests"] == 0


def test_a_request_id_that_is_used_again_starts_anew(recorder):
    step(recorder, ("whole", spec(), Prompt(9), 0, START + 2))
    assert whole(recorder, spec()) == [expected(), LENGTH - START]


@pytest.mark.parametrize(("changes", "said"), [({"key": "unknown"}, 0), ({"probe": "last"}, 1)])
def test_without_a_reference_of_its_key_and_probe_a_copy_scores_nan(recorder, changes, said):
    assert whole(recorder, spec(**changes)) == pytest.approx([math.nan, said], nan_ok=True)


def test_small_divergences_survive(recorder):
    near = Prompt(1)
    near.hidden_LD = near.hidden_LD + 1e-4 * COPY.hidden_LD
    p, q = REFERENCE.outcome("answer_mean"), near.outcome("answer_mean")
    assert 0 < whole(recorder, spec(), near)[0] == pytest.approx((p.exp() * (p - q)).sum().item(), rel=0.01)


@pytest.mark.parametrize("length", [9, LENGTH], ids=["up to the last", "whole"])
@pytest.mark.parametrize("cut", [0, 3, 4, 7])
def test_replacements_are_drawn_wherever_the_prompt_is_cut_and_not_without_their_rows(monkeypatch, cut, length):
    monkeypatch.setattr(outcomes, "_DRAWN_ROWS", 2)
    at, seeds, recorder = (1, 4, 5, 9), (1, 2, 3, 4), OutcomeRecorder(project)
    token_R = torch.tensor([REFERENCE.token_ids[i] for i in at])
    draws, prompt = DrawSpec(at, tuple(token_R.tolist()), seeds), Prompt(1)
    prompt.token_ids = prompt.token_ids[:length]
    want = sample_replacements(project(REFERENCE.hidden_LD)[torch.tensor(at) - 1], token_R, torch.tensor(seeds))
    if cut:
        assert step(recorder, ("r", draws, prompt, 0, cut)) == {}
    found = step(recorder, ("r", draws, prompt, cut, length - cut))["r"]
    assert found == [0.0, len(at), *want.tolist()]
    found = step(recorder, ("r", draws, prompt, 4, length - 4))["r"]
    assert found == pytest.approx([math.nan, 0], nan_ok=True)
    assert kept(recorder) == {"references": 0, "requests": 0}


def test_a_prompt_too_short_for_its_draws_has_none():
    found = whole(OutcomeRecorder(project), DrawSpec((1, LENGTH + 1), (0, 0), (1, 2)))
    assert found == pytest.approx([math.nan, 0], nan_ok=True)


def test_a_step_reads_nothing_back_from_the_device():
    """The second runner of vLLM queues step after step: whoever reads a number waits for all. Here there are none to read."""
    recorder = OutcomeRecorder(lambda hidden_RD: torch.empty(len(hidden_RD), V, device="meta"))
    hidden_TD = torch.empty(3 * LENGTH, D, device="meta")
    for probe in PROBES:
        specs = [spec("reference", probe=probe), spec(probe=probe), DrawSpec((1, 4), (0, 0), (1, 2))]
        items = [Scheduled(str(i), one, COPY.token_ids, 0, LENGTH, i * LENGTH) for i, one in enumerate(specs)]
        found = recorder.step(hidden_TD, items)
        assert {name: tuple(numbers.shape) for name, numbers in found.items()} == {"0": (2,), "1": (2,), "2": (4,)}


class TestMemory:
    def test_aborted_requests_are_dropped(self, recorder):
        step(recorder, *[(f"c{i}", spec(), COPY, 0, LENGTH - 1) for i in range(3)])
        recorder.retain({"c1": None})
        assert kept(recorder)["requests"] == 1

    def test_the_least_recently_used_reference_makes_room(self, recorder):
        for i in range(MAX_REFERENCES):
            whole(recorder, spec("reference", key=str(i)), REFERENCE)
        whole(recorder, spec(key="0"))
        whole(recorder, spec("reference", key="new"), REFERENCE)
        assert kept(recorder)["references"] == MAX_REFERENCES
        assert not math.isnan(whole(recorder, spec(key="0"))[0])
        assert math.isnan(whole(recorder, spec(key="1"))[0])


def test_a_rank_without_logits_calls_for_the_same_rows(monkeypatch):
    """Tensor parallel: projecting is a collective, so both ranks must call it alike; one gets nothing from it."""
    monkeypatch.setattr(outcomes, "_ROWS", 4)
    calls: list[torch.Tensor] = []
    heard: list[torch.Tensor] = []
    driver = OutcomeRecorder(lambda hidden_RD: (calls.append(hidden_RD), project(hidden_RD))[1])
    other = OutcomeRecorder(heard.append)
    for recorder in (driver, other):
        whole(recorder, spec("reference"), REFERENCE)
        step(recorder, ("a", spec(), COPY, 0, 13), ("b", spec(key="none"), COPY, 0, 13), ("x", spec(), COPY, 12, 2))
        found = step(recorder, ("a", spec(), COPY, 13, 3), ("b", spec(key="none"), COPY, 13, 3))
        assert set(found) == {"a", "b"}
        assert kept(recorder)["requests"] == 1
    assert calls
    assert all(torch.equal(one, two) for one, two in zip(calls, heard, strict=True))
    assert kept(other)["references"] == 0


@pytest.mark.parametrize("one", [spec("reference"), DrawSpec((1, 2), (7, 7), (3, -4))], ids=["outcome", "draws"])
def test_a_spec_survives_its_journey(one):
    # Serialisers make lists of tuples.
    values = {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(one).items()}
    assert read_spec(values) == one


@pytest.mark.parametrize(
    "values",
    [
        *(asdict(spec()) | change for change in ({"role": "judge"}, {"probe": "first"}, {"start": 0})),
        {"at": (3, 3), "avoid": (5, 5), "seeds": (1, 2)},
        {"at": (0,), "avoid": (5,), "seeds": (1,)},
        {"at": (1,), "avoid": (5,), "seeds": ()},
        {"at": (), "avoid": (), "seeds": ()},
        {"at": (1,), "avoid": (), "seeds": (1,)},
    ],
)
def test_nonsense_is_refused(values):
    with pytest.raises(ValueError, match=r"scored|draw tokens"):
        read_spec(values)
