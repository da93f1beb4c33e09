"""What `tests/audit.py` makes of pip-audit's answers. No answer is not a good one, and ends nothing."""

import json
import sys
from pathlib import Path

import pytest

from tests import audit

FAULT = {"id": "PYSEC-1", "aliases": ["CVE-1"], "fix_versions": ["2.1"], "description": "d"}


def answer(name, *faults):
    return {"name": name, "version": "1.0", "vulns": list(faults)}


SKIPPED = {"name": "c", "skip_reason": "Dependency not found on PyPI"}


@pytest.mark.parametrize(
    ("found", "known", "status", "said"),
    [
        ([answer("a"), answer("b"), SKIPPED], "", 0, "2 packages checked; nothing is known of 1 others: 0 vuln"),
        ([answer("A", FAULT)], "", 1, "a 1.0: PYSEC-1: NOT EXPLAINED, fixed in 2.1"),
        ([answer("a", FAULT)], "CVE-1 a no such server here", 0, "PYSEC-1: known: no such server here"),
        ([answer("a", FAULT)], "CVE-1 b no such server here", 1, "NOT EXPLAINED"),
        ([answer("a")], "CVE-1 a no such server here", 0, "a: CVE-1: no longer reported"),
    ],
)
def test_only_what_is_not_explained_is_a_failure(found, known, status, said):
    lines, ended = audit.judged(found, audit.explained(f"# a comment\n\n{known}\n"))
    assert (ended, any(said in line for line in lines)) == (status, True)


def test_every_exception_says_why():
    audit.explained((Path(audit.__file__).parent / "known_vulnerabilities.txt").read_text(encoding="utf-8"))
    with pytest.raises(ValueError, match="unpack"):
        audit.explained("CVE-1 a\n")


def test_all_that_is_pinned_is_asked_for():
    names = [line.partition("==")[0] for line in audit.pinned()]
    assert {"torch", "verl", "ray", "vllm"} <= {*names}
    assert len(names) == len({*names}) > 150
    assert not [line for line in audit.pinned() if "+" in line]


@pytest.mark.parametrize(
    ("answers", "status", "said", "calls"),
    [
        (None, 0, "NOT CHECKED", 1),  # it ends with an error, or is not there
        ([SKIPPED], 0, "NOT CHECKED", 1),  # an index without the service: pip-audit itself says that all is well
        ([answer("vllm")], 0, "1 packages checked", 2),
        ([answer("vllm", FAULT)], 1, "NOT EXPLAINED", 2),
    ],
)
def test_an_index_that_tells_nothing_is_said_and_asked_once(
    answers, status, said, calls, tmp_path, monkeypatch, capsys
):
    program = tmp_path / "audit.py"
    content = None if answers is None else json.dumps({"dependencies": answers})
    program.write_text(
        f"import sys\nwords, content = sys.argv, {content!r}\nopen({str(tmp_path / 'calls')!r}, 'a').write('x')\n"
        "if content is None: sys.exit(2)\nopen(words[words.index('--output') + 1], 'w').write(content)\n"
    )
    monkeypatch.setenv("AUDIT", f"{sys.executable} {program}")
    assert audit.main() == status
    assert said in capsys.readouterr().out
    assert (tmp_path / "calls").read_text() == "x" * calls
