"""A tiny model, a few responses, and what their importance is when computed in the plainest way."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
)

from benchmarks.tiny import words
from oar_plugin.credit.answer import Segment, make_finder
from oar_plugin.credit.noise import gaussian, position_seeds, response_seeds, signs
from oar_plugin.credit.perturbation import importance_of_units, sample_replacements, units
from oar_plugin.credit.regression import projected, token_features

MAX_RESPONSE_LENGTH = 40
SIGMA = 1e-3
TEMPERATURE = 0.7  # of sampling; not 1, so that entropies at another temperature are noticed
make_tokenizer = partial(words.make_tokenizer, by_bytes=True)
PAD = 256  # of that tokenizer
CAPPED = {"final_logit_softcapping": 2.0, "attn_logit_softcapping": None, "head_dim": 8}
CAPPED |= {"tie_word_embeddings": True}  # a Gemma 2
COLUMNS = 200  # of a vocabulary whose other columns are taken for padding

# prompt, response, needed. The last three fall back: no answer, truncated, nothing to reason about.
ROWS = [
    ("3+4?", "well 3+4 is 7 then\n#### 7<eos>", True),
    ("12*3?", "hmm 12*3=36 ok\n#### 36<eos>", True),
    ("1+1?", "so 2\n#### 2<eos>", False),
    ("9-5?", "9-5, that is 4\n#### 400\nyes<eos>", True),
    ("8/2?", "8/2\n#### 4<eos>", True),
    ("7?", "no idea at all<eos>", True),
    ("5?", "it goes on and on and on #### 5 and on..", True),
    ("6?", "#### 6<eos>", True),
]
SCORED = [0, 1, 3, 4]
FAILS = 1
EXPERTS = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16, norm_topk_prob=True, head_dim=8)
STATUS = ["SCORED", "SCORED", "NOT_NEEDED", "SCORED", "SCORED", "NO_ANSWER", "TRUNCATED", "NO_REASONING"]


def fails_on_a_rank(text: str) -> tuple[int, int, int] | None:
    """A user's own way to find the answers, which fails for one of the responses on the last rank alone."""
    if text == ROWS[FAILS][1].removesuffix("<eos>") and distributed.get_rank() == distributed.get_world_size() - 1:
        raise TimeoutError
    found = make_finder(("hash",))(text)
    return None if found is None else (found.marker_start, found.start, found.end)


def make_model(folder: Path, kind: type[PreTrainedConfig] = Qwen2Config, **config: Any) -> None:
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder)
    new_model(tokenizer, kind, **config).save_pretrained(folder)


def make_vision_model(folder: Path, *layer_types: str) -> None:
    """A random Qwen3.5 that sees images, of one token 255 each."""
    sizes = {"hidden_size": 32, "intermediate_size": 64}
    text = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": len(make_tokenizer())}
    text |= {"layer_types": [*layer_types], "num_hidden_layers": len(layer_types), "initializer_range": 0.3}
    vision = sizes | {"depth": 1, "num_heads": 2, "out_hidden_size": 32}
    torch.manual_seed(0)
    config = Qwen3_5Config(text_config=sizes | text, vision_config=vision, image_token_id=255)
    Qwen3_5ForConditionalGeneration(config).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)


def new_model(
    tokenizer: PreTrainedTokenizerFast, kind: type[PreTrainedConfig] = Qwen2Config, **config: Any
) -> PreTrainedModel:
    """A random model, the same each time."""
    torch.manual_seed(0)
    defaults = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
        "initializer_range": 0.3,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
    }
    # Not by `from_config`, which partitions a model at once where an earlier test of the process has set up ZeRO-3.
    model: PreTrainedModel = MODEL_FOR_CAUSAL_LM_MAPPING[kind](kind(**defaults | config))
    return model


def load_model(folder: Path, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    how = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **how).eval()


def encode() -> list[tuple[Tensor, Tensor]]:
    tokenizer = make_tokenizer()
    rows = [[torch.tensor(tokenizer(text)["input_ids"]) for text in texts] for *texts, _ in ROWS]
    assert max(len(response) for _, response in rows) == len(rows[6][1]) == MAX_RESPONSE_LENGTH
    return [(prompt, response) for prompt, response in rows]


def nested(rows: Iterable[Tensor]) -> Tensor:
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)


def segments_of(response: str) -> Tensor:
    """By hand, one byte a token: `reasoning #### answer after`."""
    text = response.replace("<eos>", "\0")
    marker = text.index("####")
    end = next(i for i in range(marker + 5, len(text)) if not text[i].isdigit())
    out = [Segment.REASONING] * marker + [Segment.CONCLUDE] * 5 + [Segment.ANSWER] * (end - marker - 5)
    return torch.tensor([int(s) for s in out] + [int(Segment.AFTER)] * (len(text) - end))


# ---- importance from gradients


@cache
def reference(
    folder: Path, *which: str, dtype: torch.dtype = torch.float32, replay: str = "", **how
) -> dict[int, Tensor]:
    """Importance of each scored response, one at a time. `which`, `how`: of `gradient_importance`; `replay`: `replayed`."""
    model, scores = load_model(folder, dtype), {}
    for row in SCORED:
        ids = torch.cat(encode()[row])
        with replayed(model, ids, replay):
            scores[row] = gradient_importance(model, ids, segments_of(ROWS[row][1]), *which, **how)
    return scores


def routes(ids: Tensor) -> Tensor:
    """Experts of each token that no router chose, int16 `[T, layers, 2]`: what a rollout may have recorded."""
    first = (ids[:, None] + torch.arange(4)) % EXPERTS["num_experts"]
    return torch.stack([first, (first + 3) % EXPERTS["num_experts"]], -1).to(torch.int16)


@contextmanager
def replayed(model: PreTrainedModel, ids: Tensor, mode: str) -> Iterator[None]:
    """Route every forward of a mixture over `routes` (R3), or as the model does without noise (R2); "": as it likes."""
    routed = {} if mode == "R2" else dict(enumerate(routes(ids).long().unbind(1)))

    def replay(layer: int, gate: Any, args: Any, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        chosen = routed.setdefault(layer, output[2])
        weight = output[0].softmax(-1).gather(-1, chosen)
        return output[0], weight / weight.sum(-1, keepdim=True), chosen

    with ExitStack() as hooks:
        for number, layer in enumerate(model.model.layers if mode else []):
            hooks.callback(layer.mlp.gate.register_forward_hook(partial(replay, number)).remove)
        model(input_ids=ids[None])  # R2 records its experts
        yield


def gradient_importance(
    model, ids, segments, importance="fisher", probe="answer_mean", seed=0, columns=None, temperature=TEMPERATURE, **kw
):
    """Of a response with these segments behind its prompt, with plain autograd on a plain HuggingFace model. `columns`: of the
    vocabulary, the first ones only. `temperature`: of the entropies. `kw`: `sigma`."""
    prompt, joint = len(ids) - len(segments), probe == "answer_joint"
    reasoning = (segments == Segment.REASONING).nonzero()[:, 0] + prompt
    answer = (segments == Segment.ANSWER).nonzero()[:, 0] + prompt
    rows = answer[:1] - 1 if probe == "last" else answer - 1
    seed_1 = response_seeds(ids, torch.zeros_like(ids), 1, seed)
    embedding = model.get_input_embeddings()(ids[None]).detach().requires_grad_(True)
    logits = model(inputs_embeds=embedding).logits[0, :, :columns]

    def gradient(scalar):
        return torch.autograd.grad(scalar, embedding, retain_graph=True)[0][0]

    def row_signs(at, seed_1):
        return signs(position_seeds(seed_1.expand(len(at)), torch.arange(len(at))), 0, logits.shape[-1])

    if importance in ("entropy", "onward"):
        log_p = (logits[reasoning - 1].detach() / temperature).log_softmax(-1)
        scores = entropy = torch.zeros_like(logits[:, 0]).index_put((reasoning,), -(log_p.exp() * log_p).sum(-1))
    if importance == "onward":
        influence = torch.zeros_like(entropy)
        own = position_seeds(seed_1, torch.ones(1), 0)
        for at, seed_at, weight in ((rows, seed_1, 1.0), (reasoning - 1, own, (-entropy[reasoning, None]).exp())):
            coefficient = weight * fisher_coefficients(logits[at] / 4, row_signs(at, seed_at))
            norm = gradient((coefficient * logits[at]).sum()).square().sum(-1)
            influence = influence.maximum(norm / norm[reasoning].max())
        scores = influence ** (1 / 3) * (1 - (-entropy / 0.3).exp()) * (-entropy / 2).exp()
    if importance == "fisher":
        read, sign = logits[rows], row_signs(rows, seed_1)
        if not joint:
            read, sign = read.mean(0, keepdim=True), signs(seed_1, 0, logits.shape[-1])
        scores = gradient((fisher_coefficients(read, sign) * read).sum() / len(read)).square().sum(-1)
    if importance in ("own", "grail"):
        scalar = logits[rows].log_softmax(-1).gather(-1, ids[rows + 1][:, None]).sum()
        product = gradient(scalar) * embedding[0]
        scores = product.sum(-1).abs() if importance == "own" else product.norm(dim=-1)
    if importance == "oar_g":
        width = embedding.shape[-1]
        noise = torch.zeros(1, len(ids), width)
        noise[0, reasoning] = kw.get("sigma", SIGMA) * gaussian(
            position_seeds(seed_1.expand(len(reasoning)), reasoning, 0), width
        )
        noisy = model(inputs_embeds=embedding + noise).logits[0, rows].double()
        if joint:
            scalar = -noisy.log_softmax(-1).gather(-1, ids[rows + 1][:, None]).mean()
        else:
            p, q = (one.mean(0).log_softmax(-1) for one in (logits[rows].detach().double(), noisy))
            scalar = (p.exp() * (p - q)).sum()
        scores = (gradient(scalar) * embedding[0]).sum(-1).abs()
    return torch.where(segments == Segment.REASONING, scores.detach()[prompt:], 0.0).float()


def fisher_coefficients(logits_RV: Tensor, sign_RV: Tensor) -> Tensor:
    p = logits_RV.detach().softmax(-1)
    root = p.sqrt() * sign_RV
    return root - p * root.sum(-1, keepdim=True)


# ---- importance that is predicted

SHARE = 0.4  # of the responses: two
ENOUGH = 30, 3  # labels, more than half of all of them, and responses: a first step scores all


@cache
def predicted(folder: Path, scores: Callable[[], dict[int, Tensor]], dtype: torch.dtype) -> dict[int, Tensor]:
    """Importance of each scored response in the second of two steps with the same batch. `scores`: of all responses."""
    model, features, labels = load_model(folder, dtype), list[Tensor](), list[Tensor]()
    reasoning = {row: segments_of(ROWS[row][1]) == Segment.REASONING for row in SCORED}
    for row in SCORED:
        prompt, response = encode()[row]
        ids, at_R = torch.cat([prompt, response]), reasoning[row].nonzero()[:, 0] + len(prompt)
        with torch.no_grad():
            output = model(input_ids=ids[None], output_hidden_states=True)
        log_p = (output.logits[0, :-1] / TEMPERATURE).log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        hidden_TP, place_R = projected(output.hidden_states[-1][0]), torch.linspace(-1, 1, len(at_R))
        doubt_R = (1 - log_p[at_R - 1].exp()).float()
        features.append(token_features(hidden_TP[at_R], hidden_TP[at_R - 1], doubt_R, place_R))
        labels.append(scores()[row][reasoning[row]])
    fit_F, level = ridge([(1.0, *one) for one in zip(features, logs(labels), strict=True)])
    found = {row: ((x - x.mean(0)).double() @ fit_F + level).exp() for row, x in zip(SCORED, features, strict=True)}
    return {row: torch.zeros(len(keep)).masked_scatter(keep, found[row].float()) for row, keep in reasoning.items()}


def logs(labels: list[Tensor]) -> list[Tensor]:
    """Logarithms of the scores of a step, by response. None is below a millionth of their mean."""
    return [one.double().clamp_min(1e-6 * torch.cat(labels).double().mean()).log() for one in labels]


def ridge(
    labels: Iterable[tuple[float, Tensor, Tensor]], columns: slice = slice(None), size: float = 100.0
) -> tuple[Tensor, float]:
    """Coefficients of features, and the mean logarithm, from responses: weight, features `[U, F]` and logarithms `[U]`."""
    rows = [(w, (x - x.mean(0)).double()[:, columns], y) for w, x, y in labels]
    gram, moment = sum(w * x.T @ x for w, x, _ in rows), sum(w * x.T @ (y - y.mean()) for w, x, y in rows)
    level = sum(w * y.mean().item() for w, _, y in rows) / sum(w for w, *_ in rows)
    return torch.linalg.solve(gram + size * torch.eye(len(gram)).double(), moment), level


# ---- importance from masked copies, a whole forward for each


@dataclass(frozen=True)
class Candidate:
    """A response to score. Positions in a unit count from its start. `token_T`: with the prompt, to the answer's end."""

    token_T: Tensor
    prompt_length: int
    answer_start: int  # index in `token_T`

    @classmethod
    def of(cls, token_T: Tensor, segments_L: Tensor) -> "Candidate":
        prompt_length, answer = len(token_T) - len(segments_L), (segments_L == Segment.ANSWER).nonzero()[:, 0]
        return cls(token_T[: prompt_length + int(answer[-1]) + 1], prompt_length, prompt_length + int(answer[0]))


@cache
def counterfactual(
    folder: Path, probe: str = "answer_mean", span: int = 1, sampled: bool = False, columns: int | None = None
) -> dict[int, Tensor]:
    """OAR-P of each scored response, in float64. `columns`: tokens of the vocabulary."""
    model = load_model(folder)
    if columns is not None:
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight[:columns])
    settings = {"probe": probe, "replacement": None if sampled else PAD}
    rows = [(row, torch.cat(encode()[row]), segments_of(ROWS[row][1])) for row in SCORED]
    return {row: of_response(model, ids, segments, span, **settings).float() for row, ids, segments in rows}


def of_response(model, ids, segments, span=1, **settings):
    """OAR-P of a response with these segments behind its prompt."""
    unit_list = units((segments == Segment.REASONING).tolist(), span)
    return copies_importance(model, Candidate.of(ids, segments), unit_list, len(segments), **settings)


def copies_importance(model, candidate, unit_list, length, probe="answer_mean", replacement=PAD, seed=0):
    """OAR-P of a response of this length, float64. `replacement`: that of `one_by_one`; None: drawn with this seed."""
    if replacement is None:
        replacement = drawn(model, candidate.token_T, seed)
    return importance_of_units(unit_list, one_by_one(model, candidate, unit_list, probe, replacement), length)


@torch.no_grad()
def one_by_one(model, candidate, unit_list, probe="answer_mean", replacement=0):
    """Scores of single copies. `replacement`: one token for all, or for each position its own, `[T]`."""
    clean, scores = outcome(model, candidate.token_T, candidate, probe), []
    for unit in unit_list:
        ids, at = candidate.token_T.clone(), torch.tensor(unit) + candidate.prompt_length
        ids[at] = torch.as_tensor(replacement).expand(len(ids))[at]
        masked = outcome(model, ids, candidate, probe)
        scores.append(((clean - masked) if probe == "answer_joint" else (clean.exp() * (clean - masked)).sum()).item())
    return scores


def outcome(model, ids, candidate, probe):
    """Mean log-probability of the answer, or log-probabilities over the vocabulary; from all logits."""
    rows = slice(candidate.answer_start - 1, candidate.answer_start if probe == "last" else len(ids) - 1)
    logits = model(input_ids=ids[None], use_cache=False).logits[0, rows]
    if probe == "answer_joint":
        return logits.log_softmax(-1).gather(-1, candidate.token_T[candidate.answer_start :, None]).mean()
    return logits.mean(0).log_softmax(-1)


@torch.no_grad()
def drawn(model, token_T, seed):
    """What stands in for each token when it is drawn from the model's own prediction; for the first one, itself."""
    seed_1 = response_seeds(token_T, torch.zeros_like(token_T), 1, seed)
    at = torch.arange(1, len(token_T))
    logits = model(input_ids=token_T[None]).logits[0, :-1]
    tokens = sample_replacements(logits, token_T[1:], position_seeds(seed_1.expand(len(at)), at))
    return torch.cat([token_T[:1], tokens])
