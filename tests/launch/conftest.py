import os
import stat
from pathlib import Path

import pytest

from oar_plugin.launch.job import Job

# Everything that a shell could take for something else.
STRANGE = r"""trainer.experiment_name='it is $HOME `a` "b" \; & *'"""


@pytest.fixture
def job():
    return Job(
        recipe=Path("/shared/my recipes/seven"),
        variant="oar",
        overrides=(STRANGE, "trainer.total_epochs=1"),
        nodes=3,
        gpus_per_node=8,
        gpus=24,
        checkpoints="/shared/checkpoints/x",
        environment={"OAR_DATA": "/shared/my data", "NCCL_DEBUG": "it's $x"},
        setup="source '/opt/my env/bin/activate'",
        wait_s=60,
    )


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
