"""Tests that ids are sorted on their own stream, on an emulated GPU, and that the update waits for the sort."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("gpu_path", reason="the emulated GPU is in benchmarks/, which does not belong to a wheel")
if torch.cuda.is_available():
    pytest.skip("Triton compiles for the GPU here", allow_module_level=True)

from gpu_path.patches import emulated_gpu

from meseta.embedding import EmbeddingBagCollection
from meseta.embedding.batch_context import BatchContext
from meseta.embedding.sort_ahead import SortAhead
from meseta.ops.id_policy import CheckedIds
from meseta.sparse import KeyedJaggedTensor
from meseta.spec import FeatureSpec, OptimizerSpec, TableSpec

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NaN and infinity in masked lanes
NUM_SAMPLES = 20
Flight = BatchContext[CheckedIds]


def make(device: str, *, optimizer: OptimizerSpec | None = None, batch: str = "") -> EmbeddingBagCollection:
    """Return a collection of two tables with different row optimizers."""
    optimizers = {"item": optimizer or OptimizerSpec(name="adam", lr=0.1), "user": OptimizerSpec(name="sgd", lr=0.1)}
    tables = [TableSpec(name=n, num_embeddings=9, embedding_dim=4, optimizer=o) for n, o in optimizers.items()]
    features = [FeatureSpec(name="clicked", table="item"), FeatureSpec(name="seen", table="user", weighted=True)]
    features.append(FeatureSpec(name="read", table="item", batch=batch, pooling="mean"))
    return EmbeddingBagCollection(tables, features, seed=1, device=device)


def batch(device: str, seed: int) -> KeyedJaggedTensor:
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 3, (3 * NUM_SAMPLES,), generator=draw)
    ids = torch.randint(0, 9, (int(lengths.sum()),), generator=draw)
    weights = torch.randn(ids.numel(), generator=draw)
    tensors = [tensor.to(device) for tensor in (ids, lengths, weights)]
    return KeyedJaggedTensor(("clicked", "seen", "read"), *tensors)


def train(ours: EmbeddingBagCollection, device: str, seed: int) -> Flight:
    flight = ours.start_input_dist(batch(device, seed))
    out = ours(ours.input_dist(flight))
    sum((values.values**2).sum() for values in (out.pooled, *out.pooled_by_batch.values())).backward()
    return flight


def state_of(ours: EmbeddingBagCollection) -> list[list[float]]:
    return [tensor.tolist() for shard in ours.shards for tensor in (shard.weight, *shard.state.values())]


def count_waits(monkeypatch: pytest.MonkeyPatch) -> list[SortAhead]:
    """Return a list to which each sort is appended when the update waits for it."""
    waits, wait = list[SortAhead](), SortAhead.wait
    monkeypatch.setattr(SortAhead, "wait", lambda sort: waits.append(sort) or wait(sort))
    return waits


def test_rows_have_the_bits_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    waits, plain = count_waits(monkeypatch), make("cpu")
    with emulated_gpu():
        ours = make("cuda")
        for seed in range(2):
            train(plain, "cpu", seed)
            assert train(ours, "cuda", seed).sort_ahead is None
            assert state_of(ours) == state_of(plain)
    assert [len(sort.sorted_ids) for sort in waits] == [2] * 2


@pytest.mark.parametrize("options", [{"optimizer": OptimizerSpec(name="adam", stepped_rows="all")}, {"batch": "b"}])
def test_other_updates_sort_their_ids(options: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    # An update of all rows, or of several groups of features, has other ids than the batch.
    waits, plain = count_waits(monkeypatch), make("cpu", **options)  # type: ignore[arg-type]
    with emulated_gpu():
        ours = make("cuda", **options)  # type: ignore[arg-type]
        train(plain, "cpu", 0)
        train(ours, "cuda", 0)
        assert state_of(ours) == state_of(plain)
    assert [len(sort.sorted_ids) for sort in waits] == [1] * ("optimizer" in options)


def test_accumulated_batches_are_sorted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    waits, plain = count_waits(monkeypatch), make("cpu")
    with emulated_gpu():
        ours = make("cuda")
        for collection, device in ((plain, "cpu"), (ours, "cuda")):
            with collection.accumulate_gradients():
                train(collection, device, 0)
            train(collection, device, 1)
        assert state_of(ours) == state_of(plain)
    assert not waits


def test_dropped_and_evaluated_batches_leave_no_stream_open(monkeypatch: pytest.MonkeyPatch) -> None:
    with emulated_gpu():
        ours, ids = make("cuda"), batch("cuda", 0)
        train(ours, "cuda", 0)

        def look_up() -> Flight:
            flight = ours.start_input_dist(ids)
            flight.defers_id_check = True
            ours(ours.input_dist(flight))
            return flight

        # The end of a capture is an error if a stream of the capture has work for which no other stream waits.
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            ours.drop(look_up())
            with torch.no_grad():
                assert look_up().sort_ahead is None
        monkeypatch.setattr(SortAhead, "wait", lambda sort: None)
        with pytest.raises(RuntimeError, match="unjoined work"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            ours.drop(look_up())
