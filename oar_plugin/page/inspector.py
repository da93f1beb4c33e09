"""The inspector: one self-contained HTML file that shows responses token by token, with weights, importance and more. All data
are one compressed block: a line of JSON, then columns of numbers over the tokens of all responses, concatenated. Of a column
first come the first bytes of all numbers, then the second bytes, and so on, which compresses better. Importance is float32, as
the gate got it: the page computes weights from it. Log-probs and entropies are wrong by at most 0.5 % and 0.001 nats.
"""

import base64
import json
import math
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup

from oar_plugin.credit.answer import Segment
from oar_plugin.credit.gate import GATES
from oar_plugin.output import printable
from oar_plugin.page.record import Header, Response
from oar_plugin.page.sources import steps_text

KINDS = ("digits", "operators", "words", "marks")
_COPIED = ("step", "group", "uid", "source", "prompt", "truth", "right", "status")
_TOOL = max(Segment) + 1  # segment of tokens that a tool wrote
_UNKNOWN = 2**16 - 1  # NaN in a column of rounded numbers
_OPERATORS = frozenset("+-*/=<>^%×÷·±−≤≥≠≈√|&")
_PART_OF_A_CHARACTER = re.compile(r"(\\x[0-9a-f]{2})+")
_TEMPLATES = jinja2.Environment(  # text is escaped, and its control characters are shown
    loader=jinja2.FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    finalize=lambda value: printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value,
)


def inspector_page(responses: Sequence[Response], header: Header, run: str, as_recorded: bool = False) -> str:
    """Returns the page. `run` names the run or the files, in plain text; responses of the same step and group are siblings.

    The page computes weights with the settings in `header.config`. It shows recorded weights for a user's own gate, and if
    `as_recorded`: settings differ between steps, and `header` has the newest.
    """
    files = [Path(__file__).with_suffix(end) for end in (".css", ".js")]
    style, script = (Markup(file.read_text("utf-8")) for file in files)  # noqa: S704  the package's own
    tokens = [token for response in responses for token in zip(response.token_ids, response.tokens, strict=True)]
    # Frequent tokens first: small numbers compress better.
    table = [token for token, _ in sorted(Counter(tokens).items(), key=lambda item: (-item[1], item[0]))]
    document = _document(responses, header, table, as_recorded)
    place = {token: index for index, token in enumerate(table)}
    columns = [np.array([place[token] for token in tokens], "<u4"), *_columns(responses, document)]
    planes = [column.view(np.uint8).reshape(len(column), column.itemsize).T.tobytes() for column in columns]
    text = json.dumps(document, allow_nan=False).encode()
    block = base64.b64encode(zlib.compress(text + b"\n" + b"".join(planes), 9)).decode()
    steps = sorted({response.step for response in responses} - {0})  # 0: unknown
    named = f"{'steps' if len(steps) > 1 else 'step'} {steps_text(steps)}" if steps else ""
    title = " · ".join(filter(None, (run, "/".join(header.model.split("/")[-2:]), named))) or "Responses"
    values = {"title": title, "style": style, "script": script, "data": block, "as_recorded": as_recorded}
    settings = [("model", header.model), *header.versions.items(), *header.config.items()]
    return _TEMPLATES.get_template("inspector.html.j2").render(values, of=document, settings=settings)


def kind_of(text: str) -> str:
    """Returns the kind of a token's text, one of `KINDS`."""
    bare = text.strip()
    if bare and set(bare) <= _OPERATORS:
        return "operators"
    if not bare or _PART_OF_A_CHARACTER.fullmatch(bare):
        return "marks"
    if any(character.isdigit() for character in bare):
        return "digits"
    return "words" if any(character.isalpha() for character in bare) else "marks"


def _document(
    responses: Sequence[Response], header: Header, table: Sequence[tuple[int, str]], as_recorded: bool
) -> dict[str, Any]:
    names = list(dict.fromkeys(name for response in responses for name in response.importance))
    run = header.config
    # Where rollout engines score, responses that fell back have another importance.
    mixed = any(response.status == "scored" and set(names) - response.importance.keys() for response in responses)
    rows = {name: list(map(attrgetter(name), responses)) for name in _COPIED}
    for name in ("advantage", "reward"):
        rows[name] = [None if x is None or not math.isfinite(x) else x for x in map(attrgetter(name), responses)]
    rows["length"] = [len(response.tokens) for response in responses]
    rows["segments"] = [_segment_runs(response) for response in responses]
    rows["importances"] = [list(response.importance) for response in responses]
    rows["weighted"] = [response.weights is not None for response in responses]
    return {
        "count": sum(rows["length"]),
        "responses": rows,
        "tokens": {
            "idAfterLast": np.diff([token for token, _ in table], prepend=0).tolist(),
            "text": [text for _, text in table],
            "kind": [KINDS.index(kind_of(text)) for _, text in table],
        },
        "kinds": KINDS,
        "segmentNames": {segment.value: segment.name.lower() for segment in Segment} | {_TOOL: "tool"},
        "importances": {name: {"arbitraryScale": header.arbitrary_scale.get(name, False)} for name in names},
        "run": {name: run[name] for name in ("gate", "tau", "beta", "floor")},
        "runImportance": run["importance"] if run["importance"] in names else next(iter(names), ""),
        "gates": {k: {"tau": g.tau, "orderOnly": g.order_only, "settings": g.settings} for k, g in GATES.items()},
        "recorded": as_recorded or mixed or run["gate"] not in GATES or not names,
    }


def _columns(responses: Sequence[Response], document: Mapping[str, Any]) -> Iterator[Any]:
    for name in ("log_probs", "entropies"):
        code = np.rint(100 * np.log1p(5 * np.abs(_column(responses, map(attrgetter(name), responses)))))
        yield np.where(np.isfinite(code), code, _UNKNOWN).astype("<u2")
    for name in document["importances"]:
        yield _column(responses, (response.importance.get(name) for response in responses)).astype("<f4")
    if document["recorded"]:
        yield _column(responses, (response.weights for response in responses)).astype("<f4")


def _column(responses: Sequence[Response], rows: Iterable[Sequence[float] | None]) -> Any:
    """float64 over all tokens; NaN for a response without a row."""
    pairs = zip(responses, rows, strict=True)
    parts = [np.full(len(r.tokens), np.nan) if row is None else np.array(row, float) for r, row in pairs]
    return np.concatenate([np.zeros(0), *parts])


def _segment_runs(response: Response) -> list[int]:
    """Run-length encoding: value and length of each run of segments, `[1, 1, 2]` as `[1, 2, 2, 1]`."""
    pairs = zip(response.segments, response.mask or [1] * len(response.segments), strict=True)
    runs = groupby(segment if own else _TOOL for segment, own in pairs)
    return [number for segment, run in runs for number in (segment, len(list(run)))]
