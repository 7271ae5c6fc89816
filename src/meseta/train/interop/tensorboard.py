"""Writer of the numbers in metrics.jsonl as TensorBoard scalars."""

from __future__ import annotations

import io
import os
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from meseta.spec import MesetaError
from meseta.system.files import append_atomic
from meseta.telemetry.metrics import VALID
from meseta.telemetry.metrics_file import EvalLine, Line

# Keys of a line that identify it and are not scalars.
_POSITION_KEYS = ("kind", "step", "split")


def scalars(line: Line) -> Iterator[tuple[str, float]]:
    """Yield (tag, value) of every number in a line, such as ("train/loss", 0.5) and ("eval/tasks/buy/auc", 0.8).

    Tags of the validation split begin with "valid". Lists and missing values are skipped.
    """

    def walk(tag: str, value: Any) -> Iterator[tuple[str, float]]:
        if isinstance(value, Mapping):
            for key, inner in value.items():
                yield from walk(f"{tag}/{key}", inner)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield tag, float(value)

    place = VALID if isinstance(line, EvalLine) and line.split == VALID else line.kind
    for key, value in line.to_dict().items():
        if key not in _POSITION_KEYS:
            yield from walk(f"{place}/{key}", value)


# This uses only the record and message classes of the package tensorboard. Its event writer has a thread, whose errors
# reach the terminal as tracebacks.
class TensorBoardWriter:
    """Writes run_dir/tensorboard from the lines of metrics.jsonl, on one rank."""

    def __init__(self, folder: Path) -> None:
        """Create a writer. Requires the package tensorboard."""
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._log = event_pb2.Event, event_pb2.SessionLog
        self._summary, self._record_writer = summary_pb2.Summary, RecordWriter
        self._folder = folder
        self._file: IO[bytes] | None = None

    def begin(self, lines: Sequence[Line]) -> None:
        """Start a new file with `lines`, and delete the files of earlier starts. A resumed run passes the lines up to
        its checkpoint.

        Raises MesetaError if the folder cannot be written.
        """
        self.close()
        with self._wrap_write_errors():
            self._folder.mkdir(parents=True, exist_ok=True)
            for former in self._folder.glob("events.out.tfevents.*"):
                former.unlink()
            # TensorBoard parses the number before the host name as a time, and reads files in the order of their names.
            now_s, ns = divmod(time.time_ns(), 10**9)
            name = f"events.out.tfevents.{now_s:010d}.{socket.gethostname()}.{os.getpid()}.{ns:09d}"
            self._file = (self._folder / name).open("xb", buffering=0)
            # The session start makes a running TensorBoard discard the points that it has read.
            self._write([self._event(file_version="brain.Event:2"), self._event(session_log=self._log(status="START"))])
            for line in lines:
                self._add(line)

    def add(self, line: Line) -> None:
        """Append a line, which is on disk when this returns. Raises MesetaError if it cannot be written."""
        with self._wrap_write_errors():
            self._add(line)

    def close(self, outcome: str = "completed") -> None:
        """Close the file if it is open, whatever the outcome of the run."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _add(self, line: Line) -> None:
        values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in scalars(line)]
        self._write([self._event(step=line.step, summary=self._summary(value=values))])

    def _write(self, events: Iterable[Any]) -> None:
        """Append all of the events, or none if writing fails."""
        assert self._file is not None, "begin comes first"
        content = io.BytesIO()
        for event in events:
            event.wall_time = time.time()
            self._record_writer(content).write(event.SerializeToString())
        append_atomic(self._file, content.getvalue())

    @contextmanager
    def _wrap_write_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise MesetaError(
                f"folder {str(self._folder)!r} cannot be written: {error.strerror}; free space there, or remove "
                "'tensorboard' from train.loggers"
            ) from None
