"""Cases of the hosts, which `cases.json` has."""

import json
from pathlib import Path
from typing import Any

GIVEN: dict[str, list[dict[str, Any]]] = json.loads(Path(__file__).with_name("cases.json").read_text())
