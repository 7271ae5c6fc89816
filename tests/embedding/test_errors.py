"""Tests of error messages about wrong use."""

from __future__ import annotations

import pytest
import torch

from meseta.comm import World
from meseta.embedding import EmbeddingBagCollection, ShardedEmbeddingBagCollection, shard
from meseta.sparse import KeyedJaggedTensor
from meseta.spec import FeatureSpec, MesetaError, Plan, TableSpec

TABLE = TableSpec(name="item", num_embeddings=10, embedding_dim=4)


def collection(**feature: object) -> EmbeddingBagCollection:
    return EmbeddingBagCollection([TABLE], [FeatureSpec(name="clicked", table="item", **feature)])  # type: ignore[arg-type]


def kjt(bags: list[list[int]], key: str = "clicked") -> KeyedJaggedTensor:
    return KeyedJaggedTensor.from_lists({key: bags})


@pytest.mark.parametrize("bad", [10, -1, 2**40])
def test_an_id_outside_is_named(bad: int) -> None:
    ours = collection()
    with pytest.raises(MesetaError) as error:
        ours(kjt([[1, 2], [], [9, bad, 77]]))
    assert str(error.value) == (
        f"table 'item': id {bad} from feature 'clicked', sample 2, is outside 0..9; "
        "set id_policy='hash' ('drop', 'clamp'), enlarge num_embeddings, or fix the data"
    )
    ours(kjt([[1, 2]]))


def test_a_refused_batch_changes_no_row() -> None:
    ours = collection()
    before = ours.shards[0].weight.clone()
    with pytest.raises(MesetaError):
        ours(kjt([[10]]))
    assert torch.equal(ours.shards[0].weight, before) and ours.step == 0


def test_policies_count_what_they_change() -> None:
    features = [FeatureSpec(name=p, table="item", id_policy=p) for p in ("drop", "clamp", "hash", "error")]
    ours = EmbeddingBagCollection([TABLE], features)
    assert ours.num_out_of_range is None
    bags = {"drop": [[1, 50], [-1]], "clamp": [[50], [-1]], "hash": [[3], [50]], "error": [[0], [9]]}
    for _ in range(2):
        out = ours(KeyedJaggedTensor.from_lists(bags))
    assert ours.num_out_of_range is not None and ours.num_out_of_range.tolist() == [4, 4, 2, 0]
    rows = ours.shards[0].weight
    assert torch.equal(out["drop"], torch.stack([rows[1], torch.zeros(4)]))
    assert torch.equal(out["clamp"], rows[[9, 0]])


def test_a_dropped_id_is_not_part_of_a_mean() -> None:
    ours = collection(pooling="mean", id_policy="drop")
    out = ours(kjt([[1, 50, 2], [50]]))
    rows = ours.shards[0].weight
    torch.testing.assert_close(out["clicked"], torch.stack([(rows[1] + rows[2]) / 2, torch.zeros(4)]))


def test_a_missing_feature_names_the_nearest_key() -> None:
    with pytest.raises(MesetaError, match="no key 'clicked'; did you mean 'click'"):
        collection()(kjt([[1]], key="click"))


def test_missing_weights() -> None:
    with pytest.raises(MesetaError, match="feature 'clicked' is weighted, but the batch has no weights"):
        collection(weighted=True)(kjt([[1]]))


def test_a_sharded_lookup_refuses_weights_that_want_a_gradient() -> None:
    batch = KeyedJaggedTensor(
        keys=("clicked",),
        values=torch.tensor([1, 2]),
        lengths=torch.tensor([2]),
        weights=torch.ones(2, requires_grad=True),
    )
    plan = Plan.from_dict({"tables": {"item": "table_wise"}}, [TABLE], 1)
    with pytest.raises(MesetaError, match="a sharded lookup does not send back; detach them"):
        ShardedEmbeddingBagCollection(collection(weighted=True), plan, World.single())(batch)
    ShardedEmbeddingBagCollection(collection(), plan, World.single())(batch)  # not read, so not refused


@pytest.mark.parametrize("lengths", [[1, 1], [3, 1], [4, -1]])
def test_lengths_that_do_not_add_up_to_the_ids(lengths: list[int]) -> None:
    with pytest.raises(MesetaError, match="length"):
        collection()(
            KeyedJaggedTensor(keys=("clicked",), values=torch.tensor([1, 2, 3]), lengths=torch.tensor(lengths))
        )


def test_features_with_different_batch_sizes() -> None:
    features = [FeatureSpec(name=n, table="item") for n in ("a", "b")]
    with pytest.raises(MesetaError, match="'a' has 1 samples and 'b' 2, but both have batch ''"):
        EmbeddingBagCollection([TABLE], features)(KeyedJaggedTensor.from_lists({"a": [[1]], "b": [[1], [2]]}))


def test_an_output_that_does_not_exist() -> None:
    features = [FeatureSpec(name="a", table="item"), FeatureSpec(name="history", table="item", pooling="none")]
    out = EmbeddingBagCollection([TABLE], features)(KeyedJaggedTensor.from_lists({"a": [[1]], "history": [[1]]}))
    with pytest.raises(MesetaError, match="no feature 'historyy'; did you mean 'history'"):
        out["historyy"]


@pytest.mark.parametrize(
    ("tables", "features", "message"),
    [
        ([TABLE, TABLE], [FeatureSpec(name="a", table="item")], "table 'item' is defined 2 times"),
        ([TABLE], [FeatureSpec(name="a", table="item")] * 2, "feature 'a' is defined 2 times"),
        ([TABLE], [FeatureSpec(name="a", table="itme")], "reads the unknown table 'itme'; did you mean 'item'"),
        ([TABLE], [], "feature"),
        ([], [], "table"),
        (
            [TABLE, TableSpec(name="b", num_embeddings=1, embedding_dim=1, dtype="float64")],
            [FeatureSpec(name="a", table="item")],
            "one dtype, got .'float32', 'float64'.",
        ),
    ],
)
def test_specs_that_do_not_fit(tables: list[TableSpec], features: list[FeatureSpec], message: str) -> None:
    with pytest.raises(MesetaError, match=message):
        EmbeddingBagCollection(tables, features)


def test_shard_wants_one_collection_inside_a_model() -> None:
    with pytest.raises(MesetaError, match="must have exactly one EmbeddingBagCollection, got 0"):
        shard(torch.nn.Linear(1, 1))
    with pytest.raises(MesetaError, match="got 2"):
        shard(torch.nn.ModuleList([collection(), collection()]))
    # Refused on one process too: what runs alone must run under torchrun.
    with pytest.raises(MesetaError, match="not the collection itself"):
        shard(collection())


def test_one_process_returns_the_model_itself() -> None:
    model = torch.nn.ModuleDict({"embeddings": collection()})
    assert shard(model) is model and isinstance(model["embeddings"], EmbeddingBagCollection)


def test_a_plan_for_another_number_of_ranks() -> None:
    plan = Plan.from_dict({"tables": {"*": "row_wise"}}, [TABLE], 2)
    with pytest.raises(MesetaError, match="requires 2 ranks, but this run has 1"):
        ShardedEmbeddingBagCollection(collection(), plan, World.single())
