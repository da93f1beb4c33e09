"""Options of the command line from the fields of a dataclass, which is where their types and defaults stand."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

MODEL = {
    "size": "parameters, about",
    "architecture": "of the model",
    "vocab": "vocabulary (default: 1024 for tiny; 4096 for 1m; 152064 for 7b; else 32000)",
    "dtype": "of weights and computation",
    "device": "auto takes CUDA where there is one",
}
"""Help of the options of a model with random weights."""


def add_fields(
    group: argparse._ActionsContainer,
    settings: type[DataclassInstance],
    about: Mapping[str, str],
    **choices: Collection[str],
) -> None:
    """Declare an option for each of some fields of a dataclass.

    Args:
        group: of the parser.
        settings: the dataclass, where types and defaults stand.
        about: help by field; a default that is not None is added to it.
        choices: by field, beside those of a `Literal`.
    """
    hints = get_type_hints(settings)
    for name, text in about.items():
        option, hint = f"--{name.replace('_', '-')}", hints[name]
        default: Any = settings.__dataclass_fields__[name].default
        if hint is bool:
            group.add_argument(option, action="store_true", help=text)
            continue
        several = get_origin(hint) is tuple
        if several:
            hint = get_args(hint)[0]
        if get_origin(hint) in (UnionType, Union):
            hint = next(kind for kind in get_args(hint) if kind is not NoneType)
        literal = get_args(hint) if get_origin(hint) is Literal else None
        shown = " ".join(map(str, default)) if several else default
        group.add_argument(
            option,
            type=str if literal else hint,
            default=default,
            nargs="+" if several else None,
            choices=choices.get(name, literal),
            help=text if shown in (None, "") else f"{text} (default: {shown})",
        )


def fields(args: argparse.Namespace, settings: type[DataclassInstance]) -> dict[str, Any]:
    """The arguments that are fields of a dataclass."""
    given = {name: value for name, value in vars(args).items() if name in settings.__dataclass_fields__}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
