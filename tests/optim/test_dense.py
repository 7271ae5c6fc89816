"""Dense optimizers: the published update rules in numpy, and the same bits for any number of threads."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from meseta.config import DenseOptimizerConfig
from meseta.optim.dense import make_dense_optimizer

NAMES = ["sgd", "adagrad", "adam", "adamw"]


def numpy_steps(name: str, x: np.ndarray, gradients: list[np.ndarray], lr: float, decay: float) -> np.ndarray:
    """Textbook updates with torch's documented constants: betas (0.9, 0.999), eps 1e-8 (adagrad 1e-10)."""
    square, first = np.zeros_like(x), np.zeros_like(x)
    for step, gradient in enumerate(gradients, start=1):
        if name == "adamw":
            x, g = x * (1 - lr * decay), gradient
        else:
            g = gradient + decay * x
        if name == "sgd":
            x = x - lr * g
        elif name == "adagrad":
            square = square + g * g
            x = x - lr * g / (np.sqrt(square) + 1e-10)
        else:
            first = 0.9 * first + 0.1 * g
            square = 0.999 * square + 0.001 * g * g
            x = x - lr * (first / (1 - 0.9**step)) / (np.sqrt(square / (1 - 0.999**step)) + 1e-8)
    return x


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("name", NAMES)
def test_update_equals_the_published_rule(name: Any, weight_decay: float) -> None:
    draws = np.random.default_rng(0).normal(size=(4, 3, 5))
    parameter = nn.Parameter(torch.from_numpy(draws[0].copy()))
    optimizer = make_dense_optimizer(DenseOptimizerConfig(name=name, lr=0.05, weight_decay=weight_decay), [parameter])
    for gradient in draws[1:]:
        parameter.grad = torch.from_numpy(gradient)
        optimizer.step()
    expected = numpy_steps(name, draws[0], list(draws[1:]), 0.05, weight_decay)
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
