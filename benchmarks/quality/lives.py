"""Lives of a run: `meseta train` in a process each, killed right after a save or at its end; and what is forecast."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any

from paired import move_by_an_ulp


@dataclass(frozen=True, kw_only=True)
class Life:
    """What one process does."""

    arguments: tuple[str, ...]
    """Of `meseta train`."""
    log: Path
    """To which what it prints is added."""
    dies_after: int | None = None
    """Steps, whose save it does not outlive."""
    moves: bool = False
    """Whether one weight is moved by an ulp when it takes up a checkpoint."""
    adaptive: bool = True
    """Whether ranges of codes are."""


@dataclass(frozen=True)
class Forecast:
    """What `meseta checkpoint advise` would measure, of one width for all tables."""

    bits: int
    restores: int
    adaptive: bool


class Lives:
    """Processes, forked from one that has imported torch; all of them end when a `with` is left."""

    def __init__(self) -> None:
        self._context = get_context("forkserver")
        self._context.set_forkserver_preload(["meseta.cli.main", "meseta.cli.preload", "torch._dynamo"])
        self._running: set[BaseProcess] = set()
        self._over = False
        self._lock = threading.Lock()

    def __enter__(self) -> Lives:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._over = True
            running = [*self._running]
        for process in running:
            process.kill()
        for process in running:
            process.join()

    def run(self, function: Callable[..., None], *arguments: Any) -> int:
        """To its end; its exit code, or minus the signal that has killed it. May be called by several threads."""
        process = self._context.Process(target=function, args=arguments)
        with self._lock:
            if self._over:
                raise RuntimeError("the other runs have ended, so this one does not begin")
            process.start()
            self._running.add(process)
        process.join()
        with self._lock:
            self._running.discard(process)
        assert process.exitcode is not None
        return process.exitcode


def live(life: Life) -> None:
    """Be `meseta train`."""
    _begin(life.log)
    import meseta.cli.main

    if life.dies_after is not None:
        _die_after(life.dies_after)
    if life.moves:
        _move_at_restores()
    if not life.adaptive:
        _take_whole_ranges()
    sys.argv = ["meseta", "train", *life.arguments]
    meseta.cli.main.main()


def forecast(run_dir: Path, log: Path, out: Path, asked: Mapping[str, Forecast]) -> None:
    """Write by what part NE is expected to rise, by name, as JSON."""
    _begin(log)
    from meseta.checkpoint.files import quantization
    from meseta.train.advise import open_advisor

    found: dict[str, Any] = {}
    adaptive = quantization.quantize_rows
    for name, one in asked.items():
        with open_advisor(run_dir, one.restores) as advisor:
            quantization.quantize_rows = adaptive
            if not one.adaptive:
                _take_whole_ranges()
            found[name] = advisor.ne_loss(dict.fromkeys(advisor.tables, one.bits))  # type: ignore[arg-type]
            found["split"] = advisor.split
    out.write_text(json.dumps(found))


def _begin(log: Path) -> None:
    """Print to a file, and end when the process that has asked for this one is gone."""
    asker = parent_process()
    assert asker is not None

    def follow() -> None:
        wait([asker.sentinel])
        os._exit(1)

    threading.Thread(target=follow, name="follow", daemon=True).start()
    with log.open("ab") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)


def _die_after(last_step: int) -> None:
    from meseta.train.saving import CheckpointManager

    save = CheckpointManager.save

    def save_and_die(self: CheckpointManager, step: int, *arguments: Any, **options: Any) -> None:
        save(self, step, *arguments, **options)
        if step == last_step:
            os.kill(os.getpid(), signal.SIGKILL)

    CheckpointManager.save = save_and_die  # type: ignore[method-assign]


def _move_at_restores() -> None:
    """Of the row of the first table that was trained the most."""
    from meseta.storage import ROW, as_stored
    from meseta.train import trainer

    restore = trainer.restore

    def restore_and_move(path: Any, model: Any, optimizer: Any, *arguments: Any, **options: Any) -> dict[str, Any]:
        state = restore(path, model, optimizer, *arguments, **options)
        if optimizer is not None:
            table = model.embeddings.shards[0]
            values = table.read(0, table.shard.num_rows)
            row = int(values["sum"].argmax())
            weights = values[ROW][row : row + 1].clone()
            move_by_an_ulp(weights[0, :1])
            table.write(row, {ROW: as_stored(weights).numpy()})
        return state

    trainer.restore = restore_and_move


def _take_whole_ranges() -> None:
    """Codes from the smallest to the largest value of a row."""
    from meseta.checkpoint.files import quantization

    quantize = quantization.quantize_rows

    def quantize_whole_range(rows: Any, form: Any, *, adaptive: bool) -> Any:
        return quantize(rows, form, adaptive=False)

    quantization.quantize_rows = quantize_whole_range  # type: ignore[assignment]
