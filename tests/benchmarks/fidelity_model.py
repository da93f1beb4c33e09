"""A tiny model with random weights, and responses it never wrote."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.fidelity.measure import Source
from benchmarks.fidelity.responses import Response
from oar_plugin.credit.answer import Segment

VOCABULARY = 24
PAD = 23


def tiny_model(seed: int = 0, key_value_heads: int = 1) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=key_value_heads,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        initializer_range=0.5,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def response(length: int, seed: int, correct: bool | None = True, causal: bool = True) -> Response:
    """Four tokens of prompt, reasoning, a marker, two tokens of answer, one after."""
    token_T = torch.randint(0, PAD, (length,), generator=torch.Generator().manual_seed(seed))
    segments_T = torch.full((length,), int(Segment.REASONING))
    segments_T[:4] = Segment.OUTSIDE
    segments_T[-4:] = torch.tensor([Segment.CONCLUDE, Segment.ANSWER, Segment.ANSWER, Segment.AFTER])
    known = None
    if causal:
        known = torch.zeros(length, dtype=torch.bool)
        known[[6, 8]] = True
    return Response(token_T, segments_T, 4, tuple(f" t{i}" for i in token_T.tolist()), correct, known)


def source(name: str = "made", seed: int = 0, count: int = 3, **known: object) -> Source:
    responses = [response(16 + index, index, correct=index != 1, **known) for index in range(count)]
    return Source(name, seed, tiny_model(seed), responses, 1, PAD, 0.5)
