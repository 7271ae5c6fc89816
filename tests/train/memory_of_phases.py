"""Run one rank and compare its memory in each phase, as /proc reports it, with the prediction.

    python memory_of_phases.py FOLDER    # with RANK, WORLD_SIZE, ... of torchrun

FOLDER contains the configs of two runs: warm.json of a small one, which loads all code, and config.json of the one to
measure. The last line of the output is {phase: [predicted, peak]} in bytes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meseta.comm import World
from meseta.config import RunConfig
from meseta.data.dataset.dataset import Dataset
from meseta.embedding import EmbeddingBagCollection
from meseta.planner.cost.memory import PHASES, Phase
from meseta.train import trainer as training
from meseta.train.setup.meta_model import make_meta_model
from meseta.train.setup.specs import make_specs
from meseta.train.trainer import Trainer


class Peaks:
    """Peak memory of this process in each phase, above its memory at `begin`."""

    def __init__(self) -> None:
        self.bytes_by_phase: dict[Phase, int] = {}
        self.base = 0
        self._phase: Phase | None = None

    def begin(self) -> None:
        """Use the current memory as the base of all peaks."""
        self.base = held("VmRSS")
        self.enter("start")

    def enter(self, phase: Phase | None) -> None:
        """End the previous phase."""
        if self._phase is not None:
            self.bytes_by_phase[self._phase] = max(self.bytes_by_phase.get(self._phase, 0), held("VmHWM") - self.base)
        Path("/proc/self/clear_refs").write_text("5")
        self._phase = phase

    def within(self, call: Callable[..., Any], phase: Callable[[], Phase]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.enter(phase())
            return call(*args, **kwargs)

        return wrapped


def held(name: str) -> int:
    """Return the bytes of a line of /proc/self/status."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:")]
    return 1024 * int(line.split()[1])


def measure(config: RunConfig, world: World) -> dict[Phase, int]:
    """Train, evaluate and save, and return the peak of each phase."""
    peaks, plan_model = Peaks(), training.plan_model

    def first_plan_model(*args: Any) -> Any:
        peaks.begin()
        return plan_model(*args)

    training.plan_model = first_plan_model
    trainer = Trainer(config, world)
    training.plan_model = plan_model
    trainer.model.embeddings.shards  # noqa: B018  (one rank makes its rows at their first use)
    background = trainer.checkpoint_manager._background_saver

    def unless_saving(phase: Phase) -> Phase:
        if trainer.step == config.train.max_steps - 1:
            background.join()  # the last step runs after the save has ended, so it counts as "steady"
        return "checkpoint" if background._jobs._pending else phase

    trainer._run_step = peaks.within(  # type: ignore[method-assign]
        trainer._run_step, lambda: unless_saving("steady" if trainer.step else "first step")
    )
    trainer._evaluate = peaks.within(trainer._evaluate, lambda: unless_saving("evaluation"))  # type: ignore[method-assign]
    trainer._save = peaks.within(trainer._save, lambda: "checkpoint")  # type: ignore[method-assign]
    trainer.run()
    peaks.enter(None)
    return peaks.bytes_by_phase


def predicted(config: RunConfig, world: World) -> dict[Phase, int]:
    """Return the predicted bytes of each phase on this rank."""
    dataset = Dataset.load(config.data.dir)
    specs = make_specs(config, dataset)
    collection = EmbeddingBagCollection(*specs)
    from meseta.train.setup.planning import RunPlanner

    outline = make_meta_model(config, dataset, collection)
    planner = RunPlanner(config, dataset, collection, outline, world)
    plan = planner.plan()
    needs = planner.memory(plan).demand_by_phase(plan)
    return {phase: needs[phase][world.rank].total for phase in PHASES}


def main() -> None:
    folder = Path(sys.argv[1])
    warm, config = (
        RunConfig.model_validate(json.loads((folder / f"{name}.json").read_text())) for name in ("warm", "config")
    )
    world = World.current()
    measure(warm, world)
    needs = predicted(config, world)
    peaks = measure(config, world)
    world.barrier()
    print(json.dumps({phase: [needs[phase], peaks.get(phase, 0)] for phase in PHASES}))
    World.destroy_process_group()


if __name__ == "__main__":
    main()
