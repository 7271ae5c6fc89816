"""Raw columns of files that identify rows, such as user ids."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pyarrow as pa

from meseta.data.dataset.dataset import SPLITS, Dataset
from meseta.data.dataset.queues import run_in_order
from meseta.data.dataset.records import SourceFile
from meseta.data.dataset.statistics import UnseenValues, count_unseen, read_touched
from meseta.data.formats.bad_rows import BadRowCounter, ParsedRows, parse_good_rows
from meseta.data.formats.format import Block, Source, read_blocks
from meseta.data.formats.parquet_files import ColumnTypes
from meseta.data.prepare.earlier_dataset import find_matching_sources, make_encoders
from meseta.data.prepare.encode import TEST, Splitter
from meseta.data.prepare.write import flatten_lists
from meseta.spec import MesetaError
from meseta.system.processors import choose_num_threads


class RawKeyColumns:
    """Selected columns of files of one format. Values are fields of text, or stored values of Parquet."""

    def __init__(self, sources: Sequence[Source], names: Sequence[str]) -> None:
        """Determine the types. Raises MesetaError if a file lacks a column or has it twice, or if types are
        incompatible."""
        self._names = list(dict.fromkeys(names))
        types = ColumnTypes()
        for source in sources:
            file_columns = source.file_columns(self._names)
            schema = source.format.key_schema(f"keys: source {source.path!r}", source, file_columns)
            made = [pa.field(name, pa.string()) for name in self._names if name in source.partition]
            types.add(source.path, pa.schema([*schema, *made]))
        for name in self._names:
            types.check_compatible(name)
        self.schema = pa.schema([types.common_schema.field(name) for name in self._names])

    def extract(self, block: Block) -> pa.RecordBatch:
        """Return the columns of a block, with the types of `schema`."""
        file_columns, partition = block.source.file_columns(self._names), block.source.partition
        if len(file_columns) == len(self._names):
            return block.source.format.key_columns(block, file_columns, self.schema)
        schema = pa.schema([self.schema.field(name) for name in file_columns])
        batch = block.source.format.key_columns(block, file_columns, schema)
        columns = [
            batch[name]
            if name in file_columns
            else pa.repeat(pa.scalar(partition[name], self.schema.field(name).type), block.num_rows)
            for name in self._names
        ]
        return pa.record_batch(columns, self.schema)


NewRowsProgress = Callable[[int, float], None]
"""Called with the number of rows so far and the share of the files that has been read, 0 to 1."""


@dataclass(frozen=True, kw_only=True)
class EncodedRows:
    """Consecutive rows of one block, encoded."""

    batch: pa.RecordBatch
    """Rows in the form of the Parquet files of a dataset."""
    keys: pa.RecordBatch | None
    """Raw key columns of the same rows. `None` if no keys were requested."""
    unseen: UnseenValues
    num_non_finite: tuple[int, ...]
    """Number of inf and NaN values in each dense feature."""


class NewRows:
    """Rows of raw files, encoded like the rows of `earlier`.

    rows = NewRows(Dataset.load("data/june"), ["july.csv"])
    for encoded in rows.read():
        encoded.batch           # columns of rows.dataset
    rows.unseen.shares()        # after all rows are read
    """

    def __init__(
        self,
        earlier: Dataset,
        patterns: Sequence[str],
        *,
        keys: Sequence[str] = (),
        max_bad_rows: int | float | None = None,
        encoding: str | None = None,
        allow_unseen: bool = True,
    ) -> None:
        """Find the files and check that they have the columns of `earlier`.

        Args:
            earlier: The dataset whose encoding is used.
            patterns: Files, folders, URLs or patterns of raw files.
            keys: Raw columns that are returned unchanged with the encoded rows.
            max_bad_rows: Number or share of rows that may be skipped because they cannot be parsed. `None` means
                that the first one is an error.
            encoding: Encoding of the text, if it differs from that of the earlier files.
            allow_unseen: Whether `read` accepts any share of unseen values.

        Raises:
            MesetaError: The files lack columns of `earlier`, or files of `earlier` are missing or damaged.
        """
        self.sources, self.layout = find_matching_sources(earlier, patterns, encoding)
        self._keys = RawKeyColumns(self.sources, keys) if keys else None
        splitter = Splitter(seed=earlier.seed)
        self._encoder, self._finalizer = make_encoders(earlier, self.layout, splitter, keep_unlabeled=True)
        hashed = self._encoder.hash_rows
        self._touched = read_touched(earlier)
        looked_up = [column.name for column in self.layout.encoded_features]
        self._countable = [name for name in looked_up if name not in hashed or name in self._touched]
        self.unseen = UnseenValues(
            uncounted_features=tuple(name for name in looked_up if name not in self._countable),
            test_shares={f.name: f.test_lookups.unseen_share for f in earlier.sparse if f.test_lookups is not None},
        )
        self._allow_unseen = allow_unseen
        self.num_rows = dict.fromkeys((source.path for source in self.sources), 0)
        self.non_finite: Counter[str] = Counter()
        self.bad_rows = None if max_bad_rows is None else BadRowCounter(max_bad_rows)
        self._earlier = earlier

    @property
    def dataset(self) -> Dataset:
        """Description of the rows read so far, without splits. Rows may lack some or all of several labels."""
        has_labels, layout = bool(self.layout.labels), self.layout
        form = self._earlier.source_form
        labels = self._earlier.labels if form is None else ("label",) if len(form.labels) == 1 else form.labels
        return self._earlier.model_copy(
            update={
                "labels": labels,
                "has_labels": has_labels,
                "can_lack_labels": len(labels) > 1,
                "weight": layout.weight,
                "group": layout.group_column,
                "time": layout.time,
                "splits": {},
                "teacher": None,
                "recipe": None,
                **dict.fromkeys(("test_fraction", "valid_fraction", "split_by", "test_from", "valid_from")),
                "sources": tuple(
                    SourceFile(path=path, split="test", num_rows=number) for path, number in self.num_rows.items()
                ),
                "not_finite": dict(+self.non_finite),
                "bad_rows": None if self.bad_rows is None else self.bad_rows.bad_rows,
            }
        )

    @property
    def key_schema(self) -> pa.Schema:
        return pa.schema([]) if self._keys is None else self._keys.schema

    def read(self, progress: NewRowsProgress | None = None, num_threads: int | None = None) -> Generator[EncodedRows]:
        """Yield all rows in order. Worker threads encode a few blocks ahead.

        Raises MesetaError if a file is damaged, a row cannot be parsed, too many rows are skipped, or, after the last
        row, if too many values are unseen.
        """
        num_threads = choose_num_threads(num_threads).number
        total_bytes = sum(source.size_bytes for source in self.sources)
        if progress is not None:
            progress(0, 0.0)
        pool = ThreadPoolExecutor(num_threads, thread_name_prefix="meseta-encode")
        try:
            for index, block, parts in run_in_order(pool, self._jobs(), num_threads + 1):
                for rows in parts.results:
                    self.unseen.add(rows.unseen)
                    self.num_rows[block.source.path] += rows.batch.num_rows
                    self.non_finite.update(dict(zip(self.layout.dense, rows.num_non_finite, strict=False)))
                    yield rows
                if self.bad_rows is not None:
                    self.bad_rows.add(parts)
                if progress is not None:
                    before = sum(source.size_bytes for source in self.sources[:index])
                    progress(sum(self.num_rows.values()), (before + block.position_bytes) / total_bytes)
        finally:
            # The caller may stop early. Do not start further blocks then.
            pool.shutdown(cancel_futures=True)
        if self.bad_rows is not None:
            self.bad_rows.check()
        if not any(self.num_rows.values()):
            raise MesetaError(
                "prepare: all rows were skipped, because none of them can be parsed; check the format of the files"
            )
        if not self._allow_unseen:
            self.unseen.check()

    def _jobs(self) -> Iterator[Callable[[], tuple[int, Block, ParsedRows[EncodedRows]]]]:
        columns = list(dict.fromkeys([*self.layout.columns, *(self.key_schema.names if self._keys else ())]))
        for index, source in enumerate(self.sources):
            for block in read_blocks(source, columns):
                yield lambda index=index, block=block: (index, block, self._encode(block))  # type: ignore[misc]

    def _encode(self, block: Block) -> ParsedRows[EncodedRows]:
        if self.bad_rows is not None:
            return parse_good_rows(block, self._encode_part)
        return ParsedRows([self._encode_part(block)], block.num_rows)

    def _encode_part(self, block: Block) -> EncodedRows:
        encoded = self._encoder.encode(block, block.first_row)
        batch = self._finalizer.finalize(encoded.splits[SPLITS[TEST]])
        unseen = UnseenValues()
        for name in self._countable:
            rows = flatten_lists(batch.column(name))[0]
            unseen.value_counts[name] = rows.size
            unseen.unseen_counts[name] = count_unseen(rows, self._touched.get(name))
        keys = None if self._keys is None else self._keys.extract(block)
        return EncodedRows(batch=batch, keys=keys, unseen=unseen, num_non_finite=encoded.num_non_finite)
