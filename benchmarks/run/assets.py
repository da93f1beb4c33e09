"""What a measured run of verl works on: model and tokenizer with exact lengths, prompts, a reward, an answer finder.

verl loads this module by name (`reward.custom_reward_function`, `algorithm.oar.answer_patterns`), so it imports little.
"""

from __future__ import annotations

import itertools
import string
import threading
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

FINDER = f"python:{__name__}:find_answer"
REWARD = f"pkg://{__name__}"

ANSWER_TOKENS = 8
SIGNAL, NO_SIGNAL = "alternate", "equal"

_WIDTH = 4  # characters of a token
_TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"

_calls: defaultdict[int, int] = defaultdict(int)
_calls_lock = threading.Lock()


def find_answer(text: str) -> tuple[int, int] | None:
    """The last tokens of a response, whatever they say: a model with random weights writes no answers.

    A few tokens of the vocabulary have one character in place of four; where one is hit, the answer is longer by a token.
    """
    return (max(0, len(text) - ANSWER_TOKENS * _WIDTH), len(text)) if text else None


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None, **_: Any
) -> dict[str, float]:
    """0, 1, 0, 1 ... over the responses of a prompt with a signal; 0 for all responses of a prompt without one.

    Nothing depends on the text, so that each step has the same number of rows with an advantage. Counts calls, and so
    needs one reward worker (`cpu_overrides` has one).
    """
    if ground_truth == NO_SIGNAL:
        return {"score": 0.0}
    assert extra_info is not None
    with _calls_lock:
        before = _calls[extra_info["index"]]
        _calls[extra_info["index"]] += 1
    return {"score": float(before % 2)}


def make_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE without merges: a prompt has as many tokens as characters, and almost every token that a model samples
    is a word of four letters, as whose bytes the answer finder sees it."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ("".join(letters) for letters in itertools.product(string.ascii_lowercase, repeat=_WIDTH))
    entries = [*alphabet, *itertools.islice(words, vocabulary - len(alphabet) - 2)]
    core = Tokenizer(models.BPE(vocab={entry: i for i, entry in enumerate(entries)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in ("<pad>", "<eos>")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>")
    tokenizer.chat_template = _TEMPLATE
    return tokenizer


def prompt_rows(steps: int, prompts: int, with_signal: int, prompt_length: int) -> list[dict[str, Any]]:
    """verl's columns, in the order of the steps: no prompt twice, so that no step finds another's prefix in a cache.

    Args:
        steps: of the run.
        prompts: a step.
        with_signal: how many of them have responses with unequal rewards; they are spread evenly over the batch.
        prompt_length: tokens of each.
    """
    rows: list[dict[str, Any]] = []
    for index in range(steps * prompts):
        place = index % prompts
        signal = (place + 1) * with_signal // prompts > place * with_signal // prompts
        rows.append(
            {
                "data_source": "oar_bench",
                "prompt": [{"role": "user", "content": f"{index:0{prompt_length}d}"}],
                "ability": "none",
                "reward_model": {"style": "rule", "ground_truth": SIGNAL if signal else NO_SIGNAL},
                "extra_info": {"index": index},
            }
        )
    return rows


def write_assets(
    folder: Path, size: str, steps: int, prompts: int, with_signal: int, prompt_length: int, context: int, seed: int
) -> int:
    """Write `model/` and `prompts.parquet` below `folder`.

    Args:
        folder: exists.
        size: a key of `benchmarks.tiny.random_models.SHAPES`.
        steps: see `prompt_rows`.
        prompts: see `prompt_rows`.
        with_signal: see `prompt_rows`.
        prompt_length: see `prompt_rows`.
        context: longest sequence of the model.
        seed: of its weights.

    Returns:
        The number of the model's parameters, tied embeddings once.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq
    import torch

    from benchmarks.tiny.random_models import SHAPES, build_model

    tokenizer = make_tokenizer(SHAPES[size].vocab)
    tokenizer.save_pretrained(folder / "model")
    model: Any = build_model(size, "qwen2", SHAPES[size].vocab, context, torch.float32, torch.device("cpu"), seed)
    model.config.eos_token_id, model.config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder / "model")
    pq.write_table(
        pa.Table.from_pylist(prompt_rows(steps, prompts, with_signal, prompt_length)), folder / "prompts.parquet"
    )
    return sum(parameter.numel() for parameter in model.parameters())
