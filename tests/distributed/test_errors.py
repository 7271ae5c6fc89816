"""An error on one rank is raised on all of them, no rank hangs, and the ranks can continue."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from meseta.comm import DenseGradients, World
from meseta.embedding import EmbeddingBagCollection, ShardedEmbeddingBagCollection, shard
from meseta.errors import UnknownColumnError
from meseta.sparse import KeyedJaggedTensor
from meseta.spec import FeatureSpec, MesetaError, Plan, TableSpec

from .pool import RankPool
from .scenario import Passes

Ranks = Callable[[int], RankPool]
TABLES = [
    TableSpec(name="user", num_embeddings=10, embedding_dim=8),
    TableSpec(name="item", num_embeddings=20, embedding_dim=8),
]
FEATURES = [
    FeatureSpec(name="who", table="user", weighted=True),
    FeatureSpec(name="what", table="item", pooling="none"),
]


def sharded(scheme: str) -> ShardedEmbeddingBagCollection:
    world = World.current()
    plan = Plan.from_dict({"tables": {"*": scheme}}, TABLES, world.size)
    return ShardedEmbeddingBagCollection(EmbeddingBagCollection(TABLES, FEATURES), plan, world)


def batch(who: list[list[int]], what: list[list[int]], weighted: bool = True) -> KeyedJaggedTensor:
    kjt = KeyedJaggedTensor.from_lists({"who": who, "what": what})
    weights = torch.ones(kjt.values.numel()) if weighted else None
    return KeyedJaggedTensor(keys=kjt.keys, values=kjt.values, lengths=kjt.lengths, weights=weights)


def message_of(call: Callable[[], object]) -> str:
    """Return the text of the MesetaError that `call` raises, or "" if it raises none."""
    try:
        call()
    except MesetaError as error:
        return str(error)
    return ""


def good_step(embeddings: ShardedEmbeddingBagCollection) -> float:
    """Run a step that would hang or break if a collective were still in flight."""
    rank = embeddings.world.rank
    out = embeddings(batch([[rank], [9]], [[3], [19, rank]]))
    loss = out.pooled.values.square().sum() + out["what"].values.square().sum()
    loss.backward()
    return float(loss)


def outside_id(scheme: str, bad_rank: int) -> tuple[str, float]:
    embeddings = sharded(scheme)
    rank = embeddings.world.rank
    bad = 20 if rank == bad_rank else 0
    text = message_of(lambda: embeddings(batch([[1], [2], [3]], [[0], [], [5, bad]])))
    assert embeddings.step == 0
    return text, good_step(embeddings)


@pytest.mark.parametrize("scheme", ["table_wise", "row_wise", "data_parallel"])
@pytest.mark.parametrize("bad_rank", [0, 1])
def test_an_id_outside_on_one_rank_is_raised_on_all(ranks: Ranks, scheme: str, bad_rank: int) -> None:
    results = ranks(2).run(outside_id, scheme, bad_rank)
    for text, loss in results:
        # The sample counts from the start of the global batch, in which every rank has three.
        assert text == (
            f"table 'item': id 20 from feature 'what', sample {3 * bad_rank + 2}, is outside 0..19; "
            "set id_policy='hash' ('drop', 'clamp'), enlarge num_embeddings, or fix the data"
        )
        assert loss > 0


def outside_ids_everywhere() -> str:
    embeddings = sharded("row_wise")
    rank = embeddings.world.rank
    return message_of(lambda: embeddings(batch([[10 + rank]], [[]])))


def test_the_lowest_rank_names_its_id_if_several_are_out_of_range(ranks: Ranks) -> None:
    texts = ranks(2).run(outside_ids_everywhere)
    assert texts[0] == texts[1] and "id 10 from feature 'who', sample 0," in texts[0]


def refused_batch(kind: str) -> tuple[str, float]:
    embeddings = sharded("table_wise")
    world = embeddings.world
    good = batch([[1]], [[2]])
    refused = {
        "weights": batch([[1]], [[2]], weighted=False),
        "key": KeyedJaggedTensor.from_lists({"who": [[1]]}),
        "sizes": KeyedJaggedTensor(
            keys=("who", "what"),
            values=torch.tensor([1]),
            lengths=torch.tensor([1, 0, 0]),
            weights=torch.ones(1),
            batch_sizes=(1, 2),
        ),
    }[kind]
    text = message_of(lambda: embeddings(refused if world.rank == 1 else good))
    return text, good_step(embeddings)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("weights", "rank 1: feature 'who' is weighted, but the batch has no weights"),
        ("key", "rank 1: KeyedJaggedTensor: no key 'what'"),
        ("sizes", "rank 1: feature 'who' has 1 samples and 'what' 2"),
    ],
)
def test_a_batch_refused_on_one_rank_is_refused_on_all(ranks: Ranks, kind: str, message: str) -> None:
    results = ranks(2).run(refused_batch, kind)
    assert results[0][0] == results[1][0]
    assert results[0][0].startswith(message)
    assert all(loss > 0 for _, loss in results)


def wrong_plans() -> list[str]:
    world = World.current()
    model = torch.nn.ModuleDict({"embeddings": EmbeddingBagCollection(TABLES, FEATURES)})
    for_four = Plan.from_dict({"tables": {"*": "row_wise"}}, TABLES, 4)
    texts = [
        message_of(lambda: shard(model, for_four)),
        message_of(lambda: shard(model, for_four.to_dict())),
        message_of(lambda: ShardedEmbeddingBagCollection(model["embeddings"], for_four, world)),  # type: ignore[arg-type]
        message_of(lambda: shard(model, {"tables": {"user": "row_wise"}})),
        message_of(lambda: shard(model["embeddings"])),
    ]
    assert isinstance(model["embeddings"], EmbeddingBagCollection)
    shard(model)
    assert isinstance(model["embeddings"], ShardedEmbeddingBagCollection)
    return texts


def test_plans_that_do_not_fit_are_refused(ranks: Ranks) -> None:
    for texts in ranks(2).run(wrong_plans):
        for_other_ranks = " 4 ranks, but this run has 2"
        expected = [for_other_ranks] * 3 + ["'item' is not placed", "not the collection itself"]
        assert all(part in text for part, text in zip(expected, texts, strict=True)), texts


def raised_together(bad_ranks: list[int]) -> tuple[str, str]:
    world = World.current()
    error = OSError(f"disk {world.rank} is full") if world.rank in bad_ranks else None
    world.raise_on_all_ranks(None)
    text = message_of(lambda: world.raise_on_all_ranks(error))
    return text, str(world.all_gather_object(world.rank))


def test_raise_together_names_the_lowest_rank(ranks: Ranks) -> None:
    for bad, expected in (([1], "rank 1: disk 1 is full"), ([0, 1], "rank 0: disk 0 is full"), ([], "")):
        assert ranks(2).run(raised_together, bad) == [(expected, "[0, 1]")] * 2


def raised_twice() -> list[str]:
    world = World.current()
    texts = []
    for bad in (0, 1):
        try:
            world.raise_on_all_ranks(OSError(f"disk {bad} is full") if world.rank == bad else None)
        except MesetaError as raised:
            texts.append(message_of(partial(world.raise_on_all_ranks, raised)))
    return texts


def test_an_error_raised_on_all_ranks_names_its_rank_once(ranks: Ranks) -> None:
    assert ranks(2).run(raised_twice) == [["rank 0: disk 0 is full", "rank 1: disk 1 is full"]] * 2


def unknown_columns() -> list[tuple[str, str, str | None]]:
    """Return (text, column, remedy) of an error of rank 1 and of two errors of rank 0, raised on all ranks."""
    world = World.current()
    error = UnknownColumnError("log", "usr", ["user"])

    def refuse() -> None:
        raise error

    raised = []
    for action in (
        lambda: world.raise_on_all_ranks(error if world.rank == 1 else None),
        lambda: world.run_on_rank_0(refuse),
        lambda: world.broadcast_from_rank_0(refuse),
    ):
        with pytest.raises(UnknownColumnError) as caught:
            action()
        raised.append((str(caught.value), caught.value.column, caught.value.remedy))
    return raised


def test_an_error_keeps_its_class_and_attributes_on_all_ranks(ranks: Ranks) -> None:
    text, attributes = "log has no column 'usr'; did you mean 'user'?", ("usr", "did you mean 'user'?")
    expected = [(f"{prefix}{text}", *attributes) for prefix in ("rank 1: ", "rank 0: ", "")]
    assert ranks(2).run(unknown_columns) == [expected] * 2


def refused_by_the_system() -> list[str]:
    world = World.current()

    def write() -> None:
        raise OSError(28, "No space left on device", "notes.json")

    def message(action: Callable[[], object]) -> str:
        try:
            action()
        except (MesetaError, OSError) as error:
            return str(error)
        return ""

    return [message(lambda: world.run_on_rank_0(write)), message(lambda: world.broadcast_from_rank_0(write))]


def test_a_system_error_of_rank_0_is_raised_on_all(ranks: Ranks) -> None:
    """No rank waits for one that has left."""
    text = "[Errno 28] No space left on device: 'notes.json'"
    assert ranks(2).run(refused_by_the_system) == [[f"rank 0: {text}", text]] * 2


class Broken(torch.autograd.Function):
    """Function that raises in its backward pass."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        raise MesetaError("broken")


def reduce_after_a_failure() -> list[list[float]]:
    world = World.current()
    first, last = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    kept = DenseGradients([first, last], world, Passes(0.25 if world.rank == 0 else 0.75))
    with pytest.raises(MesetaError, match="broken"):
        (last * Broken.apply(first * 2)).sum().backward()
    first.grad = last.grad = None
    (first * last * (world.rank + 1)).sum().backward()
    assert kept.parameters and first.grad is not None and last.grad is not None
    return [first.grad.tolist(), last.grad.tolist()]


def test_gradients_are_summed_again_after_a_backward_pass_that_failed(ranks: Ranks) -> None:
    # 0.25 * 1 + 0.75 * 2
    assert ranks(2).run(reduce_after_a_failure) == [[[1.75] * 2] * 2] * 2
