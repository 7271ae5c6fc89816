"""Result of a check."""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import meseta

State = Literal["ok", "note", "problem"]
"""Severity. With a `note`, training works, but slower or without a part of Meseta. With a `problem`, training or a part
of it fails."""


@dataclass(frozen=True)
class Finding:
    """One entry of the report."""

    topic: str
    """Name of the checked property, such as 'memory' or 'disk'."""
    state: State
    text: str
    """Observed state in words."""
    way_out: str = ""
    """Remedy for the user. Required for a problem, otherwise optional."""
    figures: Mapping[str, Any] = field(default_factory=dict)
    """Observed values for programs. Keys include the unit."""

    def __post_init__(self) -> None:
        if self.state == "problem" and not self.way_out:
            raise ValueError(f"{self.topic}: a problem needs a remedy in way_out")

    def to_dict(self) -> dict[str, Any]:
        """Return the finding as a JSON object."""
        return asdict(self)


def ok(topic: str, text: str, **figures: Any) -> Finding:
    """Create a finding that needs no attention."""
    return Finding(topic, "ok", text, "", figures)


def note(topic: str, text: str, remedy: str = "", **figures: Any) -> Finding:
    """Create a finding for a property that makes training slower, or disables a part of Meseta."""
    return Finding(topic, "note", text, remedy, figures)


def problem(topic: str, text: str, remedy: str, **figures: Any) -> Finding:
    """Create a finding for a property with which training or a part of it fails."""
    return Finding(topic, "problem", text, remedy, figures)


REQUIRED = {
    "torch": "2.10",
    "numpy": "1.26",
    "pyarrow": "17",
    "pydantic": "2.7",
    "typer": "0.16",
    "rich": "13",
    "fsspec": "2025.2",
    "safetensors": "0.4",
    "jaxtyping": "0.2.34",
    "pyyaml": "6",
    "cryptography": "42",
}
"""Minimum version of each required package."""
MODULES = {name: {"pyyaml": "yaml"}.get(name, name) for name in REQUIRED}
"""Module to import for each required package."""
OPTIONAL = {
    "s3fs": "files and checkpoints at s3://",
    "gcsfs": "files and checkpoints at gs://",
    "onnx": "`checkpoint export --format onnx`",
    "onnxscript": "`checkpoint export --format onnx`",
    "tensorboard": "`train.loggers`",
    "mlflow-skinny": "`train.loggers`",
    "wandb": "`train.loggers`",
    "lightgbm": "`train --baseline lightgbm`",
    "polars": "a peer in `benchmarks/`",
}
"""Purpose of each optional package."""

VersionLookup = Callable[[str], str | None]
"""Function that returns the installed version of a package, or `None` if it is not installed."""


def installed_version(package: str) -> str | None:
    """Return the version of a package in this environment, or `None` if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def check_meseta() -> Finding:
    """Report the version and location of Meseta and of the Python interpreter."""
    folder = str(Path(meseta.__file__).parent)
    text = f"{meseta.__version__} in {folder}, Python {platform.python_version()} ({sys.executable})"
    values = {"version": meseta.__version__, "folder": folder, "system": platform.platform()}
    return ok("meseta", text, **values, python=platform.python_version(), interpreter=sys.executable)


def check_torch(fact: Mapping[str, Any], installed: VersionLookup) -> Finding:
    """Check that torch loads, and report its build. `fact` is the result of the probe 'torch'."""
    version = installed("torch")
    if "error" in fact:
        error, first = fact["error"], "choose the build for your machine, a CPU-only one is much smaller"
        if version is None:
            return problem("torch", f"not installed ({error})", f"pip install 'torch>={REQUIRED['torch']}'; {first}")
        way = f"pip install --force-reinstall torch=={version.partition('+')[0]}; {first}"
        return problem("torch", f"{version} is installed, but does not load: {error}", way, version=version)
    text = f"{fact['version']}, built for "
    text += f"CUDA {fact['cuda']}" if fact["cuda"] else f"ROCm {fact['hip']}" if fact["hip"] else "CPUs only"
    return ok("torch", text, **fact)


def check_packages(facts: Mapping[str, Mapping[str, Any]], installed: VersionLookup) -> Finding:
    """Check that required packages load and are recent enough. `facts` are all probe results. `check_torch` checks
    that torch loads."""
    versions = {name: installed(name) for name in REQUIRED}
    wrong, requirements, broken = [], [], set[str]()
    for name, version in versions.items():
        error = facts.get(f"import {MODULES[name]}", {}).get("error")
        if version is not None and _release(version) < _release(REQUIRED[name]):
            wrong.append(f"{name} {version} is older than {REQUIRED[name]}")
        elif error is not None and version:
            wrong.append(f"{name} does not load ({error})")
            broken.add(name)
        elif error is not None:
            wrong.append(f"{name} is not installed")
        else:
            continue
        requirements.append(f"'{name}>={REQUIRED[name]}'")
    if wrong:
        reinstall = "--force-reinstall " if broken else ""
        return problem("packages", "; ".join(wrong), f"pip install {reinstall}{' '.join(requirements)}", **versions)
    shown = (f"{name} {version}" for name, version in versions.items() if name != "torch" and version)
    return ok("packages", ", ".join(shown), **versions)


def check_optional(installed: VersionLookup) -> Finding:
    """Report the optional packages that are not installed."""
    versions = {name: installed(name) for name in OPTIONAL}
    missing = [name for name, version in versions.items() if version is None]
    if not missing:
        return ok("extras", ", ".join(f"{name} {version}" for name, version in versions.items()), **versions)
    text = "not installed: " + ", ".join(f"{name} ({OPTIONAL[name]})" for name in missing)
    return note("extras", text, f"pip install {' '.join(missing)}", **versions)


def _release(version: str) -> tuple[int, ...]:
    """Return the release part of a version, such as (2, 13, 0) for '2.13.0+cpu'."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()
