"""Where other systems are found, and how to get them."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from meseta.machine.environment_variables import environ
from meseta.machine.processes import run_program

PEER_PACKAGES = {"FBGEMM": "fbgemm-gpu-cpu", "TorchRec": "torchrec"}
"""Peers beside torch itself, and the packages that they come in."""
TUNED_MALLOC = {
    "MALLOC_TOP_PAD_": str(256 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(4 << 30),
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
}
"""Variables that make glibc keep freed memory. By default it gives large outputs back after every step, and whether it
does depends on the sizes that were freed before: a peer that computes the same may take twice as long."""


@dataclass(frozen=True)
class Peers:
    """What can be measured beside ours."""

    python: str
    """The interpreter that has them."""
    available: frozenset[str]
    """'PyTorch' and those of PACKAGES that are there; empty: none are wanted."""
    missing: tuple[str, ...]
    """A line for each that is not: what it is, and how to get it."""


def find_peers(python: str | None, *, enabled: bool) -> Peers:
    """Look into `python`, else $PEER_PYTHON, else this interpreter. PyTorch is measured in this one, always."""
    python = python or environ.get("PEER_PYTHON") or sys.executable
    if not enabled:
        return Peers(python, frozenset(), ())
    program = "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"
    found, missing = {"PyTorch"}, []
    for name, package in PEER_PACKAGES.items():
        module = "fbgemm_gpu" if name == "FBGEMM" else package
        try:
            # A folder of its own, so that no module of the present one is taken for a package.
            code = run_program([python, "-I", "-c", program, module]).returncode
        except OSError as error:
            code = error.errno or 1
        if code == 0:
            found.add(name)
        else:
            missing.append(
                f"{name} is not in {python}, so it is left out; `pip install {package}` into an environment of its "
                "own, and name its interpreter with --peer-python or PEER_PYTHON"
            )
    return Peers(python, frozenset(found), tuple(missing))
