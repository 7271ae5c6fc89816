"""Copies of batches to a device on a separate stream: their order, and equal bits. Streams are fakes; tests/gpu has
real ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from meseta.comm import World
from meseta.data.read.batch import Batch, Position
from meseta.embedding import EmbeddingBagCollection
from meseta.models import DLRM
from meseta.pipeline import Pipeline, StageTimes
from meseta.pipeline.device_copy import DeviceCopier
from meseta.sparse import KeyedJaggedTensor
from meseta.spec import FeatureSpec, TableSpec

CPU = torch.device("cpu")


class Streams:
    """Fake of the stream functions of torch.cuda that records events."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        self.current, self.num_streams, self.num_copies = Stream(self, "main"), 0, 0
        monkeypatch.setattr(
            torch.Tensor, "record_stream", lambda _, stream: self.events.append(f"used on {stream.name}")
        )

    def Stream(self, device: torch.device) -> Stream:
        self.num_streams += 1
        return Stream(self, "side")

    def current_stream(self, device: torch.device) -> Stream:
        return self.current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def new_buffer(self, num_bytes: int) -> torch.Tensor:
        self.num_copies += 1
        self.events.append(f"packed on {self.current.name}")
        return torch.empty(num_bytes, dtype=torch.uint8)


class Stream:
    def __init__(self, streams: Streams, name: str) -> None:
        self.streams, self.name = streams, name

    def record_event(self) -> str:
        self.streams.events.append(f"event on {self.name}")
        return f"copy {self.streams.num_copies}"

    def wait_event(self, event: str) -> None:
        self.streams.events.append(f"{self.name} waits for {event}")


def batches(count: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    return [
        Batch(
            dense=torch.randn(6, 2, generator=generator),
            sparse=KeyedJaggedTensor.from_lists({"f": [[i, j % 5] for i in range(3) for j in range(2)]}),
            label=torch.randint(0, 2, (6,), generator=generator).float(),
            position=Position(0, 6 * (j + 1)),
        )
        for j in range(count)
    ]


def make(streams: Streams | None, accumulate_steps: int = 1) -> Pipeline:
    tables = [TableSpec(name="t", num_embeddings=5, embedding_dim=4)]
    model: Any = DLRM(
        EmbeddingBagCollection(tables, [FeatureSpec(name="f", table="t")]), num_dense=2, bottom_mlp=(4,), top_mlp=(3,)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    pipeline = Pipeline(model, optimizer, World.single(), accumulate_steps=accumulate_steps)
    if streams is not None:
        pipeline.device_copier = DeviceCopier(CPU, pipeline.stage_times, cuda=streams, new_buffer=streams.new_buffer)
    return pipeline


def test_the_computation_waits_for_the_copy_and_the_memory_for_the_computation(monkeypatch: pytest.MonkeyPatch) -> None:
    streams, batch = Streams(monkeypatch), replace(batches(1)[0], weight=torch.ones(6))
    take = DeviceCopier(CPU, StageTimes(), cuda=streams, new_buffer=streams.new_buffer).start(batch)
    assert streams.events == ["packed on main", "event on side"]
    streams.events.clear()
    copied = take()
    assert streams.events == ["main waits for copy 1", "used on main"]
    assert len(batch.tensors) == 5 and streams.num_streams == 1
    for copy, original in zip(copied.tensors, batch.tensors, strict=True):
        assert copy.dtype == original.dtype and torch.equal(copy, original)
        assert copy.untyped_storage().data_ptr() == copied.dense.untyped_storage().data_ptr()
    assert copied.sparse.key_offsets == batch.sparse.key_offsets and copied.position == batch.position


@pytest.mark.parametrize("accumulate_steps", [1, 3])
def test_the_next_batch_is_copied_while_one_is_trained(monkeypatch: pytest.MonkeyPatch, accumulate_steps: int) -> None:
    streams = Streams(monkeypatch)
    plain, side = make(None, accumulate_steps), make(streams, accumulate_steps)
    expected = [step.loss for step in plain.steps(iter(batches(4)))]
    losses, copied = [], []
    for step in side.steps(iter(batches(4))):
        losses.append(step.loss)
        copied.append(streams.num_copies)
        assert step.batch.position == Position(0, 6 * len(losses))
    assert losses == expected
    assert copied == [accumulate_steps * count for count in (2, 3, 4, 4)]
    waits = [event for event in streams.events if "waits" in event]
    assert waits == [f"main waits for copy {number + 1}" for number in range(4 * accumulate_steps)]
    for copy, original in zip(side.model.parameters(), plain.model.parameters(), strict=True):  # type: ignore[attr-defined]
        assert torch.equal(copy, original)


def test_an_unreadable_batch_raises_at_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def given() -> Iterator[Batch]:
        yield from batches(2)
        raise OSError("the disk is gone")

    side, done = make(Streams(monkeypatch)), 0
    with pytest.raises(OSError, match="the disk is gone"):
        for _ in side.steps(given()):
            done += 1
    assert done == 2
    with closing(side.steps(iter(batches(3)))) as steps:  # left while a copy is in flight
        next(steps)
    assert side(batches(1)[0]).num_samples == 6
