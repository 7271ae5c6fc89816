"""Processes that benchmarks start, and memory control groups."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from record import ROOT

MESETA = (sys.executable, "-m", "meseta.cli.main")
ENTER_GROUP = """
import os, sys
open(sys.argv[1] + "/cgroup.procs", "w").write(str(os.getpid()))
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""


def check_tests(*tests: str) -> None:
    subprocess.run([sys.executable, "-m", "pytest", "-q", *tests], check=True, cwd=ROOT)


def run_meseta(*arguments: object) -> None:
    """Run a command of Meseta. Exits with its last output if it fails."""
    command = [*MESETA, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr[-500:]}")


def run_and_print(command: Sequence[str], **options: Any) -> tuple[int, list[str]]:
    """Run a command and print its output line by line. Return (exit code, stripped lines that are not empty)."""
    lines = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", **options
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line.strip())
    return process.returncode, [line for line in lines if line]


class Started(NamedTuple):
    process: subprocess.Popen[str]
    first_line: str


@contextmanager
def started(command: Sequence[str], **options: Any) -> Iterator[Started]:
    """Context manager that starts a process, waits for its first line, and kills it on exit."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options)
    try:
        assert process.stdout is not None
        first_line = process.stdout.readline().strip()
        if not first_line:
            raise RuntimeError(f"{' '.join(command)} ended before it was ready")
        yield Started(process, first_line)
    finally:
        process.kill()
        process.wait()


def script_environment(**variables: str) -> dict[str, str]:
    """Return the environment of a process that imports modules of benchmarks/."""
    paths = [str(ROOT / "benchmarks"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **variables}


def run_module(
    name: str, arguments: Sequence[str], variables: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", name, *arguments], check=False, capture_output=True, text=True,
        env=script_environment(**(variables or {})),
    )  # fmt: skip


def in_group(group: Path, arguments: Sequence[object]) -> list[str]:
    """Return the command that runs Python with `arguments` in a control group."""
    return [sys.executable, "-c", ENTER_GROUP, str(group), *map(str, arguments)]


@contextmanager
def memory_group(limit_bytes: int) -> Iterator[Path]:
    """Context manager that creates a memory control group. Raises OSError."""
    for root, name in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        group = Path(root, f"meseta-bench-{uuid.uuid4().hex[:8]}")
        if not Path(root).is_dir() or (root.endswith("cgroup") and not Path(root, "cgroup.controllers").exists()):
            continue
        group.mkdir()
        try:
            (group / name).write_text(str(limit_bytes))
            yield group
        finally:
            with contextlib.suppress(OSError):
                group.rmdir()
        return
    raise OSError("there is no control group of memory")


def can_limit_memory(limit_bytes: int) -> bool:
    try:
        with memory_group(limit_bytes):
            return True
    except OSError as error:
        print(f"this part is left out, since no memory control group can be made here: {error}")
        return False
