#!/usr/bin/env bash
# Scan the pinned dependencies for known vulnerabilities. A package that the database does not know was not
# scanned, which pip-audit passes over: here it is said, and never taken for a clean result.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-.venv/bin/python}" -m venv "$folder/venv"
if ! "$folder/venv/bin/pip" -q install pip-audit; then
    echo "not scanned: pip-audit cannot be installed here"
    exit 0
fi
"$folder/venv/bin/pip-audit" -r constraints.txt --no-deps --disable-pip --timeout 15 -f json \
    >"$folder/found.json" 2>"$folder/said" || true
"$folder/venv/bin/python" - "$folder/found.json" "$folder/said" <<'CODE'
import json
import sys

try:
    with open(sys.argv[1]) as file:
        packages = json.load(file)["dependencies"]
except ValueError:
    with open(sys.argv[2]) as file:
        print("not scanned: no database can be had here:", (file.read().strip().splitlines() or [""])[-1])
    sys.exit(0)
skipped = [package["name"] for package in packages if "skip_reason" in package]
hurt = [package for package in packages if package.get("vulns")]
print(f"{len(packages) - len(skipped)} of {len(packages)} dependencies scanned for known vulnerabilities")
if skipped:
    print("not scanned, since the database that can be had here does not know them:", ", ".join(skipped))
for package in hurt:
    print(package["name"], package["version"], ", ".join(found["id"] for found in package["vulns"]))
sys.exit(bool(hurt))
CODE
