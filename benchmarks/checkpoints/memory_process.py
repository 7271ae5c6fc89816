"""One process of a run.

    checkpoints.memory_process train CONFIG PHASES
    checkpoints.memory_process import CONFIG PHASES MODEL
    checkpoints.memory_process model CONFIG MODEL

`train` resumes from the newest checkpoint and names its phases in PHASES: load, training, save. `import` starts a run
with the tensors of MODEL (phases: start, import). `model` writes such a file of the initial values.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from checkpoints.memory_peaks import PhaseFile
from meseta.comm import World
from meseta.config import RunConfig
from meseta.ops.row_marks import Consumer, RowMarks
from meseta.storage import ROW
from meseta.train.interop.importing import import_model
from meseta.train.trainer import Trainer

FEW_STEP, NUM_FEW = 800_000, 10


def mark(marks: RowMarks, changed: str) -> None:
    """Mark 'all' rows of a shard as changed, or 'few': ten of 800,000, so that most blocks have none."""
    marks.clear(Consumer.CHECKPOINTS)
    if changed == "all":
        marks.add_range(0, marks.num_rows)
        return
    firsts = torch.arange(0, max(marks.num_rows - NUM_FEW, 1), FEW_STEP)
    rows = (firsts[:, None] + torch.arange(NUM_FEW)).flatten().clamp(max=marks.num_rows - 1).unique()
    marks.add(rows, Consumer.CHECKPOINTS)


def train(config: RunConfig, phases: PhaseFile, *, saves: bool = True) -> None:
    """Train with the first save unchanged, then few rows changed, and all rows changed before the last save."""
    phases.phase = "load"
    trainer = Trainer(config, World.current())
    shards = trainer.model.embeddings.shards
    phases.phase = "training"
    save, is_first = trainer._save, trainer.step == 0

    def marked_save() -> None:
        nonlocal is_first
        for shard in shards:
            shard.sequential_view().close()  # rows that were trained go to their tier, as they would sooner or later
            if not is_first:
                mark(shard.marks, "all" if trainer.step == trainer.num_steps else "few")
        is_first = False
        if saves:
            phases.phase = "save"
            save()
            look()

    def look() -> None:
        if phases.phase != "save":
            return
        thread = trainer.checkpoint_manager._background_saver._thread
        if thread is None or not thread.is_alive():
            phases.phase = "after"

    def step(*arguments: Any) -> Any:
        look()
        return run_step(*arguments)

    def wait() -> None:
        wait_for_save()
        phases.phase = "after" if saves else "training"

    run_step, wait_for_save = trainer._run_step, trainer.checkpoint_manager.wait
    trainer._save, trainer._run_step, trainer.checkpoint_manager.wait = marked_save, step, wait  # type: ignore[method-assign]
    trainer.run()
    phases.phase = "end"


def start_from(model: Path, config: RunConfig, phases: PhaseFile) -> None:
    begin_with = Trainer.save_initial_checkpoint

    def begin(self: Trainer, fill: Any) -> Any:
        self.model.embeddings.shards  # noqa: B018  (rows in memory are made at their first use)
        phases.phase = "import"
        return begin_with(self, fill)

    Trainer.save_initial_checkpoint = begin  # type: ignore[method-assign]
    import_model(model, "torch", config)
    phases.phase = "end"


def write_model(config: RunConfig, path: Path) -> None:
    model: Any = Trainer(config, World.current()).model
    rows = {f"embeddings.{shard.spec.name}.weight": shard.values[ROW].detach() for shard in model.embeddings.shards}
    torch.save({**model.state_dict(), **rows}, path)


def main() -> None:
    kind, config = sys.argv[1], RunConfig.model_validate(json.loads(Path(sys.argv[2]).read_text()))
    if kind == "model":
        write_model(config, Path(sys.argv[3]))
    elif kind in ("train", "train_only"):
        train(config, PhaseFile(Path(sys.argv[3])), saves=kind == "train")
    else:
        start_from(Path(sys.argv[4]), config, PhaseFile(Path(sys.argv[3])))


if __name__ == "__main__":
    main()
