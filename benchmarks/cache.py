"""Results saved in a folder, so that an interrupted study resumes."""

import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from oar_plugin.output import write_whole

T = TypeVar("T")


def cached(folder: Path | None, name: str, settings: Mapping[str, Any], compute: Callable[[], T]) -> T:
    """The result of `compute`, read from `folder` if an earlier run saved it there. Without a folder nothing is saved.

    Raises ValueError if the saved result was computed with other settings.
    """
    if folder is None:
        return compute()
    file = folder / f"{name}.pickle"
    if file.is_file():
        saved, result = pickle.loads(file.read_bytes())  # noqa: S301  written below
        if other := sorted(key for key in {*saved, *settings} if saved.get(key) != settings.get(key)):
            raise ValueError(f"--folder: {file} was made with another value of {', '.join(other)}; take another folder")
    else:
        result = compute()
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(file, pickle.dumps((dict(settings), result)))
    found: T = result
    return found
