"""Tests of the Triton kernels of row_lookup, weight_gradient and id policies under the interpreter. tests/gpu has the
same cases."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from meseta.ops.step_verdict import REJECTED_ID
from meseta.spec import MesetaError
from sampling import product, sample

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("Triton compiles for the GPU here: see tests/gpu", allow_module_level=True)

from meseta.ops.id_policy import triton
from meseta.ops.row_lookup import triton as rows
from meseta.ops.weight_gradient import triton as weights
from triton_cases import TYPES, check_repaired_ids, check_row_lookup, check_weight_gradient, lookup_case

MATRIX = product(
    dims=[[16], [1], [17, 16, 4], [20, 64, 8], [300], [2, 6, 130], [8] * 9],
    dtype=TYPES,
    integers=[torch.int64, torch.int32],
    num_samples=[0, 1, 9, 30],
    seed=[0, 1, 2],
)


@pytest.mark.parametrize("case", sample(MATRIX, 12, seed=0))
def test_rows(case: dict[str, Any]) -> None:
    check_row_lookup(lookup_case(**case), "cpu")


@pytest.mark.parametrize("case", sample(MATRIX, 12, seed=1))
def test_gradients_of_weights(case: dict[str, Any]) -> None:
    check_weight_gradient(lookup_case(**case), "cpu")


@pytest.mark.parametrize("case", sample(MATRIX, 25, seed=2))
def test_ids_outside_their_tables(case: dict[str, Any]) -> None:
    check_repaired_ids(lookup_case(**case), "cpu", case["seed"])


@pytest.mark.parametrize("bad", [-1, 3, 2**40, -(2**63)])
def test_an_id_outside_gives_zeros(bad: int) -> None:
    table, ids = torch.ones(3, 4), torch.tensor([0, bad, 2])
    assert rows.row_lookup([table], ids, [0, 3])[0].tolist() == [[1.0] * 4, [0.0] * 4, [1.0] * 4]
    got = weights.weight_gradient([table], ids, torch.tensor([0, 2, 3]), torch.ones(2, 4), [1])
    assert got.tolist() == [4.0, 0.0, 4.0]


def test_policies_of_long_batches() -> None:
    # More bags and ids of a feature than a program handles at a time, in features of different size.
    check_repaired_ids(lookup_case(0, [1, 1, 1], num_samples=5000, max_length=3), "cpu")
    ids, lengths = torch.tensor([5, 1, 9, -7, 2]), torch.tensor([0, 2, 1, 0, 0, 1, 1])
    got = triton.check_ids(ids, lengths, [0, 3, 3, 7], [6, 1, 2], [0, 2, 0])
    assert [result.tolist() for result in got] == [
        [5, 1, 0, 0, 0],
        [0, 0, 2, 3, 3, 3, 4, 5],
        [REJECTED_ID, 0, 0, 2, 9, 1, 0, 2],
    ]


def test_tensors_that_do_not_fit_are_refused() -> None:
    table, ids = torch.ones(3, 4), torch.tensor([0, 1, 2])
    for bounds in ([0, 4], [-1, 3], [2, 1]):
        with pytest.raises(MesetaError, match="bounds"):
            rows.row_lookup([table], ids, bounds)
    with pytest.raises(MesetaError, match="a gradient"):
        weights.weight_gradient([table], ids, torch.tensor([0, 2, 3]), torch.ones(2, 5), [1])
