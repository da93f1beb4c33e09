"""Log-probs of responses from a HuggingFace model."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from oar_plugin.passes.plain import of_like_length


@torch.no_grad()
def log_probs(
    model: nn.Module, rows: Sequence[tuple[Tensor, Tensor]], temperature: float, max_tokens: int
) -> list[Tensor]:
    """Log-probs of responses after prompts (rows of both), float32 `[L]` each, on the CPU.

    `max_tokens`: maximum number of tokens per forward, with padding; a longer row runs alone.
    """
    found, device = list[Tensor]([torch.zeros(0)] * len(rows)), next(model.parameters()).device
    lengths = torch.tensor([len(prompt) + len(response) for prompt, response in rows])
    for group in of_like_length(range(len(rows)), lengths, max_tokens):
        # Padding behind each row needs no mask.
        token_KT = pad_sequence([torch.cat(rows[row]) for row in group], True).to(device)
        logits_KTV = model(input_ids=token_KT, use_cache=False).logits[:, :-1]
        for row, logits_TV, token_T in zip(group, logits_KTV, token_KT[:, 1:], strict=True):
            own = slice(len(rows[row][0]) - 1, lengths[row] - 1)
            scaled_LV = logits_TV[own].float() / temperature
            found[row] = -nn.functional.cross_entropy(scaled_LV, token_T[own], reduction="none").cpu()
    return found
