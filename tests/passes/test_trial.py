"""What the trial forward of a model says of models whose configuration says nothing."""

from types import SimpleNamespace

import pytest
import torch
from transformers import (
    BertConfig,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    NemotronHConfig,
    OpenAIGPTConfig,
    Qwen2Config,
    RobertaConfig,
)

from oar_plugin.passes.gradient import Layout
from oar_plugin.passes.plain import batch_importance
from oar_plugin.passes.taps import UnsupportedModelError
from oar_plugin.passes.trial import TOKENS, Reading, fault
from tests.asked import asked
from tests.hosts.engine import world
from tests.passes.batch import SIZE, padded, random_model, rows_of

SMALL = {"vocab_size": 300, "initializer_range": 0.3}
SIZES = {
    Gemma3TextConfig: {"head_dim": 8},
    NemotronHConfig: {"head_dim": 8, "layers_block_type": ["mamba", "attention"]}
    | {"mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 1},
    OpenAIGPTConfig: {"n_positions": 128, "n_embd": 32, "n_layer": 2, "n_head": 4},
}


def run(model, importance="fisher", **arguments):
    return batch_importance(model, asked(importance, replacement_token=world.PAD), *padded(rows_of()), **arguments)


class Capped(LlamaForCausalLM):
    """Changes its logits by what no configuration says."""

    def forward(self, *arguments, **named):
        output = super().forward(*arguments, **named)
        output.logits = 5 * torch.tanh(output.logits / 5)
        return output


class NotANumber(Capped):
    """Also has a token whose logits are NaN, which no comparison sees."""

    def __init__(self, config):
        super().__init__(config)
        self.lm_head.weight.data[0] = torch.nan


class Prefixed(LlamaForCausalLM):
    """Puts a token of its own in front, and takes it off its logits."""

    def forward(self, input_ids, **named):
        output = super().forward(torch.nn.functional.pad(input_ids, (1, 0)), **named)
        output.logits = output.logits[:, 1:]
        return output


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("build", "why"),
    [
        (lambda: Capped(LlamaConfig(**SIZE | SMALL)), "Capped.*changes its logits.*by 0.*rounding explains"),
        (lambda: NotANumber(LlamaConfig(**SIZE | SMALL)), "NotANumber gives outputs that are not finite.*weights"),
        (lambda: random_model(logit_scale=0.5, **SMALL), r"LlamaForCausalLM.*configuration says \(logit_scale=0\.5\)"),
        (lambda: Prefixed(LlamaConfig(**SIZE | SMALL)), "Prefixed.*one embedding.*for each token"),
        (lambda: random_model(BertConfig, **SMALL), "BertLMHeadModel.*later tokens.*rounding explains"),
    ],
)  # fmt: skip
def test_a_model_is_refused_for_what_it_does(build, why, dtype):
    for importance in ("fisher", "oar_p"):
        with pytest.raises(UnsupportedModelError, match=why):
            run(build().to(dtype).eval(), importance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [LlamaConfig, Qwen2Config, Gemma3TextConfig, GPT2Config, NemotronHConfig])
def test_a_model_runs_one_more_forward_before_its_first_scores_only(kind, dtype):
    model, calls = random_model(kind, **SMALL | SIZES.get(kind, {})).to(dtype), []
    model.register_forward_hook(lambda *_: calls.append(1))
    counts = []
    for _ in range(2):
        calls.clear()
        assert any(row.any() for row in run(model))
        counts.append(len(calls))
    assert counts == [2, 1]
    calls.clear()
    run(model, "random")
    assert not calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_of_a_fused_forward_entropies_and_log_probs_are_compared(dtype):
    hidden_NH, weight_VH = torch.randn(TOKENS, 64).to(dtype), torch.randn(300, 64).to(dtype)
    at_N, next_N = torch.arange(TOKENS), torch.tensor([*range(1, TOKENS), -1])
    log_p_NV = (hidden_NH.float() @ weight_VH.float().T / 0.7).log_softmax(-1)
    entropy_N, log_prob_N = -(log_p_NV.exp() * log_p_NV).sum(-1), log_p_NV[at_N, next_N]
    for entropy, log_prob, differs in ((1, 1, False), (1.5, 1, True), (1, 1.2, True)):
        trial = Reading(Layout(at_N, at_N, TOKENS), fused=(0.7, next_N))
        trial.leaf(hidden_NH)
        trial._read(lambda hidden_NH: hidden_NH @ weight_VH.T, hidden_NH)
        trial.see(SimpleNamespace(entropy=entropy * entropy_N[None], log_probs=log_prob * log_prob_N[None]))
        assert bool(fault(trial, {})) is differs


def test_another_object_of_the_class_is_tried_again_and_ranks_decide_alike():
    config = LlamaConfig(**SIZE | SMALL)
    good = Capped(config).eval()
    good.lm_head.weight.data.zero_()  # nothing to cap
    run(good)
    with pytest.raises(UnsupportedModelError, match="changes its logits"):
        run(Capped(config).eval())
    with pytest.raises(UnsupportedModelError, match="another rank"):
        run(random_model(**SMALL), max_over_ranks=lambda count: max(count, 1))


@pytest.mark.parametrize("kind", [LlamaConfig, OpenAIGPTConfig, RobertaConfig, NemotronHConfig])
def test_copies_share_a_prefix_only_where_that_gives_what_whole_copies_give(kind, caplog):
    """OpenAI's GPT ignores a cache. RoBERTa's positions begin after its padding token's."""
    settings = {"is_decoder": True, "pad_token_id": 1} if kind is RobertaConfig else {}
    model = random_model(kind, **SMALL | SIZES.get(kind, {}) | settings).double()
    for (ids, segments), got in zip(rows_of(), run(model, "oar_p"), strict=True):
        prompt = int((segments > 0).nonzero()[0])
        want = world.of_response(model, ids, segments[prompt:])
        torch.testing.assert_close(got[prompt : len(ids)], want.float(), rtol=1e-3, atol=1e-4 * want.max().item())
    assert ("run whole" in caplog.text) == (kind is OpenAIGPTConfig)
