"""verl's engines on GPUs: every layout against a plain model on the CPU in float32 or float64, and peak memory.

Errors are relative to the response's largest score; in bf16 scores differ by several per cent, so their order is reported too.
Scoring on vLLM engines: the tests of tests/hosts/vllm, with CUDA graphs and asynchronous scheduling, and in bf16.
"""

import json

import pytest
import torch
from transformers import masking_utils

from oar_plugin.passes.request import IMPORTANCE
from oar_plugin.runs.launch.preflight import importable
from tests.asked import asked
from tests.gpu import here
from tests.hosts.engine import cases, world
from tests.hosts.engine.compare import worst
from tests.passes import batch
from tests.processes import ranks

WORKER = "tests.gpu.worker"
LIMIT_S = 600
SHAPE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "initializer_range": 0.1}
FLOAT32, HALF = 1e-4, 0.25
ASKED = {
    "fsdp": ["fisher", "fisher joint", "fisher dynamic", "fisher only", "oar_p"],
    "megatron": ["fisher", "fisher joint", "fisher dynamic", "fisher only"],
}
BRIDGE = "mbridge" if here.REHEARSAL and not importable("megatron.bridge") else "megatron.bridge"
MEGATRON = {
    1: ["one", "one dropout"],
    2: ["tp2", "tp2 sp", "tp2 sp full", "pp2", "pp2 vpp2", "cp2", "cp2 a2a", "dp2", "dp2 overlap"],
    8: ["tp2 sp pp2 cp2"],
}
FSDP = {
    1: ["packed", "padded", "checkpointing", "offload", "lora", "fsdp1", "bf16", "flash", "flash checkpointing"],
    2: ["fsdp2", "fsdp1", "fsdp2 flash", "ulysses flash"],
}


def layout(kind, name, processes):
    packages = ("verl", "peft") if name == "lora" else ("verl",)
    if kind == "megatron":
        packages += ("megatron.core", BRIDGE, "transformer_engine")
    if kind == "megatron" or "flash" in name:
        packages += ("flash_attn",)
    needs = pytest.mark.needs(gpus=processes, packages=packages)
    return pytest.param(kind, name, processes, marks=needs, id=f"{kind}: {name}, {processes}")


LAYOUTS = [
    layout(kind, name, processes)
    for kind, table in (("fsdp", FSDP), ("megatron", MEGATRON))
    for processes, names in table.items()
    for name in names
]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    path = tmp_path_factory.mktemp("models")
    for kind in ASKED:
        world.make_model(path / kind, **SHAPE)
    return path


def in_common(result, want):
    """The share of the highest-scored fifth of the tokens that both results agree on: mean over responses."""
    shares = []
    for place, row in enumerate(result["rows"]):
        if row in want:
            many = max(1, int((want[row] > 0).sum()) // 5)
            tops = [set(scores.topk(many).indices.tolist()) for scores in (result[IMPORTANCE][place], want[row])]
            shares.append(len(set.intersection(*tops)) / many)
    return sum(shares) / len(shares)


@pytest.mark.parametrize(("kind", "name", "processes"), LAYOUTS)
def test_importance_equals_a_plain_models(root, log, figures, kind, name, processes):
    # Masked copies read their prefix from a cache, which the stand-in for flash-attention lacks.
    asked = [words for words in ASKED[kind] if not (here.REHEARSAL and words == "oar_p" and "flash" in name)]
    every = ranks(WORKER, kind, name, root / kind, *asked, processes=processes, limit_s=LIMIT_S, log=log)
    half = {"bf16", "flash"} & {*name.split()} or (kind == "megatron" and not here.REHEARSAL)
    errors = {}
    for words in asked:
        results = [rank[f"{name} {words}"] for rank in every]
        want = cases.want(root, f"{'single' if kind == 'fsdp' else kind} {words}")
        errors[words] = max(worst(one, want) for one in results)
        share = min(in_common(one, want) for one in results)
        figures(words, f"{errors[words]:.1e}" + (f" ({share:.0%} of the top fifth)" if half else ""))
    everything = [result for rank in every for result in rank.values()]
    figures("log-probs differ by", f"{max(one.get('log_probs_error', 0.0) for one in everything):.1e}")
    assert all(one["traces"] == [] for one in everything)
    assert max(errors.values()) < (HALF if half else FLOAT32), errors


LARGE = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14}
LARGE |= {"vocab_size": 151936, "max_position_embeddings": 4096, "tie_word_embeddings": True, "initializer_range": 0.02}
# The shape of Qwen2.5-0.5B; a smaller one on a CPU, in which the vocabulary is still the largest part.
SMALL = {**SHAPE, "vocab_size": 4096, "max_position_embeddings": 4096}


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    path = tmp_path_factory.mktemp("large")
    world.make_model(path, **(SMALL if here.REHEARSAL else LARGE))
    return path


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, id=name, marks=pytest.mark.needs(packages=("verl", *packages), memory_gb=38))
        for name, packages in [
            ("packed chunked", ()),
            ("flash chunked", ("flash_attn",)),
            ("flash checkpointing chunked", ("flash_attn",)),
        ]
    ],
)
def test_importance_does_not_raise_the_peak_of_a_step(large, log, figures, name):
    """The update or verl's own log-prob pass has the peak, on top of weights and optimizer state. CUDA's allocator counts it; a
    rehearsal counts storages."""
    tokens = 64 if here.REHEARSAL else 1024
    (peaks,) = ranks(WORKER, "fsdp", name, large, "memory", tokens, processes=1, limit_s=LIMIT_S, log=log)
    for what, peak in peaks.items():
        figures(what, f"{peak / 2**20:.0f} MiB")
    assert peaks["log-probs"] > 0
    for importance in ("fisher", "entropy"):  # with gradients at the embeddings, less than a thousandth of the peak
        assert peaks[importance] <= 1.01 * max(peaks["update"], peaks["log-probs"]), importance


# ---- scoring on vLLM's engines

FILE = "tests/hosts/vllm/test_engine_scoring.py"
# A share of the memory, so that an engine starts beside other programs: its cache has a few blocks.
SHARED: dict[str, float] = {} if here.REHEARSAL else {"gpu_memory_utilization": 0.2}
EAGER = {"enforce_eager": True, "async_scheduling": False} | SHARED
GRAPHS = {"enforce_eager": here.REHEARSAL, "async_scheduling": True} | SHARED
SCORING_S = 1500


# Triton's default multiplies float32 as TF32. On an H200 0.0045 was seen, at most.
def engine(name, settings, which, tolerance=1e-2, gpus=1):
    return pytest.param(settings, which, tolerance, id=name, marks=pytest.mark.needs(gpus=gpus, packages=("vllm",)))


@pytest.mark.parametrize(
    ("settings", "which", "tolerance"),
    [
        engine("eager", EAGER, "OneRank"),
        engine("graphs", GRAPHS, "OneRank"),
        engine("graphs, second runner", GRAPHS, "SecondRunner"),
        engine("graphs, bf16", GRAPHS | {"dtype": "bfloat16"}, "(OneRank or SecondRunner) and scores_are", 0.5),
        engine("graphs, two ranks", GRAPHS, "TwoRanks", gpus=2),
    ],
)
def test_scores_equal_single_copies_of_a_plain_model(suite, figures, settings, which, tolerance):
    environment = {"OAR_TEST_ENGINE": json.dumps(settings), "OAR_TEST_TOLERANCE": str(tolerance)}
    count = suite([FILE, "-k", which], SCORING_S, VLLM_WORKER_MULTIPROC_METHOD="spawn", **environment)
    for name, number in count.items():
        figures(name, number)
    assert count["tests"] > count["skipped"]


# ---- the gradient pass


@pytest.mark.needs
@pytest.mark.parametrize("name", ["fisher", "oar_g"])
def test_a_gradient_pass_does_not_wait_for_the_gpu(monkeypatch, name):
    """Any wait before the scores come back raises. transformers itself asks in each forward whether rows are packed."""
    device, mode = ("cpu", lambda _: None) if here.REHEARSAL else ("cuda", torch.cuda.set_sync_debug_mode)
    bring_back = batch.importance_of_scores
    monkeypatch.setattr(batch, "importance_of_scores", lambda *given: mode("default") or bring_back(*given))
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda position_ids: None)
    model, rows = batch.random_model(vocab_size=300).to(device), batch.padded(batch.rows_of())
    for wanted in ("default", "error"):  # the first pass loads kernels
        mode(wanted)
        try:
            assert batch.gradient_pass(model, asked(name), *rows).any()
        finally:
            mode("default")
