"""Every causal LM of the installed transformers, built tiny with random weights, against plain autograd and whole copies.

`python -m tests.passes.test_architectures` writes architectures.json, from which `python -m docs.figures` makes the tables of
docs/evidence/architectures.md.
"""

import json
import re
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from oar_plugin.credit.answer import Segment
from oar_plugin.passes.plain import batch_importance
from oar_plugin.passes.taps import UnsupportedModelError
from tests.asked import asked
from tests.hosts.engine.world import of_response
from tests.passes.batch import distance

RESULTS = Path(__file__).with_name("architectures.json")
REASONING, LENGTH = 8, 13
SMALL = {  # the first pattern that is in a key gives its value
    r"(^|_)vocab_size": 96,
    r"token_id$": 1,
    r"max_position|n_positions|n_ctx|max_seq|context_length": 128,
    r"mamba_d_head|mamba_head|qk_head_dim": 16,
    r"d_head$|head_dim|qk_nope|qk_rope|v_head|kv_channels|d_kv|rotary_dim|head_size": 8,
    r"(key_value|kv|query_group).*(heads|num|groups)$|num_kv": 2,
    r"heads?$|n_head|num_heads": 4,
    r"lora_rank|lora_dim|low_rank": 8,
    r"experts_per_tok|moe_top_?k|moe_k$|num_selected": 2,
    r"n_group|topk_group|num_shared|n_shared": 1,
    r"num_.*experts$|n_routed_experts": 4,
    r"intermediate|ffn|d_ff|n_inner|inner_dim|inner_size|d_inner|d_ssm": 64,
    r"hidden_size|d_model|n_embd|embedding_size|embed_dim|emb_dim|dim_model|^dim$|lru_width|hidden_dim|d_embed": 32,
    r"layers?$|num_blocks": 2,
    r"state_size|d_state|n_state": 8,
}
UNSET = ("head_dim", "num_key_value_heads", "n_routed_experts", "n_shared_experts", "num_experts_per_tok")
MORE = {
    "deepseek_v2": {"topk_method": "greedy"},
    "falcon_h1": {"mamba_n_heads": 8, "lm_head_multiplier": 0.5},
    "gemma3n_text": {"intermediate_size": [64, 64], "num_kv_shared_layers": 0},
    **{f"granite{kind}": {"logits_scaling": 8.0} for kind in ("", "moe", "moehybrid", "moeshared")},
    "hyperclovax": {"logits_scaling": 0.5},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"head_dim": 16},
    "xmod": {"default_language": "en_XX"},
    "zamba2": {"mamba_headdim": 8, "hybrid_layer_ids": [1], "attention_hidden_size": 64, "attention_head_dim": 16},
}


def shrunk(config):
    """The settings of a configuration with small sizes, for its class. One layer of each kind is left, two at most."""
    small, layers = {}, next((config[key] for key in config if key.endswith("hidden_layers")), None)
    for key, value in config.items():
        size = next((size for pattern, size in SMALL.items() if re.search(pattern, key)), None)
        if isinstance(value, dict) and key.endswith("_config"):
            small[key] = shrunk(value)
        elif isinstance(value, list) and len(value) == layers:
            small[key] = [*dict.fromkeys(value), value[0]][:2]
        elif size and (type(value) is int or (value is None and key in UNSET)):
            small[key] = size if value is None else min(size, value)
    if "kv_lora_rank" in small:  # multi-head latent attention
        small["num_key_value_heads"] = small["num_attention_heads"]
    return small


def build(kind):
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind)
    decoder = {"is_decoder": True} if hasattr(config, "is_decoder") else {}
    config = type(config)(**shrunk(config.to_dict()) | decoder | MORE.get(kind, {}))
    model = AutoModelForCausalLM.from_config(config).float().eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, 0, parameter.shape[-1] ** -0.5)
    return model


def saliency(model, ids, segments):
    """|<gradient, embedding>| of the answer's log-probability at each token, by plain autograd."""
    seen = []

    def hook(module, args, output):
        seen.append(output)
        return output.clone()  # some models add to it in place

    handle = model.get_input_embeddings().register_forward_hook(hook)
    logits = model(input_ids=ids[None], use_cache=False).logits[0]
    handle.remove()
    at = (segments == Segment.ANSWER).nonzero()[:, 0]
    (gradient,) = torch.autograd.grad(logits[at - 1].log_softmax(-1).gather(-1, ids[at, None]).sum(), seen[0])
    return torch.where(segments == Segment.REASONING, (gradient * seen[0]).sum(-1).abs()[0], 0.0).detach()


def whole_copies(model, ids, segments):
    scores = of_response(model, ids, segments[-LENGTH:], replacement=padding(model))
    return torch.nn.functional.pad(scores.float(), (len(ids) - LENGTH, 0))


def padding(model):
    return getattr(model.config.get_text_config(), "pad_token_id", None) or 0


def outcome(model, importance, plain):
    """`equal`, `refused: why`, `fails: how` or `wrong: by how much`, of a padded batch against one row at a time."""
    ids = torch.randint(3, 90, (2, 5 + LENGTH), generator=torch.Generator().manual_seed(1))
    segments = torch.tensor([0] * 5 + [Segment.REASONING] * REASONING + [0, 0] + [Segment.ANSWER] * 3).repeat(2, 1)
    mask = torch.ones_like(ids).bool()
    mask[1, :3] = False
    try:
        got = batch_importance(model, asked(importance, replacement_token=padding(model)), ids, segments, mask)
    except UnsupportedModelError as error:
        why = re.sub(r"^\w+ is not supported: |: they .*|; OAR .*|^\w+: its | \(.*Error.*", "", str(error))
        return f"refused: {why}"
    except Exception as error:
        return f"fails: {type(error).__name__}"
    want = [plain(model, ids[row, keep], segments[row, keep]) for row, keep in enumerate(mask)]
    error = distance([got[row, keep] for row, keep in enumerate(mask)], want)
    return "equal" if error < 1e-2 else f"wrong: {error:.0e}"


def examined(kinds=MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
    """Class -> model type, and an outcome for each kind of importance, or why it was not built."""
    outcomes = {}
    for kind, name in sorted(kinds.items()):
        if name in outcomes:
            continue
        try:
            model = build(kind)
            model(input_ids=torch.arange(3, 8)[None], use_cache=False)
        except Exception as error:
            outcomes[name] = {"type": kind, "not built": type(error).__name__}
            continue
        gradient = outcome(model, "python:tests.own_importance:Saliency", saliency)
        outcomes[name] = {"type": kind, "gradient": gradient, "copies": outcome(model, "oar_p", whole_copies)}
    return {"transformers": transformers.__version__, "architectures": outcomes}


@pytest.mark.nightly
def test_every_architecture_has_right_scores_or_is_refused():
    now, before = examined(), json.loads(RESULTS.read_text(encoding="utf-8"))
    outcomes = [one[kind] for one in now["architectures"].values() for kind in ("gradient", "copies") if kind in one]
    assert not [one for one in outcomes if not re.match("equal|refused", one)]
    if now["transformers"] == before["transformers"]:
        assert now == before, "python -m tests.passes.test_architectures"


if __name__ == "__main__":
    RESULTS.write_text(json.dumps(examined(), indent=1) + "\n", encoding="utf-8")
