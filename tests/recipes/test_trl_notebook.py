"""The notebook of recipes/trl_notebook is what its script says. It is run by tests/hosts/trl/test_notebook.py."""

import pytest

pytest.importorskip("nbformat")

from recipes.trl_notebook.notebook import NOTEBOOK, SCRIPT, written


def test_it_is_made_from_the_script():
    assert NOTEBOOK.read_text("utf-8") == written(SCRIPT.read_text("utf-8")), "python recipes/trl_notebook/notebook.py"
