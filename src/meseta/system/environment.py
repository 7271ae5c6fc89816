"""Versions, commit and processor of this process, which are recorded with measurements."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from meseta.errors import MesetaError
from meseta.system.processes import run_program
from meseta.system.processors import read_processor


def package_version(package: str) -> str:
    """Return the installed version of a package, or "not installed"."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def check_extras(names: Iterable[str], setting: str) -> None:
    """Raise MesetaError, which mentions `setting`, if a package is not installed whose extra has the same name."""
    for name in names:
        spec = find_spec(name)
        if spec is None or spec.origin is None:  # A folder of the name is no package.
            raise MesetaError(
                f"{setting} has {name!r}, but the package {name} is not installed; "
                f"pip install 'meseta[{name}]', or remove {name!r} from {setting}"
            )


def git_commit() -> str:
    """Return the short hash of the checked-out commit. It is empty outside a git checkout."""
    return _run_git("rev-parse", "--short", "HEAD")[1]


def git_version() -> str:
    """Return `git_commit()`, followed by '+' if the source has uncommitted changes."""
    return git_commit() + "+" * (_run_git("diff", "--quiet", "HEAD", "--", ".")[0] == 1)


def _run_git(*arguments: str) -> tuple[int | None, str]:
    try:
        # Run in the package's folder. The current folder may belong to another repository.
        process = run_program(["git", *arguments], cwd=Path(__file__).resolve().parents[1], timeout_s=10.0)
    except (OSError, subprocess.SubprocessError):
        return None, ""
    return process.returncode, process.stdout.strip() if process.returncode == 0 else ""


def hardware_summary() -> str:
    """Return the processor's name, number of threads and widest instruction set for matrix products."""
    processor = read_processor()
    return f"{processor.name}, {os.cpu_count() or 1} threads, {processor.instruction_set()}"
