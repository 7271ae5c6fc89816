"""Tests of the Triton kernels of the dense part under Triton's interpreter. tests/gpu has the same cases."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch

from meseta.spec import MesetaError
from sampling import product, sample

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("Triton compiles for the GPU here: see tests/gpu", allow_module_level=True)

from triton.runtime.interpreter import InterpreterBuilder

from dense_cases import (
    DTYPES,
    check_cross_entropy,
    check_dot_interaction,
    check_gpu_mlp,
    check_mask_and_sum,
    check_scalar_linear,
    numbers,
)
from meseta.ops import linear
from meseta.ops.cross_entropy import reference
from meseta.ops.cross_entropy import triton as cross_entropy
from meseta.ops.dot_interaction import reference as dot_reference
from meseta.ops.dot_interaction import triton as dot_triton
from meseta.ops.linear import triton as linear_kernels
from meseta.ops.mlp import gpu, triton
from meseta.ops.mlp.gpu import GpuMlp
from meseta.ops.step_verdict import NON_FINITE_LOSS, VerdictMemory

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NaN and infinity in masked lanes
SHAPES = product(num_samples=[1, 9, 256, 600], width=[1, 7, 64, 130], dtype=DTYPES)
STACKS = product(
    num_samples=[1, 30, 300],
    widths=[(13, 20, 1), (5, 1), (70, 9), (100, 90, 40, 1), (3, 4, 1), (66, 8, 5)],
    dtype=DTYPES,
    bias=[True, False],
    relu_last=[True, False],
)


@pytest.mark.parametrize("case", sample(SHAPES, 8, seed=1))
def test_masked_gradients_and_sums(case: dict[str, Any]) -> None:
    check_mask_and_sum(**case, device="cpu")


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("case", sample(SHAPES, 6, seed=2))
def test_layers_with_one_output(case: dict[str, Any], relu: bool) -> None:
    check_scalar_linear(**case, relu=relu, device="cpu")


def use_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the implementations for GPUs, with large tiles."""
    products = pytest.importorskip("gpu_path.products", reason="benchmarks/ does not belong to a wheel")
    for name in ("scalar_linear", "scalar_linear_backward"):
        monkeypatch.setattr(gpu, f"_{name}", getattr(triton, name))
    for name in ("linear", "linear_backward", "mask_and_sum"):
        monkeypatch.setattr(linear, f"_{name}", getattr(linear, f"_{name}_gpu"))
    for name in products.TILE_CHOICES:
        monkeypatch.setattr(linear_kernels, name, products.choose_large_tile)
    monkeypatch.setattr(InterpreterBuilder, "create_dot", products.multiply)


@pytest.mark.parametrize("is_kernel", [False, True])
@pytest.mark.parametrize("case", sample(STACKS, 12, seed=3))
def test_stacks_of_layers(case: dict[str, Any], is_kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if is_kernel:
        use_kernels(monkeypatch)
    check_gpu_mlp(**case, device="cpu")


def test_nan_and_infinity_come_out(monkeypatch: pytest.MonkeyPatch) -> None:
    use_kernels(monkeypatch)
    x = numbers(1, 6, 5)
    x[1, 2], x[3, 0], x[4, 4] = torch.nan, torch.inf, -torch.inf
    for widths in ((5, 40, 30, 1), (5, 300, 1)):
        weights = [numbers(k, n, m) for k, (m, n) in enumerate(pairwise(widths))]
        out = GpuMlp.apply(x, False, *weights, *(None for _ in weights))
        assert out.isfinite().flatten().tolist() == [True, False, True, False, False, True]


def test_inputs_without_gradient_get_none() -> None:
    weight, bias = numbers(1, 1, 4).requires_grad_(), numbers(2, 1).requires_grad_()
    x = numbers(3, 5, 4)
    GpuMlp.apply(x, False, weight, bias).sum().backward()
    torch.testing.assert_close(weight.grad, x.sum(0, keepdim=True))
    torch.testing.assert_close(bias.grad, torch.tensor([5.0]))
    assert x.grad is None


@pytest.mark.parametrize("shape", [(1,), (0,), (700,), (5000,), (0, 2), (40, 3)])
@pytest.mark.parametrize("factors", ["none", "each", "rows"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_cross_entropies(shape: tuple[int, ...], factors: str, dtype: torch.dtype) -> None:
    check_cross_entropy(shape, factors, dtype, "cpu")


def test_the_loss_of_a_logit_that_is_no_number_is_none() -> None:
    for bad in (torch.nan, torch.inf, -torch.inf):
        loss = torch.ops.meseta.cross_entropy(torch.tensor([0.0, bad]), torch.tensor([1.0, 0.5]), None)
        assert not loss.isfinite()


def test_a_step_with_a_logit_that_is_no_number_is_refused() -> None:
    logits, label = torch.tensor([0.0, 1e30, -1e30, torch.inf, -torch.inf, torch.nan]), torch.ones(6)
    scale, results = torch.tensor(0.5, dtype=torch.float64), []
    memories = [VerdictMemory.create(torch.device("cpu")) for _ in range(2)]
    for kernel, memory in zip((cross_entropy.cross_entropy_step, reference.cross_entropy_step), memories, strict=True):
        report = torch.zeros(2, dtype=torch.int64)
        is_plain = kernel is reference.cross_entropy_step
        gradient = kernel(logits, label, None, scale, memory.flags if is_plain else memory.words, report)
        results.append((gradient, memory.flags))
        assert report[0] == NON_FINITE_LOSS and report[1:].view(torch.float64).isnan().all()
        assert memory.flags.tolist() == [1.0, 0.0] and gradient.isnan().tolist() == [False] * 5 + [True]
    torch.testing.assert_close(results[0][0], results[1][0], rtol=0, atol=0, equal_nan=True)


def test_programs_add_the_losses_of_several_blocks() -> None:
    size = 3 * cross_entropy.BLOCK.value + 1
    memory, report = VerdictMemory.create(torch.device("cpu")), torch.zeros(2, dtype=torch.int64)
    logits, scale, gradient = torch.zeros(size), torch.tensor(2.0, dtype=torch.float64), torch.full((size,), torch.nan)
    cross_entropy._finish_step[(2,)](gradient, scale, logits, logits, None, size, memory.words, report)
    torch.testing.assert_close(report[1:].view(torch.float64), torch.tensor([size * math.log(2)]).double())
    assert gradient.eq(1.0).all()


@pytest.mark.parametrize("case", sample(product(
    sizes=[(0, 2, 3), (1, 1, 1), (5, 3, 4), (9, 26, 16), (3, 101, 3), (4, 0, 5), (3, 40, 70), (2, 33, 64)],
    dtype=DTYPES[:2],
), 8, seed=4))  # fmt: skip
def test_pairwise_products(case: dict[str, Any]) -> None:
    check_dot_interaction(*case["sizes"], dtype=case["dtype"], device="cpu")


def test_non_finite_numbers_spread_to_the_same_pairs() -> None:
    x, pooled, gradient = numbers(1, 3, 16), numbers(2, 3, 40 * 16), numbers(3, 3, 16 + 40 * 41 // 2)
    pooled[0, 5], pooled[1, 36 * 16], x[2, 1], gradient[1, 90] = torch.nan, torch.inf, -torch.inf, torch.nan
    for kernel, plain in (
        ((dot_triton.dot_interaction(x, pooled),), (dot_reference.dot_interaction(x, pooled),)),
        (f(gradient, x, pooled) for f in (dot_triton.dot_interaction_backward, dot_reference.dot_interaction_backward)),
    ):
        for got, expected in zip(kernel, plain, strict=True):
            torch.testing.assert_close(got, expected, equal_nan=True)
            assert not got.isfinite().all()


def test_torch_accepts_the_operators() -> None:
    ops, sums = torch.ops.meseta, torch.zeros(1, 9)
    x, gradient = numbers(1, 5, 3), numbers(2, 5, 1)
    torch.library.opcheck(ops.mask_and_sum.default, (x, numbers(3, 5, 3), sums, 2))
    torch.library.opcheck(ops.scalar_linear.default, (x, numbers(3, 3), None, True))
    torch.library.opcheck(ops.scalar_linear_backward.default, (gradient, x, numbers(3, 3), True, sums, 4))
    logits, label = numbers(5, 4, 2).requires_grad_(), torch.ones(4, 2)
    torch.library.opcheck(ops.cross_entropy.default, (logits, label, torch.ones(2)))
    torch.library.opcheck(
        ops.cross_entropy_backward.default, (torch.tensor(1.0).double(), logits.detach(), label, None)
    )


def test_labels_and_factors_that_do_not_fit_are_named() -> None:
    logits = torch.zeros(3)
    for arguments in ((logits, torch.zeros(2), None), (logits[None, None], logits[None, None], None)):
        with pytest.raises(MesetaError, match="cross_entropy: logits"):
            torch.ops.meseta.cross_entropy(*arguments)
    with pytest.raises(MesetaError, match="cross_entropy: factors"):
        torch.ops.meseta.cross_entropy(logits, logits, torch.zeros(2, 3))
