"""Processes of `meseta train` that are killed after a save, and the forecast."""

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

from common.paired import move_by_an_ulp


@dataclass(frozen=True, kw_only=True)
class RunProcess:
    arguments: tuple[str, ...]
    log: Path
    killed_after: int | None = None
    """Step after whose save the process is killed."""
    moves_weight: bool = False
    """Whether one weight is moved by one ulp when a checkpoint is restored."""
    adaptive: bool = True


@dataclass(frozen=True)
class Forecast:
    bits: int
    restores: int
    adaptive: bool


class RunProcesses:
    """Processes forked from one that has imported torch. All end when the context manager exits."""

    def __init__(self) -> None:
        self._context = get_context("forkserver")
        self._context.set_forkserver_preload(["meseta.cli.main", "meseta.cli.preload", "torch._dynamo"])
        self._running: set[BaseProcess] = set()
        self._over = False
        self._lock = threading.Lock()

    def __enter__(self) -> RunProcesses:
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
        """Run a function in a new process and return its exit code. Thread-safe."""
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


def run_train(process: RunProcess) -> None:
    _begin(process.log)
    import meseta.cli.main

    if process.killed_after is not None:
        _kill_after(process.killed_after)
    if process.moves_weight:
        _move_at_restores()
    if not process.adaptive:
        _take_whole_ranges()
    sys.argv = ["meseta", "train", *process.arguments]
    meseta.cli.main.main()


def forecast(run_dir: Path, log: Path, out: Path, asked: Mapping[str, Forecast]) -> None:
    """Write the predicted increase of NE by name, as JSON."""
    _begin(log)
    from meseta.checkpoint.files import quantization
    from meseta.train.advise import open_advisor

    losses: dict[str, Any] = {}
    adaptive = quantization.quantize_rows
    for name, one in asked.items():
        with open_advisor(run_dir, one.restores) as advisor:
            quantization.quantize_rows = adaptive
            if not one.adaptive:
                _take_whole_ranges()
            losses[name] = advisor.ne_loss(dict.fromkeys(advisor.tables, one.bits))  # type: ignore[arg-type]
            losses["split"] = advisor.split
    out.write_text(json.dumps(losses))


def _begin(log: Path) -> None:
    """Redirect output to a file, and exit when the parent process ends."""
    asker = parent_process()
    assert asker is not None

    def follow() -> None:
        wait([asker.sentinel])
        os._exit(1)

    threading.Thread(target=follow, name="follow", daemon=True).start()
    with log.open("ab") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)


def _kill_after(last_step: int) -> None:
    from meseta.train.saving import CheckpointManager

    save = CheckpointManager.save

    def save_and_kill(self: CheckpointManager, step: int, *arguments: Any, **options: Any) -> None:
        save(self, step, *arguments, **options)
        if step == last_step:
            os.kill(os.getpid(), signal.SIGKILL)

    CheckpointManager.save = save_and_kill  # type: ignore[method-assign]


def _move_at_restores() -> None:
    """Move a weight of the most trained row of the first table."""
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
    from meseta.checkpoint.files import quantization

    quantize = quantization.quantize_rows

    def quantize_whole_range(rows: Any, form: Any, *, adaptive: bool) -> Any:
        return quantize(rows, form, adaptive=False)

    quantization.quantize_rows = quantize_whole_range  # type: ignore[assignment]
