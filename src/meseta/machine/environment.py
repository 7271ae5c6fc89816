"""What figures of this process depend on: versions, the commit, the processor."""

from __future__ import annotations

import os
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from meseta.machine.processes import run_program
from meseta.machine.processors import read_processor


def package_version(package: str) -> str:
    """As it is installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def git_commit() -> str:
    """Of this source tree; empty outside a checkout."""
    return _run_git("rev-parse", "--short", "HEAD")[1]


def git_version() -> str:
    """`commit`, with '+' where the source was changed since."""
    return git_commit() + "+" * (_run_git("diff", "--quiet", "HEAD", "--", ".")[0] == 1)


def _run_git(*arguments: str) -> tuple[int | None, str]:
    """Exit code, and what it prints where that is 0; None where there is no git, or it does not answer."""
    try:
        done = run_program(["git", *arguments], cwd=Path(__file__).resolve().parents[1], timeout_s=10.0)
    except (OSError, subprocess.SubprocessError):
        return None, ""
    return done.returncode, done.stdout.strip() if done.returncode == 0 else ""


def hardware_summary() -> str:
    """The processor's own name where the system tells it, its threads, and the instructions that products may use."""
    processor = read_processor()
    return f"{processor.name}, {os.cpu_count() or 1} threads, {processor.instruction_set()}"
