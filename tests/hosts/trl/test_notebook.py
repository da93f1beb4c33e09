"""recipes/trl_notebook: its notebook is what its script says, and runs.

In a kernel of its own, with one sum a problem and two steps: nothing is learned.
"""

import os
import re
from pathlib import Path

import pytest

pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
pytest.importorskip("matplotlib")

import nbformat
from nbclient import NotebookClient

from oar_plugin.page.sources import read
from recipes.trl_notebook.notebook import NOTEBOOK, SCRIPT, written
from tests.limits import PROCESS_S

pytestmark = pytest.mark.slow


def test_it_is_made_from_the_script():
    assert NOTEBOOK.read_text("utf-8") == written(SCRIPT.read_text("utf-8")), "python recipes/trl_notebook/notebook.py"
    assert "\nfrom IPython" not in SCRIPT.read_text("utf-8"), "it runs from a terminal too"


@pytest.mark.nightly
def test_it_runs_and_shows_the_curves_and_what_tokens_were_paid(tmp_path, monkeypatch):
    monkeypatch.setenv("OAR_NOTEBOOK_QUICK", "1")
    paths = [str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=PROCESS_S, resources={"metadata": {"path": str(tmp_path)}}).execute()

    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    shown = [kind for output in outputs for kind in output.get("data", {})]
    assert shown.count("image/png") == 1
    (page,) = (output.data["text/html"] for output in outputs if "text/html" in output.get("data", {}))
    assert "<iframe srcdoc" in page
    said = "".join(output.get("text", "") for output in outputs)
    first = dict(re.findall(r"^(\w+): \d+ s, reward (\S+) to", said, re.MULTILINE))
    assert first.keys() == {"grpo", "oar", "own"}
    assert len(set(first.values())) == 1, "the first step is the same model, problems and seed"
    for run, importance in (("oar", "fisher"), ("own", "answer_slope")):
        scored = [response for response in read([tmp_path / "outputs" / run]).items if response.status == "scored"]
        assert scored
        assert all(len(set(response.weights)) > 1 and any(response.importance[importance]) for response in scored)
