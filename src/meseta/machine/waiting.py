"""How the threads of OpenMP wait for each other: ours and torch's, which share one runtime.

GNU's runtime lets a thread that waits spin for some milliseconds. Where other programs use the processors too, the one
that it waits for is not running in that time, and what both compute may take twenty times as long. A thread that sleeps
leaves its processor to the other one; but on a quiet machine, to sleep and be woken costs small steps a quarter of
their speed. So the commands choose threads that spin while they have processors of their own, and sleep at once where
the runtime has more threads than processors; meseta.measure.waiting makes it so while others want the processors.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

LONG = 300_000
"""Turns of a spinning thread before it sleeps, some milliseconds: what GNU's runtime does by itself."""
WAITING = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": str(LONG)}
"""What the commands choose. With more threads than processors 'passive' never spins (libgomp's manual,
GOMP_SPINCOUNT)."""
CHOICES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""Variables by which a user may have chosen; the last one is of LLVM's and Intel's runtimes."""


def choose_waiting(environment: MutableMapping[str, str]) -> None:
    """Choose for this process and those that it starts, unless the user has.

    The runtime reads its variables once, as it is loaded; so this comes before torch and the compiled core.
    """
    if not any(environment.get(name) for name in CHOICES):
        environment.update(WAITING)


def is_ours(environment: Mapping[str, str]) -> bool:
    """Whether `choose_waiting` has chosen, and not the user."""
    return {name: environment[name] for name in CHOICES if environment.get(name)} == WAITING


def spins(environment: Mapping[str, str]) -> bool:
    """Whether threads that wait keep their processors for milliseconds or longer, whatever others want."""
    if is_ours(environment):
        return False
    count = environment.get("GOMP_SPINCOUNT", "").strip().lower()
    if count:
        return not count.isdigit() or int(count) >= LONG
    if environment.get("KMP_BLOCKTIME"):
        return environment["KMP_BLOCKTIME"].strip().lower() == "infinite"
    return environment.get("OMP_WAIT_POLICY", "").strip().lower() != "passive"
