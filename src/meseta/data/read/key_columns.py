"""Raw columns of a split in the order of its rows, to identify predictions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa

from meseta.data.dataset.dataset import Dataset
from meseta.data.dataset.part_files import open_part_or_raise
from meseta.errors import UnknownColumnError
from meseta.spec import MesetaError

MAX_BATCH_ROWS = 8192


class KeyColumns:
    """Selected columns of a split, read a few rows at a time.

    keys = KeyColumns(dataset, "test", ["user"])
    keys.schema                # of the tables that `take` returns
    keys.take(8192)            # the next rows; fewer at the end
    """

    def __init__(self, dataset: Dataset, split: str, names: Sequence[str]) -> None:
        """Open the footers of all files. Raises MesetaError if a file is damaged or lacks a column, a column has no
        common type, or the dataset is a recipe."""
        if names:
            dataset.check_has_files("a prediction with keys")
        self._paths = [dataset.resolve_file(file.path) for file in dataset.split(split).files]
        self._names = list(names)
        schemas = []
        for path in self._paths if names else []:
            with open_part_or_raise(path) as file:
                schema = file.schema_arrow
            for name in names:
                if name not in schema.names:
                    error = UnknownColumnError(f"keys: {str(path)!r}", name, schema.names)
                    raise error.with_suffix(", or keep it when preparing the data")
                if schema.names.count(name) > 1:
                    raise MesetaError(f"keys: {str(path)!r} has two columns {name!r}; prepare the data again")
            schemas.append(pa.schema([schema.field(name) for name in names]))
        try:  # Files may have ids of different widths.
            self.schema = pa.unify_schemas(schemas, promote_options="permissive") if schemas else pa.schema([])
        except pa.ArrowException as error:
            raise MesetaError(f"keys: {error}; remove this column from the keys, or prepare the data again") from None
        self.schema = self.schema.remove_metadata()
        self._batches = self._read()
        self._remainder: list[pa.RecordBatch] = []

    def take(self, num_rows: int) -> pa.Table:
        """Return the next `num_rows` rows, or fewer at the end, with `schema`."""
        if not self._names:
            return pa.table({})
        parts, remaining = [], num_rows
        while remaining > 0 and (batch := self._next()) is not None:
            parts.append(batch.slice(0, remaining))
            if batch.num_rows > remaining:
                # The rest of the batch is returned by the next call.
                self._remainder.append(batch.slice(remaining))
            remaining -= parts[-1].num_rows
        return pa.Table.from_batches(parts, self.schema)

    def _next(self) -> pa.RecordBatch | None:
        return self._remainder.pop() if self._remainder else next(self._batches, None)

    def _read(self) -> Iterator[pa.RecordBatch]:
        for path in self._paths:
            with open_part_or_raise(path) as file:
                for batch in file.iter_batches(MAX_BATCH_ROWS, columns=self._names):
                    yield batch.select(self._names).cast(self.schema)
