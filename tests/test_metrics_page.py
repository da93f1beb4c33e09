"""The page of metrics lists what the package writes, the page of the API has every group of settings, and commands parse."""

import ast
import importlib
import re
import shlex
from collections.abc import Iterator
from itertools import groupby

import torch

from benchmarks.__main__ import STUDIES
from oar_plugin.cli.main import COMMANDS, main
from oar_plugin.config import GROUPS
from oar_plugin.credit.diagnostics import MEASURE_NAMES, PREDICTION_NAMES, Status, summarize
from oar_plugin.hosts.verl.offload import FAULTS, OffloadRecord, offload_metrics
from tests.test_documents import DOCUMENTS
from tests.tracked import tracked

SECTIONS = dict(
    re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", DOCUMENTS["docs/troubleshooting.md"], re.DOTALL | re.MULTILINE)
)
PAGES = {"oar/responses", "oar/step_"}  # for dashboards: no metrics
BEGINS = {"oar/", "oar/offload/", "oar/fallback/"}  # of f-strings; `summarize` and `offload_metrics` make what follows


def in_code() -> tuple[set[str], set[str]]:
    """Constants that are names of metrics, or of verl's timers; and what f-strings put before other names."""
    names, begins = set[str](), set[str]()
    for node in (node for path in tracked("oar_plugin/*.py") for node in ast.walk(ast.parse(path.read_text()))):
        if isinstance(node, ast.JoinedStr) and isinstance(node.values[0], ast.Constant):
            begins |= set(re.findall(r"^oar/[\w/]*$", str(node.values[0].value)))
        elif isinstance(node, ast.Constant):
            names |= set(re.findall(r"^(?:oar/|timing_s/oar)[\w/]*$", str(node.value)))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "marked_timer":
            names |= {f"timing_s/{argument.value}" for argument in node.args if isinstance(argument, ast.Constant)}
    return names - begins - PAGES, begins - PAGES


def cells(section: str) -> list[list[str]]:
    """Names in the first cell of each row of a section's tables."""
    return [re.findall(r"`([\w/]+)`", cell) for cell in re.findall(r"^\| (.*?) \|", SECTIONS[section], re.MULTILINE)]


def test_the_page_lists_the_metrics_that_the_code_writes():
    names, begins = in_code()
    assert begins == BEGINS
    every = torch.tensor(list(Status))
    made = summarize(torch.ones(len(every), len(MEASURE_NAMES + PREDICTION_NAMES)), every)
    names |= {f"oar/{name}" for name in made}
    records = [OffloadRecord(status, attempts=1, copies=1).to_row() for status in (Status.SCORED, *FAULTS)]
    names |= {f"oar/offload/{name}" for name in offload_metrics(torch.stack(records), torch.zeros(len(records)))}
    listed = [f"oar/fallback/{name}" for row in cells("Why does a response fall back to GRPO?") for name in row]
    for first, *others in filter(None, cells("Metrics")):
        listed += [first, *(first[: first.rindex("/")] + name if name[0] == "/" else name for name in others)]
    assert set(listed) ^ names == set()
    assert len(listed) == len(names)


def test_the_api_has_every_group_of_settings():
    shown = set(re.findall(r"^::: (\S+)$", DOCUMENTS["docs/api.md"], re.MULTILINE))
    assert {f"{group.__module__}.{group.__name__}" for group in GROUPS.values()} <= shown


def commands() -> Iterator[tuple[str, list[str]]]:
    """Each command in a block of bash, as words, with its document."""
    for document, text in DOCUMENTS.items():
        for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                lexer = shlex.shlex(line, posix=True, punctuation_chars=";|&")
                lexer.whitespace_split = True
                try:
                    groups = [(ends, list(part)) for ends, part in groupby(lexer, lambda word: set(word) <= set(";|&"))]
                except ValueError:  # a quotation of several lines
                    continue
                for words in (part for ends, part in groups if not ends):
                    while words and (words[0] in ("do", "then", "RUN") or re.match(r"\w+=", words[0])):
                        del words[0]
                    yield document, words


def test_commands_in_documents_parse(monkeypatch, capsys):
    for name in COMMANDS:
        monkeypatch.setattr(importlib.import_module(f"oar_plugin.cli.{name}"), "run", lambda arguments: 0)
    wrong, count = [], 0
    for document, words in commands():
        if words[:1] == ["oar"]:
            count += 1
            try:
                status = main([word for word in words[1:] if word != "..."])
            except SystemExit as end:
                status = int(end.code or 0)
            wrong += [(document, words, capsys.readouterr().err)] if status else []
        elif words[1:3] == ["-m", "benchmarks"]:
            count += 1
            wrong += [(document, words)] if words[3] not in (*STUDIES, "--help") else []
    assert count > 20
    assert not wrong
