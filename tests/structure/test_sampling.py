"""`make test` runs the sample and `make soak` the rest, so that together they run every case once."""

import pytest

import sampling
from sampling import diagonal, product, sample


@pytest.fixture(autouse=True)
def whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "leaves_soak_out", False)


def test_every_case_is_there_once_and_k_of_them_run_by_default() -> None:
    matrix = product(ranks=[1, 2, 4], optimizer=["sgd", "adam"], pooling=["sum", "mean"])
    params = sample(matrix, 5, seed=3)
    assert [param.values[0] for param in params] == matrix
    assert sum(not param.marks for param in params) == 5
    assert len({param.id for param in params}) == 12


def test_the_choice_is_a_function_of_the_seed() -> None:
    def chosen(seed: int) -> list[int]:
        return [param.values[0] for param in sample(range(100), 10, seed) if not param.marks]

    assert chosen(1) == chosen(1) != chosen(2)


def test_a_diagonal_has_every_value_of_every_axis() -> None:
    axes = {"ranks": [1, 2, 4], "optimizer": ["sgd", "adam"], "pooling": ["sum"]}
    params = diagonal(**axes)
    chosen = [param.values[0] for param in params if not param.marks]
    assert [param.values[0] for param in params] == product(**axes) and len(chosen) == 3
    assert all({case[name] for case in chosen} == set(values) for name, values in axes.items())


@pytest.mark.parametrize("k", [0, 3, 7])
def test_k_may_exceed_the_matrix(k: int) -> None:
    assert sum(not param.marks for param in sample(range(3), k, seed=0)) == min(k, 3)


@pytest.mark.parametrize("k", [0, 1, 3])
def test_excluded_cases_change_no_choice(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen() -> list[int]:
        return [param.values[0] for param in sample(range(100), k, seed=1) if not param.marks]

    expected = chosen()
    monkeypatch.setattr(sampling, "leaves_soak_out", True)
    assert chosen() == expected and len(sample(range(100), k, seed=1)) == max(k, 1)
