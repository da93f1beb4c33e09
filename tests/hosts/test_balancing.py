"""Rows dealt out to ranks, and what each rank does with them: on made-up lengths, with verl's own partitioning below."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tensordict import TensorDict

pytest.importorskip("verl")

from hypothesis import given, settings
from hypothesis import strategies as st
from verl.utils import tensordict_utils as tu
from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions

from oar_plugin.hosts.verl.balancing import balanced_partitions, filled_up
from oar_plugin.hosts.verl.importance_pass import ROW, EngineBatch, ImportancePass
from tests.asked import asked
from tests.hosts.engine.world import nested


@given(st.integers(1, 7), st.integers(1, 9), st.data())
@settings(max_examples=100)
def test_every_rank_gets_as_many_rows_and_as_many_scored_ones_within_one(ranks, each, data):
    rows = ranks * each
    lengths = data.draw(st.lists(st.integers(1, 9000), min_size=rows, max_size=rows))
    scored = data.draw(st.lists(st.booleans(), min_size=rows, max_size=rows))
    partitions = balanced_partitions(lengths, scored, ranks)
    assert sorted(row for partition in partitions for row in partition) == list(range(rows))
    assert {len(partition) for partition in partitions} == {each}
    assert all(partition == sorted(partition) for partition in partitions), "mini-batches keep the order of sampling"
    counts = [sum(scored[row] for row in partition) for partition in partitions]
    assert max(counts) - min(counts) <= 1
    # Who has one less has one of the shortest of the others for it.
    short = sorted(length for length, one in zip(lengths, scored, strict=True) if not one)
    filled = [
        min(lengths[row] for row in partition if not scored[row])
        for partition, count in zip(partitions, counts, strict=True)
        if count < max(counts)
    ]
    assert sorted(filled) == short[: len(filled)]


@pytest.mark.parametrize(("ranks", "share"), [(8, 0.2), (64, 0.6), (512, 0.2), (512, 0.9)])
def test_the_scoring_pass_runs_at_most_a_tenth_more_than_it_needs_and_work_is_as_even_as_verls(ranks, share):
    """The bound of the page, in tokens, for 8 responses to each of 1,024 prompts, as there. Without (verl's partitions, filled
    up with the next rows): 1.1 to 2.5."""
    drawn = np.random.default_rng(0)
    prompt_B = drawn.integers(60, 260, 1024).repeat(8)
    length_B = torch.from_numpy(prompt_B + drawn.lognormal(np.log(1500), 0.8, 8192).clip(10, 8192).astype(int))
    scored_B = torch.from_numpy((drawn.random(1024) < share).repeat(8))
    work_B = calculate_workload(length_B)
    verls = get_seqlen_balanced_partitions(work_B.tolist(), ranks, equal_size=True)
    ours = balanced_partitions(length_B.tolist(), scored_B.tolist(), ranks)
    if ranks == 64:
        assert max(work_B[rows].sum() for rows in ours) < 1.001 * max(work_B[rows].sum() for rows in verls)
    ahead = max(int(scored_B[rows].sum()) for rows in ours)
    parts = ((rows, scored_B[rows].nonzero()[:, 0].tolist()) for rows in map(torch.tensor, ours))
    first = (rows[filled_up(scored, length_B[rows], ahead)] for rows, scored in parts)
    assert length_B[torch.cat([*first])].sum() <= 1.1 * length_B[scored_B].sum()


def test_a_rank_fills_up_with_its_shortest_rows():
    length = torch.tensor([9, 5, 3, 7, 5, 4])
    assert filled_up([1, 4], length, 4).tolist() == [1, 4, 2, 5]
    assert filled_up([1, 4], length, 2).tolist() == [1, 4]


# ---- the engine's side


class Engine(ImportancePass):
    """An engine whose maximum over ranks is given."""

    def __init__(self, largest, most=8, divisor=1):
        self.largest, self.divisor = largest, divisor
        self._sum_over_data = self._sum_over_sharing_ranks = None
        self.engine_config = SimpleNamespace(micro_batch_size_per_gpu=most, max_token_len_per_gpu=100)

    def _run_or_run_out_of_memory(self, data, work, request):
        self.ran = data
        return True

    def max_over_ranks(self, count):
        assert count <= self.largest
        return self.largest

    def _micro_batch_multiple(self):
        return self.divisor


def rows(number, dynamic, infer_size=8):
    data = TensorDict({"input_ids": nested([torch.arange(1 + i) for i in range(number)])}, [number])
    tu.assign_non_tensor(data, use_dynamic_bsz=dynamic, micro_batch_size_per_gpu=infer_size, max_token_len_per_gpu=100)
    return data


@pytest.mark.parametrize(
    ("largest", "most", "divisor", "dynamic", "ahead", "micro_batches"),
    [
        (5, 8, 1, True, 5, None),
        (5, 8, 4, True, 8, None),  # virtual pipeline: a micro-batch of each stage needs a row
        (5, 8, 1, False, 5, 1),  # not 8: a micro-batch is no larger than it has to be
        (13, 8, 1, False, 14, 2),  # two of seven, not of eight
        (13, 2, 4, False, 16, 8),
        (0, 8, 1, False, 0, 0),
        (24, 16, 1, False, 24, 2),
    ],
)
def test_how_many_rows_take_a_pass_of_their_own(largest, most, divisor, dynamic, ahead, micro_batches):
    engine, data = Engine(largest, most, divisor), rows(24, dynamic, infer_size=16)
    assert EngineBatch(engine, data, asked("fisher")).gradient(range(min(4, largest)), None)
    found = engine.ran[ROW].tolist() if largest else []
    assert len({*found}) == len(found) == ahead
    if micro_batches:
        assert ahead / engine.ran["micro_batch_size_per_gpu"] == micro_batches
        assert engine.ran["micro_batch_size_per_gpu"] <= most


@pytest.mark.parametrize(
    ("count", "divisor", "dynamic", "whole"),
    [(411, 1, False, 416), (16, 1, False, 16), (20, 4, False, 32), (3, 2, True, 4)],
)
def test_copies_run_in_whole_micro_batches(count, divisor, dynamic, whole):
    assert EngineBatch(Engine(0, divisor=divisor), rows(2, dynamic), asked("oar_p")).whole(count) == whole
