"""`default.yaml` as `config.py` defines it; `python -m tests.default_yaml` writes it."""

import textwrap
from pathlib import Path

import yaml

from oar_plugin.config import GROUPS, OarConfig
from oar_plugin.hosts.verl import conf

FILE = Path(conf.__file__).parent / "oar" / "default.yaml"
HEAD = """\
# @package algorithm.oar
# Every key of OAR with its default. Override any of them on the command line: algorithm.oar.tau=0.5
# Made from oar_plugin/config.py: python -m tests.default_yaml

"""


def shown(value):
    plain = list(value) if isinstance(value, tuple) else value
    return yaml.safe_dump(plain, default_flow_style=True).removesuffix("\n").removesuffix("\n...")


def keys(group, indent=""):
    blocks = []
    for name, field in group.model_fields.items():
        comment = textwrap.fill(field.description, 104, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")
        value = f"\n{keys(GROUPS[name], indent + '  ')}" if name in GROUPS else f" {shown(field.default)}\n"
        blocks.append(f"{comment}\n{indent}{name}:{value}")
    return "\n".join(blocks)


MADE = HEAD + keys(OarConfig)

if __name__ == "__main__":
    FILE.write_text(MADE)
