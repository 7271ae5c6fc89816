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
    """Every combination of the axes, as keyword arguments: `product(ranks=[1, 2], optimizer=["sgd", "adam"])`."""
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


leaves_soak_out = False
"""Whether no case marked soak is wanted. Collecting the thousands of them takes seconds in each process of tests."""


def sample(matrix: Iterable[Any], k: int, seed: int) -> list[Any]:
    """All cases of `matrix` for pytest.mark.parametrize: k of them as they are, the others marked soak.

    The choice is a function of (length of the matrix, k, seed) alone, and the order of the matrix is kept. With
    `leaves_soak_out` the others are left out, except for one if nothing is chosen: pytest skips a test without cases.
    """
    cases = list(matrix)
    chosen = set(random.Random(seed).sample(range(len(cases)), min(k, len(cases))))
    kept = (chosen or {0}) if leaves_soak_out else range(len(cases))
    return [
        pytest.param(case, id=case_id(case), marks=() if i in chosen else pytest.mark.soak)
        for i, case in enumerate(cases)
        if i in kept
    ]


def fewer_examples(divisor: int) -> "settings":
    """For a property whose examples are dear: so much fewer of them in `make test`, all in `make soak`."""
    from hypothesis import settings

    usual = settings().max_examples
    return settings(max_examples=usual if os.environ.get("MESETA_SOAK") else usual // divisor)


def case_id(case: Any) -> str:
    """`ranks=2-optimizer=adam` for a dict, the value itself for anything else."""
    return "-".join(f"{key}={value}" for key, value in case.items()) if isinstance(case, dict) else str(case)
