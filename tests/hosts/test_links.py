"""Tests of benchmarks/bench_links.py: persistent ranks, plans, the rate of links, small runs."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from itertools import permutations
from typing import Any

import numpy as np
import pytest
from common.paired import difference
from links import hybrid_part, shapes, timing
from links.rank_pool import RankPoolError, on_this_machine, start_ranks
from links.variants import Layout, Variant, Window

from hosts import Hosts, why_impossible

NAMESPACES = pytest.mark.skipif(why_impossible() is not None, reason=f"no network namespaces: {why_impossible()}")


def test_ranks_of_a_pool_persist_and_report_errors() -> None:
    with start_ranks(2, on_this_machine(2)) as ranks:
        assert ranks.ask(statistics.mean, data=[1.0, 2.0]) == [1.5, 1.5]
        with pytest.raises(RankPoolError, match=r"rank 0: (.|\n)*StatisticsError"):
            ranks.ask(statistics.mean, data=[])
        assert ranks.ask(statistics.mean, data=[4.0]) == [4.0, 4.0]


def test_a_rank_that_cannot_start_ends_the_pool() -> None:
    with (
        pytest.raises(RankPoolError, match=r"rank \d ended with 1"),
        start_ranks(2, on_this_machine(2), python="/bin/false"),
    ):
        pass


@pytest.mark.parametrize("sharding", ["table_wise", "row_wise", "column_wise"])
@pytest.mark.parametrize("layout", [Layout(4, 2), Layout(2, 4)], ids=str)
def test_plans_use_all_hosts_equally(sharding: str, layout: Layout) -> None:
    shape = shapes.training(64)
    plan = shapes.plan(shape, Variant(sharding=sharding, exchange="hierarchical"), layout)
    tables, _ = shapes.specs(shape)
    assert plan.is_hierarchical and plan.dense_exchange == "cross_host"
    held = np.zeros(layout.hosts)
    for table, entry in zip(tables, plan.tables, strict=True):
        for shard in entry.shards:
            held[[rank // layout.per_host for rank in shard.ranks]] += shard.num_columns / table.embedding_dim
    assert held.max() <= 1.5 * held.min()


def test_the_predicted_dense_part_is_that_of_the_model() -> None:
    from meseta.embedding import EmbeddingBagCollection
    from meseta.models import DLRM

    shape = shapes.training(64)
    tables, features = shapes.specs(shape)
    model = DLRM(
        EmbeddingBagCollection(tables, features),
        num_dense=shape.num_dense,
        bottom_mlp=(*shape.bottom_mlp, shape.dim),
        top_mlp=shape.top_mlp,
    )
    workload = shapes.workload(shape, Variant())
    parameters = list(model.parameters())
    assert workload.dense.parameter_bytes == 4 * sum(one.numel() for one in parameters)
    assert workload.dense_exchange.num_tensors == len(parameters)


def _window(share: float) -> list[Window]:
    return [Window(num_steps=1, seconds=1.0, busy_s=0.0, waited_s=share, sent_bytes=0, across={})]


class FakeHosts:
    """A step that waits `bits` over the rate, and computes for one second."""

    def __init__(self, bits: float) -> None:
        self.bits, self.rates = bits, list[float]()

    def reshape(self, across: str) -> None:
        self.rates.append(float(across.removesuffix("mbit")))

    def measure(self) -> Sequence[Window]:
        waited = self.bits / self.rates[-1]
        return _window(waited / (1.0 + waited))


@pytest.mark.parametrize("bits", [30.0, 600.0, 20_000.0])
def test_find_rate_makes_steps_wait(bits: float) -> None:
    fake: Any = FakeHosts(bits)
    rate, share = timing.find_rate(fake, fake.measure)
    assert timing.WAITING[0] <= share <= timing.WAITING[1]
    assert rate == f"{fake.rates[-1]:.1f}mbit"


def test_no_rate_helps_a_step_that_never_waits() -> None:
    fake: Any = FakeHosts(0.0)
    with pytest.raises(SystemExit, match="75% to 80%"):
        timing.find_rate(fake, lambda: _window(0.1))


def test_variants_take_turns() -> None:
    asked: list[str] = []

    def ask(name: str) -> Any:
        return lambda steps: asked.append(name) or _window(0.5) * steps

    measured = timing.Measured()
    timing.in_turns({name: ask(name) for name in "abc"}, 3, 0.1, measured)
    assert asked[6:] == list("abcbcacab")
    assert measured.step_s("b") == 1.0 and measured.waiting("b") == 0.5


def test_the_interval_of_a_mean_difference() -> None:
    mean, half = difference([1.0, 2.0, 3.0], [0.0, 1.5, 2.0])
    assert mean == pytest.approx(0.8333333) and half == pytest.approx(4.302653 * 0.2886751 / 3**0.5)


@NAMESPACES
def test_links_change_their_rate_while_ranks_run() -> None:
    from links.rank_pool import on_hosts

    with Hosts(2, across="100mbit") as hosts, start_ranks(2, on_hosts(hosts)) as ranks:
        hosts.reshape("250mbit")
        assert hosts.rate == 250e6
        assert ranks.ask(statistics.mean, data=[1.0]) == [1.0, 1.0]


@pytest.mark.parametrize("layout", [Layout(2, 2), Layout(4, 2), Layout(2, 4)], ids=str)
def test_bytes_of_a_sharded_dense_part_are_those_of_its_messages(layout: Layout) -> None:
    whole, size = 4.0e6, layout.size
    hybrid, over_all, replicated = hybrid_part.ways(layout)

    def of_a_host(messages: Iterable[tuple[int, int, float]]) -> float:
        return sum(num for a, b, num in messages if a // layout.per_host != b // layout.per_host) / layout.hosts

    pairs = list(permutations(range(size), 2))
    rings = [(rank, (rank + 1) % size, whole / size) for rank in range(size) for _ in range(2 * (size - 1))]
    cross_host_peers = [(a, b) for a, b in pairs if a % layout.per_host == b % layout.per_host]
    piece = whole / layout.per_host / layout.hosts
    assert hybrid_part.dense_bytes(over_all, layout, whole) == pytest.approx(
        of_a_host([*rings, *((a, b, whole / size) for a, b in pairs)])
    )
    for mode in (hybrid, replicated):  # to the owner of a piece, and back
        assert hybrid_part.dense_bytes(mode, layout, whole) == pytest.approx(
            of_a_host([(*p, 2 * piece) for p in cross_host_peers])
        )


def test_the_sharded_dense_part_has_20_million_parameters() -> None:
    assert hybrid_part.num_parameters(shapes.training(64)) == 19_997_463
