"""Tests of values that tables, features, row optimizers and topologies refuse."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from meseta.spec import FeatureSpec, InitSpec, MesetaError, OptimizerSpec, TableSpec, Topology, check_features


@pytest.fixture(autouse=True)
def as_for_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the type checks of the test run, which would fail before the tested errors."""
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)


def refused(make: Any, *words: str) -> None:
    with pytest.raises(MesetaError) as caught:
        make()
    for word in words:
        assert word in str(caught.value), str(caught.value)


def test_defaults() -> None:
    table = TableSpec(name="user", num_embeddings=10, embedding_dim=4)
    assert (table.dtype, table.init.kind, table.init.scale) == ("float32", "uniform", None)
    assert (table.optimizer.name, table.optimizer.lr, table.optimizer.eps) == ("rowwise_adagrad", 0.01, 1e-8)
    feature = FeatureSpec(name="history", table="user")
    assert (feature.pooling, feature.weighted, feature.id_policy) == ("sum", False, "error")
    assert Topology(num_hosts=2, devices_per_host=8).num_ranks == 16


def test_specs_are_frozen_and_numpy_sizes_become_int() -> None:
    table = TableSpec(name="user", num_embeddings=np.int64(10), embedding_dim=np.int32(4))  # type: ignore[arg-type]
    assert type(table.num_embeddings) is int and type(table.embedding_dim) is int
    with pytest.raises(dataclasses.FrozenInstanceError):
        table.num_embeddings = 3  # type: ignore[misc]


@pytest.mark.parametrize("field", ["num_embeddings", "embedding_dim"])
@pytest.mark.parametrize("value", [0, -1, 1e6, "7", None, True])
def test_sizes_are_whole_numbers(field: str, value: Any) -> None:
    make = lambda: TableSpec(**{"name": "user", "num_embeddings": 3, "embedding_dim": 4, field: value})  # noqa: E731
    most = 2**63 - 1 if field == "num_embeddings" else 2**31 - 1
    refused(make, f"table 'user': {field} must be an integer in 1..{most}, got {value!r}")


@pytest.mark.parametrize("name", ["", "*", 3, None])
def test_names_are_text(name: Any) -> None:
    refused(
        lambda: TableSpec(name=name, num_embeddings=1, embedding_dim=1),
        f"table {name!r}: the name must be a non-empty string",
    )
    refused(lambda: FeatureSpec(name=name, table="user"), f"feature {name!r}: the name must be a non-empty string")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: TableSpec(name="t", num_embeddings=1, embedding_dim=1, dtype="float23"), "did you mean 'float32'?"),
        (lambda: FeatureSpec(name="f", table="t", pooling="avg"), "feature 'f': pooling 'avg' is unknown; available:"),
        (
            lambda: FeatureSpec(name="f", table="t", id_policy="dorp"),
            "id_policy 'dorp' is unknown; did you mean 'drop'?",
        ),
        (lambda: FeatureSpec(name="f", table="t", pooling="none", weighted=True), "set weighted=False"),
        (lambda: OptimizerSpec(name="adagard"), "did you mean 'adagrad'?"),
        (lambda: OptimizerSpec(name="adam", beta1=1.0), "row optimizer 'adam': beta1 must be in [0, 1), got 1.0"),
        (lambda: OptimizerSpec(beta2=float("nan")), "beta2 must be a finite number, got nan"),
        (lambda: OptimizerSpec(lr=-0.1), "lr must not be negative, got -0.1"),
        (lambda: OptimizerSpec(lr=float("inf")), "lr must be a finite number, got inf"),
        (lambda: OptimizerSpec(lr="0.1"), "lr must be a finite number, got '0.1'"),
        (lambda: OptimizerSpec(eps=-1e-8), "eps must not be negative"),
        (lambda: OptimizerSpec(initial_accumulator=None), "initial_accumulator must be a finite number, got None"),
        (lambda: OptimizerSpec(name="adamw", weight_decay_mode="decoupled"), "does not use weight_decay_mode"),
        (lambda: OptimizerSpec(name="frozen", lr=0.1), "or keep the optimizer of a resumed run and set lr=0"),
        (lambda: OptimizerSpec(name="sgd", momentum=1.0), "momentum must be in [0, 1), got 1.0"),
        (lambda: OptimizerSpec(name="sgd", weight_decay=-0.1), "weight_decay must not be negative, got -0.1"),
        (lambda: OptimizerSpec(weight_decay_mode="couple"), "did you mean 'coupled'?"),
        (
            lambda: OptimizerSpec(name="adamw", stepped_rows="looked_up"),
            "set stepped_rows to 'touched', or use one of sgd, adagrad, rowwise_adagrad, adam, rowwise_adam, rmsprop",
        ),
        (
            lambda: OptimizerSpec(name="sgd", stepped_rows="looked_up", weight_decay_mode="decoupled"),
            "set weight_decay_mode to 'coupled', or stepped_rows to 'touched'",
        ),
        (lambda: OptimizerSpec(clip_norm=0.0), "clip_norm must be positive, or None to disable clipping, got 0.0"),
        (lambda: OptimizerSpec(clip_value="1"), "clip_value must be a finite number, got '1'"),
        (lambda: OptimizerSpec(name="ftrl", beta=0.0), "the sum of beta and initial_accumulator must not be 0"),
        (lambda: OptimizerSpec(name="a:b", element_states=1.5), "element_states must be a non-negative integer"),
        (lambda: OptimizerSpec(name="a:b", options=[3]), "options must map names to values, got [3]"),
        (lambda: OptimizerSpec(name="a:b", options={"x": {1, 2}}), "options must be serializable as JSON"),
        (lambda: OptimizerSpec(name=7), "name 7 is unknown"),
        (lambda: InitSpec(kind="gauss"), "init: kind 'gauss' is unknown"),
        (lambda: InitSpec(scale=float("nan")), "init: scale must be a finite number"),
        (lambda: InitSpec(scale=-1.0), "scale must not be negative for kind 'uniform'"),
        (lambda: Topology(num_hosts=0), "num_hosts must be a positive integer"),
        (lambda: Topology(devices_per_host=0), "devices_per_host must be a positive integer"),
        (lambda: Topology(hbm_bytes=0), "hbm_bytes must be an integer >= 1, or None"),
    ],
)
def test_bad_values_are_named(make: Any, words: str) -> None:
    refused(make, words)


def test_a_constant_start_may_be_negative() -> None:
    assert InitSpec(kind="constant", scale=-1.0).scale == -1.0


def test_optimizers_are_hashable_and_options_are_copied() -> None:
    options = {"rate": 0.5}
    spec = OptimizerSpec(name="a:b", options=options)
    options["rate"] = 0.7
    assert spec.options == {"rate": 0.5} and spec.is_custom and hash(spec) == hash(OptimizerSpec(name="a:b"))
    assert spec != OptimizerSpec(name="a:b")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_types_of_rows(dtype: Any) -> None:
    assert TableSpec(name="t", num_embeddings=1, embedding_dim=1, dtype=dtype).dtype == dtype


def test_features_must_fit_the_tables() -> None:
    user = TableSpec(name="user", num_embeddings=1, embedding_dim=1)
    seen, sold = FeatureSpec(name="seen", table="user"), FeatureSpec(name="sold", table="user")
    check_features([user], [seen, sold])
    refused(lambda: check_features([user, user], []), "table 'user' is defined 2 times")
    refused(lambda: check_features([user], [seen, seen]), "feature 'seen' is defined 2 times")
    refused(
        lambda: check_features([user], [FeatureSpec(name="f", table="usr")]),
        "feature 'f' reads the unknown table 'usr'; did you mean 'user'?",
    )
