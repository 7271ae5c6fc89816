"""Columns of a split as they lie in its files, in the order of the rows: what says whose a prediction is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa

from meseta.data.dataset.dataset import Dataset
from meseta.data.dataset.part_files import open_part_or_raise
from meseta.errors import UnknownColumnError
from meseta.spec import MesetaError

MAX_BATCH_ROWS = 8192
"""Rows decoded at a time."""


class KeyColumns:
    """Some columns of a split, read a few rows at a time.

    keys = KeyColumns(dataset, "test", ["user"])
    keys.schema                # of what `take` returns
    keys.take(8192)            # the next rows; fewer at the end
    """

    def __init__(self, dataset: Dataset, split: str, names: Sequence[str]) -> None:
        """Opens the footer of every file. Raises MesetaError for a column that a file lacks, or that has types without
        a common one, for a damaged file, and for a recipe."""
        if names:
            dataset.check_has_files("a prediction with keys")
        self._paths = [dataset.resolve_file(file.path) for file in dataset.split(split).files]
        self._names = list(names)
        schemas = []
        for path in self._paths if names else []:
            schema = _read_schema(path)
            for name in names:
                if name not in schema.names:
                    error = UnknownColumnError(f"keys: {str(path)!r}", name, schema.names)
                    raise error.with_suffix(", or keep it when preparing the data")
                if schema.names.count(name) > 1:
                    raise MesetaError(f"keys: {str(path)!r} has column {name!r} twice; prepare the data again")
            schemas.append(pa.schema([schema.field(name) for name in names]))
        try:  # ids of one file may be wider than those of another
            self.schema = pa.unify_schemas(schemas, promote_options="permissive") if schemas else pa.schema([])
        except pa.ArrowException as error:
            raise MesetaError(f"keys: {error}; leave that column out, or prepare the data again") from None
        self.schema = self.schema.remove_metadata()
        self._batches = self._read()
        self._remainder: list[pa.RecordBatch] = []

    def take(self, num_rows: int) -> pa.Table:
        """The next rows, with `schema`."""
        if not self._names:
            return pa.table({})
        parts, wanted = [], num_rows
        while wanted > 0 and (batch := self._next()) is not None:
            parts.append(batch.slice(0, wanted))
            if batch.num_rows > wanted:
                self._remainder.append(batch.slice(wanted))
            wanted -= parts[-1].num_rows
        return pa.Table.from_batches(parts, self.schema)

    def _next(self) -> pa.RecordBatch | None:
        return self._remainder.pop() if self._remainder else next(self._batches, None)

    def _read(self) -> Iterator[pa.RecordBatch]:
        for path in self._paths:
            with open_part_or_raise(path) as file:
                for batch in file.iter_batches(MAX_BATCH_ROWS, columns=self._names):
                    yield batch.select(self._names).cast(self.schema)


def _read_schema(path: Path) -> pa.Schema:
    with open_part_or_raise(path) as file:
        return file.schema_arrow
