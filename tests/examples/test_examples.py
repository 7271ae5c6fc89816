"""Every script in examples/ runs as it stands; those that mention torchrun run on two ranks too."""

import sys

import pytest

from beside import Beside, Program
from source_tree import ROOT

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
PROGRAMS = {
    f"{path.stem}-{name}": Program((*launcher, str(path)))
    for path in EXAMPLES
    for name, launcher in [("alone", [sys.executable]), ("two_ranks", TORCHRUN)]
    if name == "alone" or "torchrun" in path.read_text().partition('"""')[2].partition('"""')[0]
}


def test_there_are_examples() -> None:
    assert EXAMPLES


@pytest.mark.parametrize(
    "program", [pytest.param(own, id=name, marks=pytest.mark.beside(own)) for name, own in PROGRAMS.items()]
)
def test_example(program: Program, beside: Beside) -> None:
    run = beside(program)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout, "an example prints what it shows"


TEN_LINES = [PROGRAMS["01_ten_lines-alone"], PROGRAMS["01_ten_lines-two_ranks"]]


@pytest.mark.beside(TEN_LINES[0])
@pytest.mark.beside(TEN_LINES[1])
def test_two_ranks_print_the_losses_of_one_process(beside: Beside) -> None:
    alone, together = ([float(line.split()[-1]) for line in beside(own).stdout.splitlines()] for own in TEN_LINES)
    assert len(alone) == 5 and alone[-1] < 0.1 * alone[0]
    assert together == pytest.approx(alone, rel=0.0, abs=1e-5)
