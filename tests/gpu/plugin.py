"""The pytest plugin of the suite, loaded by tests/gpu.sh: it skips checks that cannot run here and writes the report."""

import json
import os
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import here
from tests.processes import run

OUT = Path(os.environ.get("OAR_GPU_REPORT", "gpu_report")).resolve()


results: list[dict[str, Any]] = []


def pytest_configure(config):
    config.addinivalue_line("markers", "timeout: of pytest-timeout, which is not needed here: processes have limits")


def pytest_runtest_setup(item):
    (needs,) = item.iter_markers("needs")
    if reason := here.missing(*needs.args, **needs.kwargs):
        pytest.skip(reason)


def pytest_runtest_logreport(report):
    if report.when != "call" and report.passed:
        return
    why = report.longrepr[2].removeprefix("Skipped: ") if report.skipped else report.longreprtext
    name = report.nodeid.rpartition("/")[2].replace(".py::", ": ")
    result = {"name": name, "outcome": report.outcome, "seconds": round(report.duration, 1), "why": why}
    results.append(result | {"figures": dict(report.user_properties)})
    content = {"machine": here.describe(), "results": results}
    # After each check: the report survives whatever ends this process.
    (OUT / "report.json").write_text(json.dumps(content, indent=1, default=str) + "\n", encoding="utf-8")


@pytest.fixture
def figures(record_property):
    return record_property


@pytest.fixture
def log(request):
    return OUT / "logs" / (re.sub(r"\W+", "_", request.node.name).strip("_") + ".log")


@pytest.fixture
def suite(log):
    """A function that runs tests of the ordinary suite; it returns how many there were and how many were skipped."""

    def of(arguments, limit_s, **variables):
        counts = log.with_suffix(".xml")
        options = ["-p", "no:cacheprovider", "-p", "no:timeout", f"--junitxml={counts}"]
        run(["-m", "pytest", *options, *arguments], log, limit_s, **variables)
        (counted,) = ET.parse(counts).getroot().iter("testsuite")
        return {name: int(counted.attrib[name]) for name in ("tests", "skipped")}

    return of
