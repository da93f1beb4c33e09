"""Pictures of credit on the dashboards that log a run: histograms, and a page of one group. Scalars are verl's own to log.

Each function takes verl's logger of that name (`verl.utils.tracking`) and is called before verl logs the step's scalars.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np

from oar_plugin.page.record import Header, Response

QUANTILES = (1, 10, 50, 90, 99)


@dataclass(frozen=True)
class Picture:
    """What dashboards show of one step.

    Attributes:
        step: training step.
        weights: of the reasoning tokens of all scored responses, `[T]`.
        importance: of the same tokens, `[T]`.
        responses: one group; empty where no response mattered.
        header: of the run.
    """

    step: int
    weights: np.ndarray
    importance: np.ndarray
    responses: Sequence[Response]
    header: Header

    @property
    def histograms(self) -> dict[str, np.ndarray]:
        """What there is to count, by its name; importance, which spans powers of ten, as its logarithm."""
        positive = self.importance[self.importance > 0]
        found = {"oar/weights": self.weights, "oar/importance_log10": np.log10(positive)}
        return {name: values for name, values in found.items() if len(values)}

    @cached_property
    def page(self) -> str:
        """The group as a page, HTML."""
        from oar_plugin.page.inspector import inspector_page

        return inspector_page(self.responses, self.header, f"Step {self.step}")


def wandb(logger: Any, picture: Picture) -> None:
    """Histograms and the page, beside the step's scalars: nothing is sent before verl logs these."""
    from wandb import Histogram, Html

    media: dict[str, Any] = {
        name: Histogram(np_histogram=np.histogram(values, 64)) for name, values in picture.histograms.items()
    }
    if picture.responses:
        media["oar/responses"] = Html(picture.page, inject=False)
    logger.log(media, step=picture.step, commit=False)


def tensorboard(logger: Any, picture: Picture) -> None:
    """Histograms, and the group as Markdown, which is all that TensorBoard renders."""
    for name, values in picture.histograms.items():
        logger.writer.add_histogram(name, values, picture.step)
    if picture.responses:
        logger.writer.add_text("oar/responses", markdown(picture.responses), picture.step)


def mlflow(logger: Any, picture: Picture) -> None:
    """The page as an artifact of the active run, and quantiles: MLflow has no histograms."""
    from mlflow import log_metrics, log_text

    values = {
        f"{name}/p{share}": float(np.percentile(found, share))
        for name, found in picture.histograms.items()
        for share in QUANTILES
    }
    if values:
        log_metrics(values, step=picture.step)
    if picture.responses:
        log_text(picture.page, f"oar/step_{picture.step:06d}.html")


DASHBOARDS: Mapping[str, Callable[[Any, Picture], None]] = {
    "wandb": wandb,
    "tensorboard": tensorboard,
    "mlflow": mlflow,
}
"""By the name of verl's logger."""


def markdown(responses: Sequence[Response]) -> str:
    """One group: what each response was paid for is bold. Whatever stands in a text stays text."""
    first = responses[0]
    truth = "" if first.truth is None else f"\n\ntruth: {_plain(first.truth)}"
    return "\n\n".join(
        [f"{_plain(first.prompt)}{truth}", *(line for response in responses for line in _told(response))]
    )


def _told(response: Response) -> Iterator[str]:
    yield f"### reward {response.reward}, advantage {response.advantage}, {response.status}"
    weights = response.weights or [1.0] * len(response.tokens)
    runs = groupby(zip(response.tokens, weights, strict=True), key=lambda token: token[1] > 1)
    texts = ((paid, _plain("".join(text for text, _ in run))) for paid, run in runs)
    yield "".join(_bold(text) if paid else text for paid, text in texts)


def _bold(text: str) -> str:
    """Stars count only where they touch what they embrace."""
    inner = text.strip()
    return text.replace(inner, f"**{inner}**", 1) if inner else text


def _plain(text: str) -> str:
    """Text that Markdown and HTML show as it is, on one line: line ends as a sign, what would be invisible by its number."""
    seen = (char if char.isprintable() else "\u21b5 " if char == "\n" else ascii(char)[1:-1] for char in text)
    one_line = re.sub(" +", " ", "".join(seen))  # four at its start would make it code
    return re.sub(r"[!-/:-@\[-`{-~]", lambda sign: f"&#{ord(sign[0])};", one_line)
