"""Tests of dense optimizers and clipping: published rules in numpy, and the same bits for any number of threads."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from meseta.config import DenseOptimizerConfig
from meseta.optim.dense import GradientClipper, global_norm, make_dense_optimizer
from meseta.spec import MesetaError

NAMES = ["sgd", "adagrad", "adam", "adamw", "lamb"]


def numpy_steps(config: DenseOptimizerConfig, x: np.ndarray, gradients: list[np.ndarray]) -> np.ndarray:
    """Take textbook steps. LAMB is algorithm 2 of arXiv 1904.00962 with bias correction."""
    lr, decay, beta1, beta2 = config.lr, config.weight_decay, config.beta1, config.beta2
    eps = {"adagrad": 1e-10, "lamb": 1e-6}.get(config.name, 1e-8) if config.eps is None else config.eps
    square, first = np.zeros_like(x), np.zeros_like(x)
    for step, gradient in enumerate(gradients, start=1):
        g = gradient if config.name in ("adamw", "lamb") else gradient + decay * x
        if config.name == "sgd":
            first = config.momentum * first + g
            x = x - lr * first
        elif config.name == "adagrad":
            square = square + g * g
            x = x - lr * g / (np.sqrt(square) + eps)
        else:
            first = beta1 * first + (1 - beta1) * g
            square = beta2 * square + (1 - beta2) * g * g
            along = (first / (1 - beta1**step)) / (np.sqrt(square / (1 - beta2**step)) + eps)
            rate = 1.0
            if config.name == "adamw":
                x = x * (1 - lr * decay)
            elif config.name == "lamb":
                along = along + decay * x
                rate = np.sqrt((x**2).sum() / (along**2).sum()) if x.any() and along.any() else 1.0
            x = x - lr * rate * along
    return x


CONSTANTS: list[dict[str, Any]] = [
    *({"name": name, "weight_decay": decay} for name in NAMES for decay in (0.0, 0.1)),
    {"name": "sgd", "momentum": 0.9},
    {"name": "sgd", "momentum": 0.5, "weight_decay": 0.1},
    {"name": "adagrad", "eps": 0.01},
    *({"name": name, "beta1": 0.5, "beta2": 0.8, "eps": 0.01} for name in ("adam", "adamw", "lamb")),
]


@pytest.mark.parametrize("keys", CONSTANTS, ids=str)
def test_update_equals_the_published_rule(keys: dict[str, Any]) -> None:
    config = DenseOptimizerConfig(lr=0.05, **keys)
    draws = np.random.default_rng(0).normal(size=(4, 3, 5))
    starts = [draws[0], np.zeros((3, 5))]  # LAMB steps from zero as Adam does
    parameters = [nn.Parameter(torch.from_numpy(start.copy())) for start in starts]
    optimizer = make_dense_optimizer(config, parameters)
    for gradient in draws[1:]:
        for parameter in parameters:
            parameter.grad = torch.from_numpy(gradient.copy())
        optimizer.step()
    for start, parameter in zip(starts, parameters, strict=True):
        expected = numpy_steps(config, start, list(draws[1:]))
        np.testing.assert_allclose(parameter.detach().numpy(), expected, rtol=1e-10)


def test_the_rate_of_a_group_can_be_scheduled() -> None:
    for name in NAMES:
        parameter = nn.Parameter(torch.ones(3))
        optimizer = make_dense_optimizer(DenseOptimizerConfig(name=name, lr=0.5), iter([parameter]))
        assert optimizer.param_groups[0]["lr"] == 0.5
        optimizer.param_groups[0]["lr"] = 0.0
        parameter.grad = torch.ones(3)
        optimizer.step()
        assert parameter.tolist() == [1.0, 1.0, 1.0]


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("name", NAMES)
def test_bits_do_not_depend_on_the_number_of_threads(name: Any) -> None:
    shapes = [(257, 131), (100_003,), (1,), (7, 9)]
    results = []
    for num_threads in (1, 2, 3, 5):
        torch.set_num_threads(num_threads)
        generator = torch.Generator().manual_seed(0)
        parameters = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
        optimizer = make_dense_optimizer(DenseOptimizerConfig(name=name, lr=0.01, weight_decay=0.01), parameters)
        for _ in range(3):
            for parameter in parameters:
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            optimizer.step()
        results.append(parameters)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_state_resumes_bit_for_bit(name: Any) -> None:
    config = DenseOptimizerConfig(name=name, lr=0.01)
    gradients = torch.randn(4, 33, generator=torch.Generator().manual_seed(0))

    def run(parameter: nn.Parameter, optimizer: torch.optim.Optimizer, rows: torch.Tensor) -> None:
        for row in rows:
            parameter.grad = row.clone()
            optimizer.step()

    straight = nn.Parameter(torch.ones(33))
    run(straight, make_dense_optimizer(config, [straight]), gradients)
    half = nn.Parameter(torch.ones(33))
    saved = make_dense_optimizer(config, [half])
    run(half, saved, gradients[:2])
    resumed = nn.Parameter(half.detach().clone())
    loaded = make_dense_optimizer(config, [resumed])
    loaded.load_state_dict(saved.state_dict())
    run(resumed, loaded, gradients[2:])
    assert torch.equal(straight, resumed)


def gradients(scale: float = 1.0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in [(257, 131), (100_003,), (1,), (7, 9), (3,)]]
    for parameter in parameters[:-1]:  # the last one has no gradient
        parameter.grad = torch.randn(parameter.shape, generator=generator) * scale
    return parameters


@pytest.mark.parametrize("limit", [0.5, 100.0, 1e6])
def test_clipping_by_norm_and_by_value_equals_torch(limit: float) -> None:
    ours, torch_clipped = gradients(), gradients()
    GradientClipper(norm=limit)(ours)
    nn.utils.clip_grad_norm_(torch_clipped, limit)
    for a, b in zip(ours[:-1], torch_clipped[:-1], strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=0)
    ours, torch_clipped = gradients(), gradients()
    GradientClipper(value=limit, norm=20.0)(ours)
    nn.utils.clip_grad_value_(torch_clipped, limit)
    nn.utils.clip_grad_norm_(torch_clipped, 20.0)
    for a, b in zip(ours[:-1], torch_clipped[:-1], strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=0)
    assert ours[-1].grad is None
    GradientClipper()(ours)


def test_the_norm_is_exact_and_a_non_finite_gradient_is_reported() -> None:
    values = [p.grad for p in gradients()[:-1] if p.grad is not None]
    expected = np.linalg.norm(np.concatenate([g.double().numpy().ravel() for g in values]))
    assert global_norm(values) == pytest.approx(expected, rel=1e-14)
    assert global_norm([]) == 0.0
    for value in (float("nan"), float("inf")):
        parameters = gradients()
        parameters[0].grad[3, 3] = value  # type: ignore[index]
        with pytest.raises(MesetaError, match="not finite"):
            GradientClipper(norm=1.0)(parameters)


@pytest.mark.usefixtures("threads")
def test_the_norm_has_the_same_bits_for_any_number_of_threads() -> None:
    norms = set()
    for num_threads in (1, 2, 3, 5):
        torch.set_num_threads(num_threads)
        norms.add(global_norm([torch.randn(3_000_001, generator=torch.Generator().manual_seed(0))]))
    assert len(norms) == 1
