"""Sharded dense parts (dense 'fsdp') train the model of one process, and resume under other modes and ranks."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from meseta import checkpoint
from meseta.checkpoint.files.block import read_tensors
from meseta.checkpoint.manifest import read_manifest
from meseta.comm import World
from meseta.comm.dense import full_tensor, make_shard_sum
from meseta.config import RunConfig
from meseta.config.models import MODEL_NAMES
from meseta.data.dataset.dataset import Dataset
from meseta.embedding import EmbeddingBagCollection, shard
from meseta.optim.dense import global_norm
from meseta.sparse import KeyedJaggedTensor
from meseta.spec import FeatureSpec, MesetaError, Plan, TableSpec
from meseta.telemetry.span import TransferTimes
from meseta.train.setup.build import make_specs
from meseta.train.setup.meta_model import make_meta_model
from small_run import predicted_memory, settings, train

from .pool import RankPool
from .scenario import IS_SOAK
from .test_shard import user_loop
from .test_training import STEPS, WIDE, evaluate_here, losses, message_of, train_until

Ranks = Callable[[int], RankPool]
HOSTS = {"devices_per_host": 2, "tables": {"*": "table_wise"}}
"""Two hosts of two devices on four ranks, one host on two."""
COMMON = {
    **WIDE,
    "embedding__dtype": "float64",
    "train__epochs": 2,
    "train__log_every_steps": 1,
    **STEPS,
}
SHARDED = {"dense__sharding": "fsdp", "plan": HOSTS}


def dense_of(run_dir: Path) -> dict[str, torch.Tensor]:
    """Return parameters and optimizer state of the dense part in the newest checkpoint."""
    path = checkpoint.latest_complete(run_dir / "checkpoints")
    assert path is not None
    tensors = read_tensors(path, read_manifest(path)["dense"])
    return {name: t for name, t in tensors.items() if name.startswith(("model.", "optimizer."))}


def check_equal(one: Path, other: Path, tolerance: float) -> None:
    np.testing.assert_allclose(losses(other), losses(one), rtol=0, atol=tolerance)
    expected, tensors = dense_of(one), dense_of(other)
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(
            tensors[name], tensor, rtol=0, atol=tolerance, msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.parametrize(("size", "batch_size"), [(2, 7), pytest.param(4, 24, marks=pytest.mark.soak), (4, 3)])
def test_a_custom_loop(ranks: Ranks, size: int, batch_size: int) -> None:
    """Slices are uneven, and some ranks have no samples. Modules are unused, frozen, or used in every second step."""
    alone = user_loop(None, batch_size)
    plan = {**HOSTS, "tables": {"user": "row_wise", "item": "column_wise"}}
    results = ranks(size).run(user_loop, plan, batch_size, "fsdp")
    parts = np.nansum([result["losses"] for result in results], axis=0)  # NaN is the mean over no samples
    np.testing.assert_allclose(parts, alone["losses"], rtol=0, atol=1e-10)
    for result in results:
        for got, expected in zip(result["dense"], alone["dense"], strict=True):
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"lr": 0.05, "momentum": 0.9},
    "adagrad": {"lr": 0.01},
    "adam": {"lr": 0.01},
    "adamw": {"lr": 0.01, "weight_decay": 0.1},
    "lamb": {"lr": 0.01, "weight_decay": 0.1},
}


@pytest.mark.parametrize(
    ("name", "size"),
    [
        *(pytest.param(name, 2, marks=[] if name == "lamb" else pytest.mark.soak) for name in OPTIMIZERS),
        pytest.param("lamb", 4, marks=pytest.mark.soak),
    ],
)
def test_every_optimizer_with_clipping_and_accumulation(
    ranks: Ranks, tiny: Path, tmp_path: Path, name: str, size: int
) -> None:
    changes = {
        **COMMON,
        "dense__optimizer": {"name": name, **OPTIMIZERS[name]},
        "dense__clip_value": 0.02,
        "dense__clip_norm": 0.05,
        "train__accumulate_steps": (3 if IS_SOAK else 2) if name in ("adam", "lamb") else 1,
    }
    one = train(settings(tiny, tmp_path / "one", **changes))
    many = ranks(size).run(train, settings(tiny, tmp_path / "many", **changes, **SHARDED))
    check_equal(tmp_path / "one", tmp_path / "many", 1e-10)
    assert many[0]["test"]["auc"] == pytest.approx(one["test"]["auc"], abs=1e-6)
    assert (tmp_path / "many" / "report.html").stat().st_size > 1000


def test_float32(ranks: Ranks, tiny: Path, tmp_path: Path) -> None:
    changes = {**COMMON, "embedding__dtype": "float32", "model__batch_norm": True, "model__dropout": 0.2}
    if not IS_SOAK:
        changes["train__max_steps"] = 2
    train(settings(tiny, tmp_path / "one", **changes))
    ranks(4 if IS_SOAK else 2).run(train, settings(tiny, tmp_path / "many", **changes, **SHARDED))
    np.testing.assert_allclose(losses(tmp_path / "many"), losses(tmp_path / "one"), rtol=0, atol=1e-5)


MODELS = [pytest.param(name, marks=[] if name == "xdeepfm" else pytest.mark.soak) for name in MODEL_NAMES]


@pytest.mark.parametrize("model", [*MODELS, "own_models:Plain"])
def test_every_model(ranks: Ranks, tiny: Path, tmp_path: Path, model: str) -> None:
    changes = {
        **({} if model == "logistic_regression" else WIDE),
        "embedding__dtype": "float64",
        "model__name": model,
        "model__deep_mlp": [8],
        "model__attention_dim": 8,
        "model__cin_layers": [6, 4],
        "model__expert_mlp": [8],
        "model__tower_mlp": [4],
        "train__max_steps": 3 if IS_SOAK else 2,
        "train__log_every_steps": 1,
    }
    train(settings(tiny, tmp_path / "one", **changes))
    ranks(2).run(train, settings(tiny, tmp_path / "two", **changes, **SHARDED))
    check_equal(tmp_path / "one", tmp_path / "two", 1e-10)


def test_replicated_hybrid_and_full_sharding(ranks: Ranks, tiny: Path, tmp_path: Path) -> None:
    """A DHEN with all modules has one unit per layer. The optimizer is SGD because the batch norm cancels the bias of a
    convolution, so that the bias's gradient is rounding error, which Adam would normalize to full steps."""
    changes = {
        **COMMON,
        "model": {"name": "dhen", "embedding_dim": 4, "interactions": ALL_MODULES, "layers": 2},
        "dense__optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9},
        **({"train__max_steps": 10} if IS_SOAK else {"train__max_steps": 2, "train__batch_size": 90}),
    }
    train(settings(tiny, tmp_path / "one", **changes))
    cases = [("hybrid", 4, "fsdp", 2), ("whole", 4, "replicated", 2), ("everywhere", 4, "fsdp", 4)]
    for name, size, sharding, per_host in cases if IS_SOAK else cases[:1]:
        plan = {**HOSTS, "devices_per_host": per_host}
        ranks(size).run(train, settings(tiny, tmp_path / name, **changes, dense__sharding=sharding, plan=plan))
        check_equal(tmp_path / "one", tmp_path / name, 1e-10)


ALL_MODULES = {"dot": 3, "self_attention": 2, "cross": 2, "linear": 2, "convolution": 2}


def test_resumed_on_any_number_of_ranks_in_either_mode(ranks: Ranks, tiny: Path, tmp_path: Path) -> None:
    train(settings(tiny, tmp_path / "whole", **COMMON))
    cut = {**COMMON, "checkpoint__every_steps": 2}
    ranks(4).run(train_until, settings(tiny, tmp_path / "cut", **cut, **SHARDED), 3)
    cases = [(1, "replicated"), (2, "fsdp"), (2, "replicated"), (4, "fsdp")]
    for size, sharding in cases if IS_SOAK else cases[:2]:
        run_dir = tmp_path / f"{sharding}{size}"
        shutil.copytree(tmp_path / "cut", run_dir)
        document = settings(tiny, run_dir, **cut, dense__sharding=sharding)
        if size == 1:
            train(document)
        else:
            ranks(size).run(train, {**document, "plan": HOSTS})
        check_equal(tmp_path / "whole", run_dir, 1e-10)
    for result in ranks(2).run(evaluate_here, tmp_path / "fsdp2"):
        assert result["logloss"] == pytest.approx(evaluate_here(tmp_path / "whole")["logloss"], abs=1e-10)


class Head(nn.Module):
    """Two layers behind an embedding. `spoil` names a fault that prevents sharding."""

    def __init__(self, spoil: str) -> None:
        super().__init__()
        tables = [TableSpec(name="t", num_embeddings=9, embedding_dim=16)]
        self.tables = EmbeddingBagCollection(tables, [FeatureSpec(name="f", table="t")])
        self.spoil = spoil
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        if spoil == "shared":
            self.second.weight = self.first.weight
        if spoil == "dtypes":
            self.second.bias = nn.Parameter(torch.zeros(16, dtype=torch.float64))
        if spoil == "nothing":
            del self.first, self.second
            self.weight = nn.Parameter(torch.zeros(16))


def refused_here(spoil: str, plan: dict[str, Any]) -> str:
    """Return the error of sharding. Runs on every rank."""
    return message_of(lambda: shard(Head(spoil), plan, dense="fsdp"))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        ("shared", "modules 'first' and 'second' share a parameter"),
        ("dtypes", "module 'second' must have parameters of one dtype"),
        ("nothing", "has no module with parameters that can be sharded"),
        ("hosts", "requires hosts of at least two devices, got 2 ranks on hosts of 1"),
    ],
)
def test_models_that_cannot_be_sharded(ranks: Ranks, spoil: str, words: str) -> None:
    plan = {"devices_per_host": 1 if spoil == "hosts" else 2, "tables": {"t": "table_wise"}}
    texts = ranks(2).run(refused_here, spoil, plan)
    assert texts[0] == texts[1] and words in texts[0] and "replicated" in texts[0]


def test_a_module_that_is_not_called(ranks: Ranks, tiny: Path, tmp_path: Path) -> None:
    document = settings(tiny, tmp_path / "run", **SHARDED, model__name="own_models:Uncalled")
    texts = ranks(2).run(message_of, train, document)
    assert texts[0] == texts[1] and texts[0].startswith("step 1: ")
    assert "without calling it" in texts[0] and "\n" not in texts[0]


def predicted_here(document: dict[str, Any]) -> tuple[int, int, list[int]]:
    """Return the bytes of the dense part, replicated and sharded, and the parameter bytes of each MLP."""
    dataset = Dataset.load(document["data"]["dir"])
    needs = []
    for sharding in ("replicated", "fsdp"):
        config = RunConfig.model_validate({**document, "dense": {"sharding": sharding}})
        tables, features = make_specs(config, dataset)
        collection = EmbeddingBagCollection(tables, features)
        plan = Plan.from_dict(HOSTS, tables, 2)
        model = make_meta_model(config, dataset, collection)
        need = predicted_memory(config, dataset, model, plan, 0)
        needs.append(need.dense_part)
    mlps = [sum(p.nbytes for p in model.get_submodule(name).parameters()) for name in ("bottom_mlp", "top_mlp")]
    return needs[0], needs[1], mlps


def test_predicted_memory(tiny: Path, tmp_path: Path) -> None:
    """Replicated: parameters, gradients and two moments. Sharded: half of each, and the largest module with its
    gradient."""
    replicated, cut, mlps = predicted_here(settings(tiny, tmp_path / "run", **WIDE, plan=HOSTS))
    assert replicated == 4 * sum(mlps)
    assert cut == 4 * (sum(mlps) // 2) + 2 * max(mlps)


def test_an_unknown_mode() -> None:
    with pytest.raises(MesetaError, match="did you mean 'fsdp'"):
        shard(Head(""), dense="fsdb")


def parts_here(plan: dict[str, Any]) -> tuple[int, int, float, float]:
    """Return the numbers of local and of all elements, and the norm of all by parts and by torch. Runs on every rank.

    Without `devices_per_host` in the plan, the launcher's variable gives the ranks of a host.
    """
    before = os.environ["LOCAL_WORLD_SIZE"]
    os.environ["LOCAL_WORLD_SIZE"] = before if "devices_per_host" in plan else "2"
    try:
        model = shard(Head(""), {**plan, "tables": {"t": "table_wise"}}, dense="fsdp")
    finally:
        os.environ["LOCAL_WORLD_SIZE"] = before
    parameters = list(model.parameters())
    held = sum(p.to_local().numel() for p in parameters)  # type: ignore[attr-defined]
    norm = global_norm(parameters, make_shard_sum(parameters, World.current()))
    flat = torch.cat([full_tensor(p.detach()).reshape(-1).double() for p in parameters])
    ids = KeyedJaggedTensor.from_lists({"f": [[World.current().rank], [3, 4]]})
    model.second(model.first(model.tables(ids).pooled.values)).mean().backward()
    assert all(p.grad is not None and p.grad.shape == p.shape for p in parameters)
    return held, flat.numel(), norm, float(flat.norm())


@pytest.mark.parametrize("plan", [{"devices_per_host": 2}, {}], ids=["by the plan", "by the launcher"])
def test_a_rank_holds_only_its_shard(ranks: Ranks, plan: dict[str, Any]) -> None:
    for held, total, norm, expected in ranks(4).run(parts_here, plan):
        assert held == total // 2
        assert norm == pytest.approx(expected, rel=1e-12)


INSIDE, ACROSS = "gradients of parameters", "gradients of hosts"


def sum_order_here(num_passes: int, is_hooked: bool) -> tuple[list[str], float]:
    """Return the names of the sums of some backward passes in their order, and the largest difference from replicated
    gradients. Runs on every rank of two hosts.

    With a hook, the first pass completes the sum of that parameter before the hook runs.
    """
    names, gradients = list[str](), list[list[torch.Tensor]]()
    for dense in ("fsdp", "replicated"):
        torch.manual_seed(1)
        world, seen = replace(World.current(), transfers=TransferTimes()), list[torch.Tensor]()
        model: Any = shard(Head(""), {"devices_per_host": 2, "tables": {"t": "table_wise"}}, dense=dense, world=world)
        weight = model.second.weight
        if is_hooked and dense == "fsdp":
            weight.register_post_accumulate_grad_hook(lambda p, seen=seen: seen.append(p.grad.to_local().clone()))
        for number in range(num_passes):
            ids = KeyedJaggedTensor.from_lists({"f": [[world.rank, number], [3, 4]]})
            model.second(model.first(model.tables(ids).pooled.values)).square().mean().backward()
        assert all(torch.equal(one, weight.grad.to_local()) for one in seen)
        names += [span.name for span in world.transfers.recent_spans if span.name in (INSIDE, ACROSS)]
        gradients.append([full_tensor(p.grad) for layer in (model.first, model.second) for p in layer.parameters()])
    return names, max(float((a - b).abs().max()) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize(
    ("num_passes", "is_hooked", "order"),
    [
        (1, False, [INSIDE, INSIDE, ACROSS, ACROSS]),
        (1, True, [INSIDE, ACROSS, INSIDE, ACROSS]),
        (2, False, [INSIDE, INSIDE, ACROSS, ACROSS, *[INSIDE, ACROSS] * 2]),
    ],
    ids=["one pass", "a hook", "two passes"],
)
def test_inter_host_sums_start_after_the_pass(ranks: Ranks, num_passes: int, is_hooked: bool, order: list[str]) -> None:
    """Sums between hosts start at the end of a pass, unless a hook or an earlier pass needs them before."""
    for names, difference in ranks(4).run(sum_order_here, num_passes, is_hooked):
        assert names == order
        assert difference < 1e-6
