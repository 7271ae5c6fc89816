"""Tests of untrusted checkpoints, by path and by URL: one line refuses them, and no other file is written, opened or
filled.

Each has one fault, and all checksums are right (tests/bad_input/hostile.py).
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from bad_input.commands import Ended, run_here, tree, within
from bad_input.hostile import CONTENTS, FILES, MANIFESTS, STATES, Change
from sampling import sample
from small_run import settings, train, write_config

NAME = "step-000000004"
MORE_BYTES = 100 << 20
"""Memory that a command may use in addition to its peak for a good checkpoint."""
COMMANDS: dict[str, list[str]] = {
    "verify": ["checkpoint", "verify", "HOSTILE"],
    "inspect": ["checkpoint", "inspect", "HOSTILE", "--json"],
    "list": ["checkpoint", "list", "ABOVE"],
    "diff": ["checkpoint", "diff", "GOOD", "HOSTILE"],
    "safetensors": ["checkpoint", "export", "HOSTILE", "--out", "OUT", "--states"],
    "numpy": ["checkpoint", "export", "HOSTILE", "--out", "OUT", "--format", "numpy"],
}


@dataclass(frozen=True)
class Place:
    """Folder with a good checkpoint, a place for a hostile one, and files that no command may touch."""

    folder: Path
    peaks: dict[tuple[str, str], int]
    """Peak memory in bytes of each command for a good checkpoint, by command and form of its name."""

    @property
    def hostile(self) -> Path:
        return self.folder / "there" / NAME

    def arguments(self, command: str, form: str) -> list[str]:
        names = {
            "HOSTILE": form.format(self.hostile),
            "ABOVE": form.format(self.hostile.parent),
            "GOOD": str(self.folder / "good" / NAME),
            "OUT": str(self.folder / "out"),
        }
        return [names.get(word, word) for word in COMMANDS[command]]


FORMS = ("{}", "file://{}")


@contextmanager
def peak(peaks: list[int]) -> Iterator[None]:
    """Context manager that appends the peak memory of the body, minus that of the process before."""
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    yield
    peaks.append(_status("VmHWM") - before)


def _status(name: str) -> int:
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:")]
    return int(line.split()[1]) << 10


@pytest.fixture(scope="module")
def run(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile")
    train(settings(tiny, folder / "run", train__max_steps=4, checkpoint__every_steps=4))
    return folder / "run"


@pytest.fixture(scope="module")
def place(run: Path) -> Place:
    folder = run.parent / "place"
    for parent in ("good", "there"):
        shutil.copytree(run / "checkpoints" / NAME, folder / parent / NAME)
    for name in ("x", "secret", "there/x", "there/other/x", "temporary/x"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    made = Place(folder, {})
    for command, form in itertools.product(COMMANDS, FORMS):
        for _ in range(2):  # the first use of a command imports modules
            taken: list[int] = []
            with peak(taken):
                ended = run_here(*made.arguments(command, form))
            assert ended.code == 0 or command == "list", ended
            shutil.rmtree(folder / "out", ignore_errors=True)
        made.peaks[command, form] = taken[0]
    return made


def refuse(place: Place, kind: str, change: Change, must: Callable[[str, str], bool]) -> None:
    """Run all commands over one hostile checkpoint. Those that `must` names have to end with exit code 1."""
    shutil.rmtree(place.hostile)
    shutil.rmtree(place.hostile.with_name("former"), ignore_errors=True)
    place.hostile.with_name("former").unlink(missing_ok=True)
    shutil.copytree(place.folder / "good" / NAME, place.hostile)
    change(place.hostile)
    before = tree(place.folder)
    for command, form in itertools.product(COMMANDS, FORMS):
        what = f"{kind}: {command} {form}"
        arguments = place.arguments(command, form)
        taken: list[int] = []
        with within(60, what), peak(taken):
            ended = run_here(*arguments)
        check(ended, what, is_list=command == "list")
        assert ended.code or not must(command, form), (what, ended.out)
        assert taken[0] <= place.peaks[command, form] + MORE_BYTES, (what, taken)
        if ended.code == 0:
            shutil.rmtree(place.folder / "out", ignore_errors=True)
        assert tree(place.folder) == before, what


def check(ended: Ended, what: str, *, is_list: bool = False) -> None:
    """Check that the command succeeds, or that one line of printable characters reports the fault."""
    lines = [line for line in (ended.out if is_list else ended.err).splitlines() if is_list or "error" in line]
    assert ended.code in (0, 1), (what, ended)
    if ended.code:
        [line] = [line for line in lines if "damaged: " in line or line.startswith("error: ")]
        assert line.isprintable() and len(line) < 1500, (what, line[:3000])
    assert "Traceback" not in ended.err, (what, ended)


@pytest.fixture(autouse=True)
def temporary(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Create temporary folders, and resolve relative paths, in a place that the test watches."""
    monkeypatch.setattr(tempfile, "tempdir", str(place.folder / "temporary"))
    monkeypatch.chdir(place.folder)


def groups(kinds: dict[str, Change], size: int) -> list[int]:
    return list(range(-(-len(kinds) // size)))


def members(kinds: dict[str, Change], group: int, size: int) -> list[tuple[str, Change]]:
    """Return the kinds of one group, spread over the list."""
    return list(kinds.items())[group :: -(-len(kinds) // size)]


@pytest.mark.parametrize("group", sample(groups(MANIFESTS, 3), 1, seed=0))
def test_manifests(place: Place, group: int) -> None:
    for kind, change in members(MANIFESTS, group, 3):
        # At a URL, a checkpoint without a complete manifest does not exist, so `list` reports nothing.
        refuse(place, kind, change, lambda command, form: command != "list" or form == "{}")


@pytest.mark.parametrize("group", sample(groups(FILES, 2), 1, seed=0))
def test_files(place: Place, group: int) -> None:
    for kind, change in members(FILES, group, 2):
        refuse(place, kind, change, lambda command, form: command != "list" or form == "{}")


@pytest.mark.parametrize("group", sample(groups(CONTENTS, 2), 1, seed=0))
def test_contents(place: Place, group: int) -> None:
    for kind, change in members(CONTENTS, group, 2):
        refuse(place, kind, change, lambda command, form: False)


@pytest.mark.parametrize("group", sample(groups(MANIFESTS | FILES, 2), 1, seed=1))
def test_runs(tiny: Path, run: Path, tmp_path: Path, group: int) -> None:
    """Run commands over a run with such a checkpoint, and start a run from it."""
    for number, (kind, change) in enumerate(members(MANIFESTS | FILES, group, 2)):
        folder = tmp_path / str(number)
        shutil.copytree(run, folder / "run")
        change(folder / "run/checkpoints" / NAME)
        mirror = {"checkpoint__mirror": f"file://{folder / 'run/checkpoints'}"}
        resume = settings(tiny, folder / "run", train__max_steps=5, checkpoint__every_steps=4)
        begin = settings(tiny, folder / "new", train__max_steps=5, **mirror)
        commands: dict[str, list[object]] = {
            "eval": ["eval", folder / "run"],
            "predict": ["predict", folder / "run", "--out", folder / "p.parquet"],
            "report": ["report", folder / "run", "--out", folder / "report.html"],
            "resume": ["train", write_config(folder / "resume.yaml", resume)],
            "mirror": ["train", write_config(folder / "begin.yaml", begin), "checkpoint.resume=auto"],
        }
        before = tree(folder)
        for command, arguments in commands.items():
            what = f"{kind}: {command}"
            with within(120, what):
                ended = run_here(*arguments)
            assert ended.code in (0, 1) and len(ended.errors) == ended.code, (what, ended)
            assert ended.code or command in ("report", "mirror"), what
            (folder / "report.html").unlink(missing_ok=True)
            shutil.rmtree(folder / "new", ignore_errors=True)
            if command != "mirror":  # a complete checkpoint replaces a partial one there
                assert tree(folder) == before, what


@pytest.mark.parametrize("group", sample(groups(STATES, 3), 1, seed=2))
def test_states(tiny: Path, run: Path, tmp_path: Path, group: int) -> None:
    """`train` refuses a state that no run has saved."""
    for number, (kind, change) in enumerate(members(STATES, group, 3)):
        folder = tmp_path / str(number)
        shutil.copytree(run, folder / "run")
        change(folder / "run/checkpoints" / NAME)
        document = settings(tiny, folder / "run", train__max_steps=5, checkpoint__every_steps=4)
        config = write_config(folder / "c.yaml", document)
        before = tree(folder)
        with within(120, kind):
            ended = run_here("train", config)
        assert ended.code == 1 and len(ended.errors) == 1, (kind, ended)
        assert tree(folder) == before, kind
