"""Batches of the engines' tests' responses for a plain model, and other random models."""

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from oar_plugin.credit.answer import Segment
from oar_plugin.passes.gradient import MicroBatchPass, importance_of_scores
from oar_plugin.passes.host import MicroBatch, Work
from oar_plugin.passes.plain import PlainHost, packed_rows
from oar_plugin.passes.request import Request
from tests.hosts.engine import world

SIZE = {"vocab_size": 90, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
SIZE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}


def random_model(kind=LlamaConfig, **settings) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(kind(**SIZE | settings)).eval()


def rows_of(numbers=world.SCORED) -> list[tuple[Tensor, Tensor]]:
    """Tokens of prompt and response, and their segments."""
    encoded, rows = world.encode(), []
    for number in numbers:
        prompt, response = encoded[number]
        segments = torch.cat([torch.zeros_like(prompt), world.segments_of(world.ROWS[number][1])])
        rows.append((torch.cat([prompt, response]), segments))
    return rows


def padded(rows, left: bool = False, more: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """`[B, L]` tokens, segments and mask; `more`: padding that no response needs."""
    width = max(len(ids) for ids, _ in rows) + more
    token_BL, segments_BL = torch.full((len(rows), width), world.PAD), torch.zeros(len(rows), width, dtype=torch.long)
    mask_BL = torch.zeros(len(rows), width, dtype=torch.bool)
    for row, (ids, segments) in enumerate(rows):
        here = slice(width - len(ids), width) if left else slice(len(ids))
        token_BL[row, here], segments_BL[row, here], mask_BL[row, here] = ids, segments, True
    return token_BL, segments_BL, mask_BL


def unpadded(values_BL: Tensor, mask_BL: Tensor) -> list[Tensor]:
    """Each sequence's values; there must be nothing at padding."""
    assert not values_BL[~mask_BL].any()
    return [row[keep] for row, keep in zip(values_BL, mask_BL, strict=True)]


def positions(segments: Tensor, wanted: Segment = Segment.REASONING) -> Tensor:
    return (segments == wanted).nonzero()[:, 0]


def distance(got: list[Tensor], want: list[Tensor]) -> float:
    """Largest error, each response's relative to its largest score, if it has one; NaN if any score is."""
    assert all(a.shape == b.shape for a, b in zip(got, want, strict=True))
    return torch.stack([(a - b).abs().max() / (b.max() or 1) for a, b in zip(got, want, strict=True)]).max().item()


def error(got: list[Tensor], reference: dict[int, Tensor]) -> float:
    """Of whole sequences' scores, with nothing at their prompts, to a reference of `world`, which has responses alone."""
    prompts = [len(world.encode()[number][0]) for number in world.SCORED]
    assert not any(row[:length].any() for row, length in zip(got, prompts, strict=True))
    responses = [row[length:] for row, length in zip(got, prompts, strict=True)]
    return distance(responses, [reference[number] for number in world.SCORED])


def gradient_pass(
    model, request: Request, token_BL: Tensor, segments_BL: Tensor, mask_BL: Tensor | None = None
) -> Tensor:
    """Importance from the gradient pass alone, in one micro-batch, float32 `[B, L]`. Without a mask, padding is tokens."""
    mask_BL = torch.ones_like(token_BL, dtype=torch.bool) if mask_BL is None else mask_BL
    packed, flat = packed_rows(token_BL, segments_BL, mask_BL)[0], torch.zeros(token_BL.numel())
    host = PlainHost(model, request, packed, token_BL.numel())

    def begin(rows, layout):
        one = MicroBatchPass(request, packed, layout)

        def end(log_prob_T):
            flat[mask_BL.flatten()] = importance_of_scores(request, packed, one.scores)

        return MicroBatch(one.tap, end)

    work = Work(request.forwards(), begin)
    host._forward(range(len(token_BL)), packed, work)
    return flat.view(token_BL.shape)
