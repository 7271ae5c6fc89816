"""Tests of row optimizers against torch.optim, published formulas in float64, published numbers, and vectors of
FBGEMM."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from meseta.ops.row_program.optimizer import Hyper, reference_step
from meseta.optim import make_row_optimizer
from meseta.spec import OptimizerSpec
from optim.specs import DIM, SPECS, draw

TORCH = [name for name, spec in SPECS.items() if spec.name in ("sgd", "adagrad", "adam", "adamw", "rmsprop")]


def hyper(spec: OptimizerSpec, step: int, dim: int = DIM, lr: float | None = None) -> Hyper:
    return Hyper(lr=spec.lr if lr is None else lr, step=step, embedding_dim=dim)


def torch_optimizer(spec: OptimizerSpec, rows: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """Return torch's optimizer over parameters of one row each, so that torch can clip each by its norm."""
    common = {"lr": spec.lr, "weight_decay": spec.weight_decay}
    if spec.name == "sgd":
        return torch.optim.SGD(rows, momentum=spec.momentum, **common)
    if spec.name == "adagrad":
        return torch.optim.Adagrad(rows, eps=spec.eps, initial_accumulator_value=spec.initial_accumulator, **common)
    if spec.name == "rmsprop":
        return torch.optim.RMSprop(rows, eps=spec.eps, alpha=spec.alpha, momentum=spec.momentum, **common)
    kind = torch.optim.AdamW if spec.name == "adamw" else torch.optim.Adam
    return kind(rows, eps=spec.eps, betas=(spec.beta1, spec.beta2), **common)


@pytest.mark.parametrize("name", TORCH)
def test_equals_torch_where_every_row_is_touched(name: str) -> None:
    spec = SPECS[name]
    rows = draw(6, DIM)
    parameters = [nn.Parameter(row.clone()) for row in rows]
    oracle, ours = torch_optimizer(spec, parameters), make_row_optimizer(spec)
    state = ours.init(rows)
    for k in range(1, 101):
        # Schedules change the rate from step to step.
        lr, g = spec.lr * (1 + k % 3), draw(6, DIM, seed=k)
        oracle.param_groups[0]["lr"] = lr
        for parameter, gradient in zip(parameters, g, strict=True):
            parameter.grad = gradient.clone()
            if spec.clip_value is not None:
                nn.utils.clip_grad_value_(parameter, spec.clip_value)
            if spec.clip_norm is not None:
                nn.utils.clip_grad_norm_(parameter, spec.clip_norm)
            parameter.grad += spec.l1 * parameter.detach().sign()
        oracle.step()
        rows, state = reference_step(ours, rows, g, state, hyper(spec, k, lr=lr))
        torch.testing.assert_close(rows, torch.stack([p.detach() for p in parameters]), rtol=0.0, atol=1e-12)


def test_lazy_adam_is_sparse_adam() -> None:
    # torch adds eps before it corrects the second moment, and the paper after: with almost none both are the same.
    spec = OptimizerSpec(name="adam", lr=0.1, eps=1e-16, beta1=0.8, beta2=0.95)
    table = nn.Parameter(draw(9, DIM))
    oracle = torch.optim.SparseAdam([table], lr=spec.lr, eps=spec.eps, betas=(spec.beta1, spec.beta2))
    ours, rows = make_row_optimizer(spec), table.detach().clone()
    state = ours.init(rows)
    generator = torch.Generator().manual_seed(0)
    for k in range(1, 31):
        ids, g = torch.randperm(9, generator=generator)[: 1 + k % 9], draw(9, DIM, seed=k)
        table.grad = torch.sparse_coo_tensor(ids[None], g[ids], table.shape, check_invariants=True)
        oracle.step()
        part = {name: value[ids] for name, value in state.items()}
        rows[ids], part = reference_step(ours, rows[ids], g[ids], part, hyper(spec, k))
        for name, value in part.items():
            state[name][ids] = value
        torch.testing.assert_close(rows, table.detach(), rtol=0.0, atol=1e-12)


# The formulas of the papers, for one row of numpy numbers, written without a look at the code under test.
# Each keeps its state in the dict `s`.


def norm(x: np.ndarray) -> float:
    return math.sqrt(math.fsum(float(v) ** 2 for v in x))


def published_rowwise_adagrad(c: OptimizerSpec, w: Any, g: Any, s: dict[str, Any], t: int, lr: float) -> Any:
    """arXiv 2104.05158, section 4.1.4: the moment of a row is the mean of the squares."""
    s["G"] = s.get("G", c.initial_accumulator) + np.mean(g**2)
    return w - lr * g / (math.sqrt(s["G"]) + c.eps)


def published_adam(c: OptimizerSpec, g: Any, square: Any, s: dict[str, Any], t: int) -> Any:
    """arXiv 1412.6980, algorithm 1: m hat / (sqrt(v hat) + eps)."""
    s["m"] = c.beta1 * s.get("m", 0.0) + (1 - c.beta1) * g
    s["v"] = c.beta2 * s.get("v", 0.0) + (1 - c.beta2) * square
    return s["m"] / (1 - c.beta1**t) / (np.sqrt(s["v"] / (1 - c.beta2**t)) + c.eps)


def published_rowwise_adam(c: OptimizerSpec, w: Any, g: Any, s: dict[str, Any], t: int, lr: float) -> Any:
    """Adam with the mean of the squares of a row as its second moment."""
    return w - lr * published_adam(c, g, np.mean(g**2), s, t)


def published_lamb(c: OptimizerSpec, w: Any, g: Any, s: dict[str, Any], t: int, lr: float) -> Any:
    """arXiv 1904.00962, algorithm 2."""
    direction = published_adam(c, g, g**2, s, t) + c.weight_decay * w
    return w - lr * norm(w) / norm(direction) * direction


def published_rowwise_lamb(c: OptimizerSpec, w: Any, g: Any, s: dict[str, Any], t: int, lr: float) -> Any:
    """LAMB with the second moment of row-wise Adam."""
    direction = published_adam(c, g, np.mean(g**2), s, t) + c.weight_decay * w
    return w - lr * norm(w) / norm(direction) * direction


def published_lars(c: OptimizerSpec, w: Any, g: Any, s: dict[str, Any], t: int, lr: float) -> Any:
    """arXiv 1708.03888, algorithm 1: eta is the trust coefficient, beta the weight decay, m the momentum."""
    local_lr = c.trust_coefficient * norm(w) / (norm(g) + c.weight_decay * norm(w))
    s["v"] = c.momentum * s.get("v", 0.0) + lr * local_lr * (g + c.weight_decay * w)
    return w - s["v"]


PUBLISHED = {
    "rowwise_adagrad": published_rowwise_adagrad,
    "rowwise_adagrad-from-zero": published_rowwise_adagrad,
    "rowwise_adam": published_rowwise_adam,
    "lamb": published_lamb,
    "lamb-decay": published_lamb,
    "rowwise_lamb": published_rowwise_lamb,
    "lars": published_lars,
    "lars-momentum": published_lars,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_equals_the_published_formula(name: str) -> None:
    spec, formula = SPECS[name], PUBLISHED[name]
    rows, ours = draw(6, DIM), make_row_optimizer(spec)
    expected: list[Any] = list(rows.numpy().copy())
    kept: list[dict[str, Any]] = [{} for _ in expected]
    state = ours.init(rows)
    for k in range(1, 51):
        lr, g = spec.lr * (1 + k % 3), draw(6, DIM, seed=k)
        expected = [
            formula(spec, w, gradient.numpy(), s, k, lr) for w, gradient, s in zip(expected, g, kept, strict=True)
        ]
        rows, state = reference_step(ours, rows, g, state, hyper(spec, k, lr=lr))
        torch.testing.assert_close(rows, torch.tensor(np.stack(expected)), rtol=0.0, atol=1e-11)


def ftrl_proximal(c: OptimizerSpec, gradients: Sequence[np.ndarray]) -> np.ndarray:
    """McMahan et al., KDD 2013, algorithm 1, from z = 0, element by element."""
    z, n, w = (np.zeros_like(gradients[0]) for _ in range(3))
    n += c.initial_accumulator
    for g in gradients:
        sigma = (np.sqrt(n + g**2) - np.sqrt(n)) / c.lr
        z, n = z + g - sigma * w, n + g**2
        w = -(z - np.sign(z) * c.l1) / ((c.beta + np.sqrt(n)) / c.lr + c.l2)
        w[np.abs(z) <= c.l1] = 0.0
    return w


@pytest.mark.parametrize("name", ["ftrl", "ftrl-penalties"])
def test_ftrl_from_rows_of_zeros_is_the_published_algorithm(name: str) -> None:
    spec, ours = SPECS[name], make_row_optimizer(SPECS[name])
    rows = torch.zeros(6, DIM, dtype=torch.float64)
    state = ours.init(rows)
    gradients = [0.3 * draw(6, DIM, seed=k) for k in range(1, 51)]
    for k, g in enumerate(gradients, start=1):
        rows, state = reference_step(ours, rows, g, state, hyper(spec, k))
        expected = torch.tensor(ftrl_proximal(spec, [g.numpy() for g in gradients[:k]]))
        torch.testing.assert_close(rows, expected, rtol=0.0, atol=1e-12)
    assert (rows == 0.0).any() == (spec.l1 > 0.0)


# Published numbers, or numbers computed by hand: (spec, first row, gradient of each step from the row,
# number of steps, last row, tolerance).
Literal = tuple[OptimizerSpec, list[float], Callable[[Tensor], Tensor], int, list[float], float]


def itself(w: Tensor) -> Tensor:
    """The gradient of w^2 / 2."""
    return w


def always(*gradient: float) -> Callable[[Tensor], Tensor]:
    return lambda w: torch.tensor([gradient], dtype=w.dtype)


LITERAL: dict[str, Literal] = {
    # Docstrings of tf.keras.optimizers (SGD, RMSprop, Adam), "Usage".
    "keras sgd": (OptimizerSpec(name="sgd", lr=0.1), [1.0], itself, 1, [0.9], 1e-12),
    "keras sgd momentum": (OptimizerSpec(name="sgd", lr=0.1, momentum=0.9), [1.0], itself, 2, [0.72], 1e-12),
    "keras rmsprop": (OptimizerSpec(name="rmsprop", lr=0.1, alpha=0.9, eps=1e-7), [10.0], itself, 1, [9.683772], 1e-6),
    "keras adam": (OptimizerSpec(name="adam", lr=0.1, eps=1e-7), [10.0], itself, 1, [9.9], 1e-6),
    # tensorflow/python/training/ftrl_test.py, testFtrlWithoutRegularization.
    "tensorflow ftrl": (
        OptimizerSpec(name="ftrl", lr=3.0, beta=0.0, initial_accumulator=0.1),
        [0.0, 0.0, 0.0, 0.0],
        always(0.1, 0.2, 0.01, 0.02),
        3,
        [-2.60260963, -4.29698515, -0.28432083, -0.56694895],
        1e-6,
    ),
    # By hand: w = 1 with g = 2 at every step: the sum is 4, 8 and 12, so the steps are 1, 1/sqrt(2) and 1/sqrt(3).
    "adagrad": (
        OptimizerSpec(name="adagrad", lr=1.0, eps=0.0),
        [1.0],
        always(2.0),
        3,
        [1 - 1 - 1 / math.sqrt(2) - 1 / math.sqrt(3)],
        1e-12,
    ),
    # By hand: the mean of 3^2, 4^2, 0 and 0 is 25/4, its root 5/2.
    "rowwise_adagrad": (
        OptimizerSpec(lr=0.5, eps=0.0),
        [0.0, 0.0, 0.0, 0.0],
        always(3.0, 4.0, 0.0, 0.0),
        1,
        [-0.6, -0.8, 0.0, 0.0],
        1e-12,
    ),
    # By hand: the first corrected moments are g and 25/4, so the step is lr * g / 2.5.
    "rowwise_adam": (
        OptimizerSpec(name="rowwise_adam", lr=0.5, eps=0.0),
        [0.0, 0.0, 0.0, 0.0],
        always(3.0, 4.0, 0.0, 0.0),
        1,
        [-0.6, -0.8, 0.0, 0.0],
        1e-12,
    ),
    # By hand: arXiv 1711.05101: 2 - 0.1 * 0.5 * 2 by decay, and the first step of Adam is lr * sign(g).
    "adamw": (OptimizerSpec(name="adamw", lr=0.1, eps=0.0, weight_decay=0.5), [2.0], always(7.0), 1, [1.8], 1e-12),
    # By hand: the direction is sign(g) = (1, -1) of norm sqrt(2), the row has norm 5.
    "lamb": (
        OptimizerSpec(name="lamb", lr=0.1, eps=0.0),
        [3.0, 4.0],
        always(1.0, -2.0),
        1,
        [3 - 0.5 / math.sqrt(2), 4 + 0.5 / math.sqrt(2)],
        1e-12,
    ),
    # By hand: the second moment is (9 + 16) / 2, so the direction is g / sqrt(12.5), and g / 5 after scaling to norm 1.
    "rowwise_lamb": (
        OptimizerSpec(name="rowwise_lamb", lr=0.1, eps=0.0),
        [6.0, -8.0],
        always(3.0, 4.0),
        1,
        [6 - 0.6, -8 - 0.8],
        1e-12,
    ),
    # By hand: rate 0.1 * 5 / (2 + 0.5 * 5) = 1/9; the gradient with decay is (1.5, 4), then lr = 0.9.
    "lars": (
        OptimizerSpec(name="lars", lr=0.9, trust_coefficient=0.1, weight_decay=0.5),
        [3.0, 4.0],
        always(0.0, 2.0),
        1,
        [3 - 0.15, 4 - 0.4],
        1e-12,
    ),
    # By hand: (3, 4) of norm 5 is scaled to norm 1; clip_value first makes it (3, 3).
    "clip_norm": (OptimizerSpec(name="sgd", lr=1.0, clip_norm=1.0), [0.0, 0.0], always(3, 4), 1, [-0.6, -0.8], 1e-6),
    "clip both": (
        OptimizerSpec(name="sgd", lr=1.0, clip_norm=1.0, clip_value=3.0),
        [0.0, 0.0],
        always(3, 4),
        1,
        [-math.sqrt(0.5), -math.sqrt(0.5)],
        1e-6,
    ),
}


@pytest.mark.parametrize("name", LITERAL)
def test_published_numbers(name: str) -> None:
    spec, first, gradient, num_steps, last, tolerance = LITERAL[name]
    rows, ours = torch.tensor([first], dtype=torch.float64), make_row_optimizer(spec)
    state = ours.init(rows)
    for k in range(1, num_steps + 1):
        rows, state = reference_step(ours, rows, gradient(rows), state, hyper(spec, k, dim=len(first)))
    torch.testing.assert_close(rows, torch.tensor([last], dtype=torch.float64), rtol=0.0, atol=tolerance)


# tensorflow/python/keras/optimizer_v2/ftrl_test.py: it starts from z = 0 whatever the rows are, and doubles l2.
TENSORFLOW_FTRL = {
    "testFtrlwithoutRegularization2": (3, {}, [-2.55607247, -3.98729396, -0.28232238, -0.56096673]),
    "testFtrlWithL1": (10, {"l1": 0.001}, [-7.66718769, -10.91273689, -0.93460727, -1.86147261]),
    "testFtrlWithBeta": (10, {"beta": 0.1}, [-6.096838, -9.162214, -0.717741, -1.425132]),
    "testFtrlWithL2_Beta": (10, {"beta": 0.1, "l2": 0.2}, [-2.735487, -4.704625, -0.294335, -0.586556]),
    "testFtrlWithL1_L2": (10, {"l1": 0.001, "l2": 4.0}, [-0.24059935, -0.46829352, -0.02406147, -0.04830509]),
}


@pytest.mark.parametrize("name", TENSORFLOW_FTRL)
def test_ftrl_has_the_numbers_of_tensorflow(name: str) -> None:
    num_steps, constants, last = TENSORFLOW_FTRL[name]
    spec = OptimizerSpec(name="ftrl", lr=3.0, initial_accumulator=0.1, **{"beta": 0.0, **constants})
    rows, ours = torch.tensor([[1.0, 2.0, 4.0, 3.0]], dtype=torch.float64), make_row_optimizer(spec)
    state = {name: value if name == "n" else torch.zeros_like(value) for name, value in ours.init(rows).items()}
    for k in range(1, num_steps + 1):
        g = torch.tensor([[0.1, 0.2, 0.01, 0.02]], dtype=torch.float64)
        rows, state = reference_step(ours, rows, g, state, hyper(spec, k, dim=4))
    torch.testing.assert_close(rows, torch.tensor([last], dtype=torch.float64), rtol=2e-6, atol=1e-8)


@pytest.mark.parametrize("name", ["ftrl", "ftrl-penalties"])
def test_ftrl_keeps_its_rows_when_only_the_rate_changes(name: str) -> None:
    spec, rows = SPECS[name], draw(6, DIM)
    ours = make_row_optimizer(spec)
    state = ours.init(rows)
    for k in range(1, 4):
        g = draw(6, DIM, seed=k) if k == 1 else torch.zeros_like(rows)
        before = rows
        rows, state = reference_step(ours, rows, g, state, hyper(spec, k, lr=spec.lr / 10**k))
    torch.testing.assert_close(rows, before, rtol=0.0, atol=1e-15)


FBGEMM = json.loads(Path(__file__).with_name("fbgemm_vectors.json").read_text())
FBGEMM_SPECS = {
    "sgd": OptimizerSpec(name="sgd", lr=0.1),
    "rowwise_adagrad": OptimizerSpec(lr=0.1, eps=1e-4),
    "adagrad": OptimizerSpec(name="adagrad", lr=0.1, eps=1e-4),
}


@pytest.mark.parametrize("name", FBGEMM_SPECS)
def test_equals_fbgemm(name: str) -> None:
    # Stored by peer_vectors.py; both are float32, so they agree to rounding.
    spec, case = FBGEMM_SPECS[name], FBGEMM["cases"][name]
    rows, ours = torch.tensor(case["start"]), make_row_optimizer(spec)
    state = ours.init(rows)
    for k, (touched, g) in enumerate(zip(case["touched"], case["gradients"], strict=True), start=1):
        part = {name: value[touched] for name, value in state.items()}
        gradients = torch.tensor(g)[touched]
        rows[touched], part = reference_step(ours, rows[touched], gradients, part, hyper(spec, k, dim=rows.shape[1]))
        for key, value in part.items():
            state[key][touched] = value
    torch.testing.assert_close(rows, torch.tensor(case["rows"]), rtol=0.0, atol=1e-6)
    for value, expected in zip(state.values(), case["states"], strict=True):
        torch.testing.assert_close(value.flatten(), torch.tensor(expected), rtol=1e-6, atol=1e-6)
