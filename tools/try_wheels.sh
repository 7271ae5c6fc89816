#!/usr/bin/env bash
# For each Python from 3.11 to 3.14 that runs here: makes the wheel that serves it, and tries it (tools/try_wheel.sh).
#   tools/try_wheels.sh --one   one of them, in turns from commit to commit
set -euo pipefail
cd "$(dirname "$0")/.."
rm -rf dist
pythons=()
for version in 3.11 3.12 3.13 3.14; do
    for python in "python$version" "$HOME/.pyenv/versions/$version".*/bin/python3; do
        if "$python" -c 'import ensurepip, venv' 2>/dev/null; then
            pythons+=("$python")
            continue 2
        fi
    done
    echo "wheel: no Python $version here"
done
if [ "${1:-}" = --one ]; then
    pythons=("${pythons[$(git rev-list --count HEAD 2>/dev/null || echo 0) % ${#pythons[@]}]}")
fi
for python in "${pythons[@]}"; do
    abi=$("$python" -c 'import sys; print("cp311-cp311" if sys.version_info < (3, 12) else "cp312-abi3")')
    ls dist/*"$abi"*.whl >/dev/null 2>&1 || make wheel PYTHON="$python"
    tools/try_wheel.sh "$python"
done
