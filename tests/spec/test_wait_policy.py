"""Tests of the wait policy of OpenMP threads."""

from __future__ import annotations

import pytest

from meseta.system.environment_variables import WAIT_POLICY, has_default_policy, set_wait_policy, threads_spin


def test_commands_set_the_policy_by_default() -> None:
    environment = {"PATH": "/bin", "KMP_BLOCKTIME": ""}
    set_wait_policy(environment)
    assert environment == {"PATH": "/bin", "KMP_BLOCKTIME": "", **WAIT_POLICY}
    assert has_default_policy(environment) and not threads_spin(environment)


@pytest.mark.parametrize(
    ("variables", "is_spinning"),
    [
        ({"OMP_WAIT_POLICY": "PASSIVE"}, False),
        ({"OMP_WAIT_POLICY": "active"}, True),
        ({"GOMP_SPINCOUNT": "1000"}, False),
        ({"GOMP_SPINCOUNT": "infinite"}, True),
        ({"KMP_BLOCKTIME": "0"}, False),
        ({"KMP_BLOCKTIME": "infinite"}, True),
    ],
)
def test_the_users_choice_is_kept(variables: dict[str, str], is_spinning: bool) -> None:
    environment = dict(variables)
    set_wait_policy(environment)
    assert environment == variables and not has_default_policy(environment) and threads_spin(environment) == is_spinning


def test_without_any_choice_threads_spin() -> None:
    assert threads_spin({})
