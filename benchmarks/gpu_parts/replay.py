"""Steps that a CUDA graph replays equal eager steps bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from gpu_path.training import Training, TrainingCase
from torch import Tensor

from gpu_parts.rows import RowWriter

NUM_STEPS, NUM_REPLAYS = 60, 50
"""Steps of a training, and how many of them must be replayed. The first ones are eager."""
BATCH_SIZE = 2048
CASES = {
    "dlrm": TrainingCase(model="dlrm", batch_size=BATCH_SIZE),
    "dcnv2": TrainingCase(model="dcnv2", batch_size=BATCH_SIZE),
    "dlrm, weighted bags": TrainingCase(model="dlrm", batch_size=BATCH_SIZE, is_ragged=True),
}


class Outcome(NamedTuple):
    """Result of a training."""

    tensors: dict[str, Tensor]
    """Predictions of each step, weights, moments, rows and their states, by name."""
    num_replays: int
    eager_reasons: dict[str, int]
    """Number of eager steps by reason, without those of a pipeline that uses no graphs."""


def train(training: Training, num_steps: int) -> Outcome:
    # The next step may reuse the memory of the logits.
    tensors = {f"prediction {number}": training.step().logits.clone() for number in range(num_steps)}
    training.pipeline.synchronize()
    graphs = training.pipeline.graphs
    counts = (0, {}) if graphs is None else (graphs.num_replayed, dict(graphs.eager_reasons))
    return Outcome(tensors | learned_tensors(training), *counts)


def learned_tensors(training: Training) -> dict[str, Tensor]:
    model: Any = training.model
    tensors = {f"weight {name}": weight.detach() for name, weight in model.named_parameters()}
    for name, weight in model.named_parameters():
        for key, moment in training.optimizer.state.get(weight, {}).items():
            tensors[f"{key} of {name}"] = torch.as_tensor(moment)
    for number, shard in enumerate(model.embeddings.shards):
        tensors |= {f"{key} of table {number}": values for key, values in shard.values.items()}
    return tensors


def different(outcome: Outcome, expected: Outcome) -> list[str]:
    """Return the names of tensors whose bits differ, and of those that only one outcome has."""
    some, others = outcome.tensors, expected.tensors
    return [
        name
        for name in some | others
        if name not in some or name not in others or not equal_bits(some[name], others[name])
    ]


def equal_bits(some: Tensor, other: Tensor) -> bool:
    if some.dtype != other.dtype or some.shape != other.shape:
        return False
    first, second = (tensor.cpu().reshape(-1).view(torch.uint8) for tensor in (some, other))
    return torch.equal(first, second)


def compare(
    rows: RowWriter, name: str, make_training: Callable[..., Training], num_steps: int, num_replays: int
) -> None:
    """Compare an eager training with two replayed ones. `make_training` has the argument `uses_graphs`."""
    expected = train(make_training(uses_graphs=False), num_steps)
    rows.at_most(f"{name}: replays in an eager run", expected.num_replays, 0, "")
    for number in (1, 2):
        outcome = train(make_training(uses_graphs=True), num_steps)
        names = different(outcome, expected)
        reasons = "".join(f", {count} eager: {reason}" for reason, count in outcome.eager_reasons.items())
        unit = f"of {num_steps} steps{reasons}"
        rows.at_least(f"{name}: replays in run {number}", outcome.num_replays, num_replays, unit)
        first = f", such as {names[0]}" if names else ""
        summary = f"{len(names)} of {len(expected.tensors)} tensors differ{first}"
        rows.holds(f"{name}: bits of run {number} equal those of eager steps", not names, summary)


def check(rows: RowWriter) -> None:
    for name, case in CASES.items():
        compare(rows, name, partial(Training, case, "cuda"), NUM_STEPS, NUM_REPLAYS)
