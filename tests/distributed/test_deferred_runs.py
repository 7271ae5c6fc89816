"""Whole runs with a deferred check of losses and signals, as on a GPU, write the files of other runs."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meseta.comm import World
from meseta.config import RunConfig
from meseta.spec import MesetaError
from meseta.system.interruption import TrainingInterrupt
from meseta.train.trainer import Trainer
from small_run import final_checksum, metrics, settings, spoil, without_times

from .pool import RankPool
from .test_training import ROW_WISE

Ranks = Callable[[int], RankPool]


def run(document: dict[str, Any], late: bool, asked_at: int | None = None) -> tuple[str, int]:
    """Return the end of a run and its step. The last rank receives SIGTERM in step `asked_at`."""
    world = World.current()
    trainer = Trainer(RunConfig.model_validate(document), world)
    trainer.pipeline.update_check.is_deferred = late
    flags = trainer.checkpoint_manager.flags

    def asked() -> tuple[float, float, float]:
        if world.rank == world.size - 1 and trainer.step + 1 == asked_at:
            trainer.checkpoint_manager.signal_listener.signal_number = signal.SIGTERM
        return flags()

    trainer.checkpoint_manager.flags = asked  # type: ignore[method-assign]
    try:
        trainer.run()
    except TrainingInterrupt:
        return "stopped", trainer.step
    except MesetaError as error:
        return str(error), trainer.step
    return "end", trainer.step


def saved(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_deferred_checks_and_a_resumed_run_write_equal_files(
    ranks: Ranks, tiny: Path, tmp_path: Path, size: int
) -> None:
    changes = {"train__log_every_steps": 2, "train__eval_every_steps": 4, "checkpoint__every_steps": 3}
    changes |= {"train__batch_size": 180, "checkpoint__keep_last": 9, "plan": ROW_WISE}
    ends = {
        name: ranks(size).run(run, settings(tiny, tmp_path / name, **changes), late, asked_at)
        for name, late, asked_at in (("at once", False, None), ("late", True, None), ("stopped", True, 4))
    }
    assert ends["late"] == ends["at once"] and ends["late"][0][0] == "end"
    assert ends["stopped"] == [("stopped", 5)] * size
    assert saved(tmp_path / "stopped") == ["step-000000003", "step-000000005"]
    assert ranks(size).run(run, settings(tiny, tmp_path / "stopped", **changes), True) == ends["late"]
    lines = [without_times(metrics(tmp_path / name)) for name in ends]
    assert lines[0] == lines[1] == lines[2]
    assert saved(tmp_path / "late") == saved(tmp_path / "at once")
    assert len({final_checksum(tmp_path / name) for name in ends}) == 1


@pytest.mark.parametrize("log_every", [pytest.param(1, marks=pytest.mark.soak), 50])
def test_a_non_finite_loss_names_its_own_step(ranks: Ranks, tiny: Path, tmp_path: Path, log_every: int) -> None:
    """The host reads the loss after each step, or only in the next step."""
    data, messages = Path(shutil.copytree(tiny, tmp_path / "data")), list[Any]()
    spoil(data, "train", "price", 555, float("nan"))
    changes = {"data__shuffle": False, "checkpoint__every_steps": 6, "train__log_every_steps": log_every}
    changes["plan"] = ROW_WISE
    for late in (False, True):
        document = settings(data, tmp_path / str(late), **changes)
        messages.append([text for text, _ in ranks(2).run(run, document, late)])
        assert saved(tmp_path / str(late)) == ["step-000000006"]
    assert [text.replace("/True/", "/False/") for text in messages[1]] == messages[0]
    assert messages[0][0].startswith("step 7: the loss is not finite, and nothing was updated: dense feature 'price'")


@pytest.mark.parametrize("late", [False, True])
def test_a_checkpoint_by_the_clock_is_not_written_twice(tiny: Path, tmp_path: Path, late: bool) -> None:
    changes = {"train__max_steps": 6, "checkpoint__every_minutes": 1e-9, "checkpoint__keep_last": 9}
    run(settings(tiny, tmp_path / "run", **changes), late)
    steps = [int(name.removeprefix("step-")) for name in saved(tmp_path / "run")]
    assert steps == ([2, 4, 6] if late else [1, 2, 3, 4, 5, 6])
