"""Wait policy of OpenMP threads, which Meseta and torch share."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

# GNU's OpenMP runtime lets a waiting thread spin for some milliseconds. If other programs compete for the processors,
# the thread that it waits for may not be running, and a computation can take twenty times as long. A sleeping thread
# frees its processor, but on an idle machine sleeping and waking makes small steps a quarter slower. With the policy
# below, threads spin while each has a processor, and sleep immediately if the runtime has more threads than processors.
# meseta.measure.threads enforces the second case while other programs need the processors.
DEFAULT_SPIN_COUNT = 300_000
"""Iterations that a waiting thread spins before it sleeps, some milliseconds. It is the default of GNU's runtime."""
# With more threads than processors, 'passive' never spins (libgomp's manual, GOMP_SPINCOUNT).
WAIT_POLICY = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": str(DEFAULT_SPIN_COUNT)}
# KMP_BLOCKTIME belongs to the runtimes of LLVM and Intel.
WAIT_POLICY_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""Environment variables with which users choose a wait policy."""


def set_wait_policy(environment: MutableMapping[str, str]) -> None:
    """Set the default wait policy for this process and its children, unless the user has chosen one.

    Call it before torch and the compiled core are imported, because the runtime reads its variables once when loaded.
    """
    if not any(environment.get(name) for name in WAIT_POLICY_VARIABLES):
        environment.update(WAIT_POLICY)


def has_default_policy(environment: Mapping[str, str]) -> bool:
    """Whether the wait policy is the default one, not the user's."""
    return {name: environment[name] for name in WAIT_POLICY_VARIABLES if environment.get(name)} == WAIT_POLICY


def threads_spin(environment: Mapping[str, str]) -> bool:
    """Whether waiting threads spin for milliseconds or longer even if there are more threads than processors."""
    if has_default_policy(environment):
        return False
    count = environment.get("GOMP_SPINCOUNT", "").strip().lower()
    if count:
        return not count.isdigit() or int(count) >= DEFAULT_SPIN_COUNT
    if environment.get("KMP_BLOCKTIME"):
        return environment["KMP_BLOCKTIME"].strip().lower() == "infinite"
    return environment.get("OMP_WAIT_POLICY", "").strip().lower() != "passive"
