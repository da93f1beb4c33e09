"""Collects exact scores and features, response by response, and makes the page of what there is."""

import copy
import json
import pickle
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any, Literal

import torch
from filelock import FileLock, Timeout
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from benchmarks.cache import cached
from benchmarks.fidelity.estimators import by_importance
from benchmarks.fidelity.language import Writer, language_source
from benchmarks.fidelity.responses import Batch, Response, Source
from benchmarks.labels.analysis import AGAIN, COMPUTED, KINDS, POOL, ROUNDED, UNITS, Long, Scored, spread
from benchmarks.labels.tables import report_on
from benchmarks.language.problems import KINDS as PROBLEMS
from benchmarks.report import Progress, Report
from benchmarks.workload import check_at_least_one
from oar_plugin.config import OarConfig
from oar_plugin.credit.answer import Segment, make_finder, segment_tokens
from oar_plugin.credit.importance import Forward
from oar_plugin.credit.perturbation import Unit
from oar_plugin.credit.regression import projected, token_features
from oar_plugin.passes.copies import CopyRows
from oar_plugin.passes.gradient import Layout, Packed
from oar_plugin.passes.host import Host, MicroBatch, Work
from oar_plugin.passes.plain import PlainHost
from oar_plugin.passes.prefix import WORKS
from oar_plugin.passes.request import Request

TEMPERATURE, MAX_TOKENS, SEED = 0.7, 2048, 0
SPANS, STARTS = (1, 4, 8, 16), 10
"""Tokens of the units of long texts, and how many units of each."""
WHOLE = 40
"""Responses of each task in the pool that have all their units scored; of the others, 16."""
REASONING = range(250, 701)
"""Tokens of reasoning of a long text."""


@dataclass(frozen=True)
class Settings:
    questions: Path
    """For gsm8k: JSON lines with question and answer."""
    texts: Path
    """Long texts: JSON lines with question and response."""
    folder: Path
    """Each response's scores stay there, and are not computed again. Processes can share it."""
    model: str = "smollm2"
    """smollm2, a folder, or a name of the hub."""
    tasks: tuple[str, ...] = PROBLEMS
    separator: str = "<|endoftext|>"
    """The model's token between documents."""
    judged: int = 24
    """Responses of each task that regressions are judged on."""
    pool: int = 180
    """The same, that they are fitted on."""
    long: int = 60
    """Long texts."""
    collect: tuple[Literal["judged", "pool", "long"], ...] = ("judged", "pool", "long")
    """In this order. With nothing, the page is made of what is in the folder."""
    out: Path | None = None

    def check(self) -> None:
        """Raises: ValueError with the argument at fault."""
        check_at_least_one(self, "judged", "pool", "long")
        for file in (self.questions, self.texts):
            if not file.is_file():
                raise ValueError(f"{file}: there is no such file")


class GivenUnits(CopyRows):
    """Copies of some units of one response, which may overlap; `given_T` takes their place (None: draws of the model's own)."""

    def __init__(self, request: Request, packed: Packed, unit_list: list[Unit], given_T: Tensor | None) -> None:
        super().__init__(request, packed, packed.reasoning_T)
        self.given_T, self._row_U = given_T, torch.zeros(len(unit_list), dtype=torch.long)
        self._at_Us = pad_sequence([torch.tensor(unit) for unit in unit_list], True, padding_value=-1)

    def begin_read(self, rows: Sequence[int], layout: Layout) -> MicroBatch:
        tap = self.tap(rows, self.packed, layout)
        assert tap is not None
        return MicroBatch(lambda forward: tap)

    def _replacements(self, host: Host) -> Tensor:
        return super()._replacements(host) if self.given_T is None else self.given_T


class Collector:
    """Scores responses of a model. `key`: what they depend on."""

    def __init__(self, settings: Settings, progress: Progress) -> None:
        self.settings, self.progress = settings, progress
        self.writer = Writer(settings.model, torch.device("cpu"), TEMPERATURE, MAX_TOKENS)
        self.key = asdict(settings) | dict.fromkeys(("folder", "collect", "out", "questions", "texts"))
        encode = partial(self.writer.tokenizer, add_special_tokens=False)
        texts = {"separator": settings.separator, "line break": "\n"}
        self.fixed = {name: encode(text)["input_ids"][0] for name, text in texts.items()} | {"pad": self.writer.pad}
        self.narrow = cache(lambda: copy.deepcopy(self.writer.model).to(torch.bfloat16))

    def run(self) -> None:
        """What is not there yet and what no other process is at."""
        for part, wait in product(self.settings.collect, (False, True)):
            for name, work in self.long_texts() if part == "long" else self.scorings(part, wait):
                self.part(name, work)

    def part(self, name: str, work: Callable[[], Any], wait: bool = False) -> Any:
        self.progress(name)
        try:
            with FileLock(self.settings.folder / f"{name}.lock", -1 if wait else 0):
                return cached(self.settings.folder, name, self.key, work)
        except Timeout:  # another process is at it
            return None

    def sample(self, kind: str) -> list[Response]:
        """Responses, each to a problem of its own."""
        asked = self.settings.judged + self.settings.pool, SEED, self.settings.questions, self.progress
        found = language_source(self.writer, kind, "short", *asked).responses
        return list({row.question: row for row in reversed(found)}.values())[::-1]

    def scorings(self, part: str, wait: bool) -> Iterator[tuple[str, Callable[[], Scored]]]:
        """One response of each task after the other, so that a cut run has some of each."""
        tasks = self.settings.tasks
        sampled = {kind: self.part(f"sampled_{kind}", partial(self.sample, kind), wait) for kind in tasks}
        first, end = self.settings.judged, self.settings.judged + self.settings.pool
        for index in range(first) if part == "judged" else range(first, end):
            for kind, rows in sampled.items():
                if rows and index < len(rows):
                    most = max(filter(None, UNITS)) if index >= first + WHOLE else None
                    yield f"{part}_{kind}_{index:03}", partial(self.scored, rows[index], rows, part == "judged", most)

    def scored(self, response: Response, batch: Sequence[Response], judged: bool, most: int | None) -> Scored:
        """Every unit of one token, or `most` of them; the others' scores are NaN. Labels in bfloat16: more in the same time."""
        model, token_T, at_R = self.writer.model, response.token_T, response.reasoning_R
        chosen = spread(len(at_R), most, random.Random(SEED))
        units: list[Unit] = [(at,) for at in at_R[chosen].tolist()]
        batch_M = torch.cat([row.token_T[row.reasoning_R] for row in batch])
        given: dict[str, Tensor | None] = {name: torch.full_like(token_T, token) for name, token in self.fixed.items()}
        given |= {name: drawn_from(batch_M, token_T, SEED + again) for again, name in enumerate(("batch", AGAIN))}
        scores = {ROUNDED: self.masked(self.narrow(), response, [(given["pad"], units)])[0]} if judged else {}
        names = (*KINDS, AGAIN) if judged else POOL
        asked = [(given.get(name), units) for name in names]
        for name, score_N in zip(names, self.masked(model if judged else self.narrow(), response, asked), strict=True):
            scores[name] = torch.full([len(at_R)], torch.nan, dtype=torch.float64)
            scores[name][chosen] = score_N
        if judged:
            source = Source("", 0, model, [response], 0, 0.0, "", self.writer.pad, TEMPERATURE)
            one = Batch(source, [response], OarConfig().probe, SEED, MAX_TOKENS)
            scores[COMPUTED] = by_importance(model, one, COMPUTED)[0].detach().double()[at_R]
        found = features(model, response, (-1, model.config.num_hidden_layers // 2))
        return Scored(scores, dict(zip(("last", "middle"), found, strict=True)), response.right)

    def masked(
        self, model: Any, response: Response, asked: Iterable[tuple[Tensor | None, list[Unit]]], whole: bool = False
    ) -> list[Tensor]:
        """Scores of units, float64 `[N]`, for each of what stands in the masked place. `whole`: without a cached prefix."""
        config, token_T, found = OarConfig(importance="oar_p"), response.token_T, []
        packed = Packed(token_T, response.segments_T, torch.tensor([0, len(token_T)]))
        if whole:
            WORKS[model] = False
        for given_T, unit_list in asked:
            request = Request(config, config.probe, SEED)
            host = PlainHost(model, request, packed, MAX_TOKENS)
            copies = GivenUnits(request, packed, unit_list, given_T)
            host.read([0], Work([Forward(None)], copies.begin_read))
            found.append(copies.scores(host).double())
        if whole:
            del WORKS[model]  # others try it anew
        return found

    def long_texts(self) -> Iterator[tuple[str, Callable[[], Long]]]:
        """Responses that other models wrote, one to a question, in an order of the seed."""
        rows = [json.loads(line) for line in self.settings.texts.read_text(encoding="utf-8").splitlines()]
        random.Random(SEED).shuffle(rows)
        finder, found, tokenizer = make_finder(OarConfig().answer_patterns), 0, self.writer.tokenizer
        for row in {row["question"]: row for row in rows}.values():
            if found == self.settings.long:
                break
            asked = [{"role": "user", "content": row["question"]}]
            prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=True)["input_ids"]
            written = tokenizer(row["response"], add_special_tokens=False)["input_ids"]
            segments_L = segment_tokens(self.writer.bytes.pieces(written), finder)
            if segments_L is not None and (segments_L == Segment.REASONING).sum() in REASONING:
                segments_T = torch.tensor([int(Segment.OUTSIDE)] * len(prompt) + segments_L.tolist())
                token_T = torch.tensor([*prompt, *written])
                response = Response(token_T, segments_T, segments_T < 0, True, row["question"], written)
                yield f"long_{found:03}", partial(self.by_span, response)
                found += 1

    def by_span(self, response: Response) -> Long:
        """Units of some lengths that begin at the same tokens, spread over the reasoning."""
        at_R, scores = response.reasoning_R, dict[tuple[str, int], list[float]]()
        start_N = torch.linspace(0, len(at_R) - max(SPANS), STARTS).long()
        pad_T = torch.full_like(response.token_T, self.writer.pad)
        asked = [(pad_T, [tuple(at_R[at : at + span].tolist()) for at in start_N.tolist()]) for span in SPANS]
        models = {"float32": self.writer.model, "bfloat16": self.narrow(), "bfloat16, whole": self.narrow()}
        for kind, model in models.items():
            for span, score_N in zip(SPANS, self.masked(model, response, asked, "whole" in kind), strict=True):
                scores[kind, span] = score_N.tolist()
        (feature_RF,) = features(self.writer.model, response, (-1,))
        means = {span: torch.stack([feature_RF[at : at + span].mean(0) for at in start_N.tolist()]) for span in SPANS}
        return Long((at_R[-1] + 1 - at_R[start_N]).tolist(), scores, means)


@torch.no_grad()
def features(model: Any, response: Response, layers: Sequence[int]) -> list[Tensor]:
    """The features of each reasoning token, float32 `[R, F]`, as the passes make them of the last layer."""
    at_R, token_1T = response.reasoning_R, response.token_T[None]
    out = model(token_1T, output_hidden_states=True)
    log_prob_R = out.logits[0, at_R - 1].float().log_softmax(-1).gather(-1, token_1T[0, at_R, None])[:, 0]
    rest = -torch.expm1(log_prob_R), torch.linspace(-1, 1, len(at_R))
    projections = (projected(out.hidden_states[layer][0]) for layer in layers)
    return [token_features(hidden_TP[at_R], hidden_TP[at_R - 1], *rest) for hidden_TP in projections]


def drawn_from(batch_M: Tensor, token_T: Tensor, seed: int) -> Tensor:
    """A token of the batch for each position, never the one that stands there, int64 `[T]`."""
    generator = torch.Generator().manual_seed(hash((seed, *token_T.tolist())) % 2**63)
    drawn_T = token_T.clone()
    while (same_T := drawn_T == token_T).any():
        drawn_T = drawn_T.where(~same_T, batch_M[torch.randint(len(batch_M), token_T.shape, generator=generator)])
    return drawn_T


def kept(settings: Settings, part: str) -> list[Any]:
    """What the folder has of a part."""
    files = sorted(settings.folder.glob(f"{part}_*.pickle"))
    return [pickle.loads(file.read_bytes())[1] for file in files]  # noqa: S301  written by `cached`


def measure(settings: Settings, progress: Progress) -> Report:
    """Raises: ValueError for a model that writes no answers, or a folder of other settings."""
    torch.set_float32_matmul_precision("highest")  # no TF32
    if settings.collect:
        settings.folder.mkdir(parents=True, exist_ok=True)
        Collector(settings, progress).run()
    judged, pool, long = (kept(settings, part) for part in ("judged", "pool", "long"))
    return report_on(judged, pool, long, asdict(settings), progress)
