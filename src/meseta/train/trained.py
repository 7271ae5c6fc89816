"""A trained model, ready to evaluate: the newest checkpoint of a run, on any number of ranks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meseta import checkpoint
from meseta.comm import World
from meseta.config import RunConfig
from meseta.data.reader import Reader, ReaderOptions
from meseta.data.selection import calibration_shift
from meseta.spec import MesetaError
from meseta.train.build import make_sharded_model
from meseta.train.precision import note_slow
from meseta.train.run_dir import RunDir
from meseta.train.session import session
from meseta.train.splits import TEST, choosing_split
from meseta.train.state import restore
from meseta.train.stopping import BestSoFar
from meseta.train.trained_on import check_encoding, open_dataset


@dataclass(frozen=True)
class Trained:
    """A model and the rows to apply it to."""

    model: Any
    reader: Reader
    world: World
    step: int
    """Steps that the checkpoint was trained for."""
    config: RunConfig
    """Of the run."""

    @property
    def shift(self) -> float:
        """What to add to its logits, since it may have seen only a share of the negatives."""
        return calibration_shift(self.config.data.negative_keep)


@contextmanager
def open_trained(
    run_dir: Path, split: str, data: Path | None = None, *, best: bool = False, every_row: bool = False
) -> Iterator[Trained]:
    """`load_trained` on the ranks of this process; raises what it raises."""
    with session(RunDir(run_dir).load_config()) as world:
        yield load_trained(run_dir, split, world, data, best=best, every_row=every_row)


def load_trained(
    run_dir: Path,
    split: str,
    world: World,
    data: Path | None = None,
    *,
    best: bool = False,
    every_row: bool = False,
) -> Trained:
    """Load the checkpoint that stands for `run_dir` (its newest, or what train.finish says), or that of its best
    evaluation. A plan made for another number of ranks
    gives way to one for this rank. The rows are those that data.filter leaves, or all where `every_row` says so.

    Raises MesetaError where there is no run, no checkpoint, no such split, or data that were encoded otherwise than
    those of the run.
    """
    run = RunDir(run_dir)
    config = run.load_config().model_copy(update={"plan": "auto"})
    path = _find_best(run, config) if best else run.final_checkpoint()
    if path is None:
        raise MesetaError(f"run {str(run_dir)!r} has no checkpoint yet; train it first with `meseta train`")
    dataset = open_dataset(config, world, data)
    way_out = f"prepare them in one call with the sources of {str(config.data.dir)!r}, as --test-files"
    check_encoding(run, path, dataset, world, way_out)
    if (note := note_slow(config, world)) and world.rank == 0:
        print(note, file=sys.stderr)
    options = ReaderOptions(
        batch_size=config.train.eval_batch_size,
        prefetch_batches=config.data.prefetch_batches,
        filter=None if every_row else config.data.filter,
    )
    reader = Reader(dataset, split, options, rank=world.rank, num_ranks=world.size)
    model = make_sharded_model(config, dataset, world).eval()
    # No optimizer is made: torch imports its compiler for the first one, which takes longer than a small evaluation.
    state = restore(path, model, None, world)
    return Trained(model=model, reader=reader, world=world, step=state["step"], config=config)


def _find_best(run: RunDir, config: RunConfig) -> Path | None:
    """The checkpoint of the best evaluation; None where the run has none at all."""
    if checkpoint.latest(run.checkpoints) is None:
        return None
    lines = [line for line in run.metrics() if line["kind"] == "eval"]
    split = choosing_split({line.get("split", TEST) for line in lines})
    best = BestSoFar(config.train.early_stopping, split)
    for line in lines:
        if line.get("split", TEST) == split:
            best.update(line)
    for listed in checkpoint.list_checkpoints(run.checkpoints):
        if listed.summary is not None and listed.summary.step == best.step:
            return listed.path
    what = (
        "there was no evaluation" if best.step is None else f"step {best.step} was its best, and no checkpoint has it"
    )
    raise MesetaError(
        f"run {str(run.path)!r}: {what}; train with checkpoint.keep_best=true and train.eval_every_steps or "
        "train.eval_every_epochs, or leave --best out"
    )
