"""Timeouts of torch.distributed in collectives, stores and rendezvous."""

from __future__ import annotations

from datetime import timedelta

from meseta.system.time_limits import TimeLimits


class ProcessTimeouts:
    """Time limits of this process, for process groups created from now on."""

    limits: TimeLimits = TimeLimits()


def transport_timeout() -> timedelta:
    """Return the timeout of process groups."""
    # It is longer than the limits of the launcher and the watchdog, whose messages say more than those of torch.
    return timedelta(seconds=ProcessTimeouts.limits.transport_timeout_s)
