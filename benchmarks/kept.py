"""Parts of a long study that stay in a folder, so that the same command goes on where it was interrupted."""

import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from oar_plugin.output import write_whole

T = TypeVar("T")


def kept(file: Path | None, settings: Mapping[str, Any], make: Callable[[], T]) -> T:
    """What `make` returns, now or when it was written into `file`; None: nothing is written.

    Raises ValueError where `file` was made with other settings.
    """
    if file is None:
        return make()
    if file.is_file():
        made, found = pickle.loads(file.read_bytes())  # noqa: S301  written below
        if made != settings:
            raise ValueError(f"--folder: {file} has other settings: {made}; take another folder")
        return found
    found = make()
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, pickle.dumps((settings, found)))
    return found
