"""How long torch waits in a collective, a store or a meeting of ranks."""

from __future__ import annotations

from datetime import timedelta

from meseta.machine.time_limits import TimeLimits


class ProcessTimeouts:
    """Of this process, for groups that are yet to come."""

    limits: TimeLimits = TimeLimits()


def transport_timeout() -> timedelta:
    """Of torch, in every group: longer than a run goes on that is stuck, which is told in better words."""
    return timedelta(seconds=ProcessTimeouts.limits.transport_timeout_s)
