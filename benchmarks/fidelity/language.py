"""Responses of a language model to problems with worked examples, short and long, right and wrong."""

from collections.abc import Iterator, Sequence
from itertools import islice, product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.fidelity.responses import Response, Source
from benchmarks.language import smollm2
from benchmarks.language.problems import Kind, Problem, problems
from benchmarks.report import Progress
from oar_plugin.credit.answer import Segment, make_finder, segment_tokens
from oar_plugin.passes.segments import end_of_sequence_tokens
from oar_plugin.passes.tokens import TokenBytes

LONGEST = {"short": 120, "long": 320}
"""Tokens at which a response is cut off."""
ROUNDS = 4
"""Of sampling. Where they give fewer responses than wanted, the page says how many."""
KEPT = 32
"""Tokens whose keys and values take the memory of one with a graph, about."""

_FINDER = make_finder(("hash",))


class Writer:
    """A model with its tokenizer. It writes until a blank line, as its worked examples do."""

    def __init__(self, name: str, device: torch.device, temperature: float, max_tokens: int) -> None:
        path = smollm2.resolved(name)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(path, padding_side="left")
        self.model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(device).eval()
        self.bytes, self.temperature, self.max_tokens = TokenBytes(self.tokenizer), temperature, max_tokens
        self.ends = sorted(end_of_sequence_tokens(self.tokenizer, self.model.generation_config))
        known = (self.model.generation_config.pad_token_id, self.tokenizer.pad_token_id, *self.ends)
        self.tokenizer.pad_token_id = self.pad = next(token for token in known if token is not None)

    def write(self, prompts: Sequence[str], longest: int) -> list[list[int]]:
        """Tokens after each prompt, until all of a forward's rows have ended."""
        rows: list[list[int]] = []
        most = max(len(self.tokenizer(prompt).input_ids) for prompt in prompts) + longest
        size = max(1, KEPT * self.max_tokens // most)
        for at in range(0, len(prompts), size):
            given = self.tokenizer(prompts[at : at + size], padding=True, return_tensors="pt").to(self.model.device)
            token_BT = self.model.generate(
                input_ids=given.input_ids, attention_mask=given.attention_mask, max_new_tokens=longest, do_sample=True,
                temperature=self.temperature, top_k=0, top_p=1.0, repetition_penalty=1.0, eos_token_id=self.ends,
                pad_token_id=self.pad, stopping_criteria=[self._stopped],
            )  # fmt: skip
            rows += token_BT[:, given.input_ids.shape[1] :].tolist()
        return rows

    def _stopped(self, token_BT: Tensor, scores: Any, **_: Any) -> Tensor:
        ended = ["\n\n" in text for text in self.tokenizer.batch_decode(token_BT[:, -4:])]
        return torch.tensor(ended, device=token_BT.device)

    def read(self, problem: Problem, row: Sequence[int]) -> Response | None:
        """None: no answer, no reasoning before it, or cut off."""
        prompt, pieces, written, length = self.tokenizer(problem.prompt).input_ids, self.bytes.pieces(row), b"", 0
        while b"\n\n" not in written and not (length and row[length - 1] in self.ends):
            if length == len(row):
                return None
            written, length = written + pieces[length], length + 1
        segments = segment_tokens(pieces[:length], _FINDER)
        if segments is None or Segment.REASONING not in segments:
            return None
        answer = b"".join(pieces[at] for at in (segments == Segment.ANSWER).nonzero()[0]).decode(errors="replace")
        token_T = torch.tensor([*prompt, *row[:length]])
        segments_T = torch.tensor([int(Segment.OUTSIDE)] * len(prompt) + segments.tolist())
        words = [*self.bytes.texts(prompt), *self.bytes.texts(row[:length])]
        right = answer.replace(",", "").strip(" $.\n") == problem.answer
        return Response(token_T, segments_T, torch.zeros(len(token_T), dtype=torch.bool), right, words)


def language_sources(
    writer: Writer, kinds: Sequence[Kind], wanted: int, seed: int, questions: Path | None, progress: Progress
) -> Iterator[Source]:
    """`wanted` short responses to problems of each kind and half as many long ones, each to a problem of its own.

    Raises ValueError where no response to problems of a kind has an answer.
    """
    torch.manual_seed(seed)
    for kind, (length, longest) in product(kinds, LONGEST.items()):
        count = wanted if length == "short" else (wanted + 1) // 2
        drawn = problems(kind, length == "long", seed, questions)
        found: list[Response] = []
        asked = 0
        for _ in range(ROUNDS):
            progress(f"{kind}, {length}: responses", len(found), count)
            batch = list(islice(drawn, 3 * max(0, count - len(found))))
            rows = writer.write([problem.prompt for problem in batch], longest) if batch else []
            found += filter(None, map(writer.read, batch, rows))
            asked += len(batch)
        if not found:
            raise ValueError(f"--tasks {kind}: the model wrote no answer to {asked} {length} problems")
        right = sum(response.right for response in found) / asked
        more = {"length": length, "pad": writer.pad, "temperature": writer.temperature}
        yield Source(kind, 0, writer.model, found[:count], asked - len(found), right, **more)
