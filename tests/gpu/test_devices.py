"""Tests of the embedding collection on a GPU.

This folder needs torch, numpy, pytest and PYTHONPATH=src, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from meseta.comm import World
from meseta.embedding import EmbeddingBagCollection, ShardedEmbeddingBagCollection
from meseta.ops.bucketize import bucketize
from meseta.ops.bucketize import reference as bucketize_reference
from meseta.ops.coalesce import coalesce
from meseta.ops.coalesce import reference as coalesce_reference
from meseta.ops.core import MODULES
from meseta.ops.id_policy import POLICIES, apply_id_policy
from meseta.ops.id_policy import reference as policy_reference
from meseta.ops.pooled_lookup import pooled_lookup
from meseta.ops.pooled_lookup import reference as pooled_reference
from meseta.ops.random_rows import initial_rows, random_bits
from meseta.ops.random_rows import reference as random_reference
from meseta.sparse import KeyedJaggedTensor
from meseta.spec import FeatureSpec, InitSpec, MesetaError, OptimizerSpec, Plan, TableSpec

SOURCE = Path(__file__).parents[2] / "src"
# MESETA_TEST_DEVICE=cpu runs the tests without a GPU (the compiled core is needed then).
DEVICE = os.environ.get("MESETA_TEST_DEVICE", "cuda")
gpu = pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="torch sees no GPU here")

FEATURES = [
    FeatureSpec(name="a", table="item", pooling="sum", id_policy="clamp"),
    FeatureSpec(name="b", table="item", pooling="mean", weighted=True, id_policy="drop"),
    FeatureSpec(name="c", table="user", pooling="none"),
    FeatureSpec(name="d", table="user", pooling="sum", weighted=True, id_policy="hash"),
]
OPTIMIZERS = ["sgd", "adagrad", "rowwise_adagrad", "adam"]


def tables(optimizer: str, dtype: str) -> list[TableSpec]:
    start = {"initial_accumulator": 0.01} if "adagrad" in optimizer else {}
    spec = OptimizerSpec(name=optimizer, lr=0.05, **start)
    sizes = {"item": (40, 20), "user": (9, 33)}
    return [
        TableSpec(name=n, num_embeddings=rows, embedding_dim=dim, dtype=dtype, optimizer=spec)  # type: ignore[arg-type]
        for n, (rows, dim) in sizes.items()
    ]


def batch(step: int, num_samples: int = 300) -> KeyedJaggedTensor:
    """Return a batch in which some ids of a, b and d are outside their tables."""
    random = np.random.default_rng(step)
    limits = {"a": 44, "b": 44, "c": 9, "d": 12}
    lengths = [random.integers(0, 5, num_samples) for _ in limits]
    values = [random.integers(0, limit, n.sum()) for limit, n in zip(limits.values(), lengths, strict=True)]
    ids = torch.from_numpy(np.concatenate(values))
    return KeyedJaggedTensor(
        keys=tuple(limits),
        values=ids,
        lengths=torch.from_numpy(np.concatenate(lengths)),
        weights=torch.from_numpy(random.normal(size=ids.numel()).astype(np.float32)),
    )


def train(embeddings: EmbeddingBagCollection | ShardedEmbeddingBagCollection, device: str) -> list[Tensor]:
    """Return outputs, tables and states after three steps."""
    results = []
    for step in range(3):
        out = embeddings(batch(step).to(device))
        loss = torch.zeros((), dtype=torch.float64, device=device)
        for index, value in enumerate((out.pooled.values, out["c"].values)):
            random = torch.Generator().manual_seed(2 * step + index)
            target = torch.randn(value.shape, generator=random, dtype=torch.float64).to(device)
            loss = loss + ((value - target) ** 2).sum() / 100
            results.append(value.detach().cpu())
        loss.backward()
    for shard in embeddings.shards:
        results += [shard.weight.cpu(), *(value.cpu() for value in shard.state.values())]
    return results


class OnCpuByReference:
    """Unsharded collection in float64 with the reference of coalesce, which needs no compiled core."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("meseta.embedding.update.coalesce", coalesce_reference.coalesce)
        monkeypatch.setattr("meseta.ops.random_rows.random_bits", random_reference.random_bits)

    def train(self, optimizer: str) -> list[Tensor]:
        return train(EmbeddingBagCollection(tables(optimizer, "float64"), FEATURES, seed=2), "cpu")


def close(got: list[Tensor], expected: list[Tensor], atol: float) -> None:
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=0.0, atol=atol)


@gpu
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("dtype", "atol"), [("float64", 1e-10), ("float32", 1e-4)])
def test_training_equals_the_cpu(optimizer: str, dtype: str, atol: float, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = OnCpuByReference(monkeypatch).train(optimizer)
    monkeypatch.undo()
    got = EmbeddingBagCollection(tables(optimizer, dtype), FEATURES, seed=2, device=DEVICE)
    close(train(got, DEVICE), expected, atol)
    assert got.num_out_of_range is not None and (got.num_out_of_range[[0, 1, 3]] > 0).all()


@gpu
@pytest.mark.parametrize("scheme", ["table_wise", "row_wise", "column_wise", "data_parallel"])
def test_the_sharded_collection_has_the_bits_of_the_whole(scheme: str) -> None:
    specs = tables("rowwise_adagrad", "float32")
    whole = EmbeddingBagCollection(specs, FEATURES, seed=2, device=DEVICE)
    plan = Plan.from_dict({"tables": {"*": scheme}}, specs, 1)
    sharded = ShardedEmbeddingBagCollection(whole, plan, World.single(DEVICE))
    for got, expected in zip(train(sharded, DEVICE), train(whole, DEVICE), strict=True):
        assert torch.equal(got, expected)


@gpu
def test_training_twice_gives_the_same_bits() -> None:
    runs = [
        train(EmbeddingBagCollection(tables("adam", "float32"), FEATURES, seed=2, device=DEVICE), DEVICE)
        for _ in range(2)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@gpu
def test_an_id_outside_is_named() -> None:
    table = TableSpec(name="t", num_embeddings=4, embedding_dim=2)
    ours = EmbeddingBagCollection([table], [FeatureSpec(name="f", table="t")], device=DEVICE)
    with pytest.raises(MesetaError, match=r"id 4 from feature 'f', sample 1, is outside 0..3"):
        ours(KeyedJaggedTensor.from_lists({"f": [[0, 3], [1, 4]]}).to(DEVICE))


@gpu
def test_random_bits_and_initial_rows() -> None:
    got = random_bits(12345, (3, 40), (5, 30), DEVICE).cpu()
    assert torch.equal(got, random_reference.random_bits(12345, (3, 40), (5, 30), "cpu"))
    for kind in ("uniform", "normal"):
        spec = TableSpec(name="t", num_embeddings=50, embedding_dim=20, init=InitSpec(kind=kind, scale=1.0))
        rows = initial_rows(spec, rows=(0, 50), columns=(0, 20), seed=1, device=DEVICE).cpu()
        piece = initial_rows(spec, rows=(10, 30), columns=(3, 20), seed=1, device=DEVICE).cpu()
        assert torch.equal(piece, rows[10:30, 3:])
        assert rows.abs().max() <= (1.0 if kind == "uniform" else 7.0) and rows.std() > 0.5


@gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scaled", [False, True])
def test_coalesce_has_the_bits_of_the_reference(dtype: torch.dtype, scaled: bool) -> None:
    random = np.random.default_rng(0)
    sample = torch.from_numpy(np.sort(random.integers(0, 1000, 5000)))
    ids = torch.from_numpy(random.integers(0, 300, 5000))
    gradient = torch.from_numpy(random.normal(size=(1000, 24))).to(dtype)[:, 3:20]
    scale = torch.from_numpy(random.normal(size=5000)).to(dtype) if scaled else None
    args = (ids, sample, sample // 256, gradient, scale)
    moved = [None if a is None else a.to(DEVICE) for a in args]
    for got, expected in zip(coalesce(*moved), coalesce_reference.coalesce(*args), strict=True):  # type: ignore[arg-type]
        assert torch.equal(got.cpu(), expected)


@gpu
def test_pooled_lookup_bucketize_and_policies() -> None:
    kjt = batch(0)
    random = torch.Generator().manual_seed(0)
    weights = [torch.randn(50, dim, generator=random) for dim in (20, 33, 1, 16)]
    moved = kjt.to(DEVICE)
    flags = [False, True, False, True]
    got = pooled_lookup([w.to(DEVICE) for w in weights], moved.values, moved.offsets, moved.weights, flags)
    args = (kjt.values, kjt.offsets, kjt.weights, flags)
    plain = pooled_reference.pooled_lookup(weights, *args)
    exact = pooled_reference.pooled_lookup([w.double() for w in weights], *args)
    ulp = torch.finfo(torch.float32).eps * float(exact.abs().max())
    assert (got.cpu() - exact).abs().max() <= 2 * (plain - exact).abs().max() + ulp

    lengths = kjt["c"].lengths
    cuts = [0, 2, 3, 9]
    for a, b in zip(
        bucketize(kjt["c"].values.to(DEVICE), lengths.to(DEVICE), cuts),
        bucketize_reference.bucketize(kjt["c"].values, lengths, cuts, [len(cuts)]),
        strict=False,  # the reference counts too
    ):
        assert torch.equal(a.cpu(), b)

    limits, policies = [40, 40, 8, 9], [f.id_policy for f in FEATURES]
    there = apply_id_policy(moved, limits, policies)
    starts, numbers = [0, *accumulate(kjt.batch_sizes)], [POLICIES.index(policy) for policy in policies]
    values, lengths, _, first_error = policy_reference.fix_ids(kjt.values, kjt.lengths, starts, limits, numbers)
    assert torch.equal(there.kjt.values.cpu(), values) and torch.equal(there.kjt.lengths.cpu(), lengths)
    counts = policy_reference.count_outside(kjt.values, kjt.key_offsets, limits)
    assert torch.equal(there.num_outside.cpu(), counts)
    assert torch.equal(there.first_error.cpu(), first_error) and first_error[0] == 2


# Packages that a GPU machine without the extras lacks.
ABSENT = [
    "pyarrow",
    "pydantic",
    "typer",
    "rich",
    "jaxtyping",
    "yaml",
    "nanobind",
    "fsspec",
    "safetensors",
    *MODULES.values(),
]
USED = ["embedding", "ops.coalesce", "ops.random_rows", "sparse", "optim", "comm", "storage", "planner", "spec"]


def bare(program: str) -> subprocess.CompletedProcess[str]:
    """Run a program in an interpreter that cannot import ABSENT."""
    blocked = f"import sys\nsys.modules.update(dict.fromkeys({ABSENT}))\n"
    return subprocess.run(
        [sys.executable, "-c", blocked + program],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        check=False,
    )


@pytest.mark.parametrize("modules", [USED, *(pytest.param([m], marks=pytest.mark.soak) for m in USED)], ids=",".join)
def test_imports_need_torch_and_numpy_alone(modules: list[str]) -> None:
    run = bare("\n".join(f"import meseta.{module}" for module in modules))
    assert run.returncode == 0, run.stderr


def test_a_missing_core_is_named_at_its_first_use() -> None:
    run = bare(
        "import meseta\n"
        "from meseta.spec import MesetaError\n"
        "table = meseta.TableSpec(name='t', num_embeddings=4, embedding_dim=2)\n"
        "ours = meseta.EmbeddingBagCollection([table], [meseta.FeatureSpec(name='f', table='t')])\n"
        "try:\n    ours(meseta.KeyedJaggedTensor.from_lists({'f': [[0]]}))\n"
        "except MesetaError as error:\n    print(error)\n"
    )
    assert run.returncode == 0, run.stderr
    assert "the compiled core meseta._C" in run.stdout and "pip install" in run.stdout
