"""Responses of a language model to problems with few-shot examples, short and long, right and wrong."""

import math
from collections.abc import Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.fidelity.responses import Response, Source
from benchmarks.language import smollm2
from benchmarks.language.problems import Problem, problems
from benchmarks.report import Progress
from oar_plugin.credit.answer import Segment, make_finder, segment_tokens
from oar_plugin.passes.segments import end_of_sequence_tokens
from oar_plugin.passes.tokens import TokenBytes

LONGEST = {"short": 120, "long": 320}
"""Tokens at which a response is cut off."""
ROUNDS = 5
"""Of sampling; each asks what is missing, by the share that had an answer before. The page says where this was too little."""
KEPT = 32
"""Tokens in the KV cache that take the memory of one with an autograd graph, about, of which `max_tokens` is the limit."""

_FINDER = make_finder(("hash",))


class Writer:
    """A model with its tokenizer and chat template."""

    def __init__(self, name: str, device: torch.device, temperature: float, max_tokens: int) -> None:
        path = smollm2.resolved(name)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(path, padding_side="left")
        self.model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(device).eval()
        self.bytes, self.temperature, self.max_tokens = TokenBytes(self.tokenizer), temperature, max_tokens
        self.ends = sorted(end_of_sequence_tokens(self.tokenizer, self.model.generation_config))
        known = (self.model.generation_config.pad_token_id, self.tokenizer.pad_token_id, *self.ends)
        self.tokenizer.pad_token_id = self.pad = next(token for token in known if token is not None)

    def write(self, chats: Sequence[Any], longest: int) -> list[tuple[list[int], list[int]]]:
        """Tokens of each prompt, and what was written after it, with padding."""
        encode = partial(self.tokenizer.apply_chat_template, add_generation_prompt=True, return_dict=True)
        prompts = [encode(chat)["input_ids"] for chat in chats]
        most, rows = max(map(len, prompts)), list[list[int]]()
        size = max(1, KEPT * self.max_tokens // (most + longest))
        for at in range(0, len(prompts), size):
            given = self.tokenizer.pad({"input_ids": prompts[at : at + size]}, return_tensors="pt").to(
                self.model.device
            )
            token_BT = self.model.generate(
                input_ids=given.input_ids, attention_mask=given.attention_mask, max_new_tokens=longest, do_sample=True,
                temperature=self.temperature, top_k=0, top_p=1.0, repetition_penalty=1.0, eos_token_id=self.ends,
                pad_token_id=self.pad,
            )  # fmt: skip
            rows += token_BT[:, given.input_ids.shape[1] :].tolist()
        return list(zip(prompts, rows, strict=True))

    def read(self, problem: Problem, prompt: Sequence[int], row: Sequence[int]) -> Response | None:
        """None: no answer, no reasoning before it, or cut off."""
        length = next((at + 1 for at, token in enumerate(row) if token in self.ends), 0)
        pieces = self.bytes.pieces(row[:length])
        segments = segment_tokens(pieces, _FINDER)
        if segments is None or Segment.REASONING not in segments:
            return None
        answer = b"".join(pieces[at] for at in (segments == Segment.ANSWER).nonzero()[0]).decode(errors="replace")
        right = answer.replace(",", "").strip(" $.") == problem.answer
        token_T = torch.tensor([*prompt, *row[:length]])
        segments_T = torch.tensor([int(Segment.OUTSIDE)] * len(prompt) + segments.tolist())
        causal_T = torch.zeros(len(token_T), dtype=torch.bool)
        question = problem.prompt[-1]["content"]
        return Response(token_T, segments_T, causal_T, right, question, self.bytes.texts(row[:length]))


def language_source(
    writer: Writer, kind: str, length: str, wanted: int, seed: int, questions: Path | None, progress: Progress
) -> Source:
    """`wanted` short responses to problems of a kind or half as many long ones, each to a problem of its own.

    Raises ValueError where no response has an answer.
    """
    torch.manual_seed(seed)
    count = wanted if length == "short" else (wanted + 1) // 2
    drawn = problems(kind, length == "long", seed, questions)
    found: list[Response] = []
    asked = 0
    for _ in range(ROUNDS):
        share = max(1 / 8, len(found) / asked if asked else 1.0)
        if batch := list(islice(drawn, math.ceil(max(0, count - len(found)) / share))):
            progress(f"{kind}, {length}: responses", len(found), count)
            rows = writer.write([problem.prompt for problem in batch], LONGEST[length])
            found += filter(None, (writer.read(problem, *row) for problem, row in zip(batch, rows, strict=True)))
            asked += len(batch)
    if not found:
        raise ValueError(f"--tasks {kind}: the model wrote no answer to {asked} {length} problems")
    right = sum(response.right for response in found) / asked
    more = {"length": length, "pad": writer.pad, "temperature": writer.temperature}
    return Source(kind, 0, writer.model, found[:count], asked - len(found), right, **more)
