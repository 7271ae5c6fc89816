"""Tests of the list of transfers: the search and predictions count the same bytes, and both follow its changes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest

from meseta.planner import documented_cost_model, find_plan, predict
from meseta.planner.cost.loads import WorkloadLoads
from meseta.planner.cost.placement import Placement
from meseta.planner.search.bound import lower_bound
from meseta.planner.search.cost_estimator import ShardCostEstimator, ShardPartitioning
from meseta.planner.search.problem import make_problem
from meseta.spec import DenseLoad, FeatureSpec, MesetaError, OptimizerSpec, Plan, TableSpec, Topology, Workload
from meseta.spec import transfer as transfers
from meseta.spec.codecs import (
    AllReduceAlgorithm,
    CodecName,
    Communication,
    Direction,
    Precision,
    all_reduce_traffic_factors,
)
from meseta.spec.constraints import Constraints
from meseta.spec.transfer import Transfer, step_transfers
from meseta.spec.workload import DenseExchange
from planning_cases import random_workload

HOSTS = ((1, 2), (1, 4), (2, 2), (2, 4), (4, 2))
SCHEMES = ("data_parallel", "table_wise", "row_wise", "column_wise", "hot_replicated", "table_row_wise",
           "table_column_wise", "grid")  # fmt: skip
OPTIMIZERS = ("rowwise_adagrad", "sgd", "adam", "lamb", "rowwise_lamb", "frozen")


def random_case(seed: int) -> tuple[Workload, Plan, Topology]:
    """Return a case with several optimizers and sharding types, and some features weighted or not pooled."""
    random = np.random.default_rng([16, seed])
    hosts, per_host = HOSTS[seed % len(HOSTS)]
    work = random_workload(6, seed, batch_size=4096)
    tables = tuple(
        replace(
            table,
            embedding_dim=max(table.embedding_dim, 16),
            optimizer=OptimizerSpec(name=str(random.choice(OPTIMIZERS))),
        )
        for table in work.tables
    )
    features = tuple(
        replace(feature, pooling="none" if random.random() < 0.25 else "sum", weighted=False)
        for feature in work.features
    )
    if random.random() < 0.5:
        features = (*features, FeatureSpec(name="weighted", table="t0", weighted=True))
    work = replace(work, tables=tables, features=features, dense=DenseLoad(parameter_bytes=4000))
    document = {}
    for table in tables:
        while table.name not in document:
            scheme = str(random.choice(SCHEMES))
            entry = {"sharding": scheme, **({"hot_rows": 16} if scheme == "hot_replicated" else {})}
            try:
                Plan.from_dict({"devices_per_host": per_host, "tables": {table.name: entry}}, [table], hosts * per_host)
            except MesetaError:  # too few columns for the ranks
                continue
            document[table.name] = entry
    exchange = str(random.choice(["flat", "hierarchical"]))
    whole = {"devices_per_host": per_host, "exchange": exchange, "tables": document}
    plan = Plan.from_dict(whole, tables, hosts * per_host)
    return work, plan, Topology(num_hosts=hosts, devices_per_host=per_host)


WAYS = [("flat", None), ("hierarchical", "cross_host"), ("hierarchical", "chain"), (None, None)]
"""Exchange algorithms of embeddings and of dense sums."""
WRITTEN = [
    *(Communication(precision=name) for name in get_args(Precision)),
    Communication(forward="int8", backward="fp16"),
    Communication(backward="fp8", dense="int8"),
]


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.soak) for part in range(1, 8))])
@pytest.mark.parametrize("comm", WRITTEN, ids=lambda comm: f"{comm.precision}-{comm.forward}-{comm.backward}")
def test_search_and_predictions_count_the_same_bytes(comm: Communication, part: int) -> None:
    names, of_codecs, model = set(), set(), documented_cost_model("cpu")
    costs = dict.fromkeys(get_args(CodecName), 1e-9)
    model = replace(model, exchange=replace(model.exchange, encode_number_s=costs, decode_number_s=costs))
    for seed in range(25 * part, 25 * part + 25):
        work, plan, topology = random_case(seed)
        exchange, dense_exchange = WAYS[(seed + part) % len(WAYS)]
        work, plan = replace(work, comm=comm), replace(plan, exchange=exchange, dense_exchange=dense_exchange)
        loads = WorkloadLoads(work)
        placement = Placement.from_plan(plan, loads, topology.devices_per_host)
        cuts = ShardPartitioning(
            host_row_parts=placement.host_row_parts,
            column_parts=placement.column_parts,
            host_column_parts=placement.host_column_parts,
            row_parts=placement.row_parts,
        )
        prices = ShardCostEstimator(loads, topology, model, algorithms=(exchange, dense_exchange))
        priced = prices.sent_bytes(placement.sharded, cuts, placement.replicated)
        for collective in predict(plan, work, topology, model).collectives:
            if collective.component != "dense":
                sent = float((collective.sent_intra_host + collective.sent_inter_host).sum())
                assert priced[collective.name] == pytest.approx(sent, rel=1e-9), (seed, collective.name)
                names.add(collective.name)
            if np.any(collective.codec_s):
                of_codecs.add(collective.name)
    assert names == {*transfers.TABLE_TRANSFERS}
    written = {
        "forward": ["embeddings", "embeddings inter-host"],
        "backward": ["gradients", "gradients inter-host", "replicas"],
        "dense": ["dense"],
    }
    directions = [one for one in get_args(Direction) if not comm.codec(one).is_lossless]
    assert of_codecs == {name for one in directions for name in written[one]}


def test_bytes_of_codecs_by_hand() -> None:
    """Uses two hosts of two ranks and 40 columns, and checks the bytes of a bag, of a replicated row and of a dense
    parameter."""
    table, other = (TableSpec(name=name, num_embeddings=100, embedding_dim=40) for name in ("a", "b"))
    features = tuple(FeatureSpec(name=name, table=name) for name in ("a", "b"))
    dense = DenseLoad(parameter_bytes=4 * 25)
    layers = DenseExchange(num_tensors=1, num_padding_elements=7)
    plain = Workload(tables=(table, other), features=features, batch_size=64, dense=dense, dense_exchange=layers)
    document = {"devices_per_host": 2, "tables": {"a": {"sharding": "table_wise", "ranks": [0]}, "b": "data_parallel"}}
    plan = Plan.from_dict(document, plain.tables, 4)
    topology = Topology(num_hosts=2, devices_per_host=2)

    def sent(**comm: str) -> dict[str, tuple[float, float]]:
        collectives = predict(plan, replace(plain, comm=Communication(**comm)), topology).collectives
        return {
            collective.name: (collective.sent_intra_host.sum(), collective.sent_inter_host.sum())
            for collective in collectives
        }

    before, after = sent(), sent(forward="int8", backward="fp16", dense="fp8")
    assert before["embeddings"] == (16 * 40 * 4, 32 * 40 * 4) and after["embeddings"] == (16 * (40 + 6), 32 * (40 + 6))
    assert after["gradients"] == (16 * 40 * 2, 32 * 40 * 2) and after["ids"] == before["ids"]
    # Each rank sends 2 (L - 1) / L of all bytes inside its host, and 2 (H - 1) / H of its half to other hosts.
    assert before["replicas"] == (4 * 100 * 41 * 4, 4 * 100 * 41 * 4 / 2)
    assert after["replicas"] == (4 * 100 * 49 * 4, 4 * 100 * (48 * 2 + 4) / 2)
    assert before["dense"] == (4 * 4 * 26, 4 * 4 * 26 / 2)
    assert after["dense"] == pytest.approx((4 * 4 * 33, 4 * (32 * 9 / 8 + 4) / 2))


@pytest.mark.parametrize("path", get_args(AllReduceAlgorithm))
def test_the_halves_of_a_sum(path: AllReduceAlgorithm) -> None:
    """A flat all-reduce sends 2 (R - 1) / R of its bytes from each rank. A hierarchical one sends the same share inside
    a host and on average between hosts."""
    shares = [all_reduce_traffic_factors(path, 6, 2, host) for host in range(3)]
    by_hand = {"flat": [(1 / 3, 4 / 3)] * 3, "cross_host": [(1, 2 / 3)] * 3, "chain": [(1, 1 / 2), (1, 1), (1, 1 / 2)]}
    assert np.array(shares) == pytest.approx(np.array(by_hand[path]))
    assert all_reduce_traffic_factors(path, 4, 4) == (1.5, 0.0)
    assert all_reduce_traffic_factors(path, 4, 1)[1] == 1.5


@pytest.fixture
def halved(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Halve the bytes of embeddings, and with them those of gradients."""
    answers = transfers._StepTransfers.embeddings

    def half(self: transfers._StepTransfers, *how: str) -> list[Transfer]:
        return [
            replace(transfer, parts=tuple(replace(part, num_bytes=part.num_bytes / 2) for part in transfer.parts))
            for transfer in answers(self, *how)
        ]

    monkeypatch.setattr(transfers._StepTransfers, "embeddings", half)
    yield


def figures(seed: int) -> tuple[dict[str, float], float, float, float]:
    """Return the bytes of each transfer, the peak memory of a step, the bound, and the step time of a fixed plan."""
    work, plan, topology = random_case(seed)
    prediction = predict(plan, work, topology)
    sent = {
        collective.name: float((collective.sent_intra_host + collective.sent_inter_host).sum())
        for collective in prediction.collectives
    }
    problem = make_problem(work, topology, documented_cost_model("cpu"), Constraints(), tiers=("hbm",))
    return sent, float(prediction.memory_bytes["steady"]["hbm"].max()), lower_bound(problem).step_s, prediction.step_s


BEFORE = [figures(seed) for seed in (2, 3)]


def test_half_the_bytes_of_embeddings_change_all_costs(halved: None) -> None:
    for seed, (sent, memory, bound, step_s) in zip((2, 3), BEFORE, strict=True):
        sent_now, memory_now, bound_now, step_s_now = figures(seed)
        of_answers = ("embeddings", "gradients", "embeddings inter-host", "gradients inter-host")
        assert sent_now == {name: size / 2 if name in of_answers else size for name, size in sent.items()}
        assert memory_now < memory and bound_now < bound and step_s_now < step_s


def test_one_rank_sends_nothing() -> None:
    work, _, _ = random_case(0)
    assert step_transfers(work, None, 1, 1) == ()
    assert find_plan(work, Topology()).prediction.collectives == ()
