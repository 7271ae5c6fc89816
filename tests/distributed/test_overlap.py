"""Overlap changes no bit, and an error of a batch read ahead is raised at its step."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any, Literal

import numpy as np
import pytest
import torch

import meseta
from meseta.comm import World, dense
from meseta.data.read.batch import Batch
from meseta.embedding import EmbeddingBagCollection, shard
from meseta.models import DLRM, MLPOptions
from meseta.optim.dense import GradientClipper
from meseta.pipeline import Pipeline
from meseta.pipeline.overlap import choose_overlap
from meseta.sparse import KeyedJaggedTensor
from meseta.spec import Communication, FeatureSpec, MesetaError, OptimizerSpec, Plan, TableSpec
from meseta.spec.stages import OVERLAPS, Overlap
from sampling import product, sample

from .pool import RankPool
from .scenario import IS_SOAK, batch_slice, random_ids

Ranks = Callable[[int], RankPool]
ROWS = {"copied": 6, "whole": 30, "columns": 11, "rows": 40, "host": 24}
SCHEMES = ("data_parallel", "table_wise", "column_wise", "row_wise", "table_row_wise")
WIDTH = 32
SIZES = [13, 8, 1, 24, 16, 3] if IS_SOAK else [1, 13, 24]
"""Sizes of global batches. Slices are uneven, and some ranks have no samples."""
MIXED: tuple[Overlap, ...] = ("ids", "gradients", "agree")


def make_model(
    exchange: Literal["flat", "hierarchical"], comm: Communication, options: MLPOptions | None = None
) -> tuple[Any, World]:
    world = World.current()
    spec = OptimizerSpec(name="rowwise_adagrad", lr=0.05)
    tables = [TableSpec(name=n, num_embeddings=rows, embedding_dim=WIDTH, optimizer=spec) for n, rows in ROWS.items()]
    features = [FeatureSpec(name=n, table=n, pooling="mean" if n == "rows" else "sum") for n in ROWS]
    options = options or MLPOptions(dropout=0.3, batch_norm=True, seed=5)
    model = DLRM(
        EmbeddingBagCollection(tables, features, seed=3),
        num_dense=4,
        bottom_mlp=(8, WIDTH),
        top_mlp=(16, 8),
        options=options,
        seed=1,
    )
    if world.size == 1:
        return model, world
    document = {"devices_per_host": 2, "exchange": exchange, "tables": dict(zip(ROWS, SCHEMES, strict=True))}
    plan = Plan.from_dict(document, tables, world.size)
    return shard(model, plan, world=world, comm=comm), world


def global_batch(number: int, size: int) -> Batch:
    draw = np.random.default_rng(number)
    ids, lengths = random_ids(draw, ROWS, size)
    return Batch(
        dense=torch.from_numpy(draw.normal(size=(size, 4)).astype(np.float32)),
        sparse=KeyedJaggedTensor(
            keys=tuple(ROWS),
            values=ids,
            lengths=lengths,
        ),
        label=torch.from_numpy(draw.integers(0, 2, size).astype(np.float32)),
        weight=torch.from_numpy(draw.random(size).astype(np.float32)) if number % 2 else None,
    )


def slices(world: World, sizes: list[int]) -> Iterator[Batch]:
    for number, size in enumerate(sizes):
        yield batch_slice(global_batch(number, size), world)


def checksum(model: Any) -> int:
    """Return the checksum of this rank's dense and embedding tensors."""
    tensors = [*model.parameters(), *model.buffers()]
    for piece in model.embeddings.shards:
        tensors += piece.read(0, piece.shard.num_rows).values()
    return zlib.crc32(b"".join(tensor.detach().numpy().tobytes() for tensor in tensors))


def make_pipeline(
    model: Any,
    world: World,
    overlap: tuple[Overlap, ...],
    accumulate_steps: int = 1,
    clip: GradientClipper | None = None,
) -> Pipeline:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    return Pipeline(model, optimizer, world, clip=clip, accumulate_steps=accumulate_steps, overlap=overlap)


def train(
    exchange: Literal["flat", "hierarchical"], comm: Communication, accumulate_steps: int, overlap: tuple[Overlap, ...]
) -> tuple[int, list[float], list[tuple[float, ...]]]:
    """Return checksum, losses and votes of a few steps with changing rates and several buckets. Runs on every rank."""
    model, world = make_model(exchange, comm)
    pipeline = make_pipeline(model, world, overlap, accumulate_steps)
    with small_buckets(model):
        return steps_of(pipeline, world)


def steps_of(pipeline: Pipeline, world: World) -> tuple[int, list[float], list[tuple[float, ...]]]:
    rates = iter(range(1, 1 + len(SIZES)))

    def schedule() -> float:
        rate = next(rates)
        pipeline.optimizer.param_groups[0]["lr"] = 0.01 * rate
        return 1.0 / rate

    steps = list(pipeline.steps(slices(world, SIZES), schedule=schedule, votes=lambda: (1.0, float(world.rank))))
    assert [step.num_samples for step in steps] == SIZES
    return checksum(pipeline.model), [step.loss for step in steps], [step.votes for step in steps]


@contextmanager
def small_buckets(model: Any) -> Iterator[None]:
    """Context manager that splits the sums of dense gradients in two: the top MLP, and the rest."""
    whole, dense.BUCKET_BYTES = dense.BUCKET_BYTES, 2048
    try:
        _ = model.dense_gradients._buckets
        yield
    finally:
        dense.BUCKET_BYTES = whole


PRECISIONS = {
    "fp32": Communication(),
    "chain": Communication(dense_exchange="chain"),
    "paper": Communication(precision="paper"),
    "int8": Communication(precision="int8"),
}


MATRIX = product(size=[2, 4, 8], exchange=["flat", "hierarchical"], precision=[*PRECISIONS], accumulate_steps=[1, 3])


@pytest.mark.parametrize("case", sample(MATRIX, 2, seed=153))
def test_no_overlap_changes_a_bit(ranks: Ranks, case: dict[str, Any]) -> None:
    """Runs have hosts of two ranks, dropout, batch norm, weights, and micro-batches without samples on some ranks.

    In `make test`, more than two ranks use all overlaps together.
    """
    size, run = case["size"], (case["exchange"], PRECISIONS[case["precision"]], case["accumulate_steps"])
    off = ranks(size).run(train, *run, ())
    assert len({tuple(losses) for _, losses, _ in off}) == 1
    assert off[0][2] == [(float(size), sum(range(size)))] * len(SIZES)
    some = [*((name,) for name in OVERLAPS), MIXED] if IS_SOAK or size == 2 else []
    for overlap in (*some, OVERLAPS):
        assert ranks(size).run(train, *run, overlap) == off, overlap


def begun_in_backward(overlap: tuple[Overlap, ...]) -> list[str]:
    """Return the order of events of a step: the gradient of the first layer, and starts of dense sums."""
    model, world = make_model("flat", Communication())
    pipeline, events, start = make_pipeline(model, world, overlap), list[str](), World.start_all_reduce
    first = next(iter(model.bottom_mlp.parameters()))
    first.register_post_accumulate_grad_hook(lambda p: events.append("gradient of the first layer"))

    def note(self: World, tensor: Any, *arguments: Any, **options: Any) -> Any:
        events.extend(["sum"] if arguments[0] == "dense" else [])
        return start(self, tensor, *arguments, **options)

    World.start_all_reduce = note  # type: ignore[method-assign]
    try:
        with small_buckets(model):
            [*_] = pipeline.steps(slices(world, [13]))
    finally:
        World.start_all_reduce = start  # type: ignore[method-assign]
    return events


def test_dense_sums_begin_inside_the_backward_pass(ranks: Ranks) -> None:
    for events in ranks(2).run(begun_in_backward, OVERLAPS):
        assert events == ["sum", "gradient of the first layer", "sum"]
    assert ranks(2).run(begun_in_backward, ()) == [["gradient of the first layer", "sum"]] * 2


def leave_early(overlap: tuple[Overlap, ...]) -> tuple[int, int]:
    """Return the checksums after two steps of a longer loop, and after one more batch."""
    model, world = make_model("hierarchical", Communication())
    pipeline = make_pipeline(model, world, overlap)
    with closing(pipeline.steps(slices(world, SIZES))) as steps:
        for _ in range(2):
            next(steps)
    first = checksum(model)
    *_, last = slices(world, SIZES)
    pipeline(last)
    return first, checksum(model)


def test_leaving_a_loop_early_completes_open_transfers(ranks: Ranks) -> None:
    size = 4 if IS_SOAK else 2
    assert ranks(size).run(leave_early, OVERLAPS) == ranks(size).run(leave_early, ())


def look_between(overlap: tuple[Overlap, ...]) -> list[int]:
    """Return checksums and evaluations between steps."""
    model, world = make_model("flat", Communication(), MLPOptions())
    pipeline, values = make_pipeline(model, world, overlap), []
    for _ in pipeline.steps(slices(world, SIZES)):
        pipeline.synchronize()
        *_, last = slices(world, SIZES)
        with torch.no_grad():
            logits = model.score(last.dense, model.embeddings(last.sparse).pooled.values)
        values += [checksum(model), zlib.crc32(logits.numpy().tobytes())]
    return values


def test_synchronize_completes_all_updates_between_steps(ranks: Ranks) -> None:
    assert ranks(2).run(look_between, OVERLAPS) == ranks(2).run(look_between, ())


def fail_at(what: str, overlap: tuple[Overlap, ...]) -> tuple[str, int, int]:
    """Return the error of a bad third batch on rank 1, the number of steps before it, and the checksum after it."""
    model, world = make_model("flat", Communication(), MLPOptions())

    def batches() -> Iterator[Batch]:
        for number, batch in enumerate(slices(world, [13] * 5)):
            if number == 2 and world.rank == 1:
                if what == "disk":
                    raise OSError("the disk is gone")
                if what == "id":
                    batch.sparse["whole"].values[0] = 99
                    batch.sparse.values[batch.sparse.key_offsets[1]] = 99
                if what == "loss":
                    batch.dense[1, 2] = torch.inf
            yield batch

    pipeline, steps = make_pipeline(model, world, overlap), 0
    before = checksum(model)
    try:
        for _ in pipeline.steps(batches()):
            pipeline.synchronize()
            steps, before = steps + 1, checksum(model)
    except MesetaError as error:
        assert checksum(model) == before, "something moved"
        return f"{type(error).__name__}: {error}", steps, before
    return "nothing", steps, before


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("disk", "MesetaError: rank 1: OSError('the disk is gone')"),
        ("id", "feature 'whole'"),
        ("loss", "NonFiniteLoss: the loss is"),
    ],
)
@pytest.mark.parametrize("overlap", [(), OVERLAPS], ids=["off", "all"])
def test_a_bad_batch_raises_at_its_step_on_all_ranks(
    ranks: Ranks, what: str, message: str, overlap: tuple[Overlap, ...]
) -> None:
    results = ranks(2).run(fail_at, what, overlap)
    assert [steps for _, steps, _ in results] == [2, 2]
    assert all(message in text for text, _, _ in results), results
    assert [sums for *_, sums in results] == [sums for *_, sums in ranks(2).run(fail_at, what, ())]


def custom_loop(hides: bool, passed_over: bool, left_at: int | None) -> tuple[int, list[float]]:
    """Run a custom loop with or without `meseta.ahead`. Return checksum and losses."""
    model, world = make_model("hierarchical", Communication())
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=0.02), []
    batches: Any = slices(world, SIZES)
    for number, batch in enumerate(meseta.ahead(batches, model) if hides else batches):
        if passed_over and number == 1:
            continue
        if number == left_at:
            break
        logits = model(batch.dense, batch.sparse)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return checksum(model), losses


@pytest.mark.parametrize(("passed_over", "left_at"), [(False, None), (True, None), (False, 2)])
def test_a_custom_loop_with_ids_ahead_is_identical(ranks: Ranks, passed_over: bool, left_at: int | None) -> None:
    size = 4 if IS_SOAK or passed_over else 2
    for plain, ahead in zip(
        *(ranks(size).run(custom_loop, hides, passed_over, left_at) for hides in (False, True)), strict=True
    ):
        assert ahead[0] == plain[0]
        np.testing.assert_array_equal(ahead[1], plain[1])  # a rank without samples has no mean


def fail_ahead(what: str) -> tuple[list[int], str]:
    """Return the batches before the third, which is bad on rank 1, and the error."""
    model, world = make_model("flat", Communication(), MLPOptions())
    numbers = []

    def batches() -> Iterator[Any]:
        for number, batch in enumerate(slices(world, [13] * 5)):
            if number == 2 and world.rank == 1:
                if what == "disk":
                    raise OSError("the disk is gone")
                yield None
            yield batch

    with pytest.raises((MesetaError, OSError)) as raised:
        for number, batch in enumerate(meseta.ahead(batches(), model)):
            numbers.append(number)
            model(batch.dense, batch.sparse).sum().backward()
    return numbers, str(raised.value)


def test_a_bad_batch_ahead_raises_at_its_turn(ranks: Ranks) -> None:
    for what, message in (("disk", "the disk is gone"), ("none", "`sparse` of a batch must be")):
        results = ranks(2).run(fail_ahead, what)
        assert [numbers for numbers, _ in results] == [[0, 1]] * 2
        assert all(message in text for _, text in results)
    with pytest.raises(MesetaError, match="must have one EmbeddingBagCollection, got 0"):
        next(meseta.ahead([], torch.nn.Linear(1, 1)))


def chosen() -> list[Any]:
    model, world = make_model("flat", Communication())
    auto = choose_overlap("auto", model, world.with_ranks_per_host(1))
    off = choose_overlap("off", model, world)
    some = choose_overlap(["agree", "ids"], model, world)
    return [auto.hidden, dict(auto.excluded), off.hidden, some.hidden]


def test_auto_selects_every_possible_overlap(ranks: Ranks) -> None:
    assert ranks(2).run(chosen)[0] == [OVERLAPS, {}, (), ("ids", "agree")]


def test_auto_excludes_ids_if_processors_copy_them() -> None:
    model, _ = make_model("flat", Communication())
    inside = World(rank=0, size=2, device=torch.device("cpu"), plan_ranks_per_host=2)
    auto, asked = choose_overlap("auto", model, inside), choose_overlap(["ids"], model, inside)
    assert "costs more than it hides" in auto.excluded["ids"] and "ids" not in auto.hidden
    assert asked.hidden == ("ids",) and not asked.excluded
    assert "ids" in choose_overlap("auto", model, inside.with_ranks_per_host(1)).hidden


class OwnScore(DLRM):
    """Model whose `score` does not use `forward_dense`."""

    def score(self, dense: Any, pooled: torch.Tensor) -> torch.Tensor:
        return super().score(dense * 2.0, pooled)


def test_one_rank_has_no_overlap_and_reports_why() -> None:
    tables = [TableSpec(name="t", num_embeddings=4, embedding_dim=2)]
    model: Any = OwnScore(
        EmbeddingBagCollection(tables, [FeatureSpec(name="f", table="t")]), num_dense=1, bottom_mlp=(2,), top_mlp=(2,)
    )
    alone = choose_overlap("auto", model, World.single())
    assert alone.hidden == () and set(alone.excluded) == set(OVERLAPS)
    with pytest.raises(MesetaError, match=r"pipeline\.overlap 'ids' is not possible: one rank sends nothing"):
        choose_overlap(["ids"], model, World.single())
    two = World(rank=0, size=2, device=torch.device("cpu"))
    assert "computes nothing from dense inputs alone" in choose_overlap("auto", model, two).excluded["embeddings"]
    with pytest.raises(MesetaError, match="'embeddings' is not possible: OwnScore"):
        choose_overlap(["embeddings"], model, two)
    assert "embeddings" not in choose_overlap("auto", model, two, accumulate_steps=2).excluded
