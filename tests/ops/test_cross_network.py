"""Tests of cross networks against plain torch, with their kernel under Triton's interpreter, and of concatenation."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sampling import product, sample

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("Triton compiles for the GPU here: see tests/gpu", allow_module_level=True)

from cross_cases import (
    LAYERS,
    NETWORKS,
    check_concat,
    check_cross_backward,
    check_cross_network,
    run_cross_backward,
)
from dense_cases import numbers
from meseta.ops import cross_network as operator
from meseta.ops.concat import _Concatenation
from meseta.ops.concat import _operator as concat_operator
from meseta.ops.cross_network import GpuCrossNetwork, cross_network, reference, triton

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NaN and infinity in masked lanes


@pytest.mark.parametrize("case", sample(LAYERS, 12, seed=1))
def test_element_wise_parts_of_layers(case: dict[str, Any]) -> None:
    check_cross_backward(**case, device="cpu")


@pytest.mark.parametrize("is_kernel", [False, True])
@pytest.mark.parametrize("case", sample(NETWORKS, 12, seed=2))
def test_networks(case: dict[str, Any], is_kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if is_kernel:
        monkeypatch.setattr(operator, "_cross_backward", triton.cross_backward)
    check_cross_network(**case, device="cpu")


@pytest.mark.parametrize("position", ["first", "inner", "last", "only"])
def test_nan_and_infinity_come_out(position: str) -> None:
    inputs = [numbers(k, 5, 3) for k in range(4)]
    for k, tensor in enumerate(inputs):
        tensor[k, 0], tensor[4, 1] = (torch.nan, torch.inf, -torch.inf, torch.nan)[k], torch.inf
    got = run_cross_backward(triton.cross_backward, inputs, position)
    expected = run_cross_backward(reference.cross_backward, inputs, position)
    torch.testing.assert_close(got, expected, equal_nan=True)
    assert not got[1].isfinite()[[0, 2, 4], [0, 0, 1]].any() and not got[0].isfinite()[[0, 1, 4], [0, 0, 1]].any()


def test_inputs_without_gradient_get_none() -> None:
    weight, bias, x0 = numbers(1, 3, 3).requires_grad_(), numbers(2, 3).requires_grad_(), numbers(3, 5, 3)
    GpuCrossNetwork.apply(x0, 1, weight, bias).sum().backward()
    torch.testing.assert_close(bias.grad, x0.sum(0))
    torch.testing.assert_close(weight.grad, x0.t() @ x0)
    assert x0.grad is None


@pytest.mark.parametrize("case", sample(product(
    num_samples=[1, 17, 40], widths=[(0, 5), (5, 0), (13, 200), (16, 416)], dtype=[torch.float32, torch.bfloat16]
), 6, seed=3))  # fmt: skip
def test_concatenated_columns(case: dict[str, Any]) -> None:
    check_concat(**case, device="cpu")


def test_gradients_of_columns_have_their_dtypes() -> None:
    a, b = numbers(1, 4, 3, dtype=torch.bfloat16).requires_grad_(), numbers(2, 4, 2).requires_grad_()
    out = _Concatenation.apply(a, b, torch.bfloat16)
    upper = numbers(3, 4, 5, dtype=torch.bfloat16)
    out.backward(upper)
    assert torch.equal(a.grad, upper[:, :3]) and torch.equal(b.grad, upper[:, 3:].float())
    assert torch.equal(out, torch.cat([a, b.bfloat16()], dim=1))


def test_torch_accepts_the_operators() -> None:
    x = numbers(1, 5, 3)
    torch.library.opcheck(operator._cross_backward, (x, x + 1, x + 2, x + 3, torch.zeros(1, 3), False, False))
    torch.library.opcheck(concat_operator, (x, numbers(2, 5, 2), torch.bfloat16))


def test_cpus_compute_layer_by_layer() -> None:
    """Results on a CPU are those of the layers on their own, bit for bit."""
    x0 = numbers(1, 40, 6).requires_grad_()
    down, up, biases = ([numbers(k, *shape) for k in (2, 3)] for shape in ((2, 6), (6, 2), (6,)))
    out = cross_network(x0, down, up, biases)
    torch.testing.assert_close(out, reference.cross_network(x0, down, up, biases))
    assert "GpuCrossNetwork" not in type(out.grad_fn).__name__
