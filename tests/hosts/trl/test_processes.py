"""Two processes on a CPU (gloo) with TRL's own trainer: DDP, FSDP2, FSDP1 and DeepSpeed's ZeRO-3.

Of eight siblings each process has four, in batches of two; at the second step the second process has none to score. What is
forced, since a CPU is not offered it: `worker.allow_on_a_cpu`. Stand-ins: none.
"""

from functools import cache

import pytest
import torch

from oar_plugin.credit.diagnostics import Status
from oar_plugin.page.sources import read
from tests.hosts.trl import tiny, worker
from tests.processes import ranks

pytestmark = pytest.mark.slow
WRAPPERS = {
    "ddp": "DistributedDataParallel",
    "fsdp2": "FSDPQwen2ForCausalLM",
    "fsdp1": "FullyShardedDataParallel",
    "zero3": "DeepSpeedEngine",
}
KIND = {layout: kind for kind, layouts in worker.LAYOUTS.items() for layout in layouts}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a kind's two processes, which are started once, and their results."""

    @cache
    def train(kind):
        folder = tmp_path_factory.mktemp(kind)
        return folder, ranks(worker.__name__, kind, folder, DS_ACCELERATOR="cpu")

    return train


@pytest.mark.parametrize("importance", worker.IMPORTANCES)
@pytest.mark.parametrize("layout", WRAPPERS)
def test_scores_are_those_of_one_process_and_metrics_and_dumps_are_of_all(trained, layout, importance):
    folder, results = trained(KIND[layout])
    both = [result[layout, importance] for result in results]
    assert {wrapper for wrapper, _, _ in both} == {WRAPPERS[layout]}
    scored = [[int((seen.status_B == Status.SCORED).sum()) for seen in kept] for _, kept, _ in both]
    assert scored == [[3, 3], [3, 0]]
    for seen in (*both[0][1], both[1][1][0]):
        seen.ask(tiny.make_model(), importance=importance, perturbation=worker.COPIES)
        assert seen.error() < 1e-5
    assert both[0][2][0]["oar/scored"] == 6 / 8
    assert both[0][2][1]["oar/scored"] == 3 / 8
    for first, second in zip(both[0][2], both[1][2], strict=True):
        names = {name for name in first if name.startswith("oar/")} - {"oar/seconds"}
        assert {name: first[name] for name in names} == pytest.approx({name: second[name] for name in names})
    items = read([folder / f"{layout}-{importance}"], steps=[1]).items
    assert {item.group for item in items} == {"0"}
    outputs = [kept[0].output for _, kept, _ in both]
    assert [item.token_ids for item in items] == [
        ids[mask.bool()].tolist()
        for output in outputs
        for ids, mask in zip(output["completion_ids"], output["completion_mask"], strict=True)
    ]


@pytest.mark.parametrize("layout", WRAPPERS)
def test_where_all_tokens_count_alike_the_weights_are_plain_grpos(trained, layout):
    """`beta=0`: a whole pass with masked copies, and weights of 1. Bit for bit, and the same in both processes."""
    (plain, even), (plain_1, even_1) = (result[layout, "even"] for result in trained(KIND[layout])[1])
    fresh = dict(tiny.make_model().named_parameters())
    assert plain.keys() == fresh.keys()
    assert not any(torch.equal(plain[name], fresh[name].detach()) for name in plain)
    for other in (even, plain_1, even_1):
        assert tiny.same_weights(plain, other)
