"""What figures of this process depend on: versions, the commit, the processor."""

from __future__ import annotations

import os
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from meseta.machine.processes import run_program
from meseta.machine.processors import this_processor


def version_of(package: str) -> str:
    """As it is installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def commit() -> str:
    """Of this source tree; empty outside a checkout."""
    return _git("rev-parse", "--short", "HEAD")[1]


def commit_with_changes() -> str:
    """`commit`, with '+' where the source was changed since."""
    return commit() + "+" * (_git("diff", "--quiet", "HEAD", "--", ".")[0] == 1)


def _git(*arguments: str) -> tuple[int | None, str]:
    """Exit code, and what it prints where that is 0; None where there is no git, or it does not answer."""
    try:
        done = run_program(["git", *arguments], folder=Path(__file__).resolve().parents[1], limit_s=10.0)
    except (OSError, subprocess.SubprocessError):
        return None, ""
    return done.returncode, done.stdout.strip() if done.returncode == 0 else ""


def hardware() -> str:
    """The processor's own name where the system tells it, its threads, and the instructions that products may use."""
    processor = this_processor()
    return f"{processor.name}, {os.cpu_count() or 1} threads, {processor.level()}"
