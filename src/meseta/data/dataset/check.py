"""Check of a prepared dataset against its dataset.json. It reads every value, on all cores."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from meseta.data.dataset.columns import dataset_columns, find_violations
from meseta.data.dataset.dataset import DATASET_FILE, Dataset
from meseta.data.dataset.growth import Candidates
from meseta.data.dataset.part_files import PART_ERRORS, open_part
from meseta.data.dataset.queues import run_in_order
from meseta.data.dataset.records import DataFile, SparseFeature
from meseta.data.dataset.statistics import read_touched
from meseta.data.dataset.vocabulary import combine_chunks, values_digest
from meseta.data.prepare.staging import PREPARE_RECORD_FILE
from meseta.errors import error_summary
from meseta.spec import MesetaError
from meseta.system.files import resolve_inside
from meseta.system.processors import choose_num_threads

STATISTICS_PAGE = "statistics.html"
"""Page that `meseta data stats` writes into the dataset folder."""
PREPARE_AGAIN = "prepare the dataset again"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Rule that an object breaks, once or several times."""

    object: str
    """File, column and row (counted from 0) of the first value that breaks the rule."""
    rule: str
    value: str
    count: int = 1
    """Number of values in this column and file that break the rule."""
    way_out: str = PREPARE_AGAIN

    def __str__(self) -> str:
        more = f" ({self.count:,} such values)" if self.count > 1 else ""
        return f"{self.object}: {self.rule}, got {self.value}{more}; {self.way_out}"


@dataclass(frozen=True)
class CheckResult:
    """Result of the check of a dataset."""

    num_rows: int
    num_files: int
    faults: tuple[Fault, ...]


@dataclass
class _GroupCheck:
    num_rows: int = 0
    faults: dict[tuple[str, str], Fault] = field(default_factory=dict)
    """First fault for each (column, rule)."""
    sums: dict[str, float] = field(default_factory=dict)
    label_counts: Counter[str] = field(default_factory=Counter)
    lookups: Counter[str] = field(default_factory=Counter)


def check_dataset(path: str | Path, on_rows: Callable[[int, int], None] | None = None) -> CheckResult:
    """Check every file and every value of the dataset in `path` against its dataset.json.

    `on_rows` receives the number of rows just read and the total number of rows. Raises MesetaError if dataset.json
    cannot be read or describes a recipe. The result contains all other faults.
    """
    dataset = Dataset.load(path)
    dataset.check_has_files("`meseta data check`")
    faults = [*_stray_files(dataset), *_vocabulary_faults(dataset), *_candidates_faults(dataset)]
    faults += _touched_faults(dataset)
    total = sum(split.num_rows for split in dataset.splits.values())
    num_rows = 0
    num_threads = choose_num_threads().number
    with ThreadPoolExecutor(num_threads, thread_name_prefix="meseta-check") as pool:
        for name, split in dataset.splits.items():
            seen = _GroupCheck()
            in_split: list[Fault] = []
            for file in split.files:
                metadata, problems = _open_file(dataset, file)
                file_faults: dict[tuple[str, str], Fault] = {}
                if metadata is not None:
                    # At most this many row groups are in memory.
                    for group in run_in_order(pool, _jobs(dataset, file, metadata), 2 * num_threads):
                        seen.sums = {key: seen.sums.get(key, 0.0) + more for key, more in group.sums.items()}
                        seen.label_counts += group.label_counts
                        seen.lookups += group.lookups
                        num_rows += group.num_rows
                        for key, fault in group.faults.items():
                            count = fault.count + (file_faults[key].count if key in file_faults else 0)
                            file_faults[key] = replace(file_faults.get(key, fault), count=count)
                        if on_rows is not None:
                            on_rows(group.num_rows, total)
                in_split += [*problems, *file_faults.values()]
            # Totals are checked only if all values are valid. Missing or invalid values would make the totals wrong
            # too.
            faults += in_split or _sum_faults(dataset, name, seen)
    return CheckResult(num_rows, sum(len(split.files) for split in dataset.splits.values()), tuple(faults))


def _stray_files(dataset: Dataset) -> Iterator[Fault]:
    named = [file.path for split in dataset.splits.values() for file in split.files]
    known = {
        DATASET_FILE,
        PREPARE_RECORD_FILE,
        STATISTICS_PAGE,
        *named,
        *(path for f in dataset.sparse for path in (f.vocabulary, f.candidates) if path),
    }
    known |= {dataset.touched} if dataset.touched else set()
    present = sorted(path for path in dataset.dir.rglob("*") if path.is_symlink() or not path.is_dir())
    for name in (path.relative_to(dataset.dir).as_posix() for path in present):
        if name not in known:
            yield Fault(
                object=name,
                rule=f"files must be named in {DATASET_FILE}",
                value="an unknown file",
                way_out="move it away",
            )


def _open_file(dataset: Dataset, file: DataFile) -> tuple[pq.FileMetaData | None, list[Fault]]:
    """Return the metadata of a file and its faults. The metadata is `None` if the rows cannot be read."""
    try:
        with open_part(resolve_inside(dataset.dir, file.path)) as opened:
            metadata, schema = opened.metadata, opened.schema_arrow
    except PART_ERRORS as error:
        return None, [_unreadable_fault(file.path, error)]
    faults = []
    if metadata.num_rows != file.num_rows:
        faults.append(
            Fault(
                object=file.path,
                rule=f"the file must have {file.num_rows} rows, as in {DATASET_FILE}",
                value=f"{metadata.num_rows}",
            )
        )
    columns = dataset_columns(dataset)
    is_readable = True
    for column in columns:
        kinds = [schema.field(place).type for place in schema.get_all_field_indices(column.name)]
        # Every row group would fail, so report the column once and do not read the file.
        if len(kinds) != 1 or not column.accepts_type(kinds[0]):
            types = ", ".join(map(str, kinds)) or "no such column"
            faults.append(
                Fault(
                    object=f"{file.path}, column {column.name!r}",
                    rule=f"the column must hold {column.expected_type}",
                    value=types,
                )
            )
            is_readable = False
    for name in sorted(set(schema.names) - {column.name for column in columns}):
        faults.append(
            Fault(
                object=f"{file.path}, column {name!r}",
                rule=f"columns must be named in {DATASET_FILE}",
                value="an unknown column",
            )
        )
    return (metadata if is_readable else None), faults


def _jobs(dataset: Dataset, file: DataFile, metadata: pq.FileMetaData) -> Iterator[Callable[[], _GroupCheck]]:
    first = 0
    for index in range(metadata.num_row_groups):
        yield lambda index=index, first=first: _check_group(dataset, file.path, metadata, index, first)  # type: ignore[misc]
        first += metadata.row_group(index).num_rows


def _check_group(dataset: Dataset, path: str, metadata: pq.FileMetaData, index: int, first_row: int) -> _GroupCheck:
    group = _GroupCheck()
    columns = dataset_columns(dataset)
    try:
        with open_part(resolve_inside(dataset.dir, path), metadata, checks_pages=True) as file:
            table = file.read_row_group(index, columns=[column.name for column in columns], use_threads=False)
    except PART_ERRORS as error:
        group.faults["", "read"] = _unreadable_fault(path, error)
        return group
    group.num_rows = table.num_rows
    for column in columns:
        chunked = table.column(column.name)
        array = pa.concat_arrays(chunked.chunks) if chunked.num_chunks else pa.array([], chunked.type)
        rows = None
        if column.can_be_missing:
            # Rows of the values that remain, to locate faults among them.
            rows = np.flatnonzero(array.is_valid().to_numpy(zero_copy_only=False))
            array = array.drop_null()
        nulls = array.null_count + (array.values.null_count if column.is_list else 0)
        if nulls:
            where = _locate(path, column.name, first_row + _first_null(array))
            fault = Fault(object=where, rule="values must not be missing", value="a missing value", count=nulls)
            group.faults[column.name, "null"] = fault
            continue
        values = (array.flatten() if column.is_list else array).to_numpy()
        bad = find_violations(column, values)
        if bad is not None:
            at = int(np.argmax(bad))
            row = int(np.searchsorted(_offsets(array), at, side="right")) - 1 if column.is_list else at
            row = row if rows is None else int(rows[row])
            fault = Fault(
                object=_locate(path, column.name, first_row + row),
                rule=column.rule,
                value=f"{values[at].item():.6g}" if values.dtype.kind == "f" else str(values[at]),
                count=int(bad.sum()),
            )
            group.faults[column.name, "value"] = fault
        if column.role == "label":
            group.sums[column.name] = float(values.sum(dtype=np.float64))
            group.label_counts[column.name] += values.size
        if column.role == "ids":
            group.lookups[column.name] += values.size
    for feature in dataset.sparse:
        if feature.weighted and not {(feature.name, "null"), (f"{feature.name}.weight", "null")} & group.faults.keys():
            _check_lengths(group, feature, table, path, first_row)
    return group


def _check_lengths(group: _GroupCheck, feature: SparseFeature, table: pa.Table, path: str, first_row: int) -> None:
    if not feature.multi_valued or not table.num_rows:
        return
    name = f"{feature.name}.weight"
    ids, weights = (np.diff(_offsets(pa.concat_arrays(table.column(n).chunks))) for n in (feature.name, name))
    different = ids != weights
    if different.any():
        row = int(np.argmax(different))
        group.faults[name, "length"] = Fault(
            object=_locate(path, name, first_row + row),
            rule="each id must have one weight",
            value=f"{weights[row]} weights for {ids[row]} ids",
            count=int(different.sum()),
        )


def _offsets(array: pa.ListArray) -> NDArray[np.int64]:
    # A sliced array keeps the offsets of the whole array.
    offsets = array.offsets.to_numpy().astype(np.int64)
    return offsets - offsets[0]


def _first_null(array: pa.Array) -> int:
    if array.null_count:
        return int(np.argmax(array.is_null().to_numpy(zero_copy_only=False)))
    inside = np.argmax(array.flatten().is_null().to_numpy(zero_copy_only=False))
    return int(np.searchsorted(_offsets(array), inside, side="right")) - 1


def _sum_faults(dataset: Dataset, name: str, seen: _GroupCheck) -> Iterator[Fault]:
    split = dataset.splits[name]
    stated = split.positives or {dataset.labels[0]: split.num_positives}
    for label, total in stated.items():
        # Preparation adds the labels in another order, so the sums may differ by rounding.
        if label in seen.sums and abs(seen.sums[label] - total) > 1e-6 * max(total, 1.0):
            rule = f"the sum of label {label!r} must be {total:.8g}, as in {DATASET_FILE}"
            yield Fault(object=f"split {name!r}", rule=rule, value=f"{seen.sums[label]:.8g}")
    for label, number in split.known.items():
        if label in seen.sums and number != seen.label_counts[label]:
            rule = f"{number} samples must have label {label!r}, as in {DATASET_FILE}"
            yield Fault(object=f"split {name!r}", rule=rule, value=str(seen.label_counts[label]))
    for feature in dataset.sparse:
        # A dataset without training rows has the test_lookups of the dataset that it was prepared like.
        test_lookups = feature.test_lookups if "train" in dataset.splits else None
        counted = {"train": feature.statistics, "test": test_lookups}.get(name)
        if counted is not None and counted.num_lookups != seen.lookups[feature.name]:
            rule = f"feature {feature.name!r} must have {counted.num_lookups} ids, as in {DATASET_FILE}"
            yield Fault(object=f"split {name!r}", rule=rule, value=str(seen.lookups[feature.name]))


def _vocabulary_faults(dataset: Dataset) -> Iterator[Fault]:
    for feature in dataset.sparse:
        if feature.encoding != "vocabulary":
            continue
        where = feature.vocabulary or DATASET_FILE
        if feature.vocabulary is None:
            yield Fault(object=where, rule=f"feature {feature.name!r} needs a vocabulary", value="none")
            continue
        try:
            table = pq.read_table(resolve_inside(dataset.dir, feature.vocabulary), columns=["value", "id", "count"])
        except (pa.ArrowException, OSError, KeyError) as error:
            yield _unreadable_fault(where, error)
            continue
        missing = [name for name in ("value", "id", "count") if name not in table.column_names]
        if missing:
            yield Fault(
                object=where,
                rule="the vocabulary must have the columns value, id and count",
                value=f"no {missing[0]!r}",
            )
        elif table.num_rows != feature.num_embeddings:
            rule = f"the vocabulary must have {feature.num_embeddings} rows, as in {DATASET_FILE}"
            yield Fault(object=where, rule=rule, value=str(table.num_rows))
        elif not np.array_equal(table["id"].to_numpy(), np.arange(table.num_rows)):
            yield Fault(object=where, rule="ids must be 0, 1, 2, ...", value="others")
        elif table["value"].slice(1).null_count and feature.vocabulary_digest is None:
            yield Fault(object=where, rule="only row 0 may be without a value", value="others")
        elif feature.vocabulary_digest is not None:
            digest = values_digest(combine_chunks(table["value"].slice(1)))
            if digest != feature.vocabulary_digest:
                rule = f"the SHA-256 of the values must be {feature.vocabulary_digest[:16]}..., as in {DATASET_FILE}"
                yield Fault(object=where, rule=rule, value=f"{digest[:16]}...")


def _candidates_faults(dataset: Dataset) -> Iterator[Fault]:
    for feature in dataset.sparse:
        if feature.candidates is not None:
            try:
                Candidates.load(dataset.dir, feature)
            except MesetaError as error:
                rule = "the file must have hashes and counts of values without a row"
                yield Fault(object=feature.candidates, rule=rule, value=error.reason)


def _touched_faults(dataset: Dataset) -> Iterator[Fault]:
    try:
        read_touched(dataset)
    except MesetaError as error:
        rule = "the file must have the bits of hashed features"
        yield Fault(object=dataset.touched or DATASET_FILE, rule=rule, value=error.reason)


def _locate(path: str, column: str, row: int) -> str:
    return f"{path}, column {column!r}, row {row}"


def _unreadable_fault(path: str, error: Exception) -> Fault:
    missing = isinstance(error, FileNotFoundError)
    return Fault(
        object=path, rule="the file must be readable", value="no such file" if missing else error_summary(error)
    )
