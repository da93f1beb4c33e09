"""The responses that estimators are judged on, and those of small models on tasks whose causal tokens are known."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from benchmarks.learning.tasks import TASKS
from benchmarks.learning.warm_start import warm_model
from benchmarks.report import Progress
from benchmarks.tiny.model import sample
from benchmarks.tiny.words import PAD, VOCABULARY, text
from oar_plugin.credit.answer import Segment
from oar_plugin.credit.probe import Probe


@dataclass(frozen=True)
class Response:
    """A response with an answer and R reasoning tokens before it, T tokens with its prompt."""

    token_T: Tensor  # int64
    segments_T: Tensor  # int64 of `Segment`; the prompt is OUTSIDE
    causal_T: Tensor  # bool, the tokens that are known to decide the answer
    right: bool  # whether the answer is
    question: str  # the prompt's text, without worked examples
    words: Sequence[str]  # the text of each of the response's tokens

    @property
    def reasoning_R(self) -> Tensor:
        """Positions of the reasoning tokens."""
        return (self.segments_T == Segment.REASONING).nonzero()[:, 0]


@dataclass(frozen=True)
class Source:
    task: str
    number: int  # of the warm model
    model: nn.Module  # float32
    responses: list[Response]
    unusable: int  # responses without an answer or without reasoning, which are not among them
    right: float  # share of right answers of all that were sampled
    length: str = ""  # `short` or `long`, of a language model
    pad: int = PAD  # what padding and replaced tokens become
    temperature: float = 1.0  # that the responses were sampled at


class Batch:
    """What an estimator scores: B responses, padded on the right, where causal attention does not look.

    `probe` is the outcome that is watched, `seed` that of signs, noise and draws, `max_tokens` the most of a forward.
    """

    def __init__(self, source: Source, responses: Sequence[Response], probe: Probe, seed: int, max_tokens: int) -> None:
        self.responses, self.probe, self.seed, self.max_tokens = responses, probe, seed, max_tokens
        self.pad, self.temperature = source.pad, source.temperature
        self.token_BT = pad_sequence([row.token_T for row in responses], True, source.pad)  # int64
        # int64 of `Segment`; prompts and padding are OUTSIDE
        self.segments_BT = pad_sequence([row.segments_T for row in responses], True, int(Segment.OUTSIDE))
        ones = [torch.ones_like(row.token_T, dtype=torch.bool) for row in responses]
        self.mask_BT = pad_sequence(ones, True, False)  # false at padding


def task_sources(tasks: Sequence[str], models: int, responses: int, seed: int, progress: Progress) -> Iterator[Source]:
    """The first warm models of each task, and responses that they sample with `seed`.

    Raises:
        ValueError: an unknown task, or a model that hardly ever writes an answer.
        StuckError: a model did not learn its task.
    """
    if unknown := [name for name in tasks if name not in TASKS]:
        raise ValueError(f"--tasks {unknown[0]}: allowed: {', '.join(TASKS)}")
    for name in tasks:
        for number in range(models):
            yield _source(name, number, responses, seed, progress)


def _source(name: str, number: int, wanted: int, seed: int, progress: Progress) -> Source:
    task = TASKS[name]
    model = warm_model(name, number, progress)
    generator = torch.Generator().manual_seed(seed)
    problems = task.problems(10**6 + seed)
    responses: list[Response] = []
    asked = right = unusable = 0
    while len(responses) < wanted:
        if asked > 4 * wanted + 64:
            raise ValueError(f"--tasks {name}: warm model {number} wrote {len(responses)} answers to {asked} problems")
        batch = list(islice(problems, wanted))
        prompt_BP = torch.tensor([problem.prompt for problem in batch])
        rows = sample(model, prompt_BP, 1, task.max_response_length, generator).tolist()
        for problem, row in zip(batch, rows, strict=True):
            reading = task.read(problem, row)
            asked, right = asked + 1, right + reading.right
            if reading.segments is None or Segment.REASONING not in reading.segments or not reading.ended:
                unusable += 1
                continue
            before, after = len(problem.prompt), reading.length
            token_T = torch.tensor([*problem.prompt, *row[:after]])
            segments_T = torch.tensor([int(Segment.OUTSIDE)] * before + reading.segments.tolist())
            causal_T = torch.tensor([place in reading.causal for place in range(-before, after)])
            words = [f"{VOCABULARY[token]} " for token in row[:after]]
            asks = text(problem.prompt)
            responses.append(Response(token_T, segments_T, causal_T, reading.right, asks, words))
    return Source(name, number, model, responses[:wanted], unusable, right / asked)
