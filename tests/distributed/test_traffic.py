"""Predicted bytes of a plan's exchanges are exactly those that ranks pass to the process group."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist

import meseta.comm.world as world_module
from meseta.comm import World
from meseta.comm.messages import ANNOUNCEMENT_TAG
from meseta.comm.sums import CHUNK_ALIGNMENT
from meseta.config import RunConfig
from meseta.embedding import EmbeddingBagCollection, shard
from meseta.pipeline import Pipeline
from meseta.planner import predict
from meseta.sparse import KeyedJaggedTensor
from meseta.spec import FeatureLoad, FeatureSpec, OptimizerSpec, Plan, TableSpec, Topology, Workload
from meseta.spec.codecs import AllReduceAlgorithm, all_reduce_traffic_factors, traffic_factors
from meseta.spec.transfer import Transfer, step_transfers
from meseta.telemetry.metrics_file import TrainLine
from meseta.train.setup.meta_model import make_meta_model
from meseta.train.setup.specs import make_workload
from meseta.train.trainer import Trainer
from small_run import settings

from .pool import RankPool

OPERATIONS = ("all_to_all_single", "all_reduce", "all_gather_into_tensor", "all_gather_single",
              "reduce_scatter_tensor", "reduce_scatter_single")  # fmt: skip
OPERATIONS = tuple(name for name in OPERATIONS if hasattr(dist, name))
"""Collectives of torch. Only `fully_shard` calls any."""
Counted = tuple[list[str], dict[str, float], list[tuple[str, int]]]
"""Names of transfers in order, bytes that this rank sends by name, and calls of OPERATIONS."""
ROWS, BATCH, IDS = 64, 512, 4
"""Every rank's ids visit every row of a table equally often, so that expected and real numbers of ids agree."""


def specs(optimizer: str, weighted: bool, pooling: str) -> tuple[list[TableSpec], list[FeatureSpec]]:
    spec = OptimizerSpec(name=optimizer)
    tables = [
        TableSpec(name=n, num_embeddings=ROWS, embedding_dim=d, optimizer=spec) for n, d in (("a", 32), ("b", 48))
    ]
    first = FeatureSpec(name="one", table="a", weighted=weighted, pooling=pooling)  # type: ignore[arg-type]
    return tables, [first, FeatureSpec(name="two", table="a"), FeatureSpec(name="three", table="b", pooling="mean")]


class Counter:
    """Names and bytes of transfers, counted in the messages of the process group."""

    def __init__(self) -> None:
        self.names: list[str] = []
        """Names in the order in which transfers start."""
        self.sent: dict[str, float] = {}
        """Bytes by name, without announcements."""
        self.calls: list[tuple[str, int]] = []
        """Operation, and bytes that this rank sends to others in it."""
        self._sending = threading.local()

    @property
    def counted(self) -> Counted:
        """Names, bytes by name, and calls."""
        return self.names, {name: self.sent.get(name, 0.0) for name in self.names}, self.calls

    def __enter__(self) -> Counter:
        functions = {name: getattr(dist, name) for name in OPERATIONS}
        self._before = functions | {"check": world_module.check_known_collective}
        self._send, self._swap = vars(dist.ProcessGroup)["send"], world_module.start_exchange
        for name in OPERATIONS:
            setattr(dist, name, partial(self._called, name))
        send = dist.ProcessGroup.send
        dist.ProcessGroup.send = lambda group, *arguments: self._sent(send, group, *arguments)
        world_module.start_exchange = self._swapped
        world_module.check_known_collective = self._named
        return self

    def __exit__(self, *_: object) -> None:
        dist.ProcessGroup.send, world_module.start_exchange = self._send, self._swap
        world_module.check_known_collective = self._before.pop("check")
        for name, function in self._before.items():
            setattr(dist, name, function)

    def _named(self, name: str) -> None:
        self._before["check"](name)
        self.names.append(name)

    def _swapped(self, rank: int, peers: Any, name: str, **options: Any) -> Any:
        self._sending.name = name
        return self._swap(rank, peers, name, **options)

    def _sent(self, send: Any, group: Any, tensors: list[torch.Tensor], to: int, tag: int) -> Any:
        if tag != ANNOUNCEMENT_TAG:
            name = self._sending.name
            self.sent[name] = self.sent.get(name, 0.0) + sum(tensor.nbytes for tensor in tensors)
        return send(group, tensors, to, tag)

    def _called(self, operation: str, *arguments: Any, **options: Any) -> Any:
        output, source = (options.get(name, arguments[k] if k < len(arguments) else None)
                         for k, name in enumerate(("output_tensor", "input_tensor")))  # fmt: skip
        size = max(output.numel(), source.numel()) // min(output.numel(), source.numel())
        self.calls.append((operation, (size - 1) * min(output.nbytes, source.nbytes)))
        return self._before[operation](*arguments, **options)


def count(plan: Any, optimizer: str, weighted: bool, pooling: str) -> Counted:
    """Count one forward and backward pass."""
    tables, features = specs(optimizer, weighted, pooling)
    world = World.current()
    model = torch.nn.Sequential(EmbeddingBagCollection(tables, features, seed=1))
    embeddings = shard(model, Plan.from_dict(plan, tables, world.size))[0]
    batch = BATCH // world.size
    ids = torch.arange(batch * IDS).repeat(3) % ROWS
    lengths = torch.full((3 * batch,), IDS)
    weights = torch.ones(ids.numel()) if weighted else None
    kjt = KeyedJaggedTensor(keys=("one", "two", "three"), values=ids, lengths=lengths, weights=weights)
    with Counter() as counter:
        output = embeddings(kjt)
        rows = [output[name].values.sum() for name in ("one",) if pooling == "none"]
        (output.pooled.values.sum() + sum(rows)).backward()
    assert not counter.calls
    spans: dict[str, float] = {}
    for one in embeddings.world.transfers.recent_spans:
        spans[one.name] = spans.get(one.name, 0.0) + one.intra_host_bytes + one.inter_host_bytes
    names, sent, _ = counter.counted
    assert sorted(one.name for one in embeddings.world.transfers.recent_spans) == sorted(names)
    assert spans == pytest.approx(sent, rel=1e-6, abs=BOUNDS)
    return counter.counted


BOUNDS = 2 * 4 * CHUNK_ALIGNMENT * 8
"""Largest difference in bytes between ranks, because the chunks of a sum are uneven: both directions, four ranks."""
PLANS = {
    "table_wise": {
        "tables": {"a": {"sharding": "table_wise", "ranks": [1]}, "b": {"sharding": "table_wise", "ranks": 0}}
    },
    "row_wise": {"tables": {"*": "row_wise"}},
    "column_wise": {"tables": {"*": "column_wise"}},
    "data_parallel": {"tables": {"a": "data_parallel", "b": "table_wise"}},
    "hot_replicated": {"tables": {"a": {"sharding": "hot_replicated", "hot_rows": 16}, "b": "table_wise"}},
    "mixed": {"tables": {"a": "row_wise", "b": "column_wise"}},
}


HOSTS = {
    name: {"devices_per_host": 2, "tables": {"a": name, "b": name}}
    for name in ("table_wise", "row_wise", "table_row_wise", "table_column_wise", "grid")
}
HOSTS["data_parallel"] = {"devices_per_host": 2, "tables": {"a": "data_parallel", "b": "table_wise"}}
HOSTS["column_wise"] = {"devices_per_host": 2, "tables": {"a": "column_wise", "b": "column_wise"}}
HOSTS["mixed of hosts"] = {"devices_per_host": 2, "tables": {"a": "table_row_wise", "b": "row_wise"}}


def check(ranks: RankPool, plan: Any, topology: Topology, optimizer: str, weighted: bool, pooling: str) -> None:
    """Compare every collective of a step on every rank: names, order and bytes."""
    tables, features = specs(optimizer, weighted, pooling)
    counted = ranks.run(count, plan, optimizer, weighted, pooling)
    loads = {feature.name: FeatureLoad(pooling_factor=float(IDS)) for feature in features}
    work = Workload(tables=tuple(tables), features=tuple(features), batch_size=BATCH, loads=loads)
    prediction = predict(Plan.from_dict(plan, tables, topology.num_ranks), work, topology)
    of_tables = [collective for collective in prediction.collectives if collective.component != "dense"]
    for rank, (names, sent, _) in enumerate(counted):
        assert names == [collective.name for collective in of_tables for _ in range(collective.num_calls)]
        for collective in of_tables:
            predicted = float(collective.sent_intra_host[rank] + collective.sent_inter_host[rank])
            # The number of distinct rows is an expected value.
            rel = 1e-3 if pooling == "none" and collective.name in ("embeddings", "embeddings inter-host") else 1e-6
            assert sent[collective.name] == pytest.approx(
                predicted, rel=rel, abs=BOUNDS * (collective.name == "replicas")
            ), collective.name


KINDS = [("adam", True, "sum"), ("rowwise_adagrad", False, "none"), ("rowwise_lamb", True, "sum")]
"""Row optimizer, whether a feature is weighted, and its pooling."""
ON_SOME = [2, pytest.param(4, marks=pytest.mark.soak)]


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize(("optimizer", "weighted", "pooling"), KINDS)
@pytest.mark.parametrize("size", ON_SOME)
def test_predicted_bytes_are_counted_bytes(
    ranks: Callable[[int], RankPool], name: str, size: int, optimizer: str, weighted: bool, pooling: str
) -> None:
    check(ranks(size), PLANS[name], Topology(devices_per_host=size), optimizer, weighted, pooling)


@pytest.mark.parametrize("name", {**PLANS, **HOSTS})
@pytest.mark.parametrize(
    ("optimizer", "weighted", "pooling"), [KINDS[1], pytest.param(*KINDS[2], marks=pytest.mark.soak)]
)
def test_predicted_bytes_are_counted_bytes_of_two_hosts(
    ranks: Callable[[int], RankPool], name: str, optimizer: str, weighted: bool, pooling: str
) -> None:
    plan = {"devices_per_host": 2, **{**PLANS, **HOSTS}[name]}
    check(ranks(4), plan, Topology(num_hosts=2, devices_per_host=2), optimizer, weighted, pooling)


@pytest.mark.parametrize(
    ("name", "optimizer", "weighted", "pooling"),
    [
        pytest.param(name, *kind, marks=[] if place == number % len(KINDS) else pytest.mark.soak)
        for number, name in enumerate(HOSTS)
        for place, kind in enumerate(KINDS)
    ],
)
def test_predicted_bytes_are_counted_bytes_of_hierarchical_exchanges(
    ranks: Callable[[int], RankPool], name: str, optimizer: str, weighted: bool, pooling: str
) -> None:
    plan = {"exchange": "hierarchical", **HOSTS[name]}
    check(ranks(4), plan, Topology(num_hosts=2, devices_per_host=2), optimizer, weighted, pooling)


NUMBERS = 16_000
"""Elements of a summed buffer."""


def sums(path: AllReduceAlgorithm, per_host: int) -> list[tuple[str, float, float, float]]:
    """Return (name, counted bytes, intra-host bytes, inter-host bytes) of a sum over all ranks and of one between
    hosts."""
    world, results = replace(World.current().with_ranks_per_host(per_host), sum_algorithm=path), []
    for name, add in (("dense", world.start_all_reduce), ("gradients of hosts", world.start_all_reduce_inter_host)):
        with Counter() as counter:
            add(torch.ones(NUMBERS), name).wait()
        span = world.transfers.recent_spans[-1]
        results.append((name, counter.sent.get(name, 0.0), span.intra_host_bytes, span.inter_host_bytes))
    return results


@pytest.mark.parametrize("path", get_args(AllReduceAlgorithm))
@pytest.mark.parametrize("per_host", [1, 2])
def test_sums_send_the_bytes_of_their_algorithm(
    ranks: Callable[[int], RankPool], path: AllReduceAlgorithm, per_host: int
) -> None:
    """Every rank counts the bytes that its position in the algorithm implies, and spans split them by level."""
    for rank, ((_, *of_all), (_, *of_hosts)) in enumerate(ranks(4).run(sums, path, per_host)):
        intra, inter = all_reduce_traffic_factors(path, 4, per_host, rank // per_host)
        whole = 4.0 * NUMBERS
        assert of_all == pytest.approx([(intra + inter) * whole, intra * whole, inter * whole], abs=BOUNDS)
        _, inter = traffic_factors("hosts chain" if path == "chain" else "hosts sum", 4, per_host, rank // per_host)
        assert of_hosts == pytest.approx([inter * whole, 0.0, inter * whole], abs=BOUNDS)


def step_of_run(document: dict[str, Any]) -> tuple[Counted, tuple[Transfer, ...], dict[str, float]]:
    """Return the counts of the first step of a run, the listed transfers, and the number of calls in its line."""
    trainer = Trainer(RunConfig.model_validate(document), World.current())
    embeddings, counter, run = trainer.model.embeddings, Counter(), Pipeline._train_step
    per_host = embeddings.plan.ranks_per_host
    specs = embeddings.tables, embeddings.features
    outline = make_meta_model(trainer.config, trainer.dataset, EmbeddingBagCollection(*specs))
    work = make_workload(trainer.config, trainer.dataset, *specs, outline)
    listed = step_transfers(work, embeddings.plan, trainer.world.size, per_host)

    def first(self: Pipeline, *arguments: Any) -> Any:
        Pipeline._train_step = run  # type: ignore[method-assign]
        with counter:
            result = run(self, *arguments)
            self.synchronize()
            return result

    Pipeline._train_step = first  # type: ignore[method-assign]
    try:
        trainer.run()
    finally:
        Pipeline._train_step = run  # type: ignore[method-assign]
    [line, *_] = [one for one in trainer.run_dir.lines() if isinstance(one, TrainLine)]
    num_calls = {name: one.num_calls for name, one in line.transfers.items()}
    return counter.counted, listed, num_calls


DENSE = {
    "plain": {},
    "batch norm": {"model__name": "wide_deep", "model__deep_mlp": [8, 4], "model__batch_norm": True},
    "micro-batches": {"train__accumulate_steps": 3},
    "terms of the loss": {"model": {"name": "own_models:TwoBlocks", "embedding_dim": 4}},
    "loss of the global batch": {"model": {"name": "own_models:GlobalLoss", "embedding_dim": 4}},
    "one norm": {"train__clip_norm": 1.0, "embedding__optimizer__name": "rowwise_adagrad"},
    "one norm, fsdp": {"dense__sharding": "fsdp", "train__clip_norm": 1.0, "train__accumulate_steps": 2},
    "fsdp": {"dense__sharding": "fsdp", "dense__clip_norm": 1.0},
    "fsdp, lamb": {"dense__sharding": "fsdp", "dense__optimizer": {"name": "lamb"}, "train__accumulate_steps": 2},
}


FEW_RANKS = {"fsdp": 4, "terms of the loss": 4, "one norm, fsdp": None}
"""Number of ranks in `make test`, if it is not 2. `None` runs in `make soak` only."""


@pytest.mark.parametrize(
    ("name", "size"),
    [
        pytest.param(name, size, marks=[] if size == FEW_RANKS.get(name, 2) else pytest.mark.soak)
        for name in DENSE
        for size in (2, 4)
    ],
)
def test_a_whole_step_sends_the_listed_transfers(
    ranks: Callable[[int], RankPool], tiny: Path, tmp_path: Path, name: str, size: int
) -> None:
    plan = {"devices_per_host": 2, "tables": {"*": "table_wise"}}
    document = settings(tiny, tmp_path / "run", train__max_steps=1, plan=plan, **DENSE[name])
    for (names, sent, calls), listed, num_calls in ranks(size).run(step_of_run, document):
        named = [transfer for transfer in listed if transfer.name not in OF_TORCH]
        order = list(dict.fromkeys(transfer.name for transfer in named))
        assert list(dict.fromkeys(names)) == order
        assert {n: names.count(n) for n in order} == {n: sum(t.num_calls for t in named if t.name == n) for n in order}
        assert num_calls == {n: float(names.count(n)) for n in order}
        for of_dense in {transfer.name for transfer in named if not transfer.depends_on_plan}:
            parts = [part for transfer in named if transfer.name == of_dense for part in transfer.parts]
            expected = sum(sum(traffic_factors(part.collective, size, 2)) * part.num_bytes for part in parts)
            num_sums = sum(transfer.name == of_dense for transfer in named)
            assert sent[of_dense] == pytest.approx(expected, abs=BOUNDS * num_sums), of_dense
        by_torch = [transfer for transfer in listed if transfer.name in OF_TORCH]
        assert [operation.startswith("all_gather") for operation, _ in calls] == [True] * sum(
            t.num_calls for t in by_torch
        )
        assert sum(n for _, n in calls) == sum(part.num_bytes for transfer in by_torch for part in transfer.parts)


OF_TORCH = ("parameters",)
"""Transfers of `fully_shard`."""
