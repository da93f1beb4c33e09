"""Math problems: their data sets on the hub, their rows in verl's columns, and the comparison of answers."""

import os
from pathlib import Path


def data_folder() -> Path:
    """Return the folder in which recipes look for their files: OAR_DATA, or ~/data/oar without it."""
    return Path(os.environ.get("OAR_DATA") or Path.home() / "data" / "oar")
