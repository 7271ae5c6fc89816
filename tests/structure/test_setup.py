"""Tests of tools/check_machine.sh: a missing requirement gives one clear line and a non-zero exit code.

Each case runs the script with a PATH that contains only the programs of the case.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from source_tree import ROOT

CHECK = ROOT / "tools" / "check_machine.sh"
SHELL = shutil.which("sh") or "sh"


def write(path: Path, text: str) -> None:
    path.write_text(f"#!{SHELL}\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """Folder with all required programs, used as the whole PATH. Tests remove or replace some."""
    for tool in ("mktemp", "rm"):
        (tmp_path / tool).symlink_to(shutil.which(tool) or pytest.skip(f"no {tool} here"))
    write(tmp_path / "python3", f'exec "{sys.executable}" "$@"')
    write(tmp_path / "g++", "exit 0")
    return tmp_path


def check(path: Path, **env: str) -> tuple[int, list[str]]:
    """Return (exit code, printed lines)."""
    run = subprocess.run(
        [SHELL, str(CHECK)], env={"PATH": str(path), **env}, capture_output=True, text=True, check=False, timeout=60
    )
    return run.returncode, (run.stdout + run.stderr).splitlines()


def old_python(path: Path, version: str) -> None:
    """Create an interpreter that reports an old version."""
    write(path, f'case "$2" in *print*) echo {version};; *version_info*) exit 1;; esac')


def broken_python(path: Path, needle: str) -> None:
    """Create an interpreter that fails when the check looks for `needle`."""
    write(path, f'case "$2" in *{needle}*) exit 1;; esac\nexec "{sys.executable}" "$@"')


def test_a_complete_machine_passes_in_silence(machine: Path) -> None:
    assert check(machine) == (0, [])


def test_no_python(machine: Path) -> None:
    (machine / "python3").unlink()
    code, lines = check(machine)
    assert code == 1
    assert len(lines) == 1
    assert "no 'python3' on PATH" in lines[0]
    assert "PYTHON=" in lines[0]


def test_old_python_is_named_with_the_override(machine: Path) -> None:
    old_python(machine / "python3", "3.9.18")
    code, lines = check(machine)
    assert code == 1
    assert len(lines) == 1
    assert "Python 3.9.18, but 3.11 or newer" in lines[0]
    assert "PYTHON=" in lines[0]


def test_the_override_is_used(machine: Path) -> None:
    (machine / "python3").rename(machine / "python3.11")
    old_python(machine / "python3", "3.9.18")
    assert check(machine, PYTHON="python3.11") == (0, [])


def test_python_that_does_not_run(machine: Path) -> None:
    write(machine / "python3", "exit 127")
    code, lines = check(machine)
    assert code == 1
    assert len(lines) == 1
    assert "'python3' does not run" in lines[0]


@pytest.mark.parametrize(
    ("needle", "message"), [("ensurepip", "apt install python3-venv"), ("Python.h", "apt install python3-dev")]
)
def test_a_missing_part_of_python_names_its_package(machine: Path, needle: str, message: str) -> None:
    broken_python(machine / "python3", needle)
    code, lines = check(machine)
    assert code == 1
    assert len(lines) == 1
    assert message in lines[0]


def test_no_compiler(machine: Path) -> None:
    (machine / "g++").unlink()
    code, lines = check(machine)
    assert code == 1
    assert len(lines) == 1
    assert "no C++ compiler" in lines[0]
    assert "apt install g++" in lines[0]


def test_cxx_that_is_not_there(machine: Path) -> None:
    code, lines = check(machine, CXX="no-such-compiler -O2")
    assert code == 1
    assert len(lines) == 1
    assert "CXX names 'no-such-compiler -O2'" in lines[0]


def test_a_compiler_that_is_too_old(machine: Path) -> None:
    write(machine / "g++", "exit 1")
    code, lines = check(machine)
    assert code == 1
    assert len(lines) == 1
    assert "'g++' cannot build a C++20 program" in lines[0]


def test_everything_missing_is_said_at_once(machine: Path) -> None:
    (machine / "python3").unlink()
    (machine / "g++").unlink()
    code, lines = check(machine)
    assert code == 1
    assert len(lines) == 2


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_stops_at_the_check(machine: Path, tmp_path: Path) -> None:
    """`make test` on a machine without a compiler prints the line and makes no .venv."""
    clone = tmp_path / "clone"
    clone.mkdir()
    for name in ("Makefile", "constraints.txt", "pyproject.toml", "CMakeLists.txt", "tools"):
        (clone / name).symlink_to(ROOT / name)
    (machine / "g++").unlink()
    (machine / "sh").symlink_to(SHELL)
    make = shutil.which("make") or "make"
    run = subprocess.run(
        [make, "test"], cwd=clone, env={"PATH": str(machine)}, capture_output=True, text=True, check=False, timeout=60
    )
    assert run.returncode != 0
    assert "no C++ compiler" in run.stderr
    assert not (clone / ".venv").exists()
