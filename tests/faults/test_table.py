"""The page of faults says what was seen, and of which nothing was."""

import pytest

pytest.importorskip("verl")

from tests.faults.table import PAGE, page


def test_the_page_is_made_of_what_was_seen():
    assert PAGE.read_text(encoding="utf-8") == page(), "python -m tests.faults.table"
