"""The pages' templates, in this folder. They escape text and show control characters instead of obeying them."""

from pathlib import Path

import jinja2
from markupsafe import Markup

from oar_plugin.output import printable

TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    finalize=lambda value: printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value,
)
