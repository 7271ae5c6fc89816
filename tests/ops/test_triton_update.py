"""Tests of the Triton update under Triton's interpreter. tests/gpu runs the same cases on a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from meseta.optim import make_row_optimizer
from meseta.spec import MesetaError
from meseta.spec.average import AverageSpec
from optim.specs import SPECS
from sampling import product, sample

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("Triton compiles for the GPU here: see tests/gpu", allow_module_level=True)

from meseta.ops.row_update import reference
from meseta.ops.row_update import triton as kernel
from triton_cases import TYPES, check_update, copied, update_case, updated

# Lanes beyond a row's columns divide nothing by nothing, and numpy says so.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

MATRIX = product(optimizer=list(SPECS), dtype=TYPES, seed=[0, 1, 2])
SHAPES = product(
    dims=[(1,), (64, 64), (16, 40), (3, 130, 20), (300,), (8, 8, 8)],
    num_samples=[1, 9, 30],
    dtype=TYPES,
    seed=[0, 1, 2],
)


@pytest.mark.parametrize("case", sample(MATRIX, 8, seed=0))
def test_optimizers_and_types_of_rows(case: dict[str, Any]) -> None:
    check_update(update_case(make_row_optimizer(SPECS[case["optimizer"]]), case["seed"], dtype=case["dtype"]), "cpu")


@pytest.mark.parametrize("optimizer", SPECS)
def test_every_optimizer(optimizer: str) -> None:
    check_update(update_case(make_row_optimizer(SPECS[optimizer]), 5, dims=(20,)), "cpu")


@pytest.mark.soak
@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adam", "lamb"])
@pytest.mark.parametrize("decay", [None, 0.9, 2.0**-60, 2.0**-90])
def test_averages(optimizer: str, decay: float | None) -> None:
    average = AverageSpec(kind="swa") if decay is None else AverageSpec(kind="ema", decay=decay)
    check_update(update_case(make_row_optimizer(SPECS[optimizer], average), 5, dims=(20, 16)), "cpu")


@pytest.mark.parametrize("case", sample(SHAPES, 4, seed=20))
def test_ragged_batches(case: dict[str, Any]) -> None:
    check_update(update_case(make_row_optimizer(SPECS["rowwise_adagrad"]), **case), "cpu")


@pytest.mark.parametrize("weighted", [False, True])
def test_hot_rows(weighted: bool) -> None:
    # Runs of all lengths around the one from which they are summed beforehand, in several blocks of samples.
    call = update_case(make_row_optimizer(SPECS["adagrad"]), 1, dims=(16,), num_samples=600, max_length=2, max_rows=3)
    check_update(call if weighted else replace(call, weights=None), "cpu")


def test_contributions_are_summed_in_blocks_of_256_samples() -> None:
    # 1 + 2^-24 is 1 in float32: the order shows in the result.
    call = update_case(make_row_optimizer(SPECS["sgd"]), dims=(1,), num_samples=512)
    gradient = torch.full((512, 1), 2.0**-24)
    gradient[0] = 1.0
    call = replace(
        call,
        tables=[torch.zeros(1, 1)],
        features=[0, 0, 0, 0, 0, 0],
        ids=torch.zeros(512, dtype=torch.int64),
        offsets=torch.arange(513),
        gradients=[gradient],
        weights=None,
        uniforms=torch.ones_like(call.uniforms),
    )
    assert updated(call, "cpu")[0].item() == -(1.0 + 2.0**-16)


def test_several_tables_read_one_feature() -> None:
    # As two column shards of a table do: together they are the table.
    whole = update_case(make_row_optimizer(SPECS["adam"]), 2, dims=(48,), dtype=torch.bfloat16)
    cuts = [(0, 32), (32, 48)]
    first_row, first_column, key = whole.origins
    position, _, gradient, column, per_id, weighted = whole.features[:6]
    pieces = replace(
        whole,
        tables=[whole.tables[0][:, a:b].contiguous() for a, b in cuts],
        states=[state[:, a:b].contiguous() for a, b in cuts for state in whole.states],
        uniforms=whole.uniforms.expand(2, -1),
        origins=[number for a, _ in cuts for number in (first_row, first_column + a, key)],
        features=[n for t, (a, _) in enumerate(cuts) for n in (position, t, gradient, column + a, per_id, weighted)],
    )
    got = updated(pieces, "cpu")
    expected = updated(replace(whole, features=whole.features[:6]), "cpu")
    assert torch.equal(torch.cat(got[:2], dim=1), expected[0])
    for k, state in enumerate(expected[1:]):
        assert torch.equal(torch.cat([got[2 + k], got[2 + len(expected[1:]) + k]], dim=1), state)


@pytest.mark.parametrize("integers", [torch.int32, torch.int64])
def test_ids_outside_are_left_out(integers: torch.dtype) -> None:
    call = update_case(make_row_optimizer(SPECS["sgd"]), 0, dims=(8,))
    features = [f for f in range(0, 12, 6) if not call.features[f + 4]] or [0]
    call = replace(call, features=call.features[features[0] : features[0] + 6], ids=call.ids.to(integers))
    bad = call.ids.clone()
    bad[::2] = torch.tensor([-1, 30, 2**31 - 1]).to(integers).repeat(call.ids.numel())[: bad[::2].numel()]
    zeroed = call.weights.clone()
    zeroed[::2] = 0.0
    outside = updated(replace(call, ids=bad, features=[*call.features[:5], 1]), "cpu")
    silent = updated(replace(call, weights=zeroed, features=[*call.features[:5], 1]), "cpu")
    assert all(torch.equal(a, b) for a, b in zip(outside, silent, strict=True))


@pytest.mark.parametrize("padding", [1, 5000])
def test_padding_ids_change_nothing(padding: int) -> None:
    call = update_case(make_row_optimizer(SPECS["adam"]), 6, dims=(8, 40), num_samples=30)
    ids = torch.cat([call.ids, torch.zeros(padding, dtype=torch.int64)])
    padded = replace(call, ids=ids, weights=torch.cat([call.weights, torch.ones(padding)]))
    for got, expected in zip(updated(padded, "cpu"), updated(call, "cpu"), strict=True):
        assert torch.equal(got, expected)


def test_many_rows_features_and_gradients() -> None:
    # More items and features than a program handles at a time, and more gradients than a launch takes addresses of.
    call = update_case(make_row_optimizer(SPECS["rowwise_adagrad"]), 4, dims=(1, 20) * 6, num_samples=60, max_rows=300)
    assert len(call.gradients) > 8 and call.ids.numel() > 2 * kernel.CHUNK.value
    check_update(call, "cpu")


@pytest.mark.parametrize("case", [(0, 2**31, 2**31, 2**31), (0, 0, 0, 0)])
def test_wide_keys_and_numbers_give_the_same_bits(case: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    # Rows, bags and contributions of large batches need 32 or 64 bits, which small batches do not use.
    call = update_case(make_row_optimizer(SPECS["adam"]), 1, dims=(8, 20), num_samples=60, max_rows=9)
    expected = updated(call, "cpu")
    for name, limit in zip(("INT16_ROWS", "INT32_ROWS", "INT32_BAGS", "INT32_ITEMS"), case, strict=True):
        monkeypatch.setattr(kernel, name, limit)
    assert all(torch.equal(a, b) for a, b in zip(updated(call, "cpu"), expected, strict=True))


@pytest.mark.parametrize("weighted", [False, True])
def test_ids_may_be_sorted_before_gradients_exist(weighted: bool) -> None:
    call = update_case(make_row_optimizer(SPECS["adam"]), 7, dims=(32, 32), num_samples=40, max_rows=9)
    call = copied(call if weighted else replace(call, weights=None))
    expected = updated(call, "cpu")
    sorted_ids = kernel.sort_row_ids(call.tables, call.features, call.ids, call.offsets, call.num_bags, call.weights)
    assert sorted_ids is not None
    call.ids.fill_(-1)  # The update reads only sorted ids.
    kernel.apply_row_update(call, sorted_ids)
    assert all(torch.equal(a, b) for a, b in zip((*call.tables, *call.states), expected, strict=True))


def test_tables_of_more_than_two_billion_elements() -> None:
    call = update_case(make_row_optimizer(SPECS["sgd"]), dims=(1,))
    table = torch.from_numpy(np.zeros((2**31 + 8, 1), dtype=np.float16))  # unwritten pages take no memory
    ids = torch.tensor([2**31 + 7, 0, 2**31 + 7])
    gradient = torch.tensor([[-1.0], [-2.0], [-4.0]])
    kernel.row_update(
        replace(
            call,
            tables=[table],
            features=[0] * 6,
            ids=ids,
            offsets=torch.arange(4),
            num_bags=3,
            gradients=[gradient],
            weights=None,
            uniforms=torch.ones_like(call.uniforms),
        )
    )
    assert [table[row].item() for row in (-1, 0, 7)] == [5.0, 2.0, 0.0]


@pytest.mark.parametrize("optimizer", ["adam", "sgd-clip_value", "ftrl-penalties"])
def test_non_finite_numbers_give_the_bits_of_the_reference(optimizer: str) -> None:
    call = update_case(make_row_optimizer(SPECS[optimizer]), 3, dims=(20,), num_samples=30)
    call.gradients[0][::3, ::2] = torch.nan
    call.gradients[0][1::3, 1::2] = torch.inf
    plain = copied(call)
    reference.row_update(plain)
    for result, other in zip(updated(call, "cpu"), (*plain.tables, *plain.states), strict=True):
        torch.testing.assert_close(result, other, rtol=0, atol=0, equal_nan=True)


def test_nothing_to_do_changes_nothing() -> None:
    call = update_case(make_row_optimizer(SPECS["sgd"]), max_length=0)
    for nothing in (call, replace(call, features=[])):
        assert all(torch.equal(a, b) for a, b in zip(updated(nothing, "cpu"), call.tables, strict=True))


def test_tensors_that_do_not_fit_are_refused() -> None:
    call = copied(update_case(make_row_optimizer(SPECS["adam"])))
    with pytest.raises(MesetaError, match="table 1 is"):
        kernel.row_update(replace(call, tables=[call.tables[0], call.tables[1].half()]))
    with pytest.raises(MesetaError, match="a state of table 0 is"):
        kernel.row_update(replace(call, states=[state.double() for state in call.states]))
    with pytest.raises(MesetaError, match="ids are"):
        kernel.row_update(replace(call, ids=call.ids.short()))
    with pytest.raises(MesetaError, match="weights for"):
        kernel.row_update(replace(call, weights=torch.ones(1)))
    pooled = next(f for f in range(0, 24, 6) if not call.features[f + 4])
    for field, value, match in ((0, 99, "is outside"), (0, -1, "is outside"), (3, 10**6, "needs gradients of")):
        features = call.features[pooled : pooled + 6]
        features[field] = value
        with pytest.raises(MesetaError, match=match):
            kernel.row_update(replace(call, features=features))
    with pytest.raises(MesetaError, match="needs 9 gradients"):
        kernel.row_update(replace(call, gradients=[call.gradients[0][:5], *call.gradients[1:]]))
