"""Copies of batches to a device on a separate stream: their order, and equal bits. Streams are fakes; tests/gpu has
real ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from late_copies import LateDevice
from meseta.comm import World
from meseta.data.read.batch import Batch, Position, split_batch
from meseta.embedding import EmbeddingBagCollection
from meseta.models import DLRM
from meseta.ops.common import MAX_PENDING_COPIES, BufferPool
from meseta.pipeline import Pipeline, StageTimes, device_copy, lookahead
from meseta.pipeline.device_copy import BatchPacker, DeviceCopier, PendingCopy
from meseta.sparse import KeyedJaggedTensor
from meseta.spec import FeatureSpec, IdPolicy, MesetaError, TableSpec

CPU = torch.device("cpu")


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


def make(device: LateDevice | None, accumulate_steps: int = 1, policy: IdPolicy = "error") -> Pipeline:
    tables = [TableSpec(name="t", num_embeddings=5, embedding_dim=4)]
    features = [FeatureSpec(name="f", table="t", id_policy=policy)]
    embeddings = EmbeddingBagCollection(tables, features)
    model: Any = DLRM(embeddings, num_dense=2, bottom_mlp=(4,), top_mlp=(3,))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    pipeline = Pipeline(model, optimizer, World.single(), accumulate_steps=accumulate_steps)
    if device is not None:
        pipeline.device_copier = copier(device, pipeline.stage_times, accumulate_steps)
    return pipeline


def copier(device: LateDevice, times: StageTimes | None = None, num_parts: int = 1) -> DeviceCopier:
    return DeviceCopier(CPU, times or StageTimes(), num_parts, cuda=device, new_buffer=device.new_buffer)


def start(copying: DeviceCopier, batch: Batch) -> PendingCopy:
    [part] = copying.packer.pack(batch).parts
    return copying.start(part)


def test_the_computation_waits_for_the_copy_and_the_memory_for_the_computation(monkeypatch: pytest.MonkeyPatch) -> None:
    device, batch = LateDevice(monkeypatch), replace(batches(1)[0], weight=torch.ones(6))
    pending = start(copier(device), batch)
    assert device.events == ["copy 1 on side", "event on side"]
    device.events.clear()
    buffer = pending.wait_buffer()
    assert device.events == ["main waits for copy 1", "used on main"]
    device.events.clear()
    copied = pending.wait()
    assert device.events == ["main waits for copy 1", "used on main"]
    assert (buffer.dtype, buffer.shape) == (torch.uint8, (pending.part.layout.num_bytes,))
    assert buffer.data_ptr() == copied.dense.data_ptr()
    assert len(batch.tensors) == 5 and device.num_streams == 1
    for copy, original in zip(copied.tensors, batch.tensors, strict=True):
        assert torch.equal(copy, original)
        is_lengths = copy is copied.sparse.lengths
        assert copy.dtype == (torch.int32 if copy is copied.sparse.values else original.dtype)
        assert is_lengths != (copy.untyped_storage().data_ptr() == copied.dense.untyped_storage().data_ptr())
    assert copied.sparse.key_offsets == batch.sparse.key_offsets and copied.position == batch.position


def test_no_buffer_is_overwritten_while_its_copy_is_in_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of different sizes are packed much faster than they are copied."""
    device, inputs = LateDevice(monkeypatch), batches(40)
    inputs = [part for index, batch in enumerate(inputs) for part in split_batch(batch, 1 + index % 3)]
    copying, queue = copier(device), deque[PendingCopy]()
    for number, batch in enumerate(inputs):
        queue.append(start(copying, batch))
        if number >= 7:
            check_equal(queue.popleft().wait(), inputs[number - 7])
    for pending, batch in zip(queue, inputs[-7:], strict=True):
        check_equal(pending.wait(), batch)
    device.check_copies()
    assert device.num_buffers == MAX_PENDING_COPIES
    assert sum("the host waits" in event for event in device.events) > 40


def check_equal(copied: Batch, batch: Batch) -> None:
    for copy, original in zip(copied.tensors, batch.tensors, strict=True):
        assert torch.equal(copy, original)


def test_buffers_grow_by_a_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    device = LateDevice(monkeypatch)
    pool = BufferPool(device.new_buffer)
    sizes = []
    for num_bytes in (1000, 900, 1250, 1251, 1500, 1000):
        buffer = pool.acquire(num_bytes)
        sizes.append(buffer.numel())
        torch.empty(num_bytes, dtype=torch.uint8).copy_(buffer[:num_bytes])
        device.complete(device.copies[-1])
        pool.release(buffer, device.copies[-1])
    assert sizes == [1250, 1250, 1250, 1563, 1563, 1563] and device.num_buffers == 2


def test_the_training_thread_only_starts_a_copy_of_a_packed_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    device, batch = LateDevice(monkeypatch), batches(1)[0]
    [part] = BatchPacker(CPU, new_buffer=device.new_buffer).pack(batch).parts
    copying = copier(device)
    for function in ("make_batch_totals", "split_batch", "PackedLayouts"):
        monkeypatch.setattr(device_copy, function, None)
    with CountOperators() as counter:
        copied = copying.start(part).wait()
    check_equal(copied, batch)
    assert counter.count <= 24 and device.num_buffers == 1


class CountOperators(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("packs_ahead", [False, True])
@pytest.mark.parametrize("accumulate_steps", [1, 3])
def test_the_next_batch_is_copied_while_one_is_trained(
    monkeypatch: pytest.MonkeyPatch, accumulate_steps: int, packs_ahead: bool
) -> None:
    device = LateDevice(monkeypatch)
    plain, side = make(None, accumulate_steps), make(device, accumulate_steps)
    expected = [step.loss for step in plain.steps(iter(batches(4)))]
    # The thread that packs a batch splits it and adds its weights.
    for function in ("make_batch_totals", "split_batch"):
        monkeypatch.setattr(lookahead, function, None)
    packer = BatchPacker(CPU, accumulate_steps, new_buffer=device.new_buffer)
    inputs = map(packer.pack, batches(4)) if packs_ahead else iter(batches(4))
    losses, copied = [], []
    for step in side.steps(inputs):
        losses.append(step.loss)
        copied.append(len(device.copies))
        assert step.batch.position == Position(0, 6 * len(losses))
        assert step.batch.sparse.values.dtype == torch.int64
    assert losses == expected
    assert copied == [accumulate_steps * count for count in (2, 3, 4, 4)]
    waits = [event for event in device.events if event.startswith("main waits")]
    assert waits == [f"main waits for copy {number + 1}" for number in range(4 * accumulate_steps)]
    device.check_copies()
    for copy, original in zip(side.model.parameters(), plain.model.parameters(), strict=True):  # type: ignore[attr-defined]
        assert torch.equal(copy, original)


@pytest.mark.parametrize("policy", ["error", "drop", "clamp", "hash"])
@pytest.mark.parametrize("wide", [7, -1, 2**31, 2**40 + 3])
def test_ids_outside_their_table_are_handled_as_without_copies(
    monkeypatch: pytest.MonkeyPatch, policy: IdPolicy, wide: int
) -> None:
    results = []
    for device in (None, LateDevice(monkeypatch)):
        pipeline, inputs = make(device, policy=policy), batches(3)
        inputs[1].sparse.values[4] = wide
        losses: list[Any] = []
        with ExitStack() as stack:
            if policy == "error":
                caught = stack.enter_context(pytest.raises(MesetaError, match=f"id {wide} from feature 'f', sample 2"))
            losses.extend(step.loss for step in pipeline.steps(iter(inputs)))
        rows = pipeline.model.embeddings.shards[0].weight
        results.append((losses, str(caught.value) if policy == "error" else "", rows.tolist()))
    assert results[0] == results[1] and len(results[0][0]) == (1 if policy == "error" else 3)


def test_an_unreadable_batch_raises_at_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def inputs() -> Iterator[Batch]:
        yield from batches(2)
        raise OSError("the disk is gone")

    side, done = make(LateDevice(monkeypatch)), 0
    with pytest.raises(OSError, match="the disk is gone"):
        for _ in side.steps(inputs()):
            done += 1
    assert done == 2
    with closing(side.steps(iter(batches(3)))) as steps:  # left while a copy is in flight
        next(steps)
    assert side(batches(1)[0]).num_samples == 6
