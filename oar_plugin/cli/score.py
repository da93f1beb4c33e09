"""Computes reward and credit of responses that are given as text, with a HuggingFace model (`oar inspect --model`)."""

import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from pickle import UnpicklingError
from statistics import mean, stdev
from typing import Annotated, Any

import torch
import yaml
from pydantic import AliasChoices, BaseModel, BeforeValidator, Field, FiniteFloat, ValidationError, model_validator
from rich.console import Console
from rich.progress import track
from transformers import AutoModelForCausalLM, AutoTokenizer

from oar_plugin.config import OarConfig
from oar_plugin.front_door import importance
from oar_plugin.output import say
from oar_plugin.page.record import Response
from oar_plugin.passes.tokens import TokenBytes
from oar_plugin.runs.evaluate.checkpoints import EvaluationError, find
from oar_plugin.runs.math.sources import messages_of, rows_of, truth_of

_Prompt = Annotated[str | list[Any], BeforeValidator(lambda it: messages_of(it) if isinstance(it, list | dict) else it)]


class Text(BaseModel, coerce_numbers_to_str=True, extra="allow"):
    """A line of a file of prompts and responses. The second names are those of verl's own dump of rollouts."""

    prompt: _Prompt = Field(validation_alias=AliasChoices("prompt", "input"), min_length=1)
    response: str = Field(validation_alias=AliasChoices("response", "output"))
    truth: Annotated[Any, BeforeValidator(truth_of)] = Field(None, validation_alias=AliasChoices("truth", "gts"))
    reward: FiniteFloat | None = Field(None, validation_alias=AliasChoices("reward", "score"))
    source: str = Field("", validation_alias=AliasChoices("source", "data_source"))
    group: str = ""
    step: int = Field(0, ge=0)
    _left_out: dict[str, Any] = {}

    @model_validator(mode="wrap")
    @classmethod
    def _without(cls, row: Any, read: Any) -> Any:
        """Leaves out what cannot be used in a row of verl's dump, but for prompt and response: a reward function chose it."""
        try:
            return read(row)
        except ValidationError as error:
            wrong = {str(name): row[name] for name, *_ in (one["loc"] for one in error.errors()) if name in row}
            if "output" not in row or not wrong or wrong.keys() & {"input", "output"}:
                raise
            text = cls.model_validate({name: value for name, value in row.items() if name not in wrong})
            text._left_out = wrong | text._left_out
            return text


def configs_of(names: Sequence[str] | None, settings: Sequence[str]) -> list[OarConfig]:
    """Returns the settings for each importance; `settings` are `key=value`. Raises ValueError."""
    pairs = (word.removeprefix("algorithm.oar.").split("=", 1) for word in settings)
    # All scores are computed: no step before has labels to predict from.
    given = {key: yaml.safe_load(value) for key, value in pairs if not key.startswith("amortize.")}
    names = names or [given.get("importance", OarConfig().importance)]
    return [OarConfig.parse({**given, "importance": name}, predicts=False) for name in names]


def scored(files: Sequence[Path], checkpoint: str, configs: Sequence[OarConfig]) -> Iterator[Response]:
    """Yields the responses of files, with the importance of each of `configs` and the weights of the first one.

    `checkpoint`: see `find`. ValueError: a line or a setting cannot be used. EvaluationError: the model cannot be loaded.
    """
    texts, rewards = [pair for file in files for pair in _read(file)], defaultdict[Any, list[Any]](list)
    for _, text in texts:
        rewards[text.step, text.group].append(text.reward)
    if unread := sorted({key for _, text in texts for key in text.model_extra or ()}):
        say(f"oar inspect: keys that are not read: {', '.join(unread)}", sys.stderr)
    if lacking := [f"{uid}: {text._left_out!r:.200}" for uid, text in texts if text._left_out]:
        fault = "have a truth or score that cannot be used and is left out"
        say(f"oar inspect: {len(lacking)} of {len(texts)} rows {fault}, first {lacking[0]}", sys.stderr)
    model, tokenizer = _load(checkpoint)
    console = Console(stderr=True)
    for uid, text in track(texts, "scoring", console=console, transient=True, disable=not console.is_terminal):
        ids, siblings = tokenizer(text.response, add_special_tokens=False)["input_ids"], rewards[text.step, text.group]
        given = {"prompts": [text.prompt], "responses": [ids], "tokenizer": tokenizer, "step": max(1, text.step)}
        # The page has the status of each response.
        credits = [importance(model, **given, **config.model_dump() | {"fallback_warning": 1}) for config in configs]
        first, begin = credits[0], credits[0].input_ids.shape[1] - len(ids)
        known = len(siblings) > 1 and None not in siblings
        yield Response(
            **text.model_dump(include={"step", "group", "source", "reward"}),
            truth=" or ".join(text.truth) if isinstance(text.truth, list) else text.truth,
            uid=uid,
            prompt=tokenizer.decode(first.input_ids[0, :begin]),
            token_ids=ids,
            tokens=TokenBytes(tokenizer).texts(ids),
            segments=first.segments[0, begin:].tolist(),
            importance={one.config.importance_object.name: one.importance[0, begin:].tolist() for one in credits},
            weights=first.weights[0, begin:].tolist(),
            advantage=(text.reward - mean(siblings)) / (stdev(siblings) + 1e-6) if known else None,  # GRPO's
            status=first.status[0].name.lower(),
        )


def _read(file: Path) -> Iterator[tuple[str, Text]]:
    """Yields an id and the text of each line. A text with a truth and without a reward gets the recipes' reward."""
    for number, text in rows_of(file, Text):
        if text.reward is None and text.truth is not None and not text._left_out.keys() & {"score", "reward"}:
            from oar_plugin.runs.reward import compute_score

            text.reward = compute_score(text.source, text.response, text.truth)["score"]
        text.group = text.group or str(text.prompt)
        yield f"{file.stem}:{number}", text


def _load(checkpoint: str) -> tuple[Any, Any]:
    path = find(checkpoint, lambda message: say(f"oar inspect: {message}", sys.stderr))
    device, dtype = ("cuda", "auto") if torch.cuda.is_available() else ("cpu", torch.float32)
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, trust_remote_code=False)
        return model.to(device).eval(), AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, UnpicklingError) as error:
        raise EvaluationError(f"not loaded: {' '.join(str(error).split())[:300]}") from error
