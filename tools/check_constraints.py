"""Ask pip's resolver whether constraints.txt holds, for every build of torch, Python and platform, by metadata alone.

    python tools/check_constraints.py                      a line for each, and exit code 1 if one has no solution
    python tools/check_constraints.py --in-turns           of one Python, another one after each commit; of all of them
                                                           if recent commits changed constraints or requirements
    python tools/check_constraints.py --constraints FILE   of other constraints

The packages come from the index that pip is configured with. Its torch for Linux is built for CUDA. A build for CPUs
may be in another index, so its metadata are derived: those of the CUDA build, without the requirements on Linux only
(CUDA's libraries and triton).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pip._internal.cli.main import main as pip
from pip._internal.index import collector, package_finder
from pip._internal.network import lazy_wheel
from pip._internal.network.session import PipSession
from pip._internal.operations import prepare as operations
from pip._vendor.packaging import markers

ROOT = Path(__file__).parents[1]
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
NUM_RECENT_COMMITS = 100
"""More than one run of continuous integration covers, so that none misses a change of constraints."""
MINOR_GLIBC = range(5, 29)
"""Wheels for glibc 2.5 to 2.28, the one that torch itself needs."""


@dataclass(frozen=True)
class Platform:
    """A system and processor, as pip and as markers call them."""

    system: str
    machine: str

    @property
    def tags(self) -> list[str]:
        if self.system == "Darwin":
            return [f"macosx_14_0_{self.machine}"]
        manylinux = [f"manylinux_2_{minor}_{self.machine}" for minor in MINOR_GLIBC]
        return [*manylinux, f"manylinux2014_{self.machine}", f"linux_{self.machine}"]


LINUX = (Platform("Linux", "x86_64"), Platform("Linux", "aarch64"))
MACOS = Platform("Darwin", "arm64")


@dataclass(frozen=True)
class Cell:
    """One line of the table. `build` of torch is 'cuda' or 'cpu'."""

    build: str
    python: str
    platform: Platform

    @property
    def markers(self) -> dict[str, str]:
        return {
            "platform_system": self.platform.system,
            "platform_machine": self.platform.machine,
            "sys_platform": self.platform.system.lower(),
            "python_version": self.python,
            "python_full_version": f"{self.python}.0",
        }

    def __str__(self) -> str:
        return f"{self.build:4}  {self.python:4}  {self.platform.system:6} {self.platform.machine:8}"


CELLS = [
    *(Cell("cuda", python, platform) for python in PYTHONS for platform in LINUX),
    *(Cell("cpu", python, platform) for python in PYTHONS for platform in (*LINUX, MACOS)),
]


def pins(constraints: Path) -> dict[str, str]:
    """Return the versions by name in lines NAME==VERSION."""
    return dict(re.findall(r"^([\w.-]+)==(\S+)", constraints.read_text(), re.MULTILINE))


def requirements(constraints: Path) -> list[str]:
    """Return all requirements of the project, and the pinned tools."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = [requirement for extra in project["optional-dependencies"].values() for requirement in extra]
    asked = [*project["dependencies"], *optional]
    names = {re.split(r"[^\w.-]", requirement)[0].lower() for requirement in asked}
    return [*asked, *(name for name in pins(constraints) if name.lower() not in names)]


def prepare_pip(markers_of: Callable[[], dict[str, str]]) -> None:
    """Make pip evaluate markers for other machines, and cache pages and metadata, because it runs many times here.

    pip chooses wheels by --python-version and --platform, but evaluates markers for the interpreter that runs it. If an
    index does not serve metadata, pip reads the end of a wheel in requests of 10 kB, hundreds of them for torch.
    """
    here = markers.default_environment
    markers.default_environment = lambda: {**here(), **markers_of()}
    lazy_wheel.LazyZipOverHTTP.__init__.__defaults__ = (2**18,)
    collector._get_index_content = once(collector._get_index_content)
    package_finder.parse_links = once(lambda page: [link for link in collector.parse_links(page) if link.is_wheel])
    operations.dist_from_wheel_url = once(operations.dist_from_wheel_url)


def once(ask: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that caches the results of `ask` by positional arguments. pip's session, new in each run, is
    ignored."""
    answers: dict[str, Any] = {}

    def answer(*arguments: Any, **others: Any) -> Any:
        key = repr([str(argument) for argument in arguments if not isinstance(argument, PipSession)])
        if key not in answers:
            answers[key] = ask(*arguments, **others)
        return answers[key]

    return answer


def resolve(cell: Cell, arguments: list[str], folder: Path) -> list[dict[str, Any]] | str:
    """Return the metadata of each package that pip would install, or pip's error message."""
    report = folder / "report.json"
    command = ["install", "--dry-run", "--ignore-installed", "--only-binary", ":all:"]
    command += ["--use-feature", "fast-deps", "--implementation", "cp", "--python-version", cell.python]
    command += ["--target", str(folder / "target"), "--report", str(report)]
    command += [word for tag in cell.platform.tags for word in ("--platform", tag)]
    words = io.StringIO()
    with contextlib.redirect_stdout(words), contextlib.redirect_stderr(words):
        status = pip([*command, *arguments])
    if status:
        return words.getvalue()[words.getvalue().find("ERROR:") :].strip()
    return [package["metadata"] for package in json.loads(report.read_text())["install"]]


def write_cpu_build(torch: dict[str, Any], folder: Path) -> None:
    """Write a wheel with only the metadata of torch's build for CPUs, derived from those of its build for CUDA."""
    version = f"{torch['version']}+cpu"
    needed = [line for line in torch["requires_dist"] if 'platform_system == "Linux"' not in line]
    lines = ["Metadata-Version: 2.1", "Name: torch", f"Version: {version}", *(f"Requires-Dist: {n}" for n in needed)]
    info = f"torch-{version}.dist-info"
    with zipfile.ZipFile(folder / f"torch-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", "\n".join(lines) + "\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def check(cell: Cell, constraints: Path, folder: Path) -> tuple[bool, str]:
    """Return (whether pip finds a solution, its description or the error)."""
    version = pins(constraints)["torch"]
    if cell.build == "cpu" and cell.platform.system == "Linux":
        torch = resolve(cell, ["--no-deps", f"torch==={version}"], folder)
        if isinstance(torch, str):
            return False, torch
        write_cpu_build(torch[0], folder)
        version += "+cpu"
    asked = [f"torch==={version}", *requirements(constraints)]
    packages = resolve(cell, ["-c", str(constraints), "--find-links", str(folder), *asked], folder)
    if isinstance(packages, str):
        return False, packages
    versions = {package["name"].lower(): package["version"] for package in packages}
    assert versions["torch"] == version
    return True, f"{len(packages)} packages, torch {version}, triton {versions.get('triton', 'none')}"


def cells_in_turns() -> list[Cell]:
    """Return the cells of one Python, or all of them if recent commits changed constraints.txt or pyproject.toml."""

    def git(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)

    # Not 0 also in a clone without that many commits.
    if git("diff", "--quiet", f"HEAD~{NUM_RECENT_COMMITS}", "--", "constraints.txt", "pyproject.toml").returncode:
        return CELLS
    turn = int(git("rev-list", "--count", "HEAD").stdout) % len(PYTHONS)
    return [cell for cell in CELLS if cell.python == PYTHONS[turn]]


def main() -> int:
    """Print the table and return the exit code, 1 if a cell has no solution."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--constraints", type=Path, default=ROOT / "constraints.txt")
    parser.add_argument("--in-turns", action="store_true")
    arguments = parser.parse_args()
    cells = cells_in_turns() if arguments.in_turns else CELLS
    asked = cells[0]
    prepare_pip(lambda: asked.markers)
    failures = 0
    for asked in cells:
        with tempfile.TemporaryDirectory() as folder:
            resolved, text = check(asked, arguments.constraints, Path(folder))
        failures += not resolved
        print(f"{asked}  {'resolved' if resolved else 'FAILED'}: {text}", flush=True)
    print(f"{len(cells) - failures} of {len(cells)} resolved")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
