"""Models with random weights: of any size, where only costs matter, and a small one for the tasks.

With a sampler that is fast enough to train the small one in seconds.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel

from benchmarks.tiny.words import EOS, PAD, VOCABULARY

Architecture = Literal["qwen2", "llama", "qwen3_moe"]
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Shape:
    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_value_heads: int
    tied: bool = True
    vocab: int = 32_000


# From 0.5b on, the shapes of Qwen2.5.
SHAPES: dict[str, Shape] = {
    "tiny": Shape(64, 128, 2, 4, 2, vocab=1024),
    "1m": Shape(128, 352, 4, 4, 2, vocab=4096),  # heads of 32, the smallest that vLLM serves on a CPU
    "10m": Shape(256, 704, 4, 4, 2),
    "50m": Shape(512, 1408, 12, 8, 2),
    "0.1b": Shape(768, 2048, 12, 12, 4),
    "0.5b": Shape(896, 4864, 24, 14, 2, vocab=151_936),
    "1.5b": Shape(1536, 8960, 28, 12, 2, vocab=151_936),
    "7b": Shape(3584, 18944, 28, 28, 4, tied=False, vocab=152_064),
}


def model_of(
    shape: Shape,
    context: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
    seed: int = 0,
    architecture: Architecture = "qwen2",
    **settings: Any,
) -> PreTrainedModel:
    """A causal LM for sequences of at most `context` tokens; `settings` go into its configuration."""
    config = AutoConfig.for_model(
        architecture,
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_value_heads,
        max_position_embeddings=context,
        tie_word_embeddings=shape.tied,
        attention_dropout=0.0,
        **{"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, **settings},
    )
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    return model.eval()


def build_model(
    seed: int,
    hidden: int = 64,
    layers: int = 2,
    heads: int = 4,
    architecture: Architecture = "llama",
    vocab: int = len(VOCABULARY),
    tied: bool = True,
    **settings: Any,
) -> PreTrainedModel:
    """For the tasks: 100 thousand parameters unless told otherwise. vLLM on a CPU serves heads of 32 and more."""
    shape = Shape(hidden, 2 * hidden, layers, heads, heads, tied, vocab)
    # With the usual initializer_range of 0.02 nothing is learned for minutes.
    settings |= {"eos_token_id": EOS, "pad_token_id": PAD, "initializer_range": hidden**-0.5}
    return model_of(shape, 512, seed=seed, architecture=architecture, **settings)


@torch.inference_mode()
def sample(
    model: PreTrainedModel, prompt_BP: Tensor, copies: int, max_new_tokens: int, generator: torch.Generator | None
) -> Tensor:
    """Responses of a Llama at temperature 1, or the most likely tokens.

    The noise of a token depends on nothing but `generator`, row and position: two policies that agree write the same.

    Args:
        model: from `build_model`.
        prompt_BP: int64 `[B, P]`, prompts of one length.
        copies: responses to each.
        max_new_tokens: length at which a response is cut off.
        generator: of the Gumbel noise; None for the most likely tokens.

    Returns:
        int64 `[B * copies, R]`, the responses, those of a prompt next to each other, padded behind their end of sequence.
    """
    cache = DynamicCache()
    logits_BV = model(prompt_BP, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
    prompt_length = prompt_BP.shape[1]
    decoder = _Decoder(model, cache, copies, prompt_length + max_new_tokens)
    logits_NV = logits_BV.repeat_interleave(copies, 0)
    done_N = torch.zeros(len(logits_NV), dtype=torch.bool)
    tokens: list[Tensor] = []
    for position in range(prompt_length, prompt_length + max_new_tokens):
        if generator is not None:
            # -log(Exponential(1)) is Gumbel noise.
            logits_NV = logits_NV - torch.empty_like(logits_NV).exponential_(generator=generator).log_()
        token_N = logits_NV.argmax(-1).masked_fill_(done_N, PAD)
        tokens.append(token_N)
        done_N = done_N | (token_N == EOS)
        if bool(done_N.all()) or len(tokens) == max_new_tokens:
            break
        logits_NV = decoder.step(token_N, position)
    return torch.stack(tokens, 1)


class _Decoder:
    """One token at a time through a Llama, with keys and values in buffers that are written in place.

    Five times as fast as the model's own forward at this size, where most of the time goes into calls rather than
    arithmetic.
    """

    def __init__(self, model: PreTrainedModel, cache: DynamicCache, copies: int, length: int) -> None:
        base: Any = model.model
        self.embedding_VH, self.head_VH, self.norm = base.embed_tokens.weight, model.lm_head.weight, base.norm
        self.heads = model.config.num_attention_heads
        cos, sin = base.rotary_emb(self.head_VH, torch.arange(length)[None])
        half = cos.shape[-1] // 2
        # Rotation as one product: x * cos + roll(x) * sin, with the sign of rotate_half in the sine.
        self.cos_LD, self.sin_LD = cos[0], torch.cat((-sin[0, :, :half], sin[0, :, half:]), -1)
        self.layers = []
        for layer, cached in zip(base.layers, cache.layers, strict=True):
            attention, mlp = layer.self_attn, layer.mlp
            buffers = []
            for prompt in (cached.keys, cached.values):
                buffer = prompt.new_empty(len(prompt) * copies, prompt.shape[1], length, prompt.shape[3])
                buffer[:, :, : prompt.shape[2]] = prompt.repeat_interleave(copies, 0)
                buffers.append(buffer)
            qkv = torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])
            gate_up = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
            self.layers.append((layer, qkv, attention.o_proj.weight, gate_up, mlp.down_proj.weight, *buffers))

    def step(self, token_N: Tensor, position: int) -> Tensor:
        """Logits `[N, V]` behind the tokens at `position`."""
        hidden_NH = self.embedding_VH[token_N]
        rows = len(hidden_NH)
        for layer, qkv, out, gate_up, down, key_buffer, value_buffer in self.layers:
            q, k, v = F.linear(_norm(layer.input_layernorm, hidden_NH), qkv).view(rows, 3, self.heads, -1).unbind(1)
            key_buffer[:, :, position] = self._rotate(k, position)
            value_buffer[:, :, position] = v
            attended = F.scaled_dot_product_attention(
                self._rotate(q, position)[:, :, None],
                key_buffer[:, :, : position + 1],
                value_buffer[:, :, : position + 1],
            )
            hidden_NH = hidden_NH + F.linear(attended.reshape(rows, -1), out)
            gate, up = F.linear(_norm(layer.post_attention_layernorm, hidden_NH), gate_up).chunk(2, -1)
            hidden_NH = hidden_NH + F.linear(F.silu(gate) * up, down)
        return F.linear(_norm(self.norm, hidden_NH), self.head_VH)

    def _rotate(self, x_NhD: Tensor, position: int) -> Tensor:
        return x_NhD * self.cos_LD[position] + x_NhD.roll(x_NhD.shape[-1] // 2, -1) * self.sin_LD[position]


def _norm(module: Any, x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), module.weight, module.variance_epsilon)
