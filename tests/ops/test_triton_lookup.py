"""Tests of the Triton lookup under Triton's interpreter. tests/gpu runs the same cases on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from meseta.spec import MesetaError
from sampling import product, sample

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("Triton compiles for the GPU here: see tests/gpu", allow_module_level=True)

from meseta.ops.pooled_lookup import triton as kernel
from meseta.ops.row_lookup import triton as rows
from triton_cases import TYPES, check_lookup, check_surrounded_rows, lookup_case

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # Lanes beyond a row's columns add other memory.

MATRIX = product(
    dims=[[16], [1], [17, 16, 4], [20, 64, 8], [100], [2, 6, 130], [128] * 2],
    dtype=TYPES,
    integers=[torch.int64, torch.int32],
    num_samples=[1, 9, 40],
    seed=[0, 1, 2],
)


@pytest.mark.parametrize("case", sample(MATRIX, 16, seed=0))
def test_ragged_batches(case: dict[str, Any]) -> None:
    check_lookup(lookup_case(**case), "cpu")


def test_no_samples_only_empty_bags_and_long_bags() -> None:
    check_lookup(lookup_case(0, [16, 3], num_samples=0), "cpu")
    check_lookup(lookup_case(0, [16, 3], max_length=0), "cpu")
    check_lookup(lookup_case(3, [16, 20], num_samples=5, max_length=70), "cpu")


ODD = product(dims=[[16, 17], [3], [40, 1, 5]], dtype=TYPES, shift=[0, 1, 3, 6])


@pytest.mark.parametrize("case", sample(ODD, 5, seed=3))
def test_rows_and_tables_that_do_not_start_at_16_bytes(case: dict[str, Any]) -> None:
    check_surrounded_rows(**case, device="cpu")


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_only_words_with_bytes_of_the_table_are_read(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime import interpreter

    memory = torch.zeros(1 << 16, dtype=dtype)
    table = memory[20001:20035].view(2, 17)
    begin = memory.data_ptr()
    words: set[int] = set()
    load = interpreter._interpreter.load

    def recorded(pointers: Any, mask: Any, *rest: Any) -> Any:
        words.update((pointers[mask].astype(np.int64) // 16).tolist())
        return load(pointers, mask, *rest)

    monkeypatch.setattr(interpreter._interpreter, "load", recorded)
    kernel.pooled_lookup([table], torch.tensor([1, 0]), torch.tensor([0, 1, 2]), None, [0])
    rows.row_lookup([table], torch.tensor([1, 0]), [0, 2])
    read = {word for word in words if begin <= 16 * word < begin + memory.nbytes}
    first, last = table.data_ptr() // 16, (table.data_ptr() + table.nbytes - 1) // 16
    assert read == set(range(first, last + 1))


@pytest.mark.parametrize("bad", [-1, 3, 2**40, -(2**63)])
def test_an_id_outside_adds_nothing(bad: int) -> None:
    table = torch.ones(3, 4)
    got = kernel.pooled_lookup([table], torch.tensor([0, bad, 2]), torch.tensor([0, 2, 3]), None, [0])
    assert got.tolist() == [[1.0] * 4, [1.0] * 4]


def test_padding_ids_add_nothing() -> None:
    case = lookup_case(4, [16, 3, 8])
    ids = torch.cat([case.ids, torch.zeros(50, dtype=torch.int64)])
    weights = None if case.weights is None else torch.cat([case.weights, torch.ones(50)])
    got = kernel.pooled_lookup(case.tables, ids, case.offsets, weights, case.flags)
    assert torch.equal(got, case.by_reference())


def test_tables_of_more_than_two_billion_elements() -> None:
    table = torch.from_numpy(np.zeros((2**31 + 8, 1), dtype=np.float16))  # unwritten pages take no memory
    table[-1], table[0] = 3.0, 1.0
    got = kernel.pooled_lookup([table], torch.tensor([2**31 + 7, 0, 7]), torch.tensor([0, 2, 3]), None, [0])
    assert got.tolist() == [[4.0], [0.0]]


def test_weights_of_other_features_are_not_read() -> None:
    tables, weights = [torch.ones(2, 1), torch.ones(2, 1)], torch.tensor([torch.nan, 3.0])
    got = kernel.pooled_lookup(tables, torch.zeros(2, dtype=torch.int64), torch.tensor([0, 1, 2]), weights, [0, 1])
    assert got.tolist() == [[1.0, 3.0]]


def test_tensors_that_do_not_fit_are_refused() -> None:
    ids, offsets = torch.tensor([0]), torch.tensor([0, 1, 1])
    with pytest.raises(MesetaError, match="3 offsets for 3 features"):
        kernel.pooled_lookup([torch.ones(1, 4)] * 3, ids, offsets, None, [0] * 3)
    for other in (torch.ones(1, 4).half(), torch.ones(4), torch.ones(4, 2).T):
        with pytest.raises(MesetaError, match="table 1"):
            kernel.pooled_lookup([torch.ones(1, 4), other], ids, offsets, None, [0, 0])
