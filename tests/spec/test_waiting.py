"""Who decides how OpenMP's threads wait."""

from __future__ import annotations

import pytest

from meseta.machine.waiting import WAITING, choose_waiting, is_ours, spins


def test_commands_choose_where_nobody_has() -> None:
    environment = {"PATH": "/bin", "KMP_BLOCKTIME": ""}
    choose_waiting(environment)
    assert environment == {"PATH": "/bin", "KMP_BLOCKTIME": "", **WAITING}
    assert is_ours(environment) and not spins(environment)


@pytest.mark.parametrize(
    ("own", "is_spinning"),
    [
        ({"OMP_WAIT_POLICY": "PASSIVE"}, False),
        ({"OMP_WAIT_POLICY": "active"}, True),
        ({"GOMP_SPINCOUNT": "1000"}, False),
        ({"GOMP_SPINCOUNT": "infinite"}, True),
        ({"KMP_BLOCKTIME": "0"}, False),
        ({"KMP_BLOCKTIME": "infinite"}, True),
    ],
)
def test_the_users_own_choice_stays(own: dict[str, str], is_spinning: bool) -> None:
    environment = dict(own)
    choose_waiting(environment)
    assert environment == own and not is_ours(environment) and spins(environment) == is_spinning


def test_without_any_choice_threads_spin() -> None:
    assert spins({})
