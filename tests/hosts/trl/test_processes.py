"""Two processes on a CPU (gloo) with TRL's own trainer: DDP, FSDP2, FSDP1 and DeepSpeed's ZeRO-3.

Of eight siblings each process has four, in batches of two; at the second step the second process has none to score. What is
forced, since a CPU is not offered it: `worker.allow_on_a_cpu`. Stand-ins: none.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import oar_plugin
from oar_plugin.credit.diagnostics import Status
from oar_plugin.page.sources import read
from tests.hosts.trl import tiny, worker
from tests.hosts.trl.watched import relative

pytestmark = pytest.mark.slow
SECONDS = 120
WRAPPERS = {
    "ddp": "DistributedDataParallel",
    "fsdp2": "FSDPQwen2ForCausalLM",
    "fsdp1": "FullyShardedDataParallel",
    "zero3": "DeepSpeedEngine",
}
KIND = {layout: kind for kind, layouts in worker.LAYOUTS.items() for layout in layouts}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder that a kind's two processes left, started once."""
    done = {}

    def train(kind):
        if kind not in done:
            folder = tmp_path_factory.mktemp(kind)
            here = Path(__file__).parents[3]
            paths = os.pathsep.join([str(here), os.environ.get("PYTHONPATH", "")])
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
            process = subprocess.run(
                [*command, "-m", "tests.hosts.trl.worker", kind, str(folder)],
                env={**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": paths},
                cwd=here,
                timeout=SECONDS,
                capture_output=True,
                text=True,
            )
            assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-6000:]
            (folder / "log").write_text(process.stdout + process.stderr)
            done[kind] = folder
        return done[kind]

    return train


def ranks(folder, name):
    return [torch.load(folder / f"{name}-{rank}.pt", weights_only=False) for rank in (0, 1)]


@pytest.mark.parametrize("importance", worker.IMPORTANCES)
@pytest.mark.parametrize("layout", WRAPPERS)
def test_scores_are_those_of_one_process_and_metrics_and_dumps_are_of_all(trained, layout, importance):
    folder = trained(KIND[layout])
    both = ranks(folder, f"{layout}-{importance}")
    assert {wrapper for wrapper, _, _ in both} == {WRAPPERS[layout]}
    scored = [[int((seen["status_B"] == Status.SCORED).sum()) for seen in kept] for _, kept, _ in both]
    assert scored == [[3, 3], [3, 0]]
    for _, kept, _ in both:
        for seen in kept:
            compare(seen, importance)
    assert both[0][2][0]["oar/scored"] == 6 / 8
    assert both[0][2][1]["oar/scored"] == 3 / 8
    for first, second in zip(both[0][2], both[1][2], strict=True):
        names = {name for name in first if name.startswith("oar/")} - {"oar/seconds"}
        assert {name: first[name] for name in names} == pytest.approx({name: second[name] for name in names})
    dumps = folder / f"{layout}-{importance}"
    (group,) = {item.group for item in read([dumps], steps=[1]).items}
    items = read([dumps], steps=[1]).items
    assert [item.token_ids for item in items] == [
        row[: int(mask.sum())].tolist()
        for _, kept, _ in both
        for row, mask in zip(kept[0]["output"]["completion_ids"], kept[0]["output"]["completion_mask"], strict=True)
    ]
    assert group == "0"


def compare(seen, importance):
    """With the front door on one process, on a model with the weights that both had."""
    output = seen["output"]
    credit = oar_plugin.importance(
        tiny.make_model(),
        torch.cat([output["prompt_ids"], output["completion_ids"]], 1),
        response_mask=torch.cat([torch.zeros_like(output["prompt_ids"]), output["completion_mask"]], 1),
        attention_mask=torch.cat([output["prompt_mask"], output["completion_mask"]], 1),
        tokenizer=tiny.TOKENIZER,
        importance=importance,
        perturbation=worker.COPIES,
        step=seen["step"],
    )
    begin = output["prompt_ids"].shape[1]  # the same prompt for all, without padding
    for row in (seen["status_B"] == Status.SCORED).nonzero()[:, 0].tolist():
        width = credit.importance.shape[1] - begin
        assert relative(seen["importance_BL"][row, :width], credit.importance[row, begin:]) < 1e-5


@pytest.mark.parametrize("layout", WRAPPERS)
def test_where_all_tokens_count_alike_the_weights_are_plain_grpos(trained, layout):
    """`beta=0`: a whole pass with masked copies, and weights of 1. Bit for bit, and the same in both processes."""
    (plain, even), (plain_1, even_1) = ranks(trained(KIND[layout]), f"{layout}-even")
    fresh = dict(tiny.make_model().named_parameters())
    assert plain.keys() == fresh.keys()
    assert not any(torch.equal(plain[name], fresh[name].detach()) for name in plain)
    for other in (even, plain_1, even_1):
        assert tiny.same_weights(plain, other)


@pytest.mark.parametrize("kind", worker.LAYOUTS)
def test_trls_own_trainer_loads_nothing_of_the_plugin(trained, kind):
    assert ranks(trained(kind), "loaded") == [[], []]
