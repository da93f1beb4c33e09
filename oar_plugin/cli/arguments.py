"""Types of arguments, which refuse a value before anything heavy is imported; and the message for missing packages."""

import argparse
import sys
from importlib.util import find_spec

from oar_plugin.output import INSTALL, say

_COMPOSING = dict(verl="verl", hydra="hydra-core", omegaconf="'omegaconf<2.4'", antlr4="antlr4-python3-runtime==4.9.3")
"""Module -> package: what reads a recipe, which extends verl's own files. Hydra 1.3 works with this antlr only."""
COMPOSING = f"pip install --no-deps {' '.join(_COMPOSING.values())}"

# Module -> how to install it, where that is not `pip install MODULE`. How to install vLLM depends on the machine.
INSTALLS = {module: f"pip install {package}" for module, package in _COMPOSING.items()}
INSTALLS |= {"google": "pip install protobuf", "yaml": "pip install pyyaml", "PIL": "pip install pillow"}
INSTALLS |= {"vllm": "oar doctor says how", **dict.fromkeys(("math_verify", "pebble", "scipy"), INSTALL)}


def missing_package(command: str, *modules: str | None) -> int:
    """Print that `oar command` needs these modules, one line each, and return the exit status 1."""
    for name in (str(module).partition(".")[0] for module in modules):
        text = f"{name} is not installed here; {INSTALLS.get(name, f'pip install {name}')}"
        if name in _COMPOSING:  # one line for all of them
            absent = {module: one for module, one in _COMPOSING.items() if module == name or find_spec(module) is None}
            why = "training needs verl's own environment, which may want an older transformers; plans and dry runs need only"
            text = f"not installed here: {', '.join(absent)}; {why}: pip install --no-deps {' '.join(absent.values())}"
        say(f"oar {command}: {text}", sys.stderr)
    return 1


def whole(text: str, least: int = 0) -> int:
    if int(text) < least:
        raise argparse.ArgumentTypeError(f"{text}: at least {least}")
    return int(text)


def positive(text: str) -> int:
    return whole(text, least=1)


def number(text: str, most: float = sys.float_info.max) -> float:
    """A number above 0."""
    if not 0 < float(text) <= most:
        raise argparse.ArgumentTypeError(f"{text}: must be above 0{' and at most 1' * (most == 1)}")
    return float(text)


def share(text: str) -> float:
    return number(text, most=1)


def listed(text: str) -> list[str]:
    """Words between commas, as in `a,b,c`; none is empty."""
    words = [word.strip() for word in text.split(",")]
    if not all(words):
        raise argparse.ArgumentTypeError(f"{text!r}: a list such as a,b,c, and none of them empty")
    return words
