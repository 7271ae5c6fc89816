"""How long ranks have been silent, by looks once a second."""

from __future__ import annotations

from meseta.telemetry.hearts import Hearts


def test_silence_is_counted_from_the_last_beat() -> None:
    hearts = Hearts([0, 1], 10.0)
    assert hearts.listen({0: 5}, 11.0) == {0: 0.0, 1: 1.0} and hearts.has_beaten(0) and not hearts.has_beaten(1)
    assert hearts.listen({0: 5, 1: 7}, 12.0) == {0: 1.0, 1: 0.0}
    assert hearts.listen({0: 6, 1: 7}, 14.5) == {0: 0.0, 1: 2.5}


def test_a_pause_of_the_listener_is_nobodys_silence() -> None:
    hearts = Hearts([0, 1], 0.0)
    hearts.listen({0: 1, 1: 1}, 1.0)
    assert hearts.listen({0: 1, 1: 1}, 2.0) == {0: 1.0, 1: 1.0}
    assert hearts.listen({0: 1, 1: 2}, 500.0) == {0: 1.0, 1: 0.0}
    assert hearts.listen({0: 1, 1: 3}, 501.0) == {0: 2.0, 1: 0.0}
