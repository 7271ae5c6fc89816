"""Time since the last heartbeat of each rank."""

from __future__ import annotations

from meseta.telemetry.watching import HeartbeatMonitor


def test_time_counts_from_the_last_heartbeat() -> None:
    monitor = HeartbeatMonitor([0, 1], 10.0)
    assert (
        monitor.update({0: 5}, 11.0) == {0: 0.0, 1: 1.0} and monitor.has_heartbeat(0) and not monitor.has_heartbeat(1)
    )
    assert monitor.update({0: 5, 1: 7}, 12.0) == {0: 1.0, 1: 0.0}
    assert monitor.update({0: 6, 1: 7}, 14.5) == {0: 0.0, 1: 2.5}


def test_a_pause_of_the_listener_does_not_count() -> None:
    monitor = HeartbeatMonitor([0, 1], 0.0)
    monitor.update({0: 1, 1: 1}, 1.0)
    assert monitor.update({0: 1, 1: 1}, 2.0) == {0: 1.0, 1: 1.0}
    assert monitor.update({0: 1, 1: 2}, 500.0) == {0: 1.0, 1: 0.0}
    assert monitor.update({0: 1, 1: 3}, 501.0) == {0: 2.0, 1: 0.0}
