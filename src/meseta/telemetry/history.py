"""History of a run: history.jsonl has one line per run of its chain."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from meseta.errors import MesetaError, format_value, reading_error
from meseta.system.files import parse_json, read_bounded, write_atomic
from meseta.telemetry.continued import HistoryLine

HISTORY_FILE = "history.jsonl"
MAX_HISTORY_BYTES = 1 << 28


def read_history(run_dir: Path) -> tuple[HistoryLine, ...]:
    """Read the history of a run, the oldest run first. Empty if there is no file.

    Raises MesetaError if it cannot be read, or a line is invalid.
    """
    path = run_dir / HISTORY_FILE
    try:
        content = read_bounded(path, MAX_HISTORY_BYTES)
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise reading_error(error, f"history {str(path)!r} cannot be read ({error.strerror})", _REMEDY) from None
    return parse_history(content, str(path))


def parse_history(content: bytes, where: str) -> tuple[HistoryLine, ...]:
    """Parse the lines of the file `where`. Raises MesetaError if one is invalid."""
    lines = []
    for number, line in enumerate(content.splitlines(), 1):
        try:
            # An incomplete last line is an error, because the file is written as a whole.
            lines.append(HistoryLine.model_validate(parse_json(line)))
        except ValidationError as error:
            problem = error.errors()[0]
            key = ".".join(map(str, problem["loc"]))
            reason = f"key {format_value(key)}: {problem['msg']}" if key else problem["msg"]
            raise MesetaError(f"history {where!r}, line {number}: {reason}; {_REMEDY}") from None
        except ValueError as error:
            raise MesetaError(f"history {where!r}, line {number}: it is not JSON: {error}; {_REMEDY}") from None
    return tuple(lines)


_REMEDY = "restore the file from a backup, or remove it to start a new history"


def write_history(run_dir: Path, earlier: Sequence[HistoryLine], line: HistoryLine) -> None:
    """Write the lines of the parent and of the run atomically. Raises MesetaError if that fails."""
    documents = [one.to_dict() for one in (*earlier, line)]
    write_atomic(run_dir / HISTORY_FILE, "".join(f"{json.dumps(document)}\n" for document in documents))
