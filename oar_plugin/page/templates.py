"""The pages' templates, in this folder. They escape text and show control characters instead of obeying them."""

from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from oar_plugin.output import printable


def _visible(value: Any) -> Any:
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    finalize=_visible,
)
