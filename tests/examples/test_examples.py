"""Every script in examples/ runs unchanged. Scripts that mention torchrun also run on two ranks."""

from pathlib import Path

import pytest

from cli.processes import Command
from source_tree import ROOT

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PROGRAMS = {"alone": ("python",), "two_ranks": ("torchrun", "--standalone", "--nproc_per_node", "2")}
COMMANDS = {
    f"{path.stem}-{name}": [*words, str(path)]
    for path in EXAMPLES
    for name, words in PROGRAMS.items()
    if name == "alone" or "torchrun" in path.read_text().partition('"""')[2].partition('"""')[0]
}


def run(name: str, folder: Path) -> str:
    """Run a script in a folder with examples/, and return its output."""
    (folder / "examples").symlink_to(ROOT / "examples")
    program, *words = COMMANDS[name]
    return Command(folder, *words, program=program).succeed().out.read_text()


def test_there_are_examples() -> None:
    assert EXAMPLES


@pytest.mark.parametrize("name", [name for name in COMMANDS if not name.startswith("01_ten_lines-")])
def test_example(name: str, tmp_path: Path) -> None:
    assert run(name, tmp_path), "an example prints its result"


@pytest.mark.soak  # docs/several_ranks.md has torchrun in `make test`
def test_two_ranks_print_the_losses_of_one_process(tmp_path: Path) -> None:
    losses = []
    for name in ("01_ten_lines-alone", "01_ten_lines-two_ranks"):
        (tmp_path / name).mkdir()
        losses.append([float(line.split()[-1]) for line in run(name, tmp_path / name).splitlines()])
    alone, together = losses
    assert len(alone) == 5 and alone[-1] < 0.1 * alone[0]
    assert together == pytest.approx(alone, rel=0.0, abs=1e-5)
