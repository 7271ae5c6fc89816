"""Custom loops whose ranks have different numbers of batches, under each `uneven` policy."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator
from contextlib import redirect_stderr
from dataclasses import dataclass, field
from itertools import cycle, repeat
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

import meseta
from meseta.comm import World
from meseta.data.read.batch import Batch, Position
from meseta.embedding import EmbeddingBagCollection, shard
from meseta.embedding.batch_context import UNEVEN_POLICIES
from meseta.models import DLRM, MLPOptions
from meseta.pipeline import ahead_loop as uneven_module
from meseta.pipeline.ahead_loop import make_empty_batch
from meseta.sparse import JaggedTensor, KeyedJaggedTensor
from meseta.spec import FeatureSpec, MesetaError, OptimizerSpec, Plan, TableSpec
from meseta.spec.tiers import StorageOptions

from .pool import RankPool
from .scenario import random_ids, samples_of
from .test_overlap import checksum

Ranks = Callable[[int], RankPool]
ROWS = {"copied": 6, "columns": 11, "rows": 40}
SCHEMES = ("data_parallel", "column_wise", "row_wise")
WIDTH = 32
SLICES = {2: ((5, 3, 2, 4), (6, 1)), 4: ((2, 3), (4, 0, 1, 3), (5,), (1, 2, 3))}
"""Samples of each batch, by number of ranks and by rank."""
EVEN = {2: ((5, 3), (6, 1)), 4: ((2,), (4,), (5,), (1,))}
"""The batches of `SLICES` that every rank has."""
Slices = tuple[tuple[int, ...], ...]


def make_model(world: World, lookahead: int = 0) -> Any:
    """Return the model. With `lookahead` its sharded tables are cached, and rows are prefetched that many batches
    ahead."""
    spec = OptimizerSpec(name="rowwise_adagrad", lr=0.05)
    tables = [TableSpec(name=n, num_embeddings=rows, embedding_dim=WIDTH, optimizer=spec) for n, rows in ROWS.items()]
    features = [FeatureSpec(name=n, table=n, weighted=n == "rows") for n in ROWS]
    model = DLRM(
        EmbeddingBagCollection(tables, features, seed=3),
        num_dense=4,
        bottom_mlp=(8, WIDTH),
        top_mlp=(16, 8),
        options=MLPOptions(dropout=0.3, batch_norm=True, seed=5),
        seed=1,
    )
    if world.size == 1:
        return model
    places: dict[str, Any] = dict(zip(ROWS, SCHEMES, strict=True))
    if lookahead:
        placement = {"tier": "cached", "cache_rows": max(ROWS.values())}
        places |= {name: {"sharding": places[name], **placement} for name in ROWS if places[name] != "data_parallel"}
    document = {"devices_per_host": 2, "exchange": "hierarchical", "tables": places}
    storage = StorageOptions(lookahead=lookahead)
    return shard(model, Plan.from_dict(document, tables, world.size), world=world, storage=storage)


def global_batch(number: int, slices: Slices) -> tuple[Batch, list[int]]:
    """Return batch `number` of all ranks, and the index of each rank's first sample."""
    sizes = [counts[number] if number < len(counts) else 0 for counts in slices]
    draw, size = np.random.default_rng(number), sum(sizes)
    ids, lengths = random_ids(draw, ROWS, size)
    sparse = KeyedJaggedTensor(tuple(ROWS), ids, lengths, torch.from_numpy(draw.random(len(ids)).astype(np.float32)))
    dense = torch.from_numpy(draw.normal(size=(size, 4)).astype(np.float32))
    label = torch.from_numpy(draw.integers(0, 2, size).astype(np.float32))
    return Batch(dense=dense, sparse=sparse, label=label), [0, *np.cumsum(sizes).tolist()]


def batches_of(rank: int, slices: Slices, num_batches: int) -> Iterator[Batch]:
    """Yield the slices of one rank, empty ones after its last."""
    for number in range(num_batches):
        whole, firsts = global_batch(number, slices)
        local = slice(firsts[rank], firsts[rank + 1])
        yield Batch(dense=whole.dense[local], sparse=samples_of(whole.sparse, local), label=whole.label[local])


def train(model: Any, batches: Iterable[Any]) -> list[int]:
    """Train on the batches and return the number of samples of each."""
    optimizer, sizes = torch.optim.SGD(model.parameters(), lr=0.05), []
    for batch in batches:
        loss = binary_cross_entropy_with_logits(model(batch.dense, batch.sparse), batch.label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        sizes.append(batch.batch_size)
    return sizes


def ahead_of(slices: Slices, uneven: str, epochs: int = 1, lookahead: int = 0) -> tuple[int, list[int], str]:
    """Return checksum, sizes of this rank's batches, and the text on stderr after loops over these slices."""
    world, output = World.current(), io.StringIO()
    model, sizes = make_model(world, lookahead), []
    with redirect_stderr(output):
        for _ in range(epochs):
            batches = batches_of(world.rank, slices, len(slices[world.rank]))
            sizes += train(model, meseta.ahead(batches, model, uneven=uneven))
    return checksum(model), sizes, output.getvalue()


def by_hand(slices: Slices, epochs: int = 1) -> tuple[int, list[int], str]:
    """Return the result of `ahead_of` for explicit empty slices and no look-ahead."""
    world = World.current()
    model, most = make_model(world), max(map(len, slices))
    sizes = [train(model, batches_of(world.rank, slices, most)) for _ in range(epochs)]
    return checksum(model), [size for epoch in sizes for size in epoch], ""


def model_tensors(model: Any) -> list[torch.Tensor]:
    return [tensor.detach().clone() for tensor in (*model.parameters(), *model.buffers())]


def tensors_after_ahead(slices: Slices) -> list[torch.Tensor]:
    model = make_model(World.current())
    rank = World.current().rank
    train(model, meseta.ahead(batches_of(rank, slices, len(slices[rank])), model, uneven="join"))
    return model_tensors(model)


BY_LOOKAHEAD = [(2, 0), (4, 3), *(pytest.param(*case, marks=pytest.mark.soak) for case in ((2, 3), (4, 0)))]


@pytest.mark.parametrize(("size", "lookahead"), BY_LOOKAHEAD)
def test_exhausted_ranks_join_with_empty_slices(ranks: Ranks, size: int, lookahead: int) -> None:
    """A second loop starts with nothing left in flight by the first."""
    slices = SLICES[size]
    of_ranks = ranks(size).run(ahead_of, slices, "join", 2, lookahead), ranks(size).run(by_hand, slices, 2)
    for rank, (ahead, plain) in enumerate(zip(*of_ranks, strict=True)):
        assert ahead == plain
        padded = [*slices[rank], *[0] * (max(map(len, slices)) - len(slices[rank]))]
        assert ahead[1] == 2 * padded


@pytest.mark.parametrize("size", [2, 4])
def test_join_is_one_process_that_trains_each_sample_once(ranks: Ranks, size: int) -> None:
    slices, model = SLICES[size], make_model(World.single())
    whole = [global_batch(number, slices)[0] for number in range(max(map(len, slices)))]
    assert train(model, whole) == [batch.batch_size for batch in whole]
    for tensors in ranks(size).run(tensors_after_ahead, slices):
        for tensor, expected in zip(tensors, model_tensors(model), strict=True):
            torch.testing.assert_close(tensor, expected)


@pytest.mark.parametrize(("size", "lookahead"), BY_LOOKAHEAD)
def test_drop_ends_all_with_the_shortest_and_reports_the_rest(ranks: Ranks, size: int, lookahead: int) -> None:
    results = ranks(size).run(ahead_of, SLICES[size], "drop", 1, lookahead)
    assert [result[:2] for result in results] == [
        result[:2] for result in ranks(size).run(ahead_of, EVEN[size], "error")
    ]
    notes = {
        2: "rank 1 is exhausted after 2 batches, so the loop ends; 2 batches of other ranks are not trained "
        "(rank 0: 2)",
        4: "rank 2 is exhausted after 1 batch, so the loop ends; 6 batches of other ranks are not trained "
        "(rank 0: 1, rank 1: 3, rank 3: 2)",
    }
    assert [text for *_, text in results] == [f"note: meseta.ahead: {notes[size]}\n", *[""] * (size - 1)]


def drop_infinite_batches() -> str:
    """Return the text on stderr if rank 1 has infinitely many batches."""
    world, output, before = World.current(), io.StringIO(), uneven_module.COUNT_TIMEOUT_S
    model, [batch] = make_model(world), batches_of(world.rank, ((2,), (2,)), 1)
    uneven_module.COUNT_TIMEOUT_S = 0.01
    try:
        with redirect_stderr(output):
            train(
                model,
                meseta.ahead(repeat(batch, 3) if world.rank == 0 else cycle([batch]), model, uneven="drop"),
            )
    finally:
        uneven_module.COUNT_TIMEOUT_S = before
    return output.getvalue()


def test_infinite_batches_are_counted_briefly(ranks: Ranks) -> None:
    note = ranks(2).run(drop_infinite_batches)[0]
    assert "rank 0 is exhausted after 3 batches, so the loop ends; at least " in note
    assert "(rank 1: at least " in note


def stop_with_error(slices: Slices, policies: tuple[str, ...]) -> tuple[int, str]:
    """Return the number of batches before an error, and the error."""
    world = World.current()
    model, num_batches = make_model(world), 0
    batches = batches_of(world.rank, slices, len(slices[world.rank]))
    with pytest.raises(MesetaError) as caught:
        for batch in meseta.ahead(batches, model, uneven=policies[world.rank]):
            num_batches += 1
            model(batch.dense, batch.sparse).sum().backward()
    return num_batches, str(caught.value)


def test_error_names_the_first_exhausted_rank(ranks: Ranks) -> None:
    message = (
        "meseta.ahead: rank 2 is exhausted after 1 batch, but others have more; give all ranks the same number of "
        "batches, or set uneven='join' to train the others too, or uneven='drop' to skip them"
    )
    assert ranks(4).run(stop_with_error, SLICES[4], ("error",) * 4) == [(1, message)] * 4


def test_a_rank_without_any_batch_cannot_join(ranks: Ranks) -> None:
    message = (
        "meseta.ahead: rank 1 has no batches, but uneven='join' needs one as a template for empty batches; give the "
        "rank at least one batch, which may be empty, or set uneven='drop'"
    )
    assert ranks(2).run(stop_with_error, ((2, 2), ()), ("join",) * 2) == [(0, message)] * 2
    assert [sizes for _, sizes, _ in ranks(2).run(ahead_of, ((), ()), "join")] == [[], []]
    assert [sizes for _, sizes, _ in ranks(2).run(ahead_of, ((2,), ()), "drop")] == [[], []]


def test_ranks_with_different_policies_raise(ranks: Ranks) -> None:
    for num_batches, text in ranks(2).run(stop_with_error, ((2,), (2,)), ("join", "drop")):
        assert (
            num_batches == 1
            and text.startswith("meseta.ahead: uneven must be equal")
            and text.endswith("on another rank")
        )


def skip_after_lookup(how: str) -> tuple[int, str, bool]:
    """Return the number of batches, the error, and whether the next step of all ranks succeeds."""
    world = World.current()
    model, num_batches, slices = make_model(world), 0, ((2,) * 4, (3,) * 4)
    loop = meseta.ahead(batches_of(world.rank, slices[: world.size] or slices, 4), model)
    text = "nothing"
    try:
        for batch in loop:
            num_batches += 1
            if num_batches == 2:
                model.embeddings.lookup(batch.sparse)
                if how == "left":
                    break
                continue
            model(batch.dense, batch.sparse).sum().backward()
    except MesetaError as error:
        text = str(error)
    loop.close()
    return num_batches, text, train(model, batches_of(world.rank, slices, 2)) == [(2, 3)[world.rank]] * 2


@pytest.mark.parametrize("size", [1, 2])
def test_a_batch_skipped_after_its_lookup_raises(ranks: Ranks, size: int) -> None:
    message = (
        "meseta.ahead: batch 1 (counted from 0) was looked up and then skipped, so the next batch was not started; "
        "pass the result of lookup to model.embeddings(...), skip batches only before lookup, and let errors end "
        "the loop"
    )
    assert ranks(size).run(skip_after_lookup, "passed over") == [(2, message, True)] * size
    assert ranks(size).run(skip_after_lookup, "left") == [(2, "nothing", True)] * size


@pytest.mark.parametrize("uneven", UNEVEN_POLICIES)
def test_one_process_ends_with_its_batches(uneven: str) -> None:
    plain, ahead = make_model(World.single()), make_model(World.single())
    slices = ((3, 0, 2),)
    assert train(plain, batches_of(0, slices, 3)) == [3, 0, 2]
    assert train(ahead, meseta.ahead(batches_of(0, slices, 3), ahead, uneven=uneven)) == [3, 0, 2]
    assert checksum(ahead) == checksum(plain)
    assert train(ahead, meseta.ahead([], ahead, uneven=uneven)) == []


def test_an_unknown_policy_is_rejected() -> None:
    model: Any = make_model(World.single())
    with pytest.raises(MesetaError, match=r"meseta\.ahead: uneven 'joined' is unknown; did you mean 'join'"):
        next(meseta.ahead([], model, uneven="joined"))


class Pair(NamedTuple):
    one: torch.Tensor
    other: str


class Slotted:
    __slots__ = ("sparse", "x")


@dataclass
class OwnBatch:
    sparse: KeyedJaggedTensor
    x: torch.Tensor
    parts: dict[str, Any] = field(default_factory=dict)


def test_an_empty_batch_has_the_structure_of_its_template() -> None:
    sparse = KeyedJaggedTensor(("a", "b"), torch.arange(3), torch.tensor([1, 1, 1, 0]))
    parts = {"pair": Pair(torch.ones(2, 5), "name"), "list": [torch.ones(2)], "of all": torch.ones(3), "number": 4}
    parts |= {"bags": JaggedTensor(torch.ones(3, 2), torch.tensor([1, 2])), "ids": sparse, "scalar": torch.tensor(2)}
    batch = OwnBatch(sparse, torch.ones(2, 7, dtype=torch.int32), parts)
    empty = make_empty_batch(batch, sparse.batch_sizes)
    assert empty.x.shape == (0, 7) and empty.x.dtype == torch.int32 and batch.x.shape == (2, 7)
    assert empty.parts["pair"].one.shape == (0, 5) and empty.parts["pair"].other == "name"
    assert empty.parts["list"][0].shape == (0,) and empty.parts["of all"].shape == (3,) and empty.parts["number"] == 4
    assert empty.parts["bags"].values.shape == (0, 2) and empty.parts["bags"].lengths.shape == (0,)
    assert empty.parts["ids"].keys == ("a", "b") and empty.parts["ids"].batch_size == 0
    assert empty.parts["scalar"] == 2
    slotted = Slotted()
    slotted.x = torch.ones(2, 3)
    assert make_empty_batch(slotted, (2,)).x.shape == (0, 3)
    of_reader = Batch(torch.ones(2, 1), sparse, torch.ones(2), num_padding=1, position=Position(0, 7))
    last = make_empty_batch(of_reader, sparse.batch_sizes)
    assert (last.batch_size, last.num_padding, last.position) == (0, 0, Position(0, 7))
