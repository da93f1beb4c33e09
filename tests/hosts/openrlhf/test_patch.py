"""The patch, by the commands of `patches/README.md`, on OpenRLHF's released files."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.hosts.openrlhf import host

CHECKOUT = Path(__file__).parents[3]
COMMANDS = re.findall(r"^patch .*?(?= +#|$)", (CHECKOUT / "patches" / "README.md").read_text(), re.MULTILINE)


def files(site):
    return {path.relative_to(site): path.read_bytes() for path in site.rglob("*") if path.is_file()}


@pytest.mark.skipif(shutil.which("patch") is None, reason="no program `patch` here")
def test_the_documented_commands_show_apply_and_revert_it(tmp_path):
    site, changed = host.unpack(tmp_path / "site"), []
    before = files(site)
    for command in COMMANDS:
        words = ["bash", "-c", f'at="{site}"; {command}']
        subprocess.run(words, cwd=CHECKOUT, check=True, capture_output=True)
        changed.append(sum(before.get(name) != content for name, content in files(site).items()))
    assert changed == [0, 4, 0]
