"""Tests of user-defined row optimizers, and of errors about constants and records."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch

import meseta
from meseta.config.embedding import RowOptimizerConfig
from meseta.ops.row_program.optimizer import Hyper, reference_step
from meseta.optim import RowOptimizer, element_state, make_row_optimizer, row_state
from meseta.spec import MesetaError, OptimizerSpec
from meseta.spec.optimizer import USED_FIELDS
from optim.specs import DIM, draw


def heavy_ball(spec: OptimizerSpec) -> RowOptimizer:
    """Return SGD with the momentum of an option."""

    def update(w: Any, g: Any, state: Any, stats: Any, h: Hyper) -> Any:
        velocity = state["velocity"] * spec.options["momentum"] + g
        return w - velocity * h.lr, {"velocity": velocity}

    return RowOptimizer(name="heavy_ball", init=lambda weight: {"velocity": element_state(weight)}, update=update)


def traceless(spec: OptimizerSpec) -> RowOptimizer:
    return RowOptimizer(name="traceless", init=lambda weight: {}, update=lambda w, g, s, t, h: (w - g.exp(), s))


def per_row(spec: OptimizerSpec) -> RowOptimizer:
    return RowOptimizer(name="per_row", init=lambda w: {"s": row_state(w)}, update=lambda w, g, s, t, h: (w - g, s))


@pytest.fixture(autouse=True)
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Module with these functions, importable under a fixed name."""
    made = ModuleType("own_optimizers")
    made.__dict__.update(
        heavy_ball=heavy_ball, traceless=traceless, per_row=per_row, constant=3, nothing=lambda spec: None
    )
    monkeypatch.setitem(sys.modules, "own_optimizers", made)
    return made


def own(name: str, **constants: Any) -> OptimizerSpec:
    return OptimizerSpec(name=f"own_optimizers:{name}", **constants)


MOMENTUM = {"options": {"momentum": 0.9}, "element_states": 1}


@pytest.mark.parametrize(
    "added", [{}, {"clip_norm": 2.0}, {"weight_decay": 0.1}, {"weight_decay": 0.1, "weight_decay_mode": "decoupled"}]
)
def test_a_custom_optimizer_equals_the_built_in_one(added: dict[str, Any]) -> None:
    custom = make_row_optimizer(own("heavy_ball", lr=0.1, **MOMENTUM, **added))
    built_in = make_row_optimizer(OptimizerSpec(name="sgd", lr=0.1, momentum=0.9, **added))
    rows = other = draw(6, DIM, dtype=torch.float32)
    state, other_state = custom.init(rows), built_in.init(rows)
    for k in range(1, 6):
        g, h = draw(6, DIM, seed=k, dtype=torch.float32), Hyper(lr=0.1, step=k, embedding_dim=DIM)
        rows, state = reference_step(custom, rows, g, state, h)
        other, other_state = reference_step(built_in, other, g, other_state, h)
    assert torch.equal(rows, other) and torch.equal(state["velocity"], other_state["velocity"])


def test_a_custom_optimizer_trains_a_table() -> None:
    def trained(optimizer: OptimizerSpec) -> torch.Tensor:
        table = meseta.TableSpec(name="t", num_embeddings=9, embedding_dim=4, optimizer=optimizer)
        embeddings = meseta.EmbeddingBagCollection([table], [meseta.FeatureSpec(name="f", table="t")])
        for _ in range(3):
            out = embeddings(meseta.KeyedJaggedTensor.from_lists({"f": [[1, 2], [2, 8]]}))
            out.pooled.values.square().sum().backward()
        return embeddings.shards[0].weight

    weight = trained(own("heavy_ball", lr=0.1, **MOMENTUM))
    assert torch.equal(weight, trained(OptimizerSpec(name="sgd", lr=0.1, momentum=0.9)))


def test_equal_specs_share_one_record_and_a_new_function_makes_a_new_one(module: ModuleType) -> None:
    first = make_row_optimizer(own("heavy_ball", **MOMENTUM))
    assert make_row_optimizer(own("heavy_ball", **MOMENTUM)) is first
    assert make_row_optimizer(own("heavy_ball", options={"momentum": 0.5}, element_states=1)) is not first
    module.__dict__["heavy_ball"] = partial(heavy_ball)  # as when a notebook's cell runs again
    assert make_row_optimizer(own("heavy_ball", **MOMENTUM)) is not first


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (lambda: OptimizerSpec(name="no_such_module:lion"), "module 'no_such_module' cannot be imported"),
        (lambda: OptimizerSpec(name=":lion"), "module '' cannot be imported"),
        (lambda: own("heavy_bal", **MOMENTUM), "has no function 'heavy_bal'; did you mean 'heavy_ball'?"),
        (lambda: own("constant"), "has no function 'constant'"),
        (lambda: own("nothing"), "the factory must return a RowOptimizer, got NoneType"),
        (lambda: own("traceless"), "the method or attribute 'exp' cannot be traced"),
        (lambda: own("per_row"), "set element_states=0, row_states=1"),
        (lambda: own("heavy_ball", options={"momentum": 0.9}), "set element_states=1, row_states=0"),
    ],
)
def test_errors_of_custom_optimizers_are_named(spec: Callable[[], OptimizerSpec], words: str) -> None:
    with pytest.raises(MesetaError) as caught:
        make_row_optimizer(spec())
    assert words in str(caught.value), str(caught.value)


def test_the_config_has_the_fields_and_defaults_of_the_spec() -> None:
    assert OptimizerSpec(**RowOptimizerConfig().model_dump()) == OptimizerSpec()
    assert list(RowOptimizerConfig.model_fields) == list(OptimizerSpec.__dataclass_fields__)


CHANGED: dict[str, Any] = {
    "lr": 0.5,
    "weight_decay_mode": "decoupled",
    "clip_value": 1.0,
    "clip_norm": 1.0,
    "stepped_rows": "all",
    "options": {"a": 1},
    "element_states": 1,
    "row_states": 1,
}


@pytest.mark.parametrize("name", USED_FIELDS)
def test_a_constant_without_effect_is_refused_and_one_with_effect_has_it(name: str) -> None:
    fields = [field for field in OptimizerSpec.__dataclass_fields__ if field != "name"]
    for field in fields:
        constants = {field: CHANGED.get(field, 0.25)}
        if field not in USED_FIELDS[name]:
            with pytest.raises(MesetaError, match=f"row optimizer '{name}' does not use {field}, which is set to"):
                OptimizerSpec(name=name, **constants)
        elif field not in ("weight_decay_mode", "stepped_rows"):  # these act elsewhere, or together with another
            # Without decay, LARS does not see how long a gradient is.
            others = {"weight_decay": 0.5} if name == "lars" and field != "weight_decay" else {}
            changed, unchanged = OptimizerSpec(name=name, **constants, **others), OptimizerSpec(name=name, **others)
            assert moved(changed) != moved(unchanged), field


def moved(spec: OptimizerSpec) -> list[list[float]]:
    """Return the rows after three steps."""
    optimizer, rows = make_row_optimizer(spec), 3.0 * draw(2, DIM)
    state = optimizer.init(rows)
    for k in range(1, 4):
        h = Hyper(lr=spec.lr, step=k, embedding_dim=DIM)
        rows, state = reference_step(optimizer, rows, 3.0 * draw(2, DIM, seed=k), state, h)
    return rows.tolist()
