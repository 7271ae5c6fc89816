"""Rejected ids with a deferred check, as on a GPU: the update is skipped, and the next step raises the error.

Devices are CPUs here that follow the path of GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from meseta.comm import World
from meseta.config import DenseOptimizerConfig, RunConfig
from meseta.data.read.batch import Batch
from meseta.embedding import EmbeddingBagCollection
from meseta.models import DLRM, MLPOptions
from meseta.optim.dense import make_dense_optimizer
from meseta.pipeline import LateNonFiniteLoss, Pipeline
from meseta.pipeline.losses import SkippedUpdate
from meseta.sparse import KeyedJaggedTensor
from meseta.spec import FeatureSpec, MesetaError, OptimizerSpec, TableSpec
from meseta.train.trainer import Trainer
from model_parts import lasting_tensors
from sampling import product, sample
from small_run import final_checksum, settings

NUM_STEPS, NUM_SAMPLES, NUM_ROWS = 5, 12, 50
BAD_SAMPLE = 9
CASES = product(
    bad=[0, 2, NUM_STEPS - 1],
    fault=["id", "loss", "id and loss"],
    rows=["sgd", "adam", "adagrad"],
    dense=["sgd", "adam", "adagrad"],
    accumulate_steps=[1, 2],
)


def make(rows: str, dense: str, accumulate_steps: int, *, deferred: bool) -> Pipeline:
    spec = OptimizerSpec(name=rows, lr=0.05)  # type: ignore[arg-type]
    tables = [TableSpec(name=name, num_embeddings=NUM_ROWS, embedding_dim=4, optimizer=spec) for name in "ab"]
    features = [FeatureSpec(name="seen", table="a"), FeatureSpec(name="shown", table="b", id_policy="clamp")]
    model: Any = DLRM(
        EmbeddingBagCollection(tables, features, seed=1),
        num_dense=3,
        bottom_mlp=(8, 4),
        top_mlp=(8,),
        options=MLPOptions(seed=2),
    )
    config = DenseOptimizerConfig(name=dense, lr=0.02)  # type: ignore[arg-type]
    optimizer = make_dense_optimizer(config, model.parameters())
    pipeline = Pipeline(model, optimizer, World.single(), accumulate_steps=accumulate_steps)
    pipeline.update_check.is_deferred = deferred
    return pipeline


def make_batch(number: int, fault: str = "") -> Batch:
    """Return a batch in which some ids of 'shown' are clamped. A fault is in `BAD_SAMPLE`."""
    generator = torch.Generator().manual_seed(number)
    seen, shown = (torch.randint(0, bound, (NUM_SAMPLES, 2), generator=generator) for bound in (NUM_ROWS, NUM_ROWS + 9))
    batch = Batch(
        dense=torch.randn(NUM_SAMPLES, 3, generator=generator),
        sparse=KeyedJaggedTensor.from_lists({"seen": seen.tolist(), "shown": shown.tolist()}),
        label=torch.randint(0, 2, (NUM_SAMPLES,), generator=generator).float(),
    )
    if "id" in fault:
        batch.sparse.values[2 * BAD_SAMPLE] = NUM_ROWS + 7
    if "loss" in fault:
        batch.dense[BAD_SAMPLE, 1] = torch.nan
    return batch


def state(pipeline: Pipeline) -> dict[str, Tensor]:
    counts = pipeline.model.embeddings.num_out_of_range
    tensors = {**lasting_tensors(pipeline), "outside": torch.zeros(2).long() if counts is None else counts}
    return {name: tensor.clone() for name, tensor in tensors.items()}


@pytest.mark.parametrize("case", sample(CASES, 12, seed=4))
def test_a_rejected_id_leaves_every_bit(case: dict[str, Any]) -> None:
    bad, fault, options = (
        case["bad"],
        case["fault"],
        {name: case[name] for name in ("rows", "dense", "accumulate_steps")},
    )
    before, pipeline = (make(**options, deferred=deferred) for deferred in (False, True))
    list(before.steps(map(make_batch, range(bad))))
    batches = [make_batch(number, fault if number == bad else "") for number in range(NUM_STEPS)]
    num_yielded = 0
    with pytest.raises(SkippedUpdate) as raised:
        for _ in pipeline.steps(iter(batches)):
            num_yielded += 1
    assert num_yielded == min(bad + 1, NUM_STEPS) and pipeline.batch is batches[bad]
    with pytest.raises(MesetaError) as immediate:
        make(**options, deferred=False)(batches[bad])
    if "id" in fault:
        assert str(raised.value) == str(immediate.value)
        sample_in_part = BAD_SAMPLE % (NUM_SAMPLES // case["accumulate_steps"])
        assert f"id {NUM_ROWS + 7} from feature 'seen', sample {sample_in_part}, is outside" in str(raised.value)
    else:
        assert isinstance(raised.value, LateNonFiniteLoss)
    assert pipeline.model.embeddings.step == bad
    expected, kept = state(before), state(pipeline)
    assert kept.keys() == expected.keys()
    assert [name for name in kept if not torch.equal(kept[name], expected[name])] == []
    # Training continues as if the batch had not been there.
    assert before(make_batch(99)).loss == pipeline(make_batch(99)).loss
    expected, kept = state(before), state(pipeline)
    assert [name for name in kept if not torch.equal(kept[name], expected[name])] == []


def spoiled(batches: Iterator[Batch], index: int) -> Iterator[Batch]:
    for number, batch in enumerate(batches):
        if number == index:
            batch.sparse.values[4] = 10**6
        yield batch


@pytest.mark.parametrize("log_every_steps", [1, 50])
def test_a_run_names_the_step_and_keeps_the_checkpoint_before(tiny: Path, tmp_path: Path, log_every_steps: int) -> None:
    """A checkpoint is due after the step of the rejected id."""
    changes = {"train__max_steps": 9, "train__log_every_steps": log_every_steps, "checkpoint__every_steps": 3}
    messages = []
    for deferred in (False, True):
        run_dir = tmp_path / str(deferred)
        trainer = Trainer(RunConfig.model_validate(settings(tiny, run_dir, **changes)), World.single())
        trainer.pipeline.update_check.is_deferred = deferred
        trainer._batches = spoiled(trainer._batches, 5)  # type: ignore[assignment]
        with pytest.raises(MesetaError) as raised:
            trainer.run()
        assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["step-000000003"]
        messages.append(str(raised.value).replace(str(run_dir), "run"))
    assert messages[0] == messages[1] and messages[0].startswith("step 6: table ")
    assert "id 1000000 from feature" in messages[0]
    assert final_checksum(tmp_path / "False") == final_checksum(tmp_path / "True")
