"""Every figure in a document is what `python -m docs.figures` writes from committed files."""

import runpy

import pytest

pytest.importorskip("verl")  # the table of faults is made of the faults' own cases

from docs.figures import BLOCK, FIGURES, ROOT, documents, written

DOCUMENTS = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in documents()}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_figures_are_those_of_the_committed_files(document):
    assert DOCUMENTS[document] == written(DOCUMENTS[document]), "python -m docs.figures"


def test_every_figure_stands_in_a_document():
    assert {name for text in DOCUMENTS.values() for _, name, _ in BLOCK.findall(text)} == FIGURES.keys()


def test_the_picture_is_drawn_from_the_committed_page():
    drawn = runpy.run_path(str(ROOT / "docs" / "shaded_tokens.py"))["picture"]()
    assert (ROOT / "docs" / "shaded_tokens.svg").read_text() == drawn
