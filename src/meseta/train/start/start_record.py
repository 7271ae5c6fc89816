"""Record of the start of a run from its parent: the chosen checkpoint, and the settings taken over."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from meseta.errors import StorageError, format_value
from meseta.spec import MesetaError
from meseta.spec.documents import read_mapping
from meseta.system.files import format_json, path_exists, write_atomic

RecordT = TypeVar("RecordT", bound=BaseModel)
START_FILE = "start.json"
"""File of the record in a run folder."""


def load_record(file: Path, form: type[RecordT]) -> RecordT:
    """Load a record of a run folder. Raises MesetaError if it is missing or invalid."""
    try:
        return form.model_validate(read_mapping(file))
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(map(str, problem["loc"]))
        raise MesetaError(
            f"run file {str(file)!r}: {format_value(key)}: {problem['msg'].lower()}; start again with --force"
        ) from None
    except StorageError:
        raise
    except MesetaError as error:
        raise MesetaError(f"run file {str(file)!r}: {error}; start again with --force") from None


class StartRecord(BaseModel):
    """Content of start.json."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    start_from: str
    """Value of the config key."""
    checkpoint: str
    """Path or URL of the checkpoint that was chosen."""
    checksum: str
    """SHA-256 of its manifest."""
    settings: dict[str, Any] = {}
    """Settings of the parent that the run has taken over, as a config document."""

    @staticmethod
    def load(run_dir: Path) -> StartRecord | None:
        """Return the record in a run folder, or `None` without one. Raises MesetaError if it is invalid."""
        file = run_dir / START_FILE
        return load_record(file, StartRecord) if path_exists(file) else None

    def save(self, run_dir: Path) -> None:
        """Write the record to a run folder. Raises MesetaError if it cannot be written."""
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            write_atomic(run_dir / START_FILE, format_json(self.model_dump(mode="json")))
        except OSError as error:
            raise MesetaError(
                f"run_dir {str(run_dir)!r} cannot be written: {error.strerror}; choose another run_dir"
            ) from None
