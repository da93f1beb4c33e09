import os
import stat
from pathlib import Path

import pytest

from oar_plugin.hosts.verl.recipe import command
from oar_plugin.launch.job import fill

# Everything that a shell or Kubernetes could take for something else.
STRANGE = r"""trainer.experiment_name='it is $HOME $(OAR_DATA) `a` "b" \; & *'"""


@pytest.fixture
def script():
    """Fills a template for a run on three nodes with eight GPUs each."""

    def make(template, **changes):
        import shlex

        recipe = Path("/shared/my recipes/seven")
        values = {
            "name": "seven-oar",
            "nodes": 3,
            "gpus_per_node": 8,
            "gpus": 24,
            "checkpoints": "/shared/checkpoints/x",
            "train": shlex.join(command(recipe, "oar", ["+on=cluster", STRANGE])),
            "train_alone": shlex.join(command(recipe, "oar", [STRANGE])),
            "secrets": ("HF_TOKEN", "WANDB_API_KEY"),
            "environment": {"OAR_DATA": "/shared/my data", "NCCL_DEBUG": "it's $x"},
            "setup": "",
            "wait_s": 60,
        }
        return fill(template, **{**values, **changes})

    return make


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Puts programs of a name and a bash body in front of PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    def make(name, body):
        file = folder / name
        file.write_text(f"#!/bin/bash\n{body}\n")
        file.chmod(file.stat().st_mode | stat.S_IEXEC)

    return make
