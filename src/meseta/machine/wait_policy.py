"""How the threads of OpenMP wait for each other: ours and torch's, which share one runtime.

GNU's runtime lets a thread that waits spin for some milliseconds. Where other programs use the processors too, the one
that it waits for is not running in that time, and what both compute may take twenty times as long. A thread that sleeps
leaves its processor to the other one; but on a quiet machine, to sleep and be woken costs small steps a quarter of
their speed. So the commands choose threads that spin while they have processors of their own, and sleep at once where
the runtime has more threads than processors; meseta.measure.cpu_contention makes it so while others want the
processors.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

DEFAULT_SPIN_COUNT = 300_000
"""Turns of a spinning thread before it sleeps, some milliseconds: what GNU's runtime does by itself."""
WAIT_POLICY = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": str(DEFAULT_SPIN_COUNT)}
"""What the commands choose. With more threads than processors 'passive' never spins (libgomp's manual,
GOMP_SPINCOUNT)."""
WAIT_POLICY_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""Variables by which a user may have chosen; the last one is of LLVM's and Intel's runtimes."""


def set_wait_policy(environment: MutableMapping[str, str]) -> None:
    """Choose for this process and those that it starts, unless the user has.

    The runtime reads its variables once, as it is loaded; so this comes before torch and the compiled core.
    """
    if not any(environment.get(name) for name in WAIT_POLICY_VARIABLES):
        environment.update(WAIT_POLICY)


def has_default_policy(environment: Mapping[str, str]) -> bool:
    """Whether `set_wait_policy` has chosen, and not the user."""
    return {name: environment[name] for name in WAIT_POLICY_VARIABLES if environment.get(name)} == WAIT_POLICY


def threads_spin(environment: Mapping[str, str]) -> bool:
    """Whether threads that wait keep their processors for milliseconds or longer, whatever others want."""
    if has_default_policy(environment):
        return False
    count = environment.get("GOMP_SPINCOUNT", "").strip().lower()
    if count:
        return not count.isdigit() or int(count) >= DEFAULT_SPIN_COUNT
    if environment.get("KMP_BLOCKTIME"):
        return environment["KMP_BLOCKTIME"].strip().lower() == "infinite"
    return environment.get("OMP_WAIT_POLICY", "").strip().lower() != "passive"
