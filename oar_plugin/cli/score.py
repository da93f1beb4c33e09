"""Computes reward and credit of responses that are given as text, with a HuggingFace model (`oar inspect --model`)."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pickle import UnpicklingError
from typing import Any

import jinja2
import torch
import yaml
from torch import Tensor

from oar_plugin.cli.tables import progress_bar
from oar_plugin.config import OarConfig, OarConfigError
from oar_plugin.credit.diagnostics import Status
from oar_plugin.credit.vocabulary import WHOLE_VOCABULARY
from oar_plugin.front_door import importance
from oar_plugin.output import say
from oar_plugin.page.record import Header, Response, header_for
from oar_plugin.page.sources import SourceError, Text, advantages
from oar_plugin.passes.taps import Projection, UnsupportedModelError
from oar_plugin.passes.tokens import TokenBytes
from oar_plugin.runs.evaluate import EvaluationError
from oar_plugin.runs.evaluate.checkpoints import find

ROWS = 512
"""Positions whose logits are in memory at once: 0.3 GB of float32 for a vocabulary of 152,000."""


def configs_of(names: Sequence[str] | None, settings: Sequence[str]) -> dict[str, OarConfig]:
    """Return the settings for each importance, by its name; `settings` are `key=value`. Raises SourceError."""
    given: dict[str, Any] = {}
    for key, _, text in (word.partition("=") for word in settings):
        group, _, name = key.removeprefix("algorithm.oar.").rpartition(".")
        try:
            (given.setdefault(group, {}) if group else given)[name] = yaml.safe_load(text)
        except (yaml.YAMLError, TypeError):
            raise SourceError(f"{key}={text}: not valid; write values as on verl's command line") from None
    try:
        names = names or [str(given.get("importance", OarConfig().importance))]
        configs = [OarConfig.parse({**given, "importance": name}) for name in names]
    except OarConfigError as error:
        raise SourceError(str(error)) from None
    return {config.importance_object.name: config for config in configs}


def header_of(configs: Mapping[str, OarConfig], model: str) -> Header:
    """Return the header for responses without a run's dump. `configs` is from `configs_of`; empty without a model."""
    scales = {name: config.importance_object.arbitrary_scale for name, config in configs.items()}
    return header_for(next(iter(configs.values()), OarConfig()), scales, model=model)


def graded(texts: Sequence[Text]) -> list[Text]:
    """Return the same texts. A text that has a ground truth but no reward gets the recipes' reward."""

    def grade(text: Text) -> Text:
        if text.truth is None or text.reward is not None:
            return text
        from oar_plugin.runs.reward import compute_score

        return replace(text, reward=compute_score(text.source, text.response, text.truth)["score"])

    try:
        return list(map(grade, texts))
    except ImportError as error:
        say(f"oar inspect: responses are not graded: {error}", sys.stderr)
        return list(texts)


def scored(name: str, device: str | None, texts: Sequence[Text], configs: Mapping[str, OarConfig]) -> list[Response]:
    """Return the texts as tokens, with the importances of `configs` (from `configs_of`) and the weights of the first of them.

    `name` is a checkpoint, as in `oar eval`. If `device` is None, a GPU is used if there is one.

    Raises:
        SourceError: the tokenizer has no template for a prompt, or a setting is for runs only.
        EvaluationError: the model cannot be loaded, is not supported, or needs more memory than there is.
    """
    model, tokenizer = _load(name, device)
    token_bytes, longest = TokenBytes(tokenizer), getattr(model.config, "max_position_embeddings", None) or 2**31
    responses = []
    with progress_bar() as progress:
        for place, (text, advantage) in enumerate(zip(texts, advantages(texts), strict=True)):
            progress("responses", place, len(texts))
            prompt, ids = _prompt_ids(tokenizer, text), tokenizer(text.response, add_special_tokens=False)["input_ids"]
            credit: dict[str, Any] = {"segments": [0] * len(ids), "status": Status.TOO_LONG.name.lower()}
            try:
                if len(prompt) + len(ids) <= longest:
                    credit = _credit(model, tokenizer, prompt, ids, max(1, text.step), configs)
            except OarConfigError as error:
                raise SourceError(str(error)) from error
            except UnsupportedModelError as error:
                raise EvaluationError(str(error)) from error
            except torch.OutOfMemoryError as error:
                advice = "leave this response out, or use --device cpu"
                raise EvaluationError(f"{text.uid}: not enough memory for its {len(ids)} tokens; {advice}") from error
            responses.append(text.to_response(advantage, token_ids=ids, tokens=token_bytes.texts(ids), **credit))
    return responses


def _load(name: str, device: str | None) -> tuple[Any, Any]:
    """Return the model and its tokenizer. Raises EvaluationError."""
    path = find(name, False, lambda text: say(f"oar inspect: {text}", sys.stderr))
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        dtype = torch.float32 if place.type == "cpu" else "auto"
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, trust_remote_code=False)
        return model.to(place).eval(), tokenizer
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, AssertionError, UnpicklingError) as error:
        on = f" on --device={device}" if device else ""
        raise EvaluationError(f"not loaded{on}: {' '.join(str(error).split())[:300]}") from error


def _prompt_ids(tokenizer: Any, text: Text) -> list[int]:
    if text.chat is None:
        return list(tokenizer(text.prompt)["input_ids"])
    if not getattr(tokenizer, "chat_template", None):
        raise SourceError("a prompt is a list of messages, and the model's tokenizer has no chat template: use texts")
    try:
        prompt = tokenizer.apply_chat_template(text.chat, add_generation_prompt=True, tokenize=False)
    except (jinja2.TemplateError, TypeError) as error:
        raise SourceError(f"{text.uid}: the model's chat template refuses its prompt: {error}") from error
    return list(tokenizer(prompt, add_special_tokens=False)["input_ids"])


def _credit(
    model: Any, tokenizer: Any, prompt: list[int], ids: list[int], step: int, configs: Mapping[str, OarConfig]
) -> dict[str, Any]:
    """Return the fields of `Response` that a model adds: its numbers for each token, and the status."""
    given: dict[str, Any] = {"prompts": [prompt], "responses": [ids], "tokenizer": tokenizer, "step": step}
    credits = {name: importance(model, **given, **config.model_dump()) for name, config in configs.items()}
    first, own = next(iter(credits.values())), slice(len(prompt), None)
    log_prob_N, entropy_N = _log_probs_and_entropies(model, first.input_ids[0].to(model.device), len(prompt))
    return {
        "segments": first.segments[0, own].tolist(),
        "importance": {name: credit.importance[0, own].tolist() for name, credit in credits.items()},
        "weights": first.weights[0, own].tolist(),
        "log_probs": log_prob_N.tolist(),
        "entropies": entropy_N.tolist(),
        "status": first.status[0].name.lower(),
    }


@torch.no_grad()
def _log_probs_and_entropies(model: Any, token_L: Tensor, begin: int) -> tuple[Tensor, Tensor]:
    """Return log-probs of the tokens from `begin` on and entropies of their distributions, in nats, float32 `[L - begin]`."""
    hidden_NH = model.base_model(input_ids=token_L[None], use_cache=False).last_hidden_state[0, begin - 1 : -1]
    pairs = zip(hidden_NH.split(ROWS), token_L[begin:].split(ROWS), strict=True)
    project = Projection(model)
    chunks = ((project(rows_NH), token_N) for rows_NH, token_N in pairs)
    columns = [(WHOLE_VOCABULARY.log_prob(rows, token_N), WHOLE_VOCABULARY.entropy(rows)) for rows, token_N in chunks]
    log_probs, entropies = zip(*columns, strict=True)
    return torch.cat(log_probs), torch.cat(entropies)
