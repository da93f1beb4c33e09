"""A real tokenizer with a vocabulary of a few hundred: byte-level BPE, trained offline on text of the demo's task.

Trained until nothing is left to merge, every word of the task (with the space before it) is one token. Any other text
still encodes, byte by byte. It is a plain ``PreTrainedTokenizerFast``: saved beside a Llama configuration
``AutoTokenizer`` loads it as it is, whereas beside a Qwen2 configuration it would become Qwen's own tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterator

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from recipes.cpu_demo.task import MARKER, WORDS

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def _corpus() -> Iterator[str]:
    symbols = [*WORDS, *"0123456789", *"+-=;?", MARKER]
    yield "user\nassistant\nsystem\n"
    for symbol in symbols:
        yield f"{symbol} {symbol}"


def build_tokenizer() -> PreTrainedTokenizerFast:
    """The demo's tokenizer: the same on every machine, nothing is downloaded."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1024,
        min_frequency=1,
        special_tokens=[PAD, START, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(_corpus(), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[START],
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
