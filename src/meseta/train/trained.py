"""A trained model, ready to evaluate: the newest checkpoint of a run, on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meseta import checkpoint
from meseta.comm import World
from meseta.data.dataset import Dataset
from meseta.data.reader import Reader, ReaderOptions
from meseta.optim.dense import make_dense_optimizer
from meseta.spec import MesetaError
from meseta.train.build import make_sharded_model
from meseta.train.run_dir import RunDir
from meseta.train.session import session
from meseta.train.trainer import restore


@dataclass(frozen=True)
class Trained:
    """A model and the rows to apply it to."""

    model: Any
    reader: Reader
    world: World
    step: int
    """Steps that the checkpoint was trained for."""


@contextmanager
def open_trained(run_dir: Path, split: str, data: Path | None = None) -> Iterator[Trained]:
    """Load the newest checkpoint of `run_dir`. A plan made for another number of ranks gives way to a balanced one.

    Raises MesetaError where there is no run, no checkpoint, no such split, or data with other features.
    """
    run = RunDir(run_dir)
    config = run.load_config()
    path = checkpoint.latest(run.checkpoints)
    if path is None:
        raise MesetaError(f"run {str(run_dir)!r} has no checkpoint yet; train it first with `meseta train`")
    trained_on = Dataset.load(run_dir)
    dataset = trained_on if data is None else Dataset.load(data)
    for kind, mine, theirs in (
        ("dense features", [d.name for d in trained_on.dense], [d.name for d in dataset.dense]),
        ("sparse features", [(s.name, s.num_embeddings) for s in trained_on.sparse],
         [(s.name, s.num_embeddings) for s in dataset.sparse]),
    ):  # fmt: skip
        if mine != theirs:
            raise MesetaError(
                f"dataset {str(data)!r} has other {kind} than the run was trained on; prepare it with the same options"
            )
    if data is None:
        dataset = Dataset.load(config.data.dir)
    with session(config) as world:
        config = config.model_copy(update={"plan": "balanced"})
        model = make_sharded_model(config, dataset, world)
        optimizer = make_dense_optimizer(config.dense.optimizer, model.parameters())
        state = restore(path, model, optimizer, world)
        options = ReaderOptions(batch_size=config.train.eval_batch_size, prefetch_batches=config.data.prefetch_batches)
        reader = Reader(dataset, split, options, rank=world.rank, num_ranks=world.size)
        yield Trained(model=model, reader=reader, world=world, step=state["step"])
