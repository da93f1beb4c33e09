"""Where data lies. On its own: `oar doctor` asks in environments that have not even numpy."""

import os
from pathlib import Path


def data_folder() -> Path:
    """Where the recipes look for their files: OAR_DATA, or ~/data/oar without it."""
    return Path(os.environ.get("OAR_DATA") or Path.home() / "data" / "oar")
