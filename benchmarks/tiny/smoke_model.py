"""A model small enough to train in seconds, which writes letters, `#### ` and a digit, with prompts to match.

Smoke tests of recipes and whole runs in tests use it: some responses are right and some wrong, every one has an answer, and one
token of each decides it.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, Literal, get_args

import pandas as pd
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

Architecture = Literal["qwen2", "llama", "qwen3_moe"]
ARCHITECTURES: tuple[Architecture, ...] = get_args(Architecture)
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
HIDDEN, LAYERS, HEADS = 64, 2, 2  # heads of 32, the smallest that vLLM serves on a CPU


def make_tokenizer(*more: str) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer: a token a byte, `<pad>`, `<eos>` and further special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<pad>", "<eos>", *more)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def make_assets(folder: Path, length: tuple[int, int] = (3, 6), architecture: Architecture = "qwen2") -> None:
    """Write `model/` and `data.parquet`. About ten seconds.

    Args:
        folder: where they go.
        length: how many letters a response begins with, least and most.
        architecture: of the model.
    """
    # verl looks for the end of a turn in a Qwen3 tokenizer.
    tokenizer = make_tokenizer(*(["<|im_end|>"] if architecture == "qwen3_moe" else []))
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "model")
    model = _model(architecture, tokenizer)
    rng = random.Random(0)
    _teach(model, tokenizer, rng, length)
    model.save_pretrained(folder / "model")
    pd.DataFrame([_problem(i, digit) for i, digit in enumerate(rng.choices(range(10), k=64))]).to_parquet(
        folder / "data.parquet"
    )


def _model(architecture: Architecture, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    experts: dict[str, Any] = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": HIDDEN,
        "head_dim": HIDDEN // HEADS,
    }
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(
        AutoConfig.for_model(
            architecture,
            vocab_size=len(tokenizer),
            hidden_size=HIDDEN,
            intermediate_size=2 * HIDDEN,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=HEADS,
            max_position_embeddings=128,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            **(experts if architecture == "qwen3_moe" else {}),
        )
    )


def _teach(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, rng: random.Random, length: tuple[int, int]
) -> None:
    """Teach the form of a response, not the answer to the prompt: that is left to the run."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # two threads only get in each other's way at this size
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(350):
        texts = [f"{rng.randint(0, 9)}?" + _response(rng, length) + "<eos>" for _ in range(32)]
        rows = [tokenizer(text)["input_ids"] for text in texts]
        width = max(map(len, rows))
        ids = torch.tensor([row + [tokenizer.pad_token_id] * (width - len(row)) for row in rows])
        labels = ids.masked_fill(ids == tokenizer.pad_token_id, -100)
        labels[:, :2] = -100
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.set_num_threads(threads)


def _response(rng: random.Random, length: tuple[int, int]) -> str:
    """Letters, of which the last decides the answer: some token matters, and which one a policy can choose."""
    letters = "".join(rng.choice("abcdef") for _ in range(rng.randint(*length)))
    return f"{letters}#### {ord(letters[-1]) % 4}"


def _problem(index: int, digit: int) -> dict[str, Any]:
    return {
        "data_source": "tiny",
        "prompt": [{"role": "user", "content": f"{digit}?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(digit % 4)},
        "extra_info": {"index": index, "split": "train"},
    }
