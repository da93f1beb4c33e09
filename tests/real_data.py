"""Where responses and problems of real models and data sets are, for tests that skip without them."""

import json
import os
from pathlib import Path

DATA = Path(os.environ.get("OAR_TEST_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
MATH_RESPONSES = DATA / "math_responses.jsonl"


def read_lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
