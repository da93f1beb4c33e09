"""What `tests/audit.py` makes of pip-audit's answers. No answer is not a good one, and ends nothing."""

import sys

import pytest

from tests import audit


def test_all_that_is_pinned_is_asked_for():
    names = [line.partition("==")[0] for line in audit.pinned()]
    assert {"torch", "verl", "ray", "vllm"} <= {*names}
    assert len(names) == len({*names}) > 150
    assert not [line for line in audit.pinned() if "+" in line]


KNOWS = '{"dependencies": [{"name": "vllm", "version": "1", "vulns": []}]}'
KNOWS_NOT = '{"dependencies": [{"name": "vllm", "skip_reason": "Dependency not found"}]}'


@pytest.mark.parametrize(
    ("first", "status", "ended", "said"),
    [
        (KNOWS, 0, 0, "No known vulnerabilities"),
        (KNOWS, 1, 1, "a PYSEC-1"),
        (KNOWS, 2, 0, "NOT CHECKED"),
        (KNOWS_NOT, 0, 0, "NOT CHECKED"),
        ("no JSON", 0, 0, "NOT CHECKED"),
    ],
)
def test_no_answer_is_not_a_good_one(first, status, ended, said, tmp_path, monkeypatch, capsys):
    program = tmp_path / "pip_audit.py"
    report = {0: "No known vulnerabilities found", 1: "a PYSEC-1", 2: ""}[status]
    program.write_text(
        f"import sys\nif 'json' in sys.argv: print({first!r}); sys.exit(0)\n"
        f"print({report!r}, *sys.argv)\nsys.exit({status})\n"
    )
    monkeypatch.setenv("AUDIT", f"{sys.executable} {program}")
    monkeypatch.setattr(audit, "KNOWN", {"CVE-1": "no such server here"})
    assert audit.main() == ended
    out = capsys.readouterr().out
    assert said in out
    assert ("--ignore-vuln CVE-1" in out) == ("NOT CHECKED" not in out)


def test_pip_audit_that_is_not_there_ends_nothing(monkeypatch, capsys):
    monkeypatch.setenv("AUDIT", "no-such-program")
    assert audit.main() == 0
    assert "NOT CHECKED" in capsys.readouterr().out
