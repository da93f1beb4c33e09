"""Responses that come as text: their reward, and their credit under a HuggingFace model (`oar inspect --model`)."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pickle import UnpicklingError
from typing import Any

import jinja2
import torch
from torch import Tensor

from oar_plugin.cli.tables import progress_bar
from oar_plugin.config import OarConfig, OarConfigError
from oar_plugin.credit.diagnostics import Status
from oar_plugin.credit.vocabulary import WHOLE_VOCABULARY
from oar_plugin.front_door import importance
from oar_plugin.output import say
from oar_plugin.page.record import Header, Response, header_for
from oar_plugin.page.sources import SourceError, Text, advantages
from oar_plugin.passes.tap import UnsupportedModelError
from oar_plugin.passes.tokens import TokenBytes
from oar_plugin.runs.evaluate.checkpoints import find
from oar_plugin.runs.evaluate.problems import EvaluationError

ROWS = 512
"""Positions whose logits are there at a time: 0.3 GB of float32 for a vocabulary of 152,000."""


def header_of(configs: Mapping[str, OarConfig]) -> Header:
    """The header of responses that no run dumped; `configs` by the name of the importance, none without a model."""
    first = next(iter(configs.values()), OarConfig())
    scales = {name: config.importance_object.arbitrary_scale for name, config in configs.items()}
    return header_for(first, scales)


def graded(texts: Sequence[Text]) -> list[Text]:
    """The same texts, with the recipes' reward where there is a truth and no reward."""
    needed = [text.reward is None and text.truth is not None for text in texts]
    if not any(needed):
        return list(texts)
    try:
        from oar_plugin.runs.reward import compute_score
    except ImportError as error:
        say(f"oar inspect: responses are not graded: {error}", sys.stderr)
        return list(texts)

    return [
        replace(text, reward=compute_score(text.source, text.response, str(text.truth))["score"]) if need else text
        for text, need in zip(texts, needed, strict=True)
    ]


def _load(name: str, device: str | None) -> tuple[Any, Any]:
    """Model and tokenizer. Raises EvaluationError."""
    path = find(name, False, lambda said: say(f"oar inspect: {said}", sys.stderr))
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


def scored(name: str, device: str | None, texts: Sequence[Text], configs: Mapping[str, OarConfig]) -> list[Response]:
    """The texts cut into tokens, with the importances that `configs` name and the weights of the first of them.

    Args:
        name: of the model, as `oar eval` takes it.
        device: None: a GPU if there is one.
        texts: R responses.
        configs: by the name of the importance.

    Raises:
        SourceError: a prompt that the tokenizer has no template for, or settings that are for runs only.
        EvaluationError: the model cannot be loaded, is none that OAR serves, or there is no memory left.
    """
    model, tokenizer = _load(name, device)
    token_bytes, longest = TokenBytes(tokenizer), getattr(model.config, "max_position_embeddings", None) or 2**31
    responses = []
    with progress_bar() as progress:
        for place, (text, advantage) in enumerate(zip(texts, advantages(texts), strict=True)):
            progress("responses", place, len(texts))
            prompt, ids = _prompt_ids(tokenizer, text), tokenizer(text.response, add_special_tokens=False)["input_ids"]
            known: dict[str, Any] = {"segments": [0] * len(ids), "status": Status.TOO_LONG.name.lower()}
            try:
                if len(prompt) + len(ids) <= longest:
                    known = _credit(model, tokenizer, prompt, ids, max(1, text.step), configs)
            except OarConfigError as error:
                raise SourceError(str(error)) from error
            except UnsupportedModelError as error:
                raise EvaluationError(str(error)) from error
            except torch.OutOfMemoryError as error:
                advice = "leave it out, or --device cpu"
                raise EvaluationError(f"{text.uid}: no memory for its {len(ids)} tokens; {advice}") from error
            responses.append(text.told(advantage, token_ids=ids, tokens=token_bytes.texts(ids), **known))
    return responses


def _prompt_ids(tokenizer: Any, text: Text) -> list[int]:
    if text.chat is None:
        return list(tokenizer(text.prompt)["input_ids"])
    if not getattr(tokenizer, "chat_template", None):
        raise SourceError("a prompt is a list of messages, and the model's tokenizer has no chat template: give texts")
    try:
        prompt = tokenizer.apply_chat_template(text.chat, add_generation_prompt=True, tokenize=False)
    except (jinja2.TemplateError, TypeError) as error:
        raise SourceError(f"{text.uid}: the model's chat template refuses its prompt: {error}") from error
    return list(tokenizer(prompt, add_special_tokens=False)["input_ids"])


def _credit(
    model: Any, tokenizer: Any, prompt: list[int], ids: list[int], step: int, configs: Mapping[str, OarConfig]
) -> dict[str, Any]:
    """What `Response` has of each token of one response, and its status."""
    given: dict[str, Any] = {"prompts": [prompt], "responses": [ids], "tokenizer": tokenizer, "step": step}
    credits = {name: importance(model, **given, **config.model_dump()) for name, config in configs.items()}
    first, own = next(iter(credits.values())), slice(len(prompt), None)
    log_prob_N, entropy_N = _read_tokens(model, first.input_ids[0].to(model.device), len(prompt))
    return {
        "segments": first.segments[0, own].tolist(),
        "importance": {name: credit.importance[0, own].tolist() for name, credit in credits.items()},
        "weights": first.weights[0, own].tolist(),
        "log_probs": log_prob_N.tolist(),
        "entropies": entropy_N.tolist(),
        "status": first.status[0].name.lower(),
    }


@torch.no_grad()
def _read_tokens(model: Any, token_L: Tensor, begin: int) -> tuple[Tensor, Tensor]:
    """Log-probs of the tokens from `begin` on and entropies of what they were drawn from, `[L - begin]` each."""
    hidden_NH = model.base_model(input_ids=token_L[None], use_cache=False).last_hidden_state[0, begin - 1 : -1]
    pairs = zip(hidden_NH.split(ROWS), token_L[begin:].split(ROWS), strict=True)
    logits = ((model.get_output_embeddings()(rows_NH), token_N) for rows_NH, token_N in pairs)
    found = [(WHOLE_VOCABULARY.log_prob(rows, token_N), WHOLE_VOCABULARY.entropy(rows)) for rows, token_N in logits]
    log_probs, entropies = zip(*found, strict=True)
    return torch.cat(log_probs), torch.cat(entropies)
