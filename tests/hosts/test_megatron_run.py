"""Whole steps with a Megatron actor: real verl, real Ray, real vLLM, verl's real Megatron engine on stand-ins for CUDA.

The optimizer is megatron-core's ordinary one, without clipping: its distributed optimizer and its clipping take CUDA tensors
only. What stands in for what: oar_plugin/hosts/verl/cpu/megatron.py.
"""

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("verl")
pytest.importorskip("vllm")
pytest.importorskip("megatron.core")

from transformers import Qwen2ForCausalLM

from oar_plugin.credit.answer import Segment
from oar_plugin.credit.noise import response_seeds, signs, step_seed
from recipes.smoke import run_smoke
from tests.hosts.whole_run import LIMIT_S, check, whole_run

pytestmark = whole_run

RECIPE = Path(__file__).parents[2] / "recipes" / "qwen2_5_32b_megatron"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("verl")


@pytest.fixture(scope="module")
def two_steps(folder):
    """The recipe's smoke test: two actor processes with tensor and sequence parallelism."""
    more = ["actor_rollout_ref.actor.optim.lr=1e-4", f"algorithm.oar.dump_dir={folder}/dump"]
    return run_smoke(RECIPE, folder, overrides=more, timeout_s=LIMIT_S)


def test_two_steps_with_a_megatron_actor(two_steps):
    check(two_steps, [1, 2])
    for step in two_steps:
        assert step["training/rollout_probs_diff_max"] < 1e-4, (
            "the rollout has the actor's weights, also after an update"
        )


def test_importance_of_the_first_step_equals_a_plain_backward(two_steps, folder):
    """`fisher` on the weights on disk, with autograd on a plain HuggingFace model."""
    model = Qwen2ForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
    rows = [json.loads(line) for line in (folder / "dump" / "step_000001.jsonl").read_text().splitlines()]
    assert rows
    for row in rows:
        prompt = row["prompt_ids"]
        ids = torch.tensor([*prompt, *row["token_ids"]])
        segments = torch.tensor(row["segments"])
        answer = (segments == Segment.ANSWER).nonzero()[:, 0] + len(prompt)
        embedding = model.get_input_embeddings()(ids[None]).detach().requires_grad_(True)
        logits = model(inputs_embeds=embedding).logits[0, answer - 1].mean(0)
        p = logits.detach().softmax(-1)
        root = p.sqrt() * signs(response_seeds(ids, torch.zeros_like(ids), 1, step_seed(0, 1)), 0, len(p))[0]
        (gradient,) = torch.autograd.grad(((root - p * root.sum()) * logits).sum(), embedding)
        want = gradient[0].square().sum(-1)[len(prompt) :].masked_fill(segments != Segment.REASONING, 0.0)
        got = torch.tensor(row["importance"])
        assert ((got - want).abs().max() / want.max()).item() < 1e-4
