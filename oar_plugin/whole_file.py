"""Files that a reader may open while they are written, in folders that others may write in too."""

import os
from pathlib import Path


def write_whole(file: Path, content: str | bytes) -> None:
    """Write a file as a whole or not at all; its folder is made. OSError: it could not be written.

    A symbolic link in its place is replaced; what it leads to stays as it is.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(f".{file.name}.unfinished")
    unfinished.unlink(missing_ok=True)
    try:
        with unfinished.open("xb") as opened:  # x follows no link
            opened.write(content if isinstance(content, bytes) else content.encode(errors="replace"))
        os.replace(unfinished, file)
    finally:
        unfinished.unlink(missing_ok=True)


def no_link(file: str, flags: int) -> int:
    """The `opener` of files that are written in place. OSError: the file is a symbolic link."""
    return os.open(file, flags | os.O_NOFOLLOW, 0o666)
