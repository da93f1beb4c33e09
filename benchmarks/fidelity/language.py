"""Responses of a language model to problems with worked examples, short and long, right and wrong."""

from collections.abc import Iterator, Sequence
from itertools import islice, product
from pathlib import Path
from typing import Any, get_args

import numpy as np
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

KINDS: tuple[Kind, ...] = get_args(Kind)
LONGEST = {"short": 100, "long": 320}
"""Tokens at which a response is cut off."""
ROUNDS = 4
"""Of sampling; fewer responses are then taken as they are."""
KEPT = 32
"""Tokens whose keys and values take the memory of one with a graph, about."""

_FINDER = make_finder(("hash",))


class Writer:
    """A model with its tokenizer that writes until a blank line, as its worked examples do."""

    def __init__(self, name: str, device: torch.device, temperature: float, max_tokens: int) -> None:
        path = smollm2.resolved(name)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(path)
        self.model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(device).eval()
        self.bytes, self.temperature, self.max_tokens = TokenBytes(self.tokenizer), temperature, max_tokens
        generation = self.model.generation_config
        self.ends = sorted(end_of_sequence_tokens(self.tokenizer, generation))
        known = (generation.pad_token_id, self.tokenizer.pad_token_id, *self.ends)
        self.pad: int = next(token for token in known if token is not None)

    def write(self, prompts: Sequence[Sequence[int]], longest: int) -> list[list[int]]:
        """A response to each, with all that it wrote in the round in which the last one ended."""
        rows: list[list[int]] = []
        most = max(map(len, prompts))
        size = max(1, KEPT * self.max_tokens // (most + longest))
        for at in range(0, len(prompts), size):
            part = prompts[at : at + size]
            # On the left: responses then begin in one column.
            token_BP = torch.tensor([[self.pad] * (most - len(ids)) + [*ids] for ids in part])
            mask_BP = torch.tensor([[0] * (most - len(ids)) + [1] * len(ids) for ids in part])
            written_BT = self.model.generate(
                **{"input_ids": token_BP.to(self.model.device), "attention_mask": mask_BP.to(self.model.device)},
                do_sample=True, temperature=self.temperature, top_k=0, top_p=1.0, repetition_penalty=1.0,
                max_new_tokens=longest, eos_token_id=self.ends, pad_token_id=self.pad, stopping_criteria=[self._stopped],
            )  # fmt: skip
            rows += written_BT[:, most:].tolist()
        return rows

    def _stopped(self, token_BT: Tensor, scores: Any, **_: Any) -> Tensor:
        ended = ["\n\n" in tail for tail in self.tokenizer.batch_decode(token_BT[:, -4:])]
        return torch.tensor(ended, device=token_BT.device)

    def read(self, prompt: Sequence[int], problem: Problem, row: Sequence[int], longest: int) -> Response | None:
        """None: no answer, no reasoning before it, or cut off."""
        pieces, written = self.bytes.pieces(row), b""
        length = next((at + 1 for at, token in enumerate(row) if token in self.ends), None)
        for at, piece in enumerate(pieces[:length]):
            written += piece
            if b"\n\n" in written:
                length = at + 1
                break
        if length is None or length > longest:
            return None
        segments = segment_tokens(pieces[:length], _FINDER)
        if segments is None or Segment.REASONING not in segments:
            return None
        answer = b"".join(pieces[at] for at in np.flatnonzero(segments == Segment.ANSWER))
        right = answer.decode(errors="replace").replace(",", "").strip(" $.\n") == problem.answer
        token_T = torch.tensor([*prompt, *row[:length]])
        segments_T = torch.tensor([int(Segment.OUTSIDE)] * len(prompt) + segments.tolist())
        words = [*self.bytes.texts(prompt), *self.bytes.texts(row[:length])]
        return Response(token_T, segments_T, torch.zeros(len(token_T), dtype=torch.bool), right, words)


def language_sources(
    writer: Writer, kinds: Sequence[Kind], wanted: int, seed: int, questions: Path | None, progress: Progress
) -> Iterator[Source]:
    """`wanted` short responses to problems of each kind and half as many long ones, each to a problem of its own.

    Raises ValueError for an unknown kind, and where a kind's problems cannot be had or no response to them has an answer.
    """
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise ValueError(f"--tasks {unknown[0]}: allowed with --model: {', '.join(KINDS)}")
    torch.manual_seed(seed)
    for kind, (length, longest) in product(kinds, LONGEST.items()):
        count = wanted if length == "short" else (wanted + 1) // 2
        drawn = problems(kind, length == "long", seed, questions)
        responses: list[Response] = []
        asked = usable = right = 0
        for _ in range(ROUNDS):
            if len(responses) >= count:
                break
            progress(f"{kind}, {length}: responses", len(responses), count)
            batch = list(islice(drawn, 3 * (count - len(responses))))
            prompts = [writer.tokenizer(problem.prompt).input_ids for problem in batch]
            written = zip(prompts, batch, writer.write(prompts, longest), strict=True)
            found = [one for row in written if (one := writer.read(*row, longest)) is not None]
            asked, usable, right = asked + len(batch), usable + len(found), right + sum(one.right for one in found)
            responses += found
        if not responses:
            raise ValueError(f"--tasks {kind}: the model wrote no answer to {asked} {length} problems")
        yield Source(
            kind, 0, writer.model, responses[:count], asked - usable, right / asked, None, length, writer.pad,
            writer.temperature,
        )  # fmt: skip
