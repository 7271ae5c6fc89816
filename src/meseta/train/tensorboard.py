"""The figures of metrics.jsonl as scalars that TensorBoard shows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from meseta.spec import MesetaError
from meseta.train.splits import VALID

_PLACES = ("kind", "step", "split")
"""Keys of a line that say where its figures belong."""


def scalars(line: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """(tag, value) of every number in a line, such as ("train/loss", 0.5) and ("eval/tasks/buy/auc", 0.8), with "valid"
    for "eval" where the line is of that split; what has no value and what is a list is left out."""

    def walk(tag: str, value: Any) -> Iterator[tuple[str, float]]:
        if isinstance(value, Mapping):
            for key, inner in value.items():
                yield from walk(f"{tag}/{key}", inner)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield tag, float(value)

    place = VALID if line.get("split") == VALID else line["kind"]
    for key, value in line.items():
        if key not in _PLACES:
            yield from walk(f"{place}/{key}", value)


class TensorBoard:
    """Writes run_dir/tensorboard from the lines of metrics.jsonl, on one rank."""

    def __init__(self, folder: Path) -> None:
        """Raises MesetaError where the package is not installed."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise MesetaError(
                f"train.tensorboard is set, but the package tensorboard cannot be imported ({error}); "
                "pip install 'meseta[tensorboard]', or set train.tensorboard=false"
            ) from None
        self._make = SummaryWriter
        self._folder = folder
        self._writer: Any = None

    def begin(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Start with these lines alone: a run that goes on writes again what came after its checkpoint.

        Files of before are deleted, and a TensorBoard that has read them is told to forget all of their points. Raises
        MesetaError where the folder cannot be written.
        """
        self.close()
        try:
            for former in self._folder.glob("events.out.tfevents.*"):
                former.unlink()
            self._writer = self._make(str(self._folder), purge_step=0)
            for line in lines:
                self._add(line)
            self._writer.flush()
        except OSError as error:
            raise self._unwritable(error) from None

    def add(self, line: Mapping[str, Any]) -> None:
        """One more line, on disk when this returns. Raises MesetaError where it cannot be written."""
        try:
            self._add(line)
            self._writer.flush()
        except OSError as error:
            raise self._unwritable(error) from None

    def close(self) -> None:
        """Close the file, if one is open."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _add(self, line: Mapping[str, Any]) -> None:
        for tag, value in scalars(line):
            self._writer.add_scalar(tag, value, line["step"])

    def _unwritable(self, error: OSError) -> MesetaError:
        return MesetaError(
            f"train.tensorboard: {str(self._folder)!r} cannot be written: {error.strerror}; make room there, or set "
            "train.tensorboard=false"
        )
