#!/usr/bin/env bash
# Builds the compiled core with AddressSanitizer and UndefinedBehaviorSanitizer, in build/sanitize, and runs the
# operators' tests on it, once per instruction set. The installed core stays as it is.
#   PYTHON=.venv/bin/python        an interpreter that has the project, its tests and its build tools
#   MESETA_ISA=baseline            one instruction set alone; by default all that this processor runs
#   tools/sanitize.sh -k fuzz      arguments are passed to pytest
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=$(command -v "${PYTHON:-.venv/bin/python}")
case $PYTHON in /*) ;; *) PYTHON=$PWD/$PYTHON ;; esac
PATH=$(dirname "$PYTHON"):$PATH
build=$PWD/build/sanitize

best=$("$PYTHON" -c 'from meseta.ops.core import instruction_set as best; print(best())')
all="baseline avx2 avx512"
builds=${all%%"$best"*}$best
sets=${MESETA_ISA:-$builds}
unset MESETA_ISA
declare -A module=([baseline]=_C [avx2]=_C_avx2 [avx512]=_C_avx512)

rm -f "$build"/_C*.so
cmake -G Ninja -S . -B "$build" -DMESETA_SANITIZE=ON -DCMAKE_CXX_COMPILER=g++ -DPython_EXECUTABLE="$PYTHON" \
    -Dnanobind_DIR="$("$PYTHON" -m nanobind --cmake_dir)" >/dev/null
# With those below a chosen one: readers of text take the baseline, and some tests compare them all.
for isa in $builds; do cmake --build "$build" --target "${module[$isa]}"; done

# The interpreter is not instrumented, so the sanitizer's runtime has to come first; with libstdc++, or it misses the
# function that throws. Memory that Python and torch never free is not the core's.
preload="$(g++ -print-file-name=libasan.so) $(g++ -print-file-name=libstdc++.so)"
# Reports go to files: pytest keeps what a process writes, and it is lost with a process that a sanitizer ends.
reports=$build/reports
# Freed memory in quarantine, which finds uses after a free, must be less than the memory of tests that measure frees.
export ASAN_OPTIONS=detect_leaks=0:quarantine_size_mb=64:log_path=$reports/address
export UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1:log_path=$reports/undefined
export MESETA_CORE_DIR=$build PYTHONPATH=$PWD/tools${PYTHONPATH:+:$PYTHONPATH} OMP_NUM_THREADS=2
for isa in $sets; do
    echo "sanitize: $isa"
    rm -rf "$reports"
    mkdir -p "$reports"
    code=0
    # GPU kernels never reach the core, and the products of test_threads.py are torch's for the most part.
    MESETA_ISA=$isa LD_PRELOAD=$preload "$PYTHON" -m pytest -p sanitized_core --ignore-glob='*/test_triton_*' \
        --ignore=tests/ops/test_threads.py tests/ops tests/data/test_hash_categories.py tests/measure/test_gather_limit.py "$@" ||
        code=$?
    for report in "$reports"/*; do
        [ -e "$report" ] || continue
        head -n 60 "$report" >&2
        [ "$code" -ne 0 ] || code=1
    done
    if [ "$code" -ne 0 ]; then
        echo "sanitize: $isa: pytest ended with $code, and sanitizers wrote $(find "$reports" -type f | wc -l) reports" >&2
        exit "$code"
    fi
done
