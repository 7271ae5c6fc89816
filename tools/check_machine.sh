#!/bin/sh
# Says in one line each what this machine lacks for building Meseta, and exits 1 if anything is missing.
#   PYTHON=python3.12 CXX=clang++ tools/check_machine.sh
# POSIX sh: on the machines it is made for, nothing else may be there yet.
set -u

python=${PYTHON:-python3}
failed=0

missing() {
    echo "meseta set-up: $1" >&2
    failed=1
}

check_python() {
    if ! command -v "$python" >/dev/null 2>&1; then
        missing "no '$python' on PATH; install Python 3.11 or newer (apt install python3 python3-venv python3-dev) or name one with PYTHON=/path/to/python3"
        return
    fi
    if ! version=$("$python" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null); then
        missing "'$python' does not run; name a working Python 3.11 or newer with PYTHON=/path/to/python3"
        return
    fi
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
        missing "'$python' is Python $version, but 3.11 or newer is needed; name another with PYTHON=/path/to/python3.11"
        return
    fi
    short=${version%.*}
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        missing "Python $version has no venv module with pip; apt install python3-venv (or python$short-venv)"
    "$python" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' ||
        missing "Python $version has no header Python.h; apt install python3-dev (or python$short-dev)"
}

check_compiler() {
    compiler=${CXX:-}
    if [ -z "$compiler" ]; then
        for candidate in c++ g++ clang++; do
            if command -v "$candidate" >/dev/null 2>&1; then
                compiler=$candidate
                break
            fi
        done
    fi
    if [ -z "$compiler" ]; then
        missing "no C++ compiler (looked for c++, g++, clang++); apt install g++, or name one with CXX=/path/to/compiler"
        return
    fi
    # $compiler may carry a launcher or flags ("ccache g++"), so it is split into words on purpose.
    # shellcheck disable=SC2086
    set -- $compiler
    if ! command -v "$1" >/dev/null 2>&1; then
        missing "CXX names '$compiler', which is not on PATH; apt install g++ and unset CXX, or correct it"
        return
    fi
    folder=$(mktemp -d) || exit 1
    printf '#include <concepts>\nint main() {}\n' >"$folder/probe.cpp"
    "$@" -std=c++20 "$folder/probe.cpp" -o "$folder/probe" >/dev/null 2>&1 ||
        missing "'$compiler' cannot build a C++20 program; apt install g++ (11 or newer), or name another with CXX="
    rm -rf "$folder"
}

check_python
check_compiler
exit "$failed"
