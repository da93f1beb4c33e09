#!/usr/bin/env bash
# What a CPU cannot show, on a machine with one or more GPUs: bash tests/gpu.sh [pytest arguments]
#
# Run it inside the environment that trains, verl's image for example, with this checkout installed there:
#     pip install --no-deps -e . && pip install pytest hypothesis
# Before it, `bash benchmarks/gpu_step.sh` measures seconds and memory, in six minutes.
# It installs nothing and needs no Internet: checks make their own models. Each says what it needs and is skipped with the
# reason where that is missing. OAR_GPU_REPORT=DIR (default: gpu_report) gets pytest's output (report.txt), figures and
# versions (report.json), and the output of each check. The exit status is 1 when a check failed. `-k NAME` runs a part.
#
# VERL_PLATFORM=cpu bash tests/gpu.sh rehearses it on a CPU, with the stand-ins of verl_cpu:
#     pip install --no-deps -e . -e ./verl_cpu
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python}
export OAR_GPU_REPORT=${OAR_GPU_REPORT:-$PWD/gpu_report}
"$python" - <<'EOF'
import importlib.metadata
import importlib.util
import os
import sys

if absent := [name for name in ("torch", "transformers", "verl", "psutil", "pytest", "hypothesis") if not importlib.util.find_spec(name)]:
    sys.exit(f"gpu.sh: {sys.executable} has no {', '.join(absent)}. Run this in the environment that trains; "
             "of pytest: pip install pytest hypothesis")
try:
    importlib.metadata.distribution("oar_plugin")
except importlib.metadata.PackageNotFoundError:
    sys.exit("gpu.sh: the plugin is not installed here, and verl would not find it: pip install --no-deps -e .")
import torch

rehearsal = os.environ.get("VERL_PLATFORM") == "cpu"
if rehearsal and not importlib.metadata.entry_points(group="verl.plugins", name="cpu"):
    sys.exit("gpu.sh: VERL_PLATFORM=cpu asks for a rehearsal, and verl_cpu is not installed: pip install --no-deps -e ./verl_cpu")
if not rehearsal and not torch.cuda.is_available():
    sys.exit("gpu.sh: PyTorch sees no GPU. A rehearsal on the CPU: VERL_PLATFORM=cpu bash tests/gpu.sh")
if rehearsal and torch.cuda.is_available():
    sys.exit("gpu.sh: VERL_PLATFORM=cpu asks for a rehearsal, and PyTorch sees a GPU; leave it out")
EOF
mkdir -p "$OAR_GPU_REPORT/logs"
status=0
"$python" -m pytest tests/gpu -o python_files="check_*.py" --confcutdir=tests/gpu -p tests.gpu.plugin -p no:cacheprovider \
    -p no:timeout -p no:xdist -W ignore::pytest.PytestConfigWarning --tb=short -v -rs "$@" 2>&1 \
    | tee "$OAR_GPU_REPORT/report.txt" || status=$?
echo "report: $OAR_GPU_REPORT/report.txt, figures: $OAR_GPU_REPORT/report.json"
exit "$status"
