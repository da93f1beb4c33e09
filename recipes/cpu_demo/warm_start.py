"""A small model that knows the form of the answers and about a third of the answers.

A Llama with random weights imitates :class:`recipes.cpu_demo.task.Tutor`: first his bare facts (``3 + 4 = 7 ;``), which
takes seconds, then whole responses to prompts in the chat format, where it still has to learn which sum comes next.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from recipes.cpu_demo.task import MARKER, WORDS, Problem, Tutor

FACT_STEPS, FACT_BATCH, FACTS_A_ROW = 130, 64, 3
LONGEST, COOL_DOWN, BATCH = 480, 140, 32
WARM_UP_STEPS = 30
LEARNING_RATE = 2e-3
FILLER_WEIGHT = 0.1
"""Weight of a filler word in the loss: they are noise, and there are more of them than of anything else."""
COPY_WEIGHT = 3.0
"""Weight of the tokens that are copied: a sum from the prompt, the results into the answer. Slowest to learn, and few."""
COPIES_BELOW = 0.05
"""Loss on those tokens at which the model is taken to copy. Then the learning rate cools down, and the form settles."""

MAX_NEW_TOKENS = 80

Progress = Callable[[int, int, float], None]
"""Called after each step with the step, the number of steps that it will be at most, and the loss."""


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    """A Llama with 0.5 million parameters and random weights. Heads of 32 are the smallest that vLLM has on a CPU."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.1,  # about 1 / sqrt(hidden_size); with the usual 0.02 nothing is learned for minutes
    )
    return LlamaForCausalLM(config)


def chat_prompt(tokenizer: PreTrainedTokenizerFast, problem: Problem) -> str:
    """The prompt as verl will show it to the model."""
    messages = [{"role": "user", "content": problem.prompt}]
    return str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))


def fact_batches(tokenizer: PreTrainedTokenizerFast, tutor: Tutor, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Token ids and labels ``[FACT_BATCH, 6 * FACTS_A_ROW]`` of bare facts; only the results are labelled."""
    rng = random.Random(seed)
    while True:
        rows = []
        for _ in range(FACT_BATCH):
            facts = [(rng.randrange(10), rng.choice("+-"), rng.randrange(10)) for _ in range(FACTS_A_ROW)]
            rows.append("".join(f" {a} {op} {b} = {tutor.result((a, op, b), rng)} ;" for a, op, b in facts))
        ids = torch.tensor(tokenizer(rows)["input_ids"])
        labels = torch.full_like(ids, -100)
        labels[:, 4::6] = ids[:, 4::6]
        yield ids, labels


def response_batches(tokenizer: PreTrainedTokenizerFast, tutor: Tutor, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Token ids and labels ``[BATCH, longest]`` of prompts with a demonstration; prompts and padding are unlabelled."""
    demonstrations = tutor.demonstrations(seed)
    while True:
        pairs = list(islice(demonstrations, BATCH))
        prompts = tokenizer([chat_prompt(tokenizer, problem) for problem, _ in pairs])["input_ids"]
        responses = tokenizer([text + tokenizer.eos_token for _, text in pairs])["input_ids"]
        longest = max(len(p) + len(r) for p, r in zip(prompts, responses, strict=True))
        ids = torch.full((BATCH, longest), tokenizer.pad_token_id)
        labels = torch.full((BATCH, longest), -100)
        for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
            end = len(prompt) + len(response)
            ids[row, :end] = torch.tensor(prompt + response)
            labels[row, len(prompt) : end] = torch.tensor(response)
        yield ids, labels


def _filler_V(tokenizer: PreTrainedTokenizerFast) -> Tensor:
    """Which tokens are filler words."""
    tokens = [token for word in WORDS for token in (word, "Ġ" + word)]
    filler_V = torch.zeros(len(tokenizer), dtype=torch.bool)
    filler_V[tokenizer.convert_tokens_to_ids(tokens)] = True
    return filler_V


def warm_start(
    tokenizer: PreTrainedTokenizerFast,
    seed: int,
    on_step: Progress | None = None,
    fact_steps: int = FACT_STEPS,
    longest: int = LONGEST,
    cool_down: int = COOL_DOWN,
) -> LlamaForCausalLM:
    """Build the model and train it. The same seed on the same machine gives the same weights.

    When a model starts to copy differs from seed to seed and from machine to machine. So the second phase lasts until
    this one does, though not longer than ``longest`` steps, and ends with ``cool_down`` steps at a falling rate.
    """
    model = build_model(tokenizer, seed)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01, betas=(0.9, 0.98))
    filler_V = _filler_V(tokenizer)
    marker, equals = tokenizer.convert_tokens_to_ids(["Ġ" + MARKER, "Ġ="])
    tutor = Tutor(seed=0)
    done = 0

    def learn(ids: Tensor, labels: Tensor, rate: float, total: int) -> float:
        nonlocal done
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (done + 1) / WARM_UP_STEPS)
        loss, copy_loss = _losses(model, ids, labels, filler_V, marker, equals)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        done += 1
        if on_step is not None:
            on_step(done, total, loss.item())
        return copy_loss

    for ids, labels in islice(fact_batches(tokenizer, tutor, 2 * seed), fact_steps):
        learn(ids, labels, LEARNING_RATE, fact_steps + longest + cool_down)
    batches = response_batches(tokenizer, tutor, 2 * seed + 1)
    smooth = math.inf
    for step, (ids, labels) in enumerate(islice(batches, longest)):
        copy_loss = learn(ids, labels, LEARNING_RATE, fact_steps + longest + cool_down)
        smooth = copy_loss if step == 0 else 0.9 * smooth + 0.1 * copy_loss
        if smooth < COPIES_BELOW:
            break
    end = done + cool_down
    for step, (ids, labels) in enumerate(islice(batches, cool_down)):
        learn(ids, labels, LEARNING_RATE * 0.5 * (1 + math.cos(math.pi * step / cool_down)), end)
    return model.eval()


def _losses(
    model: LlamaForCausalLM, ids: Tensor, labels: Tensor, filler_V: Tensor, marker: int, equals: int
) -> tuple[Tensor, float]:
    """Weighted cross-entropy at the labelled positions, and the plain one of the copied tokens among them."""
    hidden = model.model(input_ids=ids).last_hidden_state[:, :-1]
    labels = labels[:, 1:]
    copied = (labels == marker).cumsum(1).bool() & (labels != marker)
    for back in (1, 2):  # operator and second operand; before the first operand there is a choice, whether to go on
        copied[:, :-back] |= labels[:, back:] == equals
    weights = torch.where(filler_V[labels.clamp_min(0)], FILLER_WEIGHT, 1.0).masked_fill(copied, COPY_WEIGHT)
    labelled = labels != -100
    losses = F.cross_entropy(model.lm_head(hidden[labelled]), labels[labelled], reduction="none")
    loss = (losses * weights[labelled]).sum() / weights[labelled].sum()
    return loss, losses[copied[labelled]].detach().mean().item()


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write both as a folder that ``AutoModelForCausalLM`` and ``AutoTokenizer`` load."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@torch.inference_mode()
def respond(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    problems: Sequence[Problem],
    greedy: bool,
    seed: int = 0,
) -> list[str]:
    """One response to each problem: the most likely tokens, or a sample at temperature 1."""
    prompts = tokenizer([chat_prompt(tokenizer, problem) for problem in problems], return_tensors="pt")["input_ids"]
    sampling = {} if greedy else {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        ids = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=not greedy,
            max_new_tokens=MAX_NEW_TOKENS,
            **sampling,
        )
    texts: list[str] = tokenizer.batch_decode(ids[:, prompts.shape[1] :], skip_special_tokens=True)
    return texts
