"""The pages' templates, which lie beside this file. Text in them is escaped, and characters that steer are shown."""

from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from oar_plugin.output import printable


def _seen(value: Any) -> Any:
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    finalize=_seen,
)
