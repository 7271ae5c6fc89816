#!/usr/bin/env bash
# For each Python from 3.11 to 3.14 that runs here: makes the wheel that serves it, and tries it (tools/try_wheel.sh).
set -euo pipefail
cd "$(dirname "$0")/.."
rm -rf dist
for python in python3.11 python3.12 python3.13 python3.14; do
    if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        echo "wheel: no $python here"
        continue
    fi
    abi=$("$python" -c 'import sys; print("cp311-cp311" if sys.version_info < (3, 12) else "cp312-abi3")')
    ls dist/*"$abi"*.whl >/dev/null 2>&1 || make wheel PYTHON="$python"
    tools/try_wheel.sh "$python"
done
