"""`--open` of the commands that write a page."""

import sys
import webbrowser
from pathlib import Path

from oar_plugin.output import say


def open_page(page: Path, command: str) -> int:
    """Open a page and return the command's exit status: 1 where there is no browser."""
    if webbrowser.open(page.resolve().as_uri()):
        return 0
    say(f"oar {command}: --open: no browser here; open {page} yourself", sys.stderr)
    return 1
