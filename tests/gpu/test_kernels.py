"""Tests of Triton kernels on a GPU: the cases of tests/ops, no synchronization, and CUDA graphs.

They need torch, numpy, pytest, triton and PYTHONPATH=src, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cross_cases import LAYERS as CROSS_LAYERS
from cross_cases import NETWORKS, check_concat, check_cross_backward, check_cross_network
from dense_cases import (
    DTYPES,
    check_cross_entropy,
    check_dot_interaction,
    check_extremes,
    check_gpu_mlp,
    check_linear,
    check_linear_backward,
    check_mask_and_sum,
    check_scalar_linear,
)
from meseta.ops.pooled_lookup import pooled_lookup
from meseta.optim import make_row_optimizer
from meseta.spec import MesetaError
from optim.specs import SPECS
from sampling import product, sample
from triton_cases import (
    TYPES,
    check_found_inf,
    check_lookup,
    check_marks,
    check_repaired_ids,
    check_row_lookup,
    check_surrounded_rows,
    check_update,
    check_weight_gradient,
    copied,
    lookup_case,
    no_wait,
    update_case,
    updated,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here")

LOOKUPS = product(
    dims=[[16], [1], [17, 16, 4], [20, 64, 8], [300], [2, 6, 130], [128] * 5],
    dtype=TYPES,
    integers=[torch.int64, torch.int32],
    num_samples=[1, 40, 3000],
    seed=[0, 1],
)
UPDATES = product(
    dims=[(1,), (16, 40), (3, 130, 20), (300,), (8, 8, 8), (64,) * 6],
    num_samples=[1, 30, 3000],
    dtype=TYPES,
    seed=[0, 1],
)


LAYERS = product(num_samples=[1, 256, 600, 5000], width=[1, 7, 64, 513], dtype=DTYPES)
PRODUCTS = product(
    sizes=[
        (1, 1, 1),
        (64, 432, 512),
        (300, 40, 37),
        (2100, 13, 512),
        (700, 512, 256),
        (5000, 64, 16),
        (9000, 520, 1000),
    ],
    dtype=DTYPES[:2],
)
STACKS = product(
    num_samples=[1, 300, 5000],
    widths=[(13, 512, 256, 16), (5, 1), (367, 512, 256, 1), (3, 4, 1), (66, 8, 5)],
    dtype=DTYPES,
    bias=[True, False],
    relu_last=[True, False],
)
PAIRS = product(
    sizes=[(1, 1, 1), (5, 3, 4), (3000, 26, 16), (3, 101, 3), (4, 0, 5), (300, 40, 70), (70, 26, 128)],
    dtype=DTYPES[:2],
)


def on_device(call: Any, step: int) -> Any:
    """Return the update with its uniforms and step on the device, as CUDA graphs need them."""
    steps = torch.full((len(call.tables), 1), step, dtype=torch.float64)
    return replace(call, uniforms=torch.cat([call.uniforms, steps], dim=1).cuda(), step=-1)


def captured(run: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """Return a graph of `run`, after one run on a side stream, as torch's documentation requires."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


@pytest.mark.parametrize("case", sample(LAYERS, 20, seed=3))
def test_layers(case: dict[str, Any]) -> None:
    check_mask_and_sum(**case, device="cuda")
    for relu in (False, True):
        check_scalar_linear(**case, relu=relu, device="cuda")


@pytest.mark.parametrize("case", sample(PRODUCTS, 30, seed=5))
def test_products(case: dict[str, Any]) -> None:
    sizes, dtype = case["sizes"], case["dtype"]
    check_linear(*sizes, dtype=dtype, device="cuda")
    for options in ((), ("input",), ("input", "mask"), ("input", "residual"), ("input", "mask", "residual")):
        check_linear_backward(*sizes, dtype=dtype, options=options, device="cuda")


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_nan_and_infinity_come_out(dtype: torch.dtype) -> None:
    check_extremes(dtype, "cuda")


@pytest.mark.parametrize("case", sample(STACKS, 30, seed=4))
def test_stacks_of_layers(case: dict[str, Any]) -> None:
    check_gpu_mlp(**case, device="cuda")


@pytest.mark.parametrize("case", sample(CROSS_LAYERS, 20, seed=5))
def test_cross_layers(case: dict[str, Any]) -> None:
    check_cross_backward(**case, device="cuda")


@pytest.mark.parametrize("case", sample(NETWORKS, 20, seed=6))
def test_cross_networks(case: dict[str, Any]) -> None:
    check_cross_network(**case, device="cuda")


@pytest.mark.parametrize("widths", [(0, 5), (13, 200), (128, 3328)])
def test_concatenated_columns(widths: tuple[int, int]) -> None:
    check_concat(1000, widths, torch.bfloat16, "cuda")


@pytest.mark.parametrize("case", PAIRS)
def test_pairwise_products(case: dict[str, Any]) -> None:
    check_dot_interaction(*case["sizes"], dtype=case["dtype"], device="cuda")


@pytest.mark.parametrize("shape", [(1,), (5000,), (70000, 3)])
@pytest.mark.parametrize("factors", ["none", "each", "rows"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_cross_entropies(shape: tuple[int, ...], factors: str, dtype: torch.dtype) -> None:
    check_cross_entropy(shape, factors, dtype, "cuda")


@pytest.mark.parametrize("case", sample(LOOKUPS, 60, seed=1))
def test_lookups(case: dict[str, Any]) -> None:
    problem = lookup_case(**case)
    check_lookup(problem, "cuda")
    check_row_lookup(problem, "cuda")
    check_weight_gradient(problem, "cuda")
    check_repaired_ids(problem, "cuda", case["seed"])


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shift", [0, 1, 2, 3, 7])
@pytest.mark.parametrize("dims", [[16, 17], [3], [40, 1, 5]], ids=str)
def test_lookups_of_rows_that_do_not_start_at_16_bytes(dims: list[int], shift: int, dtype: torch.dtype) -> None:
    check_surrounded_rows(dims, dtype, shift, "cuda")


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("optimizer", SPECS)
def test_optimizers_and_types_of_rows(optimizer: str, dtype: torch.dtype) -> None:
    from meseta.ops.row_update import triton

    case = update_case(make_row_optimizer(SPECS[optimizer]), 5, dtype=dtype)
    check_update(case, "cuda")
    check_found_inf(case, "cuda")
    check_marks(case, "cuda", triton.row_update)


@pytest.mark.parametrize("case", sample(UPDATES, 40, seed=1))
def test_ragged_updates(case: dict[str, Any]) -> None:
    check_update(update_case(make_row_optimizer(SPECS["rowwise_adagrad"]), **case), "cuda")


def test_updating_twice_gives_the_same_bits() -> None:
    call = update_case(make_row_optimizer(SPECS["adam"]), dims=(64, 20), num_samples=5000, max_rows=3)
    assert all(torch.equal(a, b) for a, b in zip(updated(call, "cuda"), updated(call, "cuda"), strict=True))


def test_the_host_does_not_wait() -> None:
    from meseta.ops.row_update import triton

    lookup = lookup_case(0, [16, 33]).to("cuda")
    weighted, mean = [bool(flag & 1) for flag in lookup.flags], [bool(flag & 2) for flag in lookup.flags]
    call = copied(update_case(make_row_optimizer(SPECS["adam"]), dtype=torch.bfloat16), "cuda")
    call = replace(call, found_inf=torch.zeros((), device="cuda"))
    for _ in range(2):
        with no_wait():
            pooled_lookup(lookup.tables, lookup.ids, lookup.offsets, lookup.weights, weighted, mean)
            triton.row_update(call)


def test_a_captured_lookup_follows_its_inputs() -> None:
    case = lookup_case(0, [16, 33, 64], num_samples=200).to("cuda")
    weighted, mean = [bool(flag & 1) for flag in case.flags], [bool(flag & 2) for flag in case.flags]
    outputs: list[Tensor] = []
    graph = captured(
        lambda: outputs.append(pooled_lookup(case.tables, case.ids, case.offsets, case.weights, weighted, mean))
    )
    case.ids.copy_(case.ids.flip(0) % torch.tensor([table.shape[0] for table in case.tables]).min())
    for table in case.tables:
        table.mul_(2)
    graph.replay()
    assert torch.equal(outputs[-1].cpu(), case.to("cpu").by_reference())


def test_a_captured_update_takes_new_gradients_and_a_new_step() -> None:
    from meseta.ops.row_update import triton

    first_call = update_case(make_row_optimizer(SPECS["adam"]), dims=(16, 40), dtype=torch.bfloat16, num_samples=300)
    call = on_device(copied(first_call, "cuda"), step=3)
    before = [tensor.clone() for tensor in (*call.tables, *call.states)]
    graph = captured(lambda: triton.row_update(call))
    for tensor, old in zip((*call.tables, *call.states), before, strict=True):
        tensor.copy_(old)
    call.gradients[0].neg_()
    call.uniforms[:, -1] = 7
    graph.replay()
    got = [tensor.cpu() for tensor in (*call.tables, *call.states)]
    expected = copied(replace(first_call, step=7), "cuda")
    expected.gradients[0].neg_()
    triton.row_update(expected)
    for result, other in zip(got, (*expected.tables, *expected.states), strict=True):
        assert torch.equal(result, other.cpu())


def test_ids_are_sorted_on_another_stream_of_a_captured_update() -> None:
    from meseta.ops.row_update import triton

    first_call = update_case(make_row_optimizer(SPECS["rowwise_adagrad"]), dims=(16, 40), num_samples=3000)
    call, side = on_device(copied(first_call, "cuda"), step=3), torch.cuda.Stream()
    before = [tensor.clone() for tensor in (*call.tables, *call.states)]

    def update() -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            sorted_ids = triton.sort_row_ids(
                call.tables, call.features, call.ids, call.offsets, call.num_bags, call.weights
            )
        assert sorted_ids is not None
        torch.cuda.current_stream().wait_stream(side)
        triton.apply_row_update(call, sorted_ids)

    graph = captured(update)
    for tensor, old in zip((*call.tables, *call.states), before, strict=True):
        tensor.copy_(old)
    graph.replay()
    for result, other in zip((*call.tables, *call.states), updated(first_call, "cuda"), strict=True):
        assert torch.equal(result.cpu(), other)


def test_a_first_use_inside_a_capture_is_refused() -> None:
    case = lookup_case(77, [16, 4], num_samples=3).to("cuda")
    pooled_lookup(case.tables[:1], case.ids[:0], torch.zeros(4, dtype=torch.int64, device="cuda"))
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(MesetaError, match="once before the capture"), torch.cuda.graph(graph):
        pooled_lookup(case.tables, case.ids, case.offsets)


def test_tables_of_more_than_two_billion_elements() -> None:
    rows = 2**31 // 64 + 1000
    if torch.cuda.mem_get_info()[0] < 6 * 2**30:
        pytest.skip("needs 6 GB of free GPU memory")
    table = torch.zeros(rows, 64, dtype=torch.float16, device="cuda")
    ids = torch.tensor([rows - 1, 0, rows - 2], device="cuda")
    table[ids] = torch.tensor([[1.0], [2.0], [3.0]], dtype=torch.float16, device="cuda")
    got = pooled_lookup([table], ids, torch.tensor([0, 2, 3], device="cuda"))
    assert got[:, 0].tolist() == [3.0, 3.0]
