"""Decoding of the Parquet files of a split, by row group."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from meseta.data.dataset.columns import check_types, check_values
from meseta.data.dataset.dataset import Dataset
from meseta.data.dataset.part_files import open_part_or_raise
from meseta.data.read.options import CancellationCheck, never_cancelled
from meseta.data.read.rows import Rows, WindowTimer, decode_rows
from meseta.data.read.selection import ExcludedRows, RowSelection
from meseta.spec import MesetaError
from meseta.system.processors import choose_num_threads


@dataclass(frozen=True)
class _RowGroup:
    number: int
    """Number of the row group in the split."""
    file: int
    """Number of the file in the split."""
    index: int
    """Number of the row group in the file."""
    first_row: int
    """Number of rows before the group in the file."""
    first_split_row: int
    """Number of rows before the group in the split."""
    num_rows: int


class SplitFiles:
    """Row groups with selected rows in the Parquet files of a split."""

    def __init__(
        self,
        dataset: Dataset,
        split: str,
        selection: RowSelection,
        group_row_counts: Mapping[int, int] | None = None,
        check_cancelled: CancellationCheck = never_cancelled,
    ) -> None:
        """Open the footers of all files and, if the selection depends on columns, count the selected rows.

        See `open_split_rows` for the arguments. Raises MesetaError if a file is missing, damaged or differs from
        dataset.json.
        """
        files = dataset.split(split).files
        self._dataset = dataset
        self._selection = selection
        self._paths = [dataset.resolve_file(file.path) for file in files]
        self._metadata = [
            _read_footer(path, file.num_rows, dataset) for path, file in zip(self._paths, files, strict=True)
        ]
        self.excluded_rows = ExcludedRows()
        self._groups = list(_row_groups(self._metadata))
        if group_row_counts is not None:
            self._groups = [
                replace(g, num_rows=group_row_counts[g.number]) for g in self._groups if g.number in group_row_counts
            ]
        elif selection.columns:
            self._groups = self._select(self._groups, check_cancelled)

    @property
    def group_row_counts(self) -> dict[int, int]:
        return {group.number: group.num_rows for group in self._groups}

    @property
    def int64_features(self) -> list[str]:
        schemas = [metadata.schema.to_arrow_schema() for metadata in self._metadata]
        kinds = {f.name: [schema.field(f.name).type for schema in schemas] for f in self._dataset.sparse}
        return [name for name, types in kinds.items() if any(getattr(k, "value_type", k) == pa.int64() for k in types)]

    @property
    def group_rows(self) -> list[int]:
        return [group.num_rows for group in self._groups]

    def read(
        self,
        groups: Sequence[int],
        *,
        by_row: bool,
        times: WindowTimer | None = None,
        check_cancelled: CancellationCheck = never_cancelled,
    ) -> Rows:
        if times is None:
            return self._read(groups, by_row, None, check_cancelled)
        with times.time_decoding():
            return self._read(groups, by_row, times.add_storage, check_cancelled)

    def _read(
        self, groups: Sequence[int], by_row: bool, on_read: Callable[[float], None] | None, check: CancellationCheck
    ) -> Rows:
        tables = []
        columns = list(dict.fromkeys([*self._dataset.columns, *self._selection.columns]))
        for number in groups:
            check()
            group = self._groups[number]
            table = self._read_columns(group, columns, on_read)
            check_values(self._paths[group.file], group.first_row, table, self._dataset)
            if self._selection.columns:
                mask, _ = self._selection.mask(table, group.first_split_row)
                table = table.filter(pa.array(mask))
            tables.append(table)
        return decode_rows(self._dataset, tables, by_row=by_row)

    def _read_columns(
        self, group: _RowGroup, columns: list[str], on_read: Callable[[float], None] | None = None
    ) -> pa.Table:
        path = self._paths[group.file]
        with open_part_or_raise(path, self._metadata[group.file], on_read) as file:
            return file.read_row_group(group.index, columns=columns)

    def _select(self, groups: list[_RowGroup], check: CancellationCheck) -> list[_RowGroup]:

        def count_of(group: _RowGroup) -> tuple[int, ExcludedRows]:
            check()
            table = self._read_columns(group, self._selection.columns)
            mask, left_out = self._selection.mask(table, group.first_split_row)
            return int(mask.sum()), left_out

        with ThreadPoolExecutor(choose_num_threads().number, thread_name_prefix="meseta-select") as pool:
            counted = list(pool.map(count_of, groups))
        self.excluded_rows = ExcludedRows(
            sum(left_out.by_filter for _, left_out in counted),
            sum(left_out.negatives for _, left_out in counted),
        )
        return [replace(group, num_rows=num) for group, (num, _) in zip(groups, counted, strict=True) if num]


def _read_footer(path: Path, num_rows: int, dataset: Dataset) -> pq.FileMetaData:
    with open_part_or_raise(path) as file:
        metadata, schema = file.metadata, file.schema_arrow
    if metadata.num_rows != num_rows:
        raise MesetaError(
            f"dataset file {str(path)!r} holds {metadata.num_rows} rows, but dataset.json says {num_rows}; "
            "prepare the dataset again"
        )
    check_types(path, schema, dataset)
    return metadata


def _row_groups(files: Sequence[pq.FileMetaData]) -> Iterator[_RowGroup]:
    before, numbers = 0, count()
    for file, metadata in enumerate(files):
        first_row = 0
        for index in range(metadata.num_row_groups):
            num_rows = metadata.row_group(index).num_rows
            yield _RowGroup(next(numbers), file, index, first_row, before + first_row, num_rows)
            first_row += num_rows
        before += first_row
