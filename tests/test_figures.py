"""Every figure in a document is what `python -m docs.figures` writes from committed files."""

import runpy

import pytest

pytest.importorskip("verl")  # the table of faults is made of the faults' own cases

from docs.figures import ROOT, documents, written


@pytest.mark.parametrize("document", documents(), ids=lambda path: path.name)
def test_figures_are_those_of_the_committed_files(document):
    text = document.read_text(encoding="utf-8")
    assert text == written(text), "python -m docs.figures"


def test_the_picture_is_drawn_from_the_committed_page():
    drawn = runpy.run_path(str(ROOT / "docs" / "shaded_tokens.py"))["picture"]()
    assert (ROOT / "docs" / "shaded_tokens.svg").read_text() == drawn
