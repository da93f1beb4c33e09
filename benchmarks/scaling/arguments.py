"""The arguments that `oar bench scaling` and its workers share, in both directions."""

from __future__ import annotations

import argparse
from dataclasses import fields

from benchmarks.options import MODEL, add_fields
from benchmarks.scaling.measure import Settings
from benchmarks.tiny.random_models import SHAPES
from oar_plugin.credit.importance import without_copies


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Declare the fields of `Settings` on `parser`."""
    model = {**MODEL, "dtype": f"{MODEL['dtype']}; on GPUs Megatron takes bfloat16 only"}
    model["model"] = "folder of a Hugging Face model with its tokenizer instead, at the same path on every node"
    add_fields(parser.add_argument_group("model"), Settings, model, size=SHAPES)
    batch = {
        "responses": "sequences: of each data-parallel rank when weak, of all ranks together when strong",
        "response_length": "tokens each",
        "prompt_length": "tokens before them",
        "answer_length": "tokens in the box",
        "micro_batch": "sequences at a time on a rank",
        "scored_share": "share of the responses that get importance: those whose group has a non-zero advantage",
    }
    add_fields(parser.add_argument_group("batch"), Settings, batch)
    how = {
        "importance": f"{without_copies()}, or python:<module>:<class>",
        "checkpointing": "recompute activations in every backward",
        "rounds": "counted rounds, after a warm-up",
        "threads": "CPU threads of a process",
        "seed": "of weights, batch and signs",
    }
    add_fields(parser.add_argument_group("measurement"), Settings, how)


def settings_of(arguments: argparse.Namespace) -> Settings:
    """The settings that were asked for."""
    return Settings(**{field.name: getattr(arguments, field.name) for field in fields(Settings)})


def to_argv(settings: Settings) -> list[str]:
    """The inverse of parsing, without what is the default."""
    default, argv = Settings(), []
    for field in fields(Settings):
        value = getattr(settings, field.name)
        if value != getattr(default, field.name):
            argv.append(f"--{field.name.replace('_', '-')}")
            if value is not True:
                argv.append(str(value))
    return argv
