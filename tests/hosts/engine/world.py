"""A tiny model, a few responses, and what their importance is when computed in the plainest way."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from oar_plugin.credit.answer import Segment
from oar_plugin.credit.noise import gaussian, position_seeds, response_seeds, signs

MAX_RESPONSE_LENGTH = 40
SIGMA = 1e-3

# prompt, response, needed. The last three fall back: no answer, truncated, nothing to reason about.
ROWS = [
    ("3+4?", "well 3+4 is 7 then\n#### 7<eos>", True),
    ("12*3?", "hmm 12*3=36 ok\n#### 36<eos>", True),
    ("1+1?", "so 2\n#### 2<eos>", False),
    ("9-5?", "9-5, that is 4\n#### 4\nyes<eos>", True),
    ("8/2?", "8/2\n#### 4<eos>", True),
    ("7?", "no idea at all<eos>", True),
    ("5?", "it goes on and on and on #### 5 and on..", True),
    ("6?", "#### 6<eos>", True),
]
SCORED = [0, 1, 3, 4]
STATUS = ["SCORED", "SCORED", "NOT_NEEDED", "SCORED", "SCORED", "NO_ANSWER", "TRUNCATED", "NO_REASONING"]


def make_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<pad>", "<eos>")])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def make_model(folder: Path, tied: bool = False) -> None:
    """Save a random model and its tokenizer."""
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        initializer_range=0.3,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)


def encode() -> list[tuple[torch.Tensor, torch.Tensor]]:
    tokenizer = make_tokenizer()
    rows = []
    for prompt, response, _ in ROWS:
        ids = tokenizer(response)["input_ids"]
        assert len(ids) <= MAX_RESPONSE_LENGTH
        rows.append((torch.tensor(tokenizer(prompt)["input_ids"]), torch.tensor(ids)))
    assert len(rows[6][1]) == MAX_RESPONSE_LENGTH
    return rows


def segments_of(response: str) -> torch.Tensor:
    """By hand, one byte a token: `reasoning #### answer after`."""
    text = response.replace("<eos>", "\0")
    marker = text.index("####")
    end = next(i for i in range(marker + 5, len(text)) if not text[i].isdigit())
    out = [Segment.REASONING] * marker + [Segment.CONCLUDE] * 5 + [Segment.ANSWER] * (end - marker - 5)
    return torch.tensor([int(s) for s in out] + [int(Segment.AFTER)] * (len(text) - end))


def reference(
    folder: Path, importance: str = "fisher", probe: str = "answer_mean", seed: int = 0
) -> dict[int, torch.Tensor]:
    """Importance of each scored response, one at a time, with plain autograd on a plain HuggingFace model."""
    model = Qwen2ForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    vocabulary, hidden = model.config.vocab_size, model.config.hidden_size
    result = {}
    for row in SCORED:
        prompt, response = encode()[row]
        ids = torch.cat([prompt, response])
        segments = torch.cat([torch.zeros(len(prompt), dtype=torch.long), segments_of(ROWS[row][1])])
        rows = (segments == Segment.ANSWER).nonzero()[:, 0] - 1
        rows = rows[:1] if probe == "last" else rows
        seed_1 = response_seeds(ids, torch.zeros_like(ids), 1, seed)
        embedding = model.get_input_embeddings()(ids[None]).detach().requires_grad_(True)
        if importance == "oar_g":
            noise = torch.zeros(1, len(ids), hidden)
            at = (segments == Segment.REASONING).nonzero()[:, 0]
            noise[0, at] = SIGMA * gaussian(position_seeds(seed_1.expand(len(at)), at, 0), hidden)
            with torch.no_grad():
                clean = model(inputs_embeds=embedding).logits[0, rows].double()
            noisy = model(inputs_embeds=embedding + noise).logits[0, rows].double()
            if probe == "answer_joint":
                token = ids[rows + 1][:, None]
                scalar = -noisy.log_softmax(-1).gather(-1, token).mean()
            else:
                p, q = clean.mean(0).log_softmax(-1), noisy.mean(0).log_softmax(-1)
                scalar = (p.exp() * (p - q)).sum()
            (gradient,) = torch.autograd.grad(scalar, embedding)
            scores = (gradient * embedding).sum(-1).abs()[0]
        else:
            logits = model(inputs_embeds=embedding).logits[0, rows]
            if probe == "answer_joint":
                sign = signs(position_seeds(seed_1.expand(len(rows)), torch.arange(len(rows))), 0, vocabulary)
            else:
                logits, sign = logits.mean(0, keepdim=True), signs(seed_1, 0, vocabulary)
            p = logits.detach().softmax(-1)
            root = p.sqrt() * sign
            coefficient = root - p * root.sum(-1, keepdim=True)
            (gradient,) = torch.autograd.grad((coefficient * logits).sum() / len(logits), embedding)
            scores = gradient.square().sum(-1)[0]
        keep = segments == Segment.REASONING
        result[row] = torch.where(keep, scores.detach(), 0.0)[len(prompt) :]
    return result
