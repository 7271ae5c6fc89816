"""Tests of the Triton kernels of linear layers under Triton's interpreter. tests/gpu has the same cases."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sampling import product, sample

pytest.importorskip("triton")
pytest.importorskip("gpu_path", reason="the products of the interpreter are in benchmarks/, which is not in a wheel")
if torch.cuda.is_available():
    pytest.skip("Triton compiles for the GPU here: see tests/gpu", allow_module_level=True)

from gpu_path.products import TILE_CHOICES, choose_large_tile, multiply
from triton.runtime.interpreter import InterpreterBuilder

from dense_cases import check_extremes, check_linear, check_linear_backward, layer
from meseta.ops import linear as operators
from meseta.ops.linear import linear, linear_backward, linear_cross, reference, triton

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NaN and infinity in masked lanes
FUSED_DTYPES = [torch.float32, torch.bfloat16]
SIZES = [(1, 1, 1), (9, 13, 70), (70, 64, 16), (3, 20, 40), (300, 5, 33), (40, 200, 3)]
OPTIONS = [(), ("input",), ("input", "mask"), ("input", "residual"), ("input", "mask", "residual")]
TILES = [
    None,
    triton.ProductTile(64, 32, 64, 4),
    triton.ProductTile(128, 128, 64, 8),
    triton.ProductTile(256, 128, 16, 8),
]


@pytest.fixture(autouse=True)
def bfloat16_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InterpreterBuilder, "create_dot", multiply)


def use_tile(tile: triton.ProductTile | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a tile for all products, or those of their shapes if it is `None`."""
    if tile is not None:
        monkeypatch.setattr(triton, "choose_tile", lambda *shape: tile)
        monkeypatch.setattr(triton, "choose_forward_tile", lambda *shape: tile)
        monkeypatch.setattr(triton, "choose_block_tile", lambda *shape: tile._replace(rows=256))


@pytest.mark.parametrize("case", sample(product(sizes=SIZES, dtype=FUSED_DTYPES, tile=TILES), 5, seed=1))
def test_products(case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    use_tile(case["tile"], monkeypatch)
    check_linear(*case["sizes"], dtype=case["dtype"], device="cpu")


@pytest.mark.parametrize(
    "case", sample(product(sizes=SIZES, dtype=FUSED_DTYPES, tile=TILES, options=OPTIONS), 8, seed=2)
)
def test_gradients(case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    use_tile(case["tile"], monkeypatch)
    check_linear_backward(*case["sizes"], dtype=case["dtype"], options=case["options"], device="cpu")


def test_several_chunks_of_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    use_tile(TILES[-1], monkeypatch)
    check_linear_backward(2100, 3, 5, torch.float32, ("input", "mask"), "cpu")


@pytest.mark.parametrize("dtype", FUSED_DTYPES, ids=str)
def test_nan_and_infinity_come_out(dtype: torch.dtype) -> None:
    check_extremes(dtype, "cpu")


@pytest.mark.parametrize("limits", [(10**9, 1024), (10**9, 30), (0, 1024), (0, 0)])
@pytest.mark.parametrize("dtype", [*FUSED_DTYPES, torch.float64], ids=str)
def test_all_paths_give_the_results_of_the_reference(
    limits: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operators, "MAX_FUSED_FLOPS", limits[0])
    monkeypatch.setattr(operators, "MAX_FUSED_TERMS", limits[1])
    for name in TILE_CHOICES:
        monkeypatch.setattr(triton, name, choose_large_tile)
    for num_samples in (0, 300):
        results = [call_all(num_samples, dtype)]
        with monkeypatch.context() as patch:
            for name in ("linear", "linear_cross", "linear_backward", "mask_and_sum"):
                patch.setattr(operators, f"_{name}", getattr(operators, f"_{name}_gpu"))
            results.append(call_all(num_samples, dtype))
        for expected, got in zip(*results, strict=True):
            assert (expected is None) == (got is None)
            if expected is not None:
                tolerance = {torch.float32: 1e-5, torch.bfloat16: 0.05, torch.float64: 1e-12}[dtype]
                torch.testing.assert_close(got, expected, rtol=tolerance, atol=10 * tolerance)


def call_all(num_samples: int, dtype: torch.dtype) -> list[torch.Tensor | None]:
    """Return the results of all operators with all options."""
    x, weight, bias, x0, added, gradient, mask, residual = layer(num_samples, 24, 40, dtype).values()
    results: list[torch.Tensor | None] = [linear(x, weight, bias), linear(x, weight, None, relu=True)]
    results += linear_cross(x, weight, bias, x0, added)
    for options in ({}, {"needs_input": False}, {"residual": residual}):
        results += linear_backward(gradient, x, weight, **options)
    for options in ({}, {"residual": residual}):
        sums = reference.new_block_sums(gradient, 30).zero_()
        results += linear_backward(gradient, x, weight, mask=mask, sums=sums, column=4, **options)
        results.append(sums)
    return results


def test_torch_accepts_the_operators() -> None:
    ops, sums = torch.ops.meseta, torch.zeros(1, 9)
    x, weight, bias, x0, added, gradient, mask, residual = layer(5, 3, 4, torch.float32).values()
    torch.library.opcheck(ops.linear.default, (x, weight, bias, True))
    torch.library.opcheck(ops.linear_cross.default, (x, weight, None, x0, added))
    for rest in ((True, mask, residual, sums, 2), (True, None, None, None, 0), (False, None, None, None, 0)):
        torch.library.opcheck(ops.linear_backward.default, (gradient, x, weight, *rest))


def test_float32_weight_gradients_of_bfloat16_layers() -> None:
    x, weight, _, _, _, gradient, _, _ = layer(300, 8, 4, torch.bfloat16).values()
    _, weight_gradient = linear_backward(gradient, x, weight)
    torch.testing.assert_close(weight_gradient, gradient.float().t() @ x.float())
