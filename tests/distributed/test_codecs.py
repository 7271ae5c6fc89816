"""Exchanges with codecs deliver what one process computes with torch's casts, under every exchange."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from meseta.comm import World
from meseta.comm.sums import DENSE_FP16_EXPONENT, SumCodec
from meseta.embedding import EmbeddingBagCollection, ShardedEmbeddingBagCollection
from meseta.ops.codec import HalfRange
from meseta.sparse import KeyedJaggedTensor
from meseta.spec import Communication, FeatureSpec, MesetaError, Plan, TableSpec
from meseta.spec.codecs import CODECS
from sampling import product, sample

from .exactness import POOLINGS, Ranks, bit_difference, scenario_of
from .scenario import IS_SOAK, Scenario, train, whole_tables
from .test_sums import by_hand, part

CODED = ["fp16", "bf16", "fp8", "int8"]
LAYOUTS = [(2, 1), (4, 2), (8, 4), (8, 2)]
WHOLE_ROWS = ["table_wise", "column_wise", "table_column_wise"]
MATRIX = product(
    layout=LAYOUTS, codec=[*CODED, "paper"], exchange=["flat", "hierarchical"], sharding=WHOLE_ROWS, pooling=POOLINGS
)


def cast(values: Tensor, codec: str, exponent: int = 0) -> Tensor:
    """Return values rounded to the nearest by torch's casts, in blocks of 16 columns."""
    if codec == "bf16":
        return values.to(torch.bfloat16).float()
    if codec == "fp16":
        return (values * 2.0**exponent).clamp(-65504, 65504).to(torch.float16).float() * 2.0**-exponent
    blocks = values.unflatten(-1, (-1, 16))
    largest = blocks.abs().amax(-1, keepdim=True)
    scale = largest / (448.0 if codec == "fp8" else 127.0)
    nearest = scale.to(torch.bfloat16).float()
    above = (nearest.to(torch.bfloat16).view(torch.int16) + 1).view(torch.bfloat16).float()
    scale = torch.where(nearest < scale, above, nearest)
    quotient = torch.where(scale > 0, blocks / scale, 0.0)
    rounded = quotient.to(torch.float8_e4m3fn).float() if codec == "fp8" else quotient.round().clamp(-127, 127)
    return (rounded * scale).flatten(-2)


def lookups_of(plan: dict[str, Any], codec: str) -> tuple[Tensor, Tensor]:
    """Return lookups of one id per sample in training and in evaluation, for rows of many magnitudes."""
    world = World.current()
    tables = [TableSpec(name="a", num_embeddings=64, embedding_dim=48)]
    features = [FeatureSpec(name="f", table="a"), FeatureSpec(name="g", table="a", pooling="none")]
    source = EmbeddingBagCollection(tables, features, seed=3)
    embeddings = ShardedEmbeddingBagCollection(
        source,
        Plan.from_dict(plan, tables, world.size),
        world,
        Communication(precision=codec),  # type: ignore[arg-type]
    )
    ids = torch.arange(16).repeat(2) + world.rank * 7
    kjt = KeyedJaggedTensor(keys=("f", "g"), values=ids, lengths=torch.ones(32, dtype=torch.int64))
    trained = embeddings(kjt)
    with torch.no_grad():
        evaluated = embeddings(kjt)
    both = [torch.cat([one["f"], one["g"].values]) for one in (trained, evaluated)]
    return both[0].detach(), both[1]


@pytest.mark.parametrize(
    "case", sample(product(sharding=WHOLE_ROWS, exchange=["flat", "hierarchical"], codec=CODED), 8, seed=751)
)
def test_lookups_are_the_casts_of_torch_and_evaluations_are_exact(ranks: Ranks, case: dict[str, str]) -> None:
    sharding, exchange, codec = case.values()
    plan = {"devices_per_host": 2, "exchange": exchange, "tables": {"a": sharding}}
    table = EmbeddingBagCollection([TableSpec(name="a", num_embeddings=64, embedding_dim=48)],
                                   [FeatureSpec(name="f", table="a")], seed=3).shards[0].read(0, 64)  # fmt: skip
    rows = next(iter(table.values()))
    for rank, (trained, evaluated) in enumerate(ranks(4).run(lookups_of, plan, codec)):
        asked = rows[(torch.arange(16) + rank * 7).repeat(2)]
        assert torch.equal(evaluated, asked)
        assert torch.equal(trained, cast(asked, codec))


@pytest.mark.parametrize("cell", sample(MATRIX, 6, seed=785))
def test_ranks_round_where_one_process_does(ranks: Ranks, cell: dict[str, Any]) -> None:
    (size, per_host), codec, exchange, sharding, pooling = cell.values()
    scenario = scenario_of(sharding, pooling, "rowwise_adagrad")
    scenario = scenario.but(exchange=exchange, per_host=per_host, comm=Communication(precision=codec), batch_size=32)
    assert bit_difference(ranks, size, scenario) == 0


@pytest.mark.parametrize(
    "codec", [pytest.param(c, marks=() if c in ("bf16", "int8") else pytest.mark.soak) for c in CODED]
)
def test_whole_runs_have_the_same_bits_under_both_exchanges(ranks: Ranks, codec: str) -> None:
    """Tables and dense weights are equal under both exchanges, and for whole rows and columns."""
    base = Scenario(sharding="table_wise", pooling="mean", weighted=False, optimizer="adagrad", batch_size=40)
    base = base.but(per_host=2, comm=Communication(precision=codec))  # type: ignore[arg-type]
    cases = product(exchange=["flat", "hierarchical"], sharding=["table_wise", "column_wise"])
    first, *others = (ranks(4).run(train, base.but(**case)) for case in (cases if IS_SOAK else cases[::3]))
    expected = whole_tables(first, base)
    for results in others:
        assert [r["losses"] for r in results] == [r["losses"] for r in first]
        assert all(torch.equal(a, b) for r in results for a, b in zip(r["dense"], first[0]["dense"], strict=True))
        tables = whole_tables(results, base)
        assert all(torch.equal(tables[t][key], value) for t, parts in expected.items() for key, value in parts.items())


CUT_BY_ROWS = product(
    codec=CODED,
    exchange=["flat", "hierarchical"],
    pooling=["sum", "none"],
    sharding=["row_wise", "grid", "mixed", "mixed of hosts"],
)


@pytest.mark.parametrize("case", sample(CUT_BY_ROWS, 5, seed=19))
def test_bags_cut_by_rows_are_within_the_rounding(ranks: Ranks, case: dict[str, str]) -> None:
    """Each partial bag is rounded once, by at most half a unit of its codec."""
    codec, exchange, pooling, sharding = case.values()
    exact = Scenario(sharding=sharding, pooling=pooling, weighted=False, optimizer="sgd", num_steps=1)
    exact = exact.but(exchange=exchange, per_host=2, batch_size=32)
    rounded = ranks(4).run(train, exact.but(comm=Communication(forward=codec)), True)  # type: ignore[arg-type]
    for one, other in zip(rounded, ranks(4).run(train, exact, True), strict=True):
        unit = {"fp16": 2.0**-11, "bf16": 2.0**-8, "fp8": 2.0**-4, "int8": 1.01 / 254}[codec]
        largest = float(other["outputs"][0].abs().max())
        assert float((one["outputs"][0] - other["outputs"][0]).abs().max()) <= 4 * unit * largest


SIZE = 2 * 4096 + 48


def sum_with_codec(per_host: int, codec: str, path: str) -> bytes:
    """Return a sum of SIZE numbers with a codec, followed by 7 numbers without."""
    from dataclasses import replace

    world = replace(World.current().with_ranks_per_host(per_host), sum_algorithm=path)
    coding = SumCodec(CODECS[codec], SIZE, (1, 2, "dense"), HalfRange(DENSE_FP16_EXPONENT))  # type: ignore[index]
    return world.all_reduce(part(world.rank, SIZE + 7), "dense", coding).numpy().tobytes()


@pytest.mark.parametrize(("size", "per_host"), [(2, 1), (2, 2), (4, 1), (4, 2), (4, 4)])
@pytest.mark.parametrize("codec", ["fp16", "bf16"])
def test_sums_are_rounded_by_host_and_once_more(ranks: Ranks, size: int, per_host: int, codec: str) -> None:
    hosts = []
    for first in range(0, size, per_host):
        total = part(first, SIZE + 7)
        for rank in range(first + 1, first + per_host):
            total = total + part(rank, SIZE + 7)
        hosts.append(cast(total, codec, DENSE_FP16_EXPONENT))
    total = hosts[0]
    for host in hosts[1:]:
        total = total + host
    expected = cast(total, codec, DENSE_FP16_EXPONENT)
    expected[SIZE:] = by_hand(size, per_host, SIZE + 7)[SIZE:]
    for path in ("flat", "cross_host"):
        assert set(ranks(size).run(sum_with_codec, per_host, codec, path)) == {expected.numpy().tobytes()}


@pytest.mark.parametrize("codec", ["fp8", "int8"])
def test_sums_in_8_bits_are_close_and_equal_on_all_ranks(ranks: Ranks, codec: str) -> None:
    [total] = {*ranks(4).run(sum_with_codec, 2, codec, "cross_host")}
    values = torch.frombuffer(bytearray(total), dtype=torch.float32)
    exact = by_hand(4, 2, SIZE + 7)
    assert torch.equal(values[SIZE:], exact[SIZE:])
    hosts = [(part(2 * h, SIZE + 7) + part(2 * h + 1, SIZE + 7))[:SIZE] for h in range(2)]
    unit = 2.0**-3 if codec == "fp8" else 1.02 / 127
    largest = sum(host.view(-1, 16).abs().amax(1) for host in (*hosts, exact[:SIZE]))
    assert bool(((values - exact)[:SIZE].view(-1, 16).abs().amax(1) <= 1.1 * unit * largest).all())


def test_float64_cannot_use_a_codec(ranks: Ranks) -> None:
    with pytest.raises(AssertionError, match="tables of dtype float64 cannot be used with a codec"):
        scenario = Scenario(sharding="table_wise", pooling="sum", weighted=False, optimizer="sgd", dtype="float64")
        ranks(2).run(train, scenario.but(comm=Communication(precision="bf16")))


def test_a_chain_cannot_use_a_codec() -> None:
    with pytest.raises(MesetaError, match="'chain' cannot be used with a codec"):
        Communication(precision="bf16", dense_exchange="chain")
