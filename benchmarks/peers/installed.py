"""Detection of installed peers, the other systems that a benchmark compares with."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

IMPORT_PATH = (str(Path(__file__).resolve().parents[1]),)
"""Import path of worker processes, whose targets are modules of this package."""
PEER_PACKAGES = {"FBGEMM": "fbgemm-gpu-cpu", "TorchRec": "torchrec"}
"""Package that provides each peer other than PyTorch."""
TUNED_MALLOC = {
    "MALLOC_TOP_PAD_": str(256 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(4 << 30),
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
}
"""Environment variables that make glibc keep freed memory."""
# By default, glibc may return large outputs to the system after every step, depending on the sizes freed before. The
# time of a peer could then double for the same computation.


@dataclass(frozen=True)
class Peers:
    """Peers that are installed and peers that are missing."""

    python: str
    """Path of the interpreter in which peers other than PyTorch run."""
    available: frozenset[str]
    """Names of installed peers, including 'PyTorch'. Empty if peers are disabled."""
    missing: tuple[str, ...]
    """One line per missing peer, with instructions to install it."""


def peer_python(python: str | None = None) -> str:
    """Return `python`, by default the interpreter that PEER_PYTHON names, or this one."""
    return python or os.environ.get("PEER_PYTHON") or sys.executable


def has_module(python: str, module: str) -> bool:
    """Whether an interpreter finds a module. False if the interpreter cannot be started."""
    program = "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"
    try:
        # With -I, modules in the working directory are not mistaken for packages.
        done = subprocess.run([python, "-I", "-c", program, module], capture_output=True, check=False)
    except OSError:
        return False
    return done.returncode == 0


def find_peers(python: str | None, *, enabled: bool) -> Peers:
    """Find the peers that the interpreter `python` can import.

    If `python` is `None`, the environment variable PEER_PYTHON names the interpreter, else this one is used. PyTorch
    always runs in this interpreter. Returns no peers if not `enabled`.
    """
    python = peer_python(python)
    if not enabled:
        return Peers(python, frozenset(), ())
    names, missing = {"PyTorch"}, []
    for name, package in PEER_PACKAGES.items():
        if has_module(python, "fbgemm_gpu" if name == "FBGEMM" else package):
            names.add(name)
        else:
            missing.append(
                f"{name} is not installed in {python}, so it is not measured; `pip install {package}` into a separate "
                "environment, and set --peer-python or PEER_PYTHON to its interpreter"
            )
    return Peers(python, frozenset(names), tuple(missing))
