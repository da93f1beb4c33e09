"""Agreement with the numbers that the published implementation returned (arXiv 2601.07408).

Reads every `reference_*.json` (with its `.safetensors` of weights and noise) in the folder named by OAR_GOLDEN_DIR, by
default the copy in this repository.
"""

import copy
import functools
import json
import os
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from oar_plugin.credit.answer import Segment
from oar_plugin.credit.gate import bi_level
from oar_plugin.credit.probe import PROBES
from oar_plugin.passes.gradient import MicroBatchPass
from tests.asked import asked
from tests.passes.batch import gradient_pass

FILES = sorted(Path(os.environ.get("OAR_GOLDEN_DIR", Path(__file__).parents[1] / "golden")).glob("reference_*.json"))
RELATIVE = 1e-5
every_file = pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)

assert FILES, "the tests of every file would be tests of none"


@functools.cache
def load(path):
    reference, tensors = json.loads(path.read_text()), load_file(path.with_suffix(".safetensors"))
    config = Qwen2Config(**reference["model_config"], attn_implementation="sdpa")
    weights = {k.removeprefix("model."): v for k, v in tensors.items() if k.startswith("model.")}
    if config.tie_word_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model = Qwen2ForCausalLM(config)
    model.load_state_dict(weights)
    return reference, tensors, model.eval()


def oar_g(model, case, noise, probe):
    """Importance of the reasoning tokens as in a run, but with the given noise."""
    parts = {"before": Segment.OUTSIDE, "reasoning": Segment.REASONING, "conclude": Segment.CONCLUDE}
    parts["answer"] = Segment.ANSWER
    ids = torch.tensor([[token for name in parts for token in case[name]]])
    segments = torch.tensor([[int(segment) for name, segment in parts.items() for _ in case[name]]])
    reasoning = segments[0] == Segment.REASONING
    noise_BLH = torch.zeros(*ids.shape, noise.shape[1])
    noise_BLH[0, reasoning] = noise
    given = mock.patch.object(MicroBatchPass, "noise", return_value=lambda embedding: noise_BLH.to(embedding.dtype))
    with given:
        return gradient_pass(model, asked("oar_g", probe), ids, segments)[0, reasoning]


def norm_in_float64(self, hidden):
    return self.weight * hidden * (hidden.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()


def error_and_rounding(path, index, probe, louder=1.0):
    """Largest error of the published importance against ours in float64, and that of two float32 evaluations of ours.

    KL has no gradient at zero noise: dJ/dz = P_noisy - P is a difference of two softmaxes that agree to three or four digits,
    which magnifies the forward's float32 rounding. Two correct float32 programs differ by up to 3e-3 of the largest score on
    these cases, so the spread is measured on the case itself. A float64 Qwen2 would round to float32 in its norms. `louder`
    is a factor of the noise.
    """
    reference, tensors, model = load(path)
    case, noise = reference["cases"][index], tensors[f"case{index}.noise"] * louder
    singles = []
    for attention in ("eager", "sdpa"):
        model.set_attn_implementation(attention)
        singles.append(oar_g(model, case, noise, probe))
    with mock.patch.object(Qwen2RMSNorm, "forward", norm_in_float64):
        exact = oar_g(copy.deepcopy(model).double(), case, noise, probe)
    want = torch.tensor(case[f"gradient_{probe}"])
    spread = max(((single - exact).abs().max() / exact.max()).item() for single in singles)
    return ((exact - want).abs().max() / want.max()).item(), spread


@every_file
@pytest.mark.parametrize("probe", PROBES)
def test_gradient_importance_agrees_with_the_published_numbers(path, probe):
    """To 1e-5 of the response's largest score, beyond four times the float32 spread of the case."""
    for index in range(len(load(path)[0]["cases"])):
        error, spread = error_and_rounding(path, index, probe)
        assert spread < 5e-3, "the tolerance would no longer tell right from wrong"
        assert error < RELATIVE + 4 * spread, f"case {index}"


@every_file
def test_one_percent_more_noise_is_noticed(path):
    """Negative control for the tolerance above: importance is linear in the noise, so 1 % more noise is 1 % off."""
    for index in range(2):
        error, spread = error_and_rounding(path, index, "answer_mean", louder=1.01)
        assert error > RELATIVE + 4 * spread


@every_file
def test_gate_agrees_with_the_published_numbers(path):
    """The gate alone; test_estimator shows that a run passes the scores of both published importances unchanged."""
    for index, case in enumerate(load(path)[0]["gates"]):
        scores, want = torch.tensor(case["scores"])[None], torch.tensor(case["weights"])
        everywhere = torch.ones_like(scores, dtype=torch.bool)
        weights_BL = bi_level(scores, everywhere, case["tau"], case["beta"], case["floor"])
        limits = {"rtol": RELATIVE, "atol": RELATIVE * want.max().item()}
        torch.testing.assert_close(weights_BL[0], want, **limits, msg=f"gate {index}")
