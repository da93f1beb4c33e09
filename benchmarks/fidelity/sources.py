"""Models and what they wrote: small models on tasks whose causal tokens are known, or a user's own model and file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError
from torch import nn

from benchmarks.fidelity.responses import Response
from benchmarks.tiny.model import sample
from benchmarks.tiny.tasks import TASKS
from benchmarks.tiny.warm_start import warm_model
from benchmarks.tiny.words import PAD, VOCABULARY, text
from oar_plugin.credit.answer import Segment, make_finder, segment_tokens
from oar_plugin.passes.tokens import TokenBytes

FAITHFUL = 0.6
"""Share of answers that repeat the results that the model wrote itself, right or wrong, from which on a model is used. Where
a model guesses, its answer hangs on nothing that its reasoning says, and there is no truth to recall."""

TRIES = 3
"""Seeds that are tried for each model that is asked for: short training does not always arrive."""


@dataclass(frozen=True)
class Source:
    """A model (float32) and what it wrote: responses with reasoning and an answer; `unusable` had none.

    `task` may be the name of a user's model; then nobody knows the shares of right and faithful answers (`FAITHFUL`).
    """

    task: str
    seed: int
    model: nn.Module
    pad_token: int
    responses: list[Response]
    unusable: int
    right: float | None = None
    faithful: float | None = None


def task_sources(
    tasks: Sequence[str], seeds: int, responses: int, seed: int, training: Callable[[str], None]
) -> Iterator[Source]:
    """A small model of each task and seed, trained once and kept on disk, and responses that it samples with `seed`.

    `training` is called with a line of text after each step of a training.

    Raises:
        ValueError: an unknown task, or too few models answer by what they wrote.
    """
    if unknown := [name for name in tasks if name not in TASKS]:
        raise ValueError(f"--tasks {unknown[0]}: allowed: {', '.join(TASKS)}")
    for name in tasks:
        found = 0
        for model_seed in range(TRIES * seeds):
            source = _task_source(name, model_seed, responses, seed, training) if found < seeds else None
            if source is not None:
                found += 1
                yield source
        if found < seeds:
            raise ValueError(
                f"--tasks {name}: of the models with seeds 0 to {TRIES * seeds - 1} only {found} answer by their own "
                "results; try fewer --seeds, or without this task"
            )


def _task_source(name: str, model_seed: int, wanted: int, seed: int, training: Callable[[str], None]) -> Source | None:
    """None where the model does not answer by what it wrote."""
    task = TASKS[name]

    def progress(step: int, steps: int, loss: float) -> None:
        training(f"training {name}, seed {model_seed}: step {step} of {steps}, loss {loss:.2f}")

    model = warm_model(task, model_seed, progress=progress)
    generator = torch.Generator().manual_seed(seed)
    problems = task.problems(10**6 + seed)
    responses: list[Response] = []
    asked = right = faithful = unusable = 0
    while len(responses) < wanted and asked < 4 * wanted + 64:
        batch = [next(problems) for _ in range(wanted)]
        prompt_BP = torch.tensor([problem.prompt for problem in batch])
        rows = sample(model, prompt_BP, 1, task.max_response_length, generator).tolist()
        for problem, row in zip(batch, rows, strict=True):
            reading = task.read(problem, row)
            asked, right = asked + 1, right + reading.right
            segments, tokens = reading.segments, row[: reading.length]
            if segments is None or Segment.REASONING not in segments or not reading.ended:
                unusable += 1
                continue
            said = [token for token, part in zip(tokens, segments, strict=True) if part == Segment.ANSWER]
            faithful += said == [tokens[position] for position in reading.causal][-len(said) :]
            asked_for, *texts = text(problem.prompt), *(f" {VOCABULARY[token]}" for token in tokens)
            known = (reading.right, reading.causal)
            responses.append(Response(problem.prompt, asked_for, tokens, texts, segments, *known))
    if len(responses) < wanted or faithful < FAITHFUL * len(responses):
        return None
    shares = right / asked, faithful / len(responses)
    return Source(name, model_seed, model, PAD, responses[:wanted], unusable, *shares)


def file_source(folder: Path, file: Path, patterns: Sequence[str], limit: int) -> Source:
    """The model in a folder and the responses of a JSON Lines file, at most `limit` lines (0: all).

    Raises:
        ValueError: the model cannot be loaded, a line cannot be used (says which, and why), or no response can be scored.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not (folder / "config.json").is_file():
        raise ValueError(f"--model {folder}: not a folder with a model (it has no config.json)")
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.float32)
    except (OSError, ValueError) as error:
        raise ValueError(f"--model {folder}: cannot be loaded: {error}") from error
    pad_token = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    if pad_token is None:
        raise ValueError(f"--model {folder}: its tokenizer has neither a padding nor an end-of-sequence token")
    try:
        lines = [(n, line) for n, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1) if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--responses-file {file}: cannot be read: {error}") from error
    responses, unusable = [], 0
    finder, token_bytes = make_finder(patterns), TokenBytes(tokenizer)
    for number, line in lines[: limit or None]:
        try:
            prompt, tokens, correct = _read(line, tokenizer, model.config.get_text_config())
        except ValueError as error:
            raise ValueError(f"{file}, line {number}, {error}") from None
        pieces = token_bytes.pieces(tokens)
        segments = segment_tokens(pieces, finder)
        if segments is None or Segment.REASONING not in segments or not prompt:
            unusable += 1
            continue
        names = tokenizer.convert_ids_to_tokens(tokens)
        texts = [piece.decode("utf-8", "replace") or name for piece, name in zip(pieces, names, strict=True)]
        responses.append(Response(prompt, tokenizer.decode(prompt), tokens, texts, segments, correct))
    if not responses:
        raise ValueError(
            f"--responses-file {file}: none of {unusable} responses has reasoning and an answer written as "
            f"{', '.join(patterns)} (--answer-patterns)"
        )
    return Source(folder.name, 0, model, int(pad_token), responses, unusable)


class _Line(BaseModel):
    """A line of the file: texts, the chat template applied, or token ids. Other fields are ignored."""

    model_config = ConfigDict(strict=True)
    prompt: list[int] | str = Field(validation_alias=AliasChoices("prompt_ids", "prompt"))
    response: list[int] | str = Field(validation_alias=AliasChoices("response_ids", "response"))
    correct: bool | None = None


def _read(text: str, tokenizer: Any, config: Any) -> tuple[list[int], list[int], bool | None]:
    """Token ids of prompt and response, and whether it is right. ValueError names the field."""
    try:
        line = _Line.model_validate_json(text)
    except ValidationError as error:
        faults = [fault for fault in error.errors() if fault["loc"][:1] == error.errors()[0]["loc"][:1]]
        field = "".join(f"field {name!r}: " for name in faults[0]["loc"][:1])
        messages = " or ".join(fault["msg"] for fault in faults)
        raise ValueError(
            f"{field}{messages}, got {faults[0]['input']!r:.60}; a line is an object with prompt and response (texts), or "
            "prompt_ids and response_ids (token ids)"
        ) from None
    prompt, response = (
        tokenizer.encode(part, add_special_tokens=False) if isinstance(part, str) else part
        for part in (line.prompt, line.response)
    )
    if wrong := [token for token in (*prompt, *response) if not 0 <= token < config.vocab_size]:
        raise ValueError(
            f"field 'prompt_ids' or 'response_ids': {wrong[0]} is not in the vocabulary of {config.vocab_size}"
        )
    length, longest = len(prompt) + len(response), getattr(config, "max_position_embeddings", None)
    if longest and length > longest:
        raise ValueError(f"field 'response': {length} tokens with the prompt, the model allows {longest}")
    return prompt, response, line.correct
