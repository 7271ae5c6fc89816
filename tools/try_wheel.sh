#!/usr/bin/env bash
# Installs the wheel of dist/ that fits into a fresh environment in an empty folder, and there, where no source of the
# package is: README's commands, to a report, and a sample of the tests.
#   tools/try_wheel.sh python3.12
#   TORCH_INDEX=URL     the package index torch alone is taken from
#   TORCH_LIMIT_S=600   a torch that takes longer to come (gigabytes, where it is built for CUDA) ends it in one line
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
python=${1:-python3}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cp "$root/constraints.txt" "$root/pyproject.toml" "$folder/"
cp -r "$root/tests" "$folder/"
"$python" -m venv "$folder/venv"
cd "$folder"
PATH=$folder/venv/bin:$PATH
unset PYTHONPATH
export CXX=no-compiler-here PIP_DISABLE_PIP_VERSION_CHECK=1

pip() { python -m pip --quiet "$@" -c constraints.txt; }
pip install pip
status=0
timeout "${TORCH_LIMIT_S:-600}" venv/bin/python -m pip install --quiet -c constraints.txt \
    ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch || status=$?
if [ "$status" = 124 ]; then
    echo "wheel: $python is not tried: torch did not come within ${TORCH_LIMIT_S:-600} s"
    exit 0
fi
[ "$status" = 0 ]
pip install --no-index --no-deps --find-links "$root/dist" meseta
pip install --only-binary :all: 'meseta[test]'

echo "wheel: $(python -V), torch $(python -c 'import torch; print(torch.__version__)')"
mkdir empty
(
    cd empty
    python -P -c 'import meseta, sys; assert meseta.__file__.startswith(sys.prefix), meseta.__file__'
    meseta doctor
    meseta config --example main >main.yaml
    meseta data synth --out data/raw --rows 20000
    meseta prepare 'data/raw/*.tsv' --out data/click
    for ranks in 1 2; do
        meseta train dlrm data.dir=data/click run_dir="runs/$ranks" --nproc "$ranks"
    done
    meseta predict runs/1 --out predictions.parquet
    meseta report runs/1
    meseta topology detect --out machine.yaml
    meseta plan runs/1/config.yaml --topology machine.yaml
    test -s runs/1/report.html && test -s runs/2/report.html
)
python -m pytest tests/structure/test_core.py tests/sparse tests/ops/test_unique.py tests/ops/test_pooled_lookup.py \
    tests/data/test_hash_categories.py tests/data/test_parse_tsv.py tests/checkpoint/test_round_trip.py \
    tests/pipeline tests/distributed/test_step.py
