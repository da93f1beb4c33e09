"""Models and what they wrote: small models on tasks whose causal tokens are known, or a user's own model and file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.fidelity.measure import Settings, Source
from benchmarks.fidelity.responses import Response
from oar_plugin.credit.answer import AnswerFinder, Segment, make_finder, segment_tokens
from oar_plugin.passes.tokens import TokenBytes

_FIELDS = "prompt and response (text), or prompt_ids and response_ids (token ids)"


FAITHFUL = 0.6
"""Share of answers that repeat the results that the model wrote itself, right or wrong, from which on a model is used. Where
a model guesses, its answer hangs on nothing that its reasoning says, and there is no truth to recall."""

_TRIES = 3
"""Seeds that are tried for each model that is asked for: short training does not always arrive."""


class BadResponses(ValueError):
    """A file of responses cannot be used; the message names the line and the field."""


def usable(segments: np.ndarray | None) -> bool:
    """Whether there is an answer, and reasoning to score before it."""
    return segments is not None and bool((segments == Segment.REASONING).any())


def response_of(
    prompt: list[int],
    response: list[int],
    segments: np.ndarray,
    texts: list[str],
    correct: bool | None = None,
    causal: tuple[int, ...] | None = None,
) -> Response:
    """A response from token ids.

    Args:
        prompt: ids.
        response: ids.
        segments: of the response.
        texts: of the prompt's tokens and the response's.
        correct: whether the answer is right.
        causal: positions in the response.
    """
    known: Tensor | None = None
    if causal is not None:
        known = torch.zeros(len(prompt) + len(response), dtype=torch.bool)
        known[[len(prompt) + position for position in causal]] = True
    segments_T = torch.cat([torch.full((len(prompt),), int(Segment.OUTSIDE)), torch.from_numpy(segments).long()])
    return Response(torch.tensor([*prompt, *response]), segments_T, len(prompt), tuple(texts), correct, known)


def file_source(settings: Settings) -> Source:
    """The model and the responses of `--model` and `--responses-file`.

    Raises:
        BadResponses: see there.
        ValueError: the model cannot be loaded, or has no token to mask with.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert settings.model is not None
    assert settings.responses_file is not None
    if not (settings.model / "config.json").is_file():
        raise ValueError(f"--model {settings.model}: not a folder with a model (it has no config.json)")
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(settings.model, local_files_only=True)
        model = AutoModelForCausalLM.from_pretrained(settings.model, local_files_only=True, dtype=torch.float32)
    except (OSError, ValueError) as error:
        raise ValueError(f"--model {settings.model}: cannot be loaded: {error}") from error
    pad_token = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    if pad_token is None:
        raise ValueError(f"--model {settings.model}: its tokenizer has neither a padding nor an end-of-sequence token")
    responses, unusable = read_responses(
        settings.responses_file,
        tokenizer,
        make_finder(settings.answer_patterns),
        settings.responses,
        model.config.get_text_config(),
    )
    if not responses:
        raise ValueError(
            f"{settings.responses_file}: none of {unusable} responses has reasoning and an answer written as "
            f"{', '.join(settings.answer_patterns)} (--answer-patterns)"
        )
    return Source(settings.model.name, 0, model.eval(), responses, unusable, int(pad_token))


def read_responses(
    file: Path, tokenizer: Any, finder: AnswerFinder, limit: int, config: Any
) -> tuple[list[Response], int]:
    """The responses of a JSON Lines file, and how many have no answer or no reasoning before it.

    Args:
        file: a JSON object a line, with `prompt` and `response` (text, the chat template applied) or `prompt_ids` and
            `response_ids`; optionally `correct` (true or false). Further fields are ignored, and so are empty lines.
        tokenizer: of the model.
        finder: of the answer.
        limit: lines to read at most; 0 for all.
        config: the model's, for the size of its vocabulary and its longest sequence.

    Raises:
        BadResponses: a line is no object, a field is missing or of a wrong type, an id is not in the vocabulary, or a
            sequence is longer than the model allows.
    """
    token_bytes = TokenBytes(tokenizer)
    responses: list[Response] = []
    unusable = 0
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadResponses(f"--responses-file {file}: cannot be read: {error}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        if limit and len(responses) + unusable == limit:
            break
        at = f"{file}, line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise BadResponses(f"{at}: not JSON: {error}") from error
        if not isinstance(row, dict):
            raise BadResponses(f"{at}: must be an object with {_FIELDS}")
        prompt, response = (_ids(row, name, tokenizer, config.vocab_size, at) for name in ("prompt", "response"))
        correct = row.get("correct")
        if correct is not None and not isinstance(correct, bool):
            raise BadResponses(f"{at}, field 'correct': must be true or false, got {correct!r}")
        longest = getattr(config, "max_position_embeddings", None)
        if longest and len(prompt) + len(response) > longest:
            raise BadResponses(
                f"{at}, field 'response': {len(prompt) + len(response)} tokens with the prompt, the model allows {longest}"
            )
        pieces = token_bytes.pieces(response)
        segments = segment_tokens(pieces, finder)
        if segments is None or not usable(segments) or not prompt:
            unusable += 1
            continue
        texts = [
            piece.decode("utf-8", "replace") or tokenizer.convert_ids_to_tokens(token)
            for token, piece in zip([*prompt, *response], [*token_bytes.pieces(prompt), *pieces], strict=True)
        ]
        responses.append(response_of(prompt, response, segments, texts, correct))
    if not responses and not unusable:
        raise BadResponses(f"--responses-file {file}: no line with a response; each needs {_FIELDS}")
    return responses, unusable


def _ids(row: dict[str, Any], name: str, tokenizer: Any, vocabulary: int, at: str) -> list[int]:
    ids = row.get(f"{name}_ids")
    if ids is not None:
        if not isinstance(ids, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            raise BadResponses(f"{at}, field '{name}_ids': must be a list of whole numbers")
        if wrong := [i for i in ids if not 0 <= i < vocabulary]:
            raise BadResponses(f"{at}, field '{name}_ids': {wrong[0]} is not in the vocabulary of {vocabulary}")
        return list(ids)
    text = row.get(name)
    if text is None:
        raise BadResponses(f"{at}, field '{name}': missing; a line needs {_FIELDS}")
    if not isinstance(text, str):
        raise BadResponses(f"{at}, field '{name}': must be text, got {type(text).__name__}")
    return list(tokenizer.encode(text, add_special_tokens=False))


def task_sources(settings: Settings, training: Callable[[str], None]) -> Iterator[Source]:
    """A small model of each task and seed, trained once and kept on disk, and responses that it samples.

    Args:
        settings: which tasks, seeds, and how many responses.
        training: called with a line of text after each step of a training.

    Raises:
        ValueError: an unknown task, or too few models answer by what they wrote.
    """
    from benchmarks.tiny.tasks import TASKS

    if unknown := [name for name in settings.tasks if name not in TASKS]:
        raise ValueError(f"--tasks {unknown[0]}: allowed: {', '.join(TASKS)}")
    for name in settings.tasks:
        found = 0
        for seed in range(_TRIES * settings.seeds):
            if found == settings.seeds:
                break
            source = task_source(settings, name, seed, training)
            if source is not None:
                found += 1
                yield source
        if found < settings.seeds:
            raise ValueError(
                f"--tasks {name}: of the models with seeds 0 to {_TRIES * settings.seeds - 1} only {found} answer by their own "
                "results; try fewer --seeds, or without this task"
            )


def task_source(settings: Settings, name: str, seed: int, training: Callable[[str], None]) -> Source | None:
    """One of `task_sources`; None where the model does not answer by what it wrote."""
    from benchmarks.tiny.model import sample
    from benchmarks.tiny.tasks import TASKS
    from benchmarks.tiny.warm_start import warm_model
    from benchmarks.tiny.words import PAD, pieces

    task = TASKS[name]

    def progress(step: int, steps: int, loss: float) -> None:
        training(f"training {name}, seed {seed}: step {step} of {steps}, loss {loss:.2f}")

    model = warm_model(task, seed, progress=progress)
    generator = torch.Generator().manual_seed(settings.seed)
    problems = task.problems(10**6 + settings.seed)
    responses: list[Response] = []
    asked = right = faithful = unusable = 0
    while len(responses) < settings.responses and asked < 4 * settings.responses + 64:
        batch = [next(problems) for _ in range(settings.responses)]
        prompt_BP = torch.tensor([problem.prompt for problem in batch])
        rows = sample(model, prompt_BP, 1, task.max_response_length, generator).tolist()
        for problem, row in zip(batch, rows, strict=True):
            reading = task.read(problem, row)
            asked, right = asked + 1, right + reading.right
            if reading.segments is None or not usable(reading.segments) or not reading.ended:
                unusable += 1
                continue
            prompt, response = list(problem.prompt), row[: reading.length]
            parts = zip(response, reading.segments, strict=True)
            said = [token for token, part in parts if part == Segment.ANSWER]
            faithful += said == [response[position] for position in reading.causal][-len(said) :]
            texts = [piece.decode() or "<eos>" for piece in pieces([*prompt, *response])]
            responses.append(response_of(prompt, response, reading.segments, texts, reading.right, reading.causal))
    if len(responses) < settings.responses or faithful < FAITHFUL * len(responses):
        return None
    return Source(
        name, seed, model, responses[: settings.responses], unusable, PAD, right / asked, faithful / len(responses)
    )
