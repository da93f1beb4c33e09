"""The page of faults says what was seen, of every fault."""

import pytest

pytest.importorskip("verl")

from tests.faults.cases import CASES
from tests.faults.table import PAGE, page, seen


def test_the_page_is_made_of_what_was_seen():
    assert PAGE.read_text(encoding="utf-8") == page(), "python -m tests.faults.table"


def test_every_fault_was_tried():
    assert [name for name in CASES if name not in seen()] == []
