"""Detection of installed peers, the other systems that a benchmark compares with."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from meseta.system.environment_variables import environ
from meseta.system.processes import run_program

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


def find_peers(python: str | None, *, enabled: bool) -> Peers:
    """Find the peers that the interpreter `python` can import.

    If `python` is `None`, the environment variable PEER_PYTHON names the interpreter, else this one is used. PyTorch
    always runs in this interpreter. Returns no peers if not `enabled`.
    """
    python = python or environ.get("PEER_PYTHON") or sys.executable
    if not enabled:
        return Peers(python, frozenset(), ())
    program = "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"
    names, missing = {"PyTorch"}, []
    for name, package in PEER_PACKAGES.items():
        module = "fbgemm_gpu" if name == "FBGEMM" else package
        try:
            # With -I, modules in the working directory are not mistaken for packages.
            code = run_program([python, "-I", "-c", program, module]).returncode
        except OSError as error:
            code = error.errno or 1
        if code == 0:
            names.add(name)
        else:
            missing.append(
                f"{name} is not installed in {python}, so it is not measured; `pip install {package}` into a separate "
                "environment, and set --peer-python or PEER_PYTHON to its interpreter"
            )
    return Peers(python, frozenset(names), tuple(missing))
