"""A seeded sample of a large test matrix for `make test`; the rest runs in `make soak`."""

import itertools
import os
import random
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from hypothesis import settings


def product(**axes: Sequence[Any]) -> list[dict[str, Any]]:
    """Return every combination of the axes, given as `product(ranks=[1, 2], optimizer=["sgd", "adam"])`."""
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


leaves_soak_out = False
"""Whether cases marked soak are not collected. Collecting the thousands of them takes seconds in each test process."""


def sample(matrix: Iterable[Any], k: int, seed: int) -> list[Any]:
    """Return all cases of `matrix` for pytest.mark.parametrize: k of them unmarked, the others marked soak.

    The choice is a function of (length of the matrix, k, seed) alone, and the order of the matrix is kept. With
    `leaves_soak_out` the others are excluded, except for one if nothing is chosen, because pytest skips a test without
    cases.
    """
    cases = list(matrix)
    return _mark_others(cases, set(random.Random(seed).sample(range(len(cases)), min(k, len(cases)))))


def diagonal(**axes: Sequence[Any]) -> list[Any]:
    """Return `product(**axes)` for pytest.mark.parametrize, of which `make test` runs as few cases as have every value.

    Case i of `make test` has value i of each axis, and shorter axes begin again.
    """
    cases = product(**axes)
    longest = max(len(values) for values in axes.values())
    chosen = [{name: values[i % len(values)] for name, values in axes.items()} for i in range(longest)]
    return _mark_others(cases, {cases.index(case) for case in chosen})


def _mark_others(cases: Sequence[Any], chosen: set[int]) -> list[Any]:
    """Return all cases, marked soak except for those whose indices are `chosen`."""
    kept = (chosen or {0}) if leaves_soak_out else range(len(cases))
    return [
        pytest.param(case, id=case_id(case), marks=() if i in chosen else pytest.mark.soak)
        for i, case in enumerate(cases)
        if i in kept
    ]


def fewer_examples(divisor: int) -> "settings":
    """Return settings for expensive examples: `make test` runs a fraction 1 / `divisor` of them, `make soak` all."""
    from hypothesis import settings

    usual = settings().max_examples
    return settings(max_examples=usual if os.environ.get("MESETA_SOAK") else usual // divisor)


def case_id(case: Any) -> str:
    """Return `ranks=2-optimizer=adam` for a dict, and the value as text for anything else."""
    return "-".join(f"{key}={value}" for key, value in case.items()) if isinstance(case, dict) else str(case)
