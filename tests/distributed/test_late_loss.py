"""Ranks whose device keeps all as it is where a loss is no number, while the host learns of it a step later: the bits
of those that know at once. Devices are CPUs here, which are told to go about it as GPUs do."""

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
from .test_overlap import PRECISIONS, SIZES, global_batch, make_model

Ranks = Callable[[int], RankPool]
DENSE = {
    "sgd": DenseOptimizerConfig(name="sgd", lr=0.02),
    "momentum": DenseOptimizerConfig(name="sgd", lr=0.02, momentum=0.9),
    "adagrad": DenseOptimizerConfig(name="adagrad", lr=0.02),
    "adam": DenseOptimizerConfig(name="adam", lr=0.02),
    "adamw": DenseOptimizerConfig(name="adamw", lr=0.02, weight_decay=0.1),
    "lamb": DenseOptimizerConfig(name="lamb", lr=0.02),
}
NUM_STEPS = 20 if IS_SOAK else 6


def make(case: dict[str, Any], late: bool) -> Pipeline:
    """`plain`: optimizers of torch that know nothing of such a number, as torch has some on GPUs."""
    model, world = make_model(case["exchange"], PRECISIONS[case["precision"]])
    optimizer = make_dense_optimizer(DENSE[case["dense"]], model.parameters())
    if case["dense"] == "adam" and case["plain"]:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    clip = GradientClipper(norm=0.5) if case["clip"] else None
    overlap: tuple[Overlap, ...] = case["overlap"]
    pipeline = Pipeline(model, optimizer, world, clip=clip, accumulate_steps=case["accumulate_steps"], overlap=overlap)
    pipeline.defers_loss_check, pipeline.uses_stale_embeddings = late, case["stale"]
    return pipeline


def learned(pipeline: Pipeline) -> dict[str, Any]:
    """Of all tensors that last, by name, and the steps of the tables."""
    tensors = lasting_tensors(pipeline)
    sums = {name: zlib.crc32(tensor.contiguous().numpy().tobytes()) for name, tensor in tensors.items()}
    return {**sums, "step": pipeline.model.embeddings.step}


def batches(world: World, count: int, bad: int | None = None) -> Iterator[Batch]:
    for number, size in zip(range(count), itertools.cycle(SIZES[:4])):
        batch = batch_slice(global_batch(number, size), world)
        if number == bad and world.rank == world.size - 1:
            batch.dense[-1, 2] = torch.nan
        yield batch


def train(case: dict[str, Any], late: bool) -> tuple[dict[str, Any], list[float], list[Sequence[float]]]:
    """What was learned in `NUM_STEPS`, the losses, and the votes that each step gave out."""
    pipeline, numbers = make(case, late), itertools.count()
    steps = list(pipeline.steps(batches(pipeline.world, NUM_STEPS), votes=lambda: (float(next(numbers)),)))
    return learned(pipeline), [step.loss for step in steps], [step.votes for step in steps]


def fail(case: dict[str, Any], late: bool, bad: int, settled: bool) -> tuple[dict[str, Any], str, int, bool, bool]:
    """What was learned where the loss of a step is no number, what was told, after how many steps, whether the batch is
    named, and whether another loop goes on."""
    pipeline, done = make(case, late), 0
    given = list(batches(pipeline.world, bad + 3, bad))
    try:
        for _ in pipeline.steps(iter(given)):
            done += 1
            if settled:
                pipeline.synchronize()
    except NonFiniteLoss as error:
        is_bad_batch = pipeline.batch is given[bad]
        found = learned(pipeline), f"{type(error).__name__}: {error}", done, is_bad_batch
        pipeline.synchronize()  # nothing is left to be told
        good = next(batches(pipeline.world, 1))
        pipeline(good)  # and the next loop goes on
        return *found, pipeline.batch is good
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
    """One rank sends nothing, and hides nothing."""
    return {**case, "overlap": (), "exchange": "flat"} if case["size"] == 1 else case


@pytest.mark.parametrize("case", CASES)
def test_what_is_known_late_changes_no_bit(ranks: Ranks, case: dict[str, Any]) -> None:
    case, size = whole(case), case["size"]
    at_once, late = (ranks(size).run(train, case, late) for late in (False, True))
    for mine, other in zip(at_once, late, strict=True):
        assert mine[:2] == other[:2]
        assert mine[2] == [(float(size * number),) for number in range(NUM_STEPS)]
        if not case["clip"]:
            assert other[2] == [(), *mine[2][:-1]]


@pytest.mark.parametrize("case", CASES)
def test_a_loss_that_is_no_number_leaves_every_bit(ranks: Ranks, case: dict[str, Any]) -> None:
    """As the steps before it left them, on all ranks, whether the host looks between steps or not."""
    case, size, bad = whole(case), case["size"], case["bad"]
    expected = [(sums, done) for sums, _, done, *_ in ranks(size).run(fail, case, False, bad, False)]
    assert {done for _, done in expected} == {bad}
    for settled in (False, True):
        found = ranks(size).run(fail, case, True, bad, settled)
        for (sums, told, done, is_bad_batch, goes_on), (before, _) in zip(found, expected, strict=True):
            assert sums == before
            assert told.startswith("LateNonFiniteLoss: the loss is nan, and nothing was updated")
            assert is_bad_batch and goes_on and done in (bad, bad + 1)


@pytest.mark.parametrize("dense", DENSE)
def test_a_dense_step_that_the_device_forbids(dense: str) -> None:
    """Before any step, and after two; and one that it lets be."""
    for fused in (True, False):
        parameters = [torch.nn.Parameter(torch.randn(3, 4)), torch.nn.Parameter(torch.randn(5))]
        twins = [torch.nn.Parameter(p.detach().clone()) for p in parameters]
        optimizers = [make_dense_optimizer(DENSE[dense], given) for given in (parameters, twins)]
        if not fused and dense in ("adam", "momentum", "adagrad"):
            made = {"adam": torch.optim.Adam, "momentum": torch.optim.SGD, "adagrad": torch.optim.Adagrad}[dense]
            options = {"momentum": 0.9} if dense == "momentum" else {}
            optimizers = [made(given, lr=0.02, **options) for given in (parameters, twins)]  # type: ignore[operator]
        for number in range(5):
            for p, twin in zip(parameters, twins, strict=True):
                p.grad = torch.randn(p.shape) if number not in (0, 3) else torch.full(p.shape, torch.nan)
                twin.grad = p.grad.clone()
            undo = step_if_finite(optimizers[0], torch.tensor(float(number in (0, 3))))
            if number in (0, 3):
                undo()
            else:
                optimizers[1].step()
            for p, twin in zip(parameters, twins, strict=True):
                assert torch.equal(p, twin)
                mine, other = (o.state.get(q, {}) for o, q in zip(optimizers, (p, twin), strict=True))
                assert mine.keys() == other.keys()
                assert all(torch.equal(torch.as_tensor(mine[key]), torch.as_tensor(other[key])) for key in mine)


def test_a_batch_that_is_refused_behind_a_bad_loss_is_told_later(ranks: Ranks) -> None:
    assert all(told.startswith("LateNonFiniteLoss") for told in ranks(2).run(refused_behind))


def refused_behind() -> str:
    case = {
        "exchange": "flat",
        "precision": "fp32",
        "dense": "adam",
        "plain": False,
        "clip": False,
        "overlap": OVERLAPS,
    }
    pipeline = make({**case, "accumulate_steps": 1, "stale": False}, late=True)

    def given() -> Iterator[Batch]:
        for number, batch in enumerate(batches(pipeline.world, 4, bad=1)):
            if number == 2:
                raise OSError("the disk is gone")
            yield batch

    with pytest.raises(MesetaError) as raised:
        list(pipeline.steps(given()))
    return f"{type(raised.value).__name__}: {raised.value}"
