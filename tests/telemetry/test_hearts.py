"""How long ranks have been silent, by looks once a second."""

from __future__ import annotations

from meseta.telemetry.watching import HeartbeatMonitor


def test_silence_is_counted_from_the_last_beat() -> None:
    hearts = HeartbeatMonitor([0, 1], 10.0)
    assert hearts.update({0: 5}, 11.0) == {0: 0.0, 1: 1.0} and hearts.has_heartbeat(0) and not hearts.has_heartbeat(1)
    assert hearts.update({0: 5, 1: 7}, 12.0) == {0: 1.0, 1: 0.0}
    assert hearts.update({0: 6, 1: 7}, 14.5) == {0: 0.0, 1: 2.5}


def test_a_pause_of_the_listener_is_nobodys_silence() -> None:
    hearts = HeartbeatMonitor([0, 1], 0.0)
    hearts.update({0: 1, 1: 1}, 1.0)
    assert hearts.update({0: 1, 1: 1}, 2.0) == {0: 1.0, 1: 1.0}
    assert hearts.update({0: 1, 1: 2}, 500.0) == {0: 1.0, 1: 0.0}
    assert hearts.update({0: 1, 1: 3}, 501.0) == {0: 2.0, 1: 0.0}
