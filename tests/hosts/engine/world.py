"""A tiny model, a few responses, and what their importance is when computed in the plainest way."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.tiny import words
from oar_plugin.credit.answer import Segment
from oar_plugin.credit.noise import gaussian, position_seeds, response_seeds, signs
from oar_plugin.credit.perturbation import sample_replacements, units

MAX_RESPONSE_LENGTH = 40
SIGMA = 1e-3
TEMPERATURE = 0.7  # of sampling; not 1, so that entropies at another temperature are noticed
make_tokenizer = partial(words.make_tokenizer, by_bytes=True)
PAD = 256  # of that tokenizer
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
STATUS = ["SCORED", "SCORED", "NOT_NEEDED", "SCORED", "SCORED", "NO_ANSWER", "TRUNCATED", "NO_REASONING"]


def make_model(folder: Path, **config: Any) -> None:
    """Save a random model and its tokenizer."""
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    size = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
        "initializer_range": 0.3,
    }
    special = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    Qwen2ForCausalLM(Qwen2Config(**{**size, **special, **config})).save_pretrained(folder)


def encode() -> list[tuple[torch.Tensor, torch.Tensor]]:
    tokenizer = make_tokenizer()
    rows = []
    for prompt, response, _ in ROWS:
        ids = tokenizer(response)["input_ids"]
        assert len(ids) <= MAX_RESPONSE_LENGTH
        rows.append((torch.tensor(tokenizer(prompt)["input_ids"]), torch.tensor(ids)))
    assert len(rows[6][1]) == MAX_RESPONSE_LENGTH
    return rows


def nested(rows: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)


def segments_of(response: str) -> torch.Tensor:
    """By hand, one byte a token: `reasoning #### answer after`."""
    text = response.replace("<eos>", "\0")
    marker = text.index("####")
    end = next(i for i in range(marker + 5, len(text)) if not text[i].isdigit())
    out = [Segment.REASONING] * marker + [Segment.CONCLUDE] * 5 + [Segment.ANSWER] * (end - marker - 5)
    return torch.tensor([int(s) for s in out] + [int(Segment.AFTER)] * (len(text) - end))


def fisher_coefficients(logits_RV: torch.Tensor, sign_RV: torch.Tensor) -> torch.Tensor:
    p = logits_RV.detach().softmax(-1)
    root = p.sqrt() * sign_RV
    return root - p * root.sum(-1, keepdim=True)


def entropies(logits_RV: torch.Tensor, temperature: float) -> torch.Tensor:
    log_p = (logits_RV / temperature).log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1)


@cache
def reference(
    folder: Path,
    importance: str = "fisher",
    probe: str = "answer_mean",
    seed: int = 0,
    columns: int | None = None,
    dtype: torch.dtype = torch.float32,
    temperature: float = TEMPERATURE,
) -> dict[int, torch.Tensor]:
    """Importance of each scored response, one at a time, with plain autograd on a plain HuggingFace model.

    `columns`: the Fisher norm over the first columns of the vocabulary only. `temperature`: of the entropies.
    """
    model = Qwen2ForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=dtype).eval()
    vocabulary, hidden = columns or model.config.vocab_size, model.config.hidden_size
    result = {}
    for row in SCORED:
        prompt, response = encode()[row]
        ids = torch.cat([prompt, response])
        segments = torch.cat([torch.zeros(len(prompt), dtype=torch.long), segments_of(ROWS[row][1])])
        rows = (segments == Segment.ANSWER).nonzero()[:, 0] - 1
        rows = rows[:1] if probe == "last" else rows
        reasoning = (segments == Segment.REASONING).nonzero()[:, 0]
        seed_1 = response_seeds(ids, torch.zeros_like(ids), 1, seed)
        embedding = model.get_input_embeddings()(ids[None]).detach().requires_grad_(True)
        if importance == "oar_g":
            noise = torch.zeros(1, len(ids), hidden)
            noise[0, reasoning] = SIGMA * gaussian(position_seeds(seed_1.expand(len(reasoning)), reasoning, 0), hidden)
            with torch.no_grad():
                clean = model(inputs_embeds=embedding).logits[0, rows].double()
            noisy = model(inputs_embeds=embedding + noise).logits[0, rows].double()
            if probe == "answer_joint":
                token = ids[rows + 1][:, None]
                scalar = -noisy.log_softmax(-1).gather(-1, token).mean()
            else:
                p, q = clean.mean(0).log_softmax(-1), noisy.mean(0).log_softmax(-1)
                scalar = (p.exp() * (p - q)).sum()
            (gradient,) = torch.autograd.grad(scalar, embedding)
            scores = (gradient * embedding).sum(-1).abs()[0]
        elif importance == "entropy":
            entropy = entropies(model(inputs_embeds=embedding).logits[0, reasoning - 1], temperature)
            scores = torch.zeros(len(ids), dtype=dtype).index_put((reasoning,), entropy)
        elif importance == "own":
            log_p = model(inputs_embeds=embedding).logits[0, rows].log_softmax(-1)
            (gradient,) = torch.autograd.grad(log_p.gather(-1, ids[rows + 1][:, None]).sum(), embedding)
            scores = (gradient * embedding).sum(-1).abs()[0]
        elif importance == "onward":
            logits = model(inputs_embeds=embedding).logits[0, :, :columns]
            norms, entropy = [], torch.zeros(len(ids), dtype=dtype)
            for at, seed_part in ((rows, seed_1), (reasoning - 1, position_seeds(seed_1, torch.ones(1), 0))):
                sign = signs(position_seeds(seed_part.expand(len(at)), torch.arange(len(at))), 0, vocabulary)
                coefficient = fisher_coefficients(logits[at] / 4, sign)
                if at is not rows:
                    entropy[reasoning] = entropies(logits[at].detach(), temperature)
                    coefficient = coefficient * (-entropy[reasoning]).exp()[:, None]
                scalar = (coefficient * logits[at]).sum()
                (gradient,) = torch.autograd.grad(scalar, embedding, retain_graph=True)
                norms.append(gradient.square().sum(-1)[0])
            influence = torch.stack([norm / norm[reasoning].max() for norm in norms]).amax(0)
            scores = influence ** (1 / 3) * (1 - (-entropy / 0.3).exp()) * (-entropy / 2).exp()
        else:
            logits = model(inputs_embeds=embedding).logits[0, rows, :columns]
            if probe == "answer_joint":
                sign = signs(position_seeds(seed_1.expand(len(rows)), torch.arange(len(rows))), 0, vocabulary)
            else:
                logits, sign = logits.mean(0, keepdim=True), signs(seed_1, 0, vocabulary)
            scalar = (fisher_coefficients(logits, sign) * logits).sum() / len(logits)
            (gradient,) = torch.autograd.grad(scalar, embedding)
            scores = gradient.square().sum(-1)[0]
        result[row] = torch.where(segments == Segment.REASONING, scores.detach(), 0.0)[len(prompt) :].float()
    return result


@cache
def counterfactual(
    folder: Path, probe: str = "answer_mean", span: int = 1, sampled: bool = False
) -> dict[int, torch.Tensor]:
    """OAR-P of each scored response: a whole forward of a plain HuggingFace model in float64 for each copy."""
    model = Qwen2ForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float64).eval()
    result = {}
    for row in SCORED:
        prompt, response = encode()[row]
        segments = segments_of(ROWS[row][1])
        answer = (segments == Segment.ANSWER).nonzero()[:, 0] + len(prompt)
        ids = torch.cat([prompt, response])[: answer[-1] + 1]
        clean_logits = model(input_ids=ids[None]).logits[0].detach()

        def outcome(logits: torch.Tensor, ids: torch.Tensor = ids, answer: torch.Tensor = answer) -> torch.Tensor:
            rows = logits[answer - 1]
            if probe == "answer_joint":
                return rows.log_softmax(-1).gather(-1, ids[answer][:, None]).mean()
            return (rows[0] if probe == "last" else rows.mean(0)).log_softmax(-1)

        replacement = torch.full_like(ids, PAD)
        if sampled:
            seed = response_seeds(ids, torch.zeros_like(ids), 1, 0)
            at = torch.arange(1, len(ids))
            seeds = position_seeds(seed.expand(len(at)), at)
            replacement[1:] = sample_replacements(clean_logits[:-1], ids[1:], seeds)
        reasoning = (segments == Segment.REASONING).tolist()
        importance = torch.zeros(len(response), dtype=torch.float64)
        for unit in units(reasoning, span):
            masked = ids.clone()
            where = torch.tensor(unit) + len(prompt)
            masked[where] = replacement[where]
            p, q = outcome(clean_logits), outcome(model(input_ids=masked[None]).logits[0].detach())
            score = p - q if probe == "answer_joint" else (p.exp() * (p - q)).sum()
            importance[list(unit)] = score.clamp_min(0) / len(unit)
        result[row] = importance.float()
    return result
