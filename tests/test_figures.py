"""Every figure in a document is what `python -m docs.figures` writes from committed files."""

import runpy

import pytest

pytest.importorskip("verl")  # plans of recipes are composed of its own configuration

from benchmarks.language import smollm2
from docs.figures import ROOT, documents, written


@pytest.mark.parametrize("document", documents(), ids=lambda path: path.name)
def test_figures_are_those_of_the_committed_files(document):
    text = document.read_text(encoding="utf-8")
    assert text == written(text), "python -m docs.figures"


@pytest.mark.skipif(smollm2.missing() is not None, reason=str(smollm2.missing()))
def test_the_first_picture_shows_the_models_own_credit():
    pytest.importorskip("playwright")
    drawn = runpy.run_path(str(ROOT / "docs" / "shaded_tokens.py"))["picture"](smollm2.folder())
    assert (ROOT / "docs" / "shaded_tokens.svg").read_text() == drawn, "python -m docs.shaded_tokens"
