"""The arguments that `oar bench scaling` and its workers share, in both directions."""

from __future__ import annotations

import argparse
from dataclasses import fields

from oar_plugin.bench.scaling import Settings

# Keys of `models.SHAPES`, which is not imported: it takes torch and transformers along, and `--help` should not.
SIZES = ("tiny", "1m", "10m", "50m", "0.1b", "0.5b", "1.5b", "7b")


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Declare the fields of `Settings` on `parser`."""
    default = Settings()
    model = parser.add_argument_group("model")
    model.add_argument("--size", default=default.size, choices=SIZES, help="parameters, about (default: %(default)s)")
    model.add_argument(
        "--model", metavar="DIR", help="a Hugging Face model with its tokenizer instead, at the same path on every node"
    )
    model.add_argument(
        "--architecture", default=default.architecture, choices=("qwen2", "llama"), help="default: %(default)s"
    )
    model.add_argument(
        "--vocab", type=int, help="vocabulary of a --size (default: 4096 for 1m; 152064 for 7b; else 32000)"
    )
    model.add_argument(
        "--dtype",
        default=default.dtype,
        choices=("float32", "bfloat16"),
        help="of weights in the forward and of computation; on GPUs Megatron takes bfloat16 only (default: %(default)s)",
    )
    model.add_argument(
        "--device",
        default=default.device,
        choices=("auto", "cpu", "cuda"),
        help="auto takes CUDA and NCCL where there is one, else the CPU and gloo (default: %(default)s)",
    )
    batch = parser.add_argument_group("batch")
    batch.add_argument(
        "--responses",
        type=int,
        default=default.responses,
        help="sequences: of each data-parallel rank when weak, of all ranks together when strong (default: %(default)s)",
    )
    batch.add_argument(
        "--response-length", type=int, default=default.response_length, help="tokens each (default: %(default)s)"
    )
    batch.add_argument(
        "--prompt-length", type=int, default=default.prompt_length, help="tokens before them (default: %(default)s)"
    )
    batch.add_argument(
        "--answer-length", type=int, default=default.answer_length, help="tokens in the box (default: %(default)s)"
    )
    batch.add_argument(
        "--micro-batch",
        type=int,
        default=default.micro_batch,
        help="sequences at a time on a rank (default: %(default)s)",
    )
    batch.add_argument(
        "--scored-share",
        type=float,
        default=default.scored_share,
        help="share of the responses that get importance: those whose group has a non-zero advantage (default: %(default)s)",
    )
    how = parser.add_argument_group("measurement")
    how.add_argument(
        "--importance",
        default=default.importance,
        choices=("fisher", "oar_g", "onward"),
        help="estimator (default: %(default)s)",
    )
    how.add_argument("--checkpointing", action="store_true", help="recompute activations in every backward")
    how.add_argument(
        "--rounds", type=int, default=default.rounds, help="counted rounds, after a warm-up (default: %(default)s)"
    )
    how.add_argument(
        "--threads", type=int, default=default.threads, help="CPU threads of a process (default: %(default)s)"
    )
    how.add_argument(
        "--seed", type=int, default=default.seed, help="of weights, batch and signs (default: %(default)s)"
    )


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
