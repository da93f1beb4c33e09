"""Files that a reader may open while they are written."""

import os
from pathlib import Path


def write_whole(file: Path, text: str) -> None:
    """Write a file as a whole or not at all; its folder is made. OSError: it could not be written."""
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(f".{file.name}.unfinished")
    try:
        unfinished.write_text(text, encoding="utf-8", errors="replace")
        os.replace(unfinished, file)
    finally:
        unfinished.unlink(missing_ok=True)
