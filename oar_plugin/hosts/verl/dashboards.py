"""Pictures of credit on the dashboards that log a run: histograms, and a page of one group. Scalars are verl's own to log.

Each function takes verl's logger of that name (`verl.utils.tracking`) and is called before verl logs the step's scalars.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from io import StringIO
from textwrap import indent
from typing import Any

import numpy as np

from oar_plugin.page.record import Header, Response

QUANTILES = (1, 10, 50, 90, 99)


@dataclass(frozen=True)
class Picture:
    """What dashboards show of one step."""

    step: int  # training step
    weights: np.ndarray  # of the reasoning tokens of all scored responses, `[T]`
    importance: np.ndarray  # of the same tokens, `[T]`
    responses: Sequence[Response]  # one group; empty where no response mattered
    header: Header  # of the run

    @property
    def histograms(self) -> dict[str, np.ndarray]:
        """The values to count, by name; of importance, which spans powers of ten, the logarithm."""
        positive = self.importance[self.importance > 0]
        # numpy has no 64 bins between float32 numbers that are almost the same.
        found = {"oar/weights": self.weights.astype(float), "oar/importance_log10": np.log10(positive.astype(float))}
        return {name: values for name, values in found.items() if len(values)}

    @cached_property
    def page(self) -> str:
        from oar_plugin.page.inspector import inspector_page

        return inspector_page(self.responses, self.header, self.header.run)


def wandb(logger: Any, picture: Picture) -> None:
    """Histograms and the page, beside the step's scalars: nothing is sent before verl logs these."""
    from wandb import Histogram, Html

    counts = {name: np.histogram(values, 64) for name, values in picture.histograms.items()}
    media: dict[str, Any] = {name: Histogram(np_histogram=counted) for name, counted in counts.items()}
    if picture.responses:
        media["oar/responses"] = Html(picture.page, inject=False)
    logger.log(media, step=picture.step, commit=False)


def tensorboard(logger: Any, picture: Picture) -> None:
    for name, values in picture.histograms.items():
        logger.writer.add_histogram(name, values, picture.step)
    if picture.responses:
        logger.writer.add_text("oar/responses", code_block(picture.responses), picture.step)


def code_block(responses: Sequence[Response]) -> str:
    """Responses as a code block in Markdown, the only form in which TensorBoard keeps hostile text as it is."""
    from rich.console import Console
    from rich.table import Table

    from oar_plugin.page.terminal import print_responses

    text = StringIO()
    print_responses(responses, Console(file=text, width=100, color_system=None), Table())
    return indent(text.getvalue(), "    ", lambda line: True)


def mlflow(logger: Any, picture: Picture) -> None:
    """The page as an artifact of the active run, and quantiles: MLflow has no histograms."""
    from mlflow import log_metrics, log_text

    values = {
        f"{name}/p{share}": float(np.percentile(counted, share))
        for name, counted in picture.histograms.items()
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
