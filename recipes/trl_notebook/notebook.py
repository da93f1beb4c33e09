"""`trl_oar.ipynb` from `trl_oar.py`, which is the one to edit: python recipes/trl_notebook/notebook.py

The script's cells begin with `# %%`, and with `# %% [markdown]` where they are text: jupytext's percent format.
"""

import re
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

SCRIPT = Path(__file__).with_name("trl_oar.py")
NOTEBOOK = SCRIPT.with_suffix(".ipynb")


def written(script: str) -> str:
    """The notebook's file. It has no outputs: they are long, and differ from machine to machine."""
    cells = []
    for number, part in enumerate(re.split(r"^# %%", script, flags=re.MULTILINE)[1:]):
        kind, _, body = part.partition("\n")
        made = new_markdown_cell if kind else new_code_cell
        text = re.sub(r"^# ?", "", body, flags=re.MULTILINE) if kind else body
        cells.append(made(text.strip(), id=f"cell-{number}"))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return str(nbformat.writes(new_notebook(cells=cells, metadata={"kernelspec": kernel}))) + "\n"


if __name__ == "__main__":
    NOTEBOOK.write_text(written(SCRIPT.read_text(encoding="utf-8")), encoding="utf-8")
