"""Token credit in ms-swift's `swift rlhf --rlhf_type grpo`: `--external_plugins` runs `plugin.py`.

ms-swift refuses flags that it does not know, so settings are in a YAML file, by their names below `algorithm.oar`.
"""

import os
from pathlib import Path

import yaml

from oar_plugin.config import OarConfig, OarConfigError
from oar_plugin.hosts.accelerated import PREFIX
from oar_plugin.output import cause

VARIABLE = "OAR_SETTINGS"
"""The environment variable that names the file. Without it, all settings have their defaults."""


def settings() -> OarConfig:
    """Returns the settings of the run. OarConfigError: says what cannot be read or cannot work, and what is allowed."""
    name = os.environ.get(VARIABLE)
    try:
        given = yaml.safe_load(Path(name).read_text(encoding="utf-8")) if name else None
    except (OSError, ValueError, yaml.YAMLError) as error:
        wanted = "allowed: a YAML file of settings, such as `importance: fisher`"
        raise OarConfigError(f"{VARIABLE}={name}: {cause(error)}; {wanted}") from error
    return OarConfig.parse(given, PREFIX)
