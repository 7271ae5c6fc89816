"""A deferred loss check has the bits of an immediate one.

With a deferred check the device skips the update after a non-finite loss, and the host learns of it one step later.
Devices are CPUs here that follow the path of GPUs.
"""

from __future__ import annotations

import itertools
import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from meseta.comm import World
from meseta.config import DenseOptimizerConfig
from meseta.data.read.batch import Batch
from meseta.optim.dense import GradientClipper, make_dense_optimizer, step_if_finite
from meseta.pipeline import Pipeline
from meseta.pipeline.losses import NonFiniteLoss
from meseta.spec import MesetaError
from meseta.spec.stages import OVERLAPS, Overlap
from model_parts import lasting_tensors
from sampling import product, sample

from .pool import RankPool
from .scenario import IS_SOAK, batch_slice
from .test_overlap import PRECISIONS, global_batch, make_model

Ranks = Callable[[int], RankPool]
DENSE = {
    "sgd": DenseOptimizerConfig(name="sgd", lr=0.02),
    "momentum": DenseOptimizerConfig(name="sgd", lr=0.02, momentum=0.9),
    "adagrad": DenseOptimizerConfig(name="adagrad", lr=0.02),
    "adam": DenseOptimizerConfig(name="adam", lr=0.02),
    "adamw": DenseOptimizerConfig(name="adamw", lr=0.02, weight_decay=0.1),
    "lamb": DenseOptimizerConfig(name="lamb", lr=0.02),
}
NUM_STEPS = 20 if IS_SOAK else 4


def make(case: dict[str, Any], late: bool) -> Pipeline:
    """Return a pipeline. `plain` selects torch's optimizers, which do not skip steps by themselves."""
    model, world = make_model(case["exchange"], PRECISIONS[case["precision"]])
    optimizer = make_dense_optimizer(DENSE[case["dense"]], model.parameters())
    if case["dense"] == "adam" and case["plain"]:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    clip = GradientClipper(norm=0.5) if case["clip"] else None
    overlap: tuple[Overlap, ...] = case["overlap"]
    pipeline = Pipeline(model, optimizer, world, clip=clip, accumulate_steps=case["accumulate_steps"], overlap=overlap)
    pipeline.update_check.is_deferred, pipeline.uses_stale_embeddings = late, case["stale"]
    return pipeline


def checksums_of(pipeline: Pipeline) -> dict[str, Any]:
    """Return checksums of all persistent tensors by name, and the step of the tables."""
    tensors = lasting_tensors(pipeline)
    sums = {name: zlib.crc32(tensor.contiguous().numpy().tobytes()) for name, tensor in tensors.items()}
    return {**sums, "step": pipeline.model.embeddings.step}


def batches(world: World, count: int, bad: int | None = None) -> Iterator[Batch]:
    for number, size in zip(range(count), itertools.cycle((13, 8, 1, 24))):
        batch = batch_slice(global_batch(number, size), world)
        if number == bad and world.rank == world.size - 1:
            batch.dense[-1, 2] = torch.nan
        yield batch


def train(case: dict[str, Any], late: bool) -> tuple[dict[str, Any], list[float], list[Sequence[float]]]:
    """Return the model's checksums after `NUM_STEPS`, the losses, and the votes of each step."""
    pipeline, numbers = make(case, late), itertools.count()
    steps = list(pipeline.steps(batches(pipeline.world, NUM_STEPS), votes=lambda: (float(next(numbers)),)))
    return checksums_of(pipeline), [step.loss for step in steps], [step.votes for step in steps]


def fail(case: dict[str, Any], late: bool, bad: int, settled: bool) -> tuple[dict[str, Any], str, int, bool, bool]:
    """Return, for a run with a non-finite loss, the model's checksums, the error, the number of completed steps,
    whether the pipeline names the bad batch, and whether another step succeeds."""
    pipeline, done = make(case, late), 0
    all_batches = list(batches(pipeline.world, bad + 3, bad))
    try:
        for _ in pipeline.steps(iter(all_batches)):
            done += 1
            if settled:
                pipeline.synchronize()
    except NonFiniteLoss as error:
        is_bad_batch = pipeline.batch is all_batches[bad]
        result = checksums_of(pipeline), f"{type(error).__name__}: {error}", done, is_bad_batch
        pipeline.synchronize()  # no error is pending
        good = next(batches(pipeline.world, 1))
        pipeline(good)  # the next loop works
        return *result, pipeline.batch is good
    return {}, "nothing", done, False, False


MATRIX = product(
    size=[1, 2, 4],
    exchange=["flat", "hierarchical"],
    precision=["fp32", "int8"],
    dense=[*DENSE],
    plain=[False, True],
    clip=[False, True],
    overlap=[(), ("ids",), ("dense", "agree"), OVERLAPS],
    accumulate_steps=[1, 3],
    stale=[False, True],
    bad=[0, 3],
)
CASES = sample(random.Random(18).sample(MATRIX, 100), 2, seed=7)


def whole(case: dict[str, Any]) -> dict[str, Any]:
    """Return the case without exchanges and overlap if it has one rank."""
    return {**case, "overlap": (), "exchange": "flat"} if case["size"] == 1 else case


@pytest.mark.parametrize("case", CASES)
def test_a_deferred_check_changes_no_bit(ranks: Ranks, case: dict[str, Any]) -> None:
    case, size = whole(case), case["size"]
    first, late = (ranks(size).run(train, case, late) for late in (False, True))
    for immediate, deferred in zip(first, late, strict=True):
        assert immediate[:2] == deferred[:2]
        assert immediate[2] == [(float(size * number),) for number in range(NUM_STEPS)]
        if not case["clip"]:
            assert deferred[2] == [(), *immediate[2][:-1]]


@pytest.mark.parametrize("case", CASES)
def test_a_non_finite_loss_changes_no_bit(ranks: Ranks, case: dict[str, Any]) -> None:
    """Tensors are as the steps before left them, on all ranks, whether or not the host synchronizes between steps."""
    case, size, bad = whole(case), case["size"], case["bad"]
    expected = [(sums, done) for sums, _, done, *_ in ranks(size).run(fail, case, False, bad, False)]
    assert {done for _, done in expected} == {bad}
    for settled in (False, True) if IS_SOAK or size < 4 else (False,):
        results = ranks(size).run(fail, case, True, bad, settled)
        for (sums, text, done, is_bad_batch, continues), (before, _) in zip(results, expected, strict=True):
            assert sums == before
            assert text.startswith("LateNonFiniteLoss: the loss is nan, and nothing was updated")
            assert is_bad_batch and continues and done in (bad, bad + 1)


@pytest.mark.parametrize("dense", DENSE)
def test_a_dense_step_that_the_device_skips(dense: str) -> None:
    """Non-finite steps come first, and after two others. The other steps update as usual."""
    for fused in (True, False):
        parameters = [torch.nn.Parameter(torch.randn(3, 4)), torch.nn.Parameter(torch.randn(5))]
        expected = [torch.nn.Parameter(p.detach().clone()) for p in parameters]
        optimizers = [make_dense_optimizer(DENSE[dense], params) for params in (parameters, expected)]
        if not fused and dense in ("adam", "momentum", "adagrad"):
            made = {"adam": torch.optim.Adam, "momentum": torch.optim.SGD, "adagrad": torch.optim.Adagrad}[dense]
            options = {"momentum": 0.9} if dense == "momentum" else {}
            optimizers = [made(params, lr=0.02, **options) for params in (parameters, expected)]  # type: ignore[operator]
        for number in range(5):
            for p, q in zip(parameters, expected, strict=True):
                p.grad = torch.randn(p.shape) if number not in (0, 3) else torch.full(p.shape, torch.nan)
                q.grad = p.grad.clone()
            undo = step_if_finite(optimizers[0], torch.tensor([1.0, 0.0] if number in (0, 3) else [0.0, 1.0]))
            if number in (0, 3):
                undo()
            else:
                optimizers[1].step()
            for p, q in zip(parameters, expected, strict=True):
                assert torch.equal(p, q)
                state, other = (o.state.get(key, {}) for o, key in zip(optimizers, (p, q), strict=True))
                assert state.keys() == other.keys()
                assert all(torch.equal(torch.as_tensor(state[key]), torch.as_tensor(other[key])) for key in state)


def test_a_deferred_loss_error_precedes_that_of_the_next_batch(ranks: Ranks) -> None:
    assert all(text.startswith("LateNonFiniteLoss") for text in ranks(2).run(fail_after_bad_loss))


def fail_after_bad_loss() -> str:
    case = {
        "exchange": "flat",
        "precision": "fp32",
        "dense": "adam",
        "plain": False,
        "clip": False,
        "overlap": OVERLAPS,
    }
    pipeline = make({**case, "accumulate_steps": 1, "stale": False}, late=True)

    def failing_batches() -> Iterator[Batch]:
        for number, batch in enumerate(batches(pipeline.world, 4, bad=1)):
            if number == 2:
                raise OSError("the disk is gone")
            yield batch

    with pytest.raises(MesetaError) as raised:
        list(pipeline.steps(failing_batches()))
    return f"{type(raised.value).__name__}: {raised.value}"
