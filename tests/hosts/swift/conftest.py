"""ms-swift stands beside the environment (tests/run.sh): it needs an older TRL."""

import sys
from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("swift") else ["*.py"]
if find_spec("swift"):
    sys.modules.update(dict.fromkeys(("vllm", "ray")))  # if installed, ms-swift imports them, and needs neither
