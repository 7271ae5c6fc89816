"""Parser of one block of libsvm or libffm text. Its errors name the file and line.

A line of libsvm is `label index:value ...`. If rows have groups, `qid:group` follows the label. A line of libffm is
`label field:index:value ...` (Juan et al., "Field-aware Factorization Machines for CTR Prediction", RecSys 2016). An
index is an id, and its value is the weight. Text after '#' is a comment.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from meseta.data.dataset.queues import run_in_order
from meseta.data.formats.bad_rows import parse_good_rows
from meseta.data.formats.format import (
    FIX_LINE,
    Block,
    ColumnRequest,
    FileHead,
    RawFormat,
    ScanProgress,
    Source,
    TextDialect,
    read_blocks,
)
from meseta.data.formats.text import TextFormat, prepend_field, raw_text, read_first_line
from meseta.data.schema.layout import RawLayout, RawRows, RawSparse, SparseColumn, is_label
from meseta.data.schema.schema import check_names
from meseta.errors import error_summary
from meseta.spec import MesetaError
from meseta.system.processors import choose_num_threads

LIBSVM_FEATURE = "features"
"""Name of the only feature of libsvm files."""
QID_COLUMN = "qid"
"""Name of the column with the groups of libsvm rows. In files, it is the prefix of a group."""
_FIELD_PREFIX = "field_"


@dataclass(frozen=True)
class SvmRows:
    """Ids and weights of n rows. Those of a row are contiguous, in row order."""

    label: NDArray[np.float32]
    """Labels in 0..1 [n]."""
    lengths: NDArray[np.int64]
    """Number of ids per row [n]."""
    fields: NDArray[np.int64] | None
    """Field of each id [nnz]. `None` for libsvm."""
    ids: pa.Array
    """Ids as decimal text [nnz]."""
    weights: NDArray[np.float32]
    """Finite weights [nnz]."""
    group: NDArray[np.int64] | None
    """Group of each row [n]. `None` if the rows have no groups."""


def starts_with_label(line: bytes) -> bool:
    """Whether a line begins with a label. Lines without labels begin with a pair."""
    return b":" not in line.split(maxsplit=1)[0] if line.split() else False


def parse_svm_rows(block: Block, raw: bytes, *, has_fields: bool) -> SvmRows:
    """Parse and check all rows. Raises MesetaError naming the file, the line and the pair."""
    num_parts = 3 if has_fields else 2
    try:
        lines = pc.split_pattern(pa.array([raw]).cast(pa.string()), "\n").flatten()[:-1]
        if b"#" in raw:
            lines = pc.replace_substring_regex(lines, "#.*", "")
        tokens = pc.ascii_split_whitespace(pc.ascii_trim_whitespace(lines))
        lengths = pc.list_value_length(tokens).to_numpy().astype(np.int64)
        flat = tokens.flatten()
        first = np.cumsum(lengths) - lengths
        is_pair = np.ones(len(flat), bool)
        is_pair[first] = False
        label = _to_float64(flat.take(pa.array(first)))
        group = None
        if b"qid:" in raw:
            place = first + 1
            if not np.array_equal(np.flatnonzero(pc.starts_with(flat, "qid:")), place):
                raise _locate_error(block, raw, "only some rows have a qid", has_fields)
            group = pc.utf8_slice_codeunits(flat.take(pa.array(place)), 4).cast(pa.int64()).to_numpy()
            is_pair[place] = False
            lengths -= 1
        parts = pc.split_pattern(flat.filter(pa.array(is_pair)), ":")
        if not (pc.list_value_length(parts).to_numpy() == num_parts).all():
            raise _locate_error(block, raw, "a pair has an invalid form", has_fields)
        columns = [parts.flatten()[at::num_parts] for at in range(num_parts)]
        ids = columns[-2].cast(pa.int64()).cast(pa.string())
        fields = columns[0].cast(pa.int64()).to_numpy() if has_fields else None
        with np.errstate(over="ignore"):  # Overflow yields infinity, which is rejected below.
            weights = _to_float64(columns[-1]).astype(np.float32)
    except pa.ArrowInvalid as error:
        raise _locate_error(block, raw, error_summary(error), has_fields) from None
    label[label == -1] = 0  # The classes of libsvm are -1 and +1.
    if not is_label(label).all() or not np.isfinite(weights).all():
        raise _locate_error(block, raw, "a label is outside 0..1, or a value is not finite", has_fields)
    return SvmRows(label.astype(np.float32), lengths - 1, fields, ids, weights, group)


def parse_svm(block: Block, raw: bytes, layout: RawLayout, *, has_fields: bool) -> RawRows:
    """Parse and check all rows. Keeps only the fields of the layout. Raises MesetaError as `parse_svm_rows` does."""
    pairs = parse_svm_rows(block, raw, has_fields=has_fields)
    group = pairs.group if layout.group else None
    if pairs.fields is None:
        sparse = [
            RawSparse(pairs.ids, pairs.lengths, pairs.weights if column.weighted else None) for column in layout.sparse
        ]
        return RawRows([pairs.label], [], sparse, group=group)
    # A stable sort by field keeps the order of ids within a row.
    order = np.argsort(pairs.fields, kind="stable")
    fields = pairs.fields[order]
    rows = np.repeat(np.arange(pairs.label.size), pairs.lengths)[order]
    ids, weights = pairs.ids.take(pa.array(order)), pairs.weights[order]
    sparse = []
    for column in layout.sparse:
        field = int(column.name.removeprefix(_FIELD_PREFIX))
        start, stop = (int(np.searchsorted(fields, field, side)) for side in ("left", "right"))
        lengths = np.bincount(rows[start:stop], minlength=pairs.label.size).astype(np.int64)
        sparse.append(RawSparse(ids[start:stop], lengths, weights[start:stop] if column.weighted else None))
    return RawRows([pairs.label], [], sparse)


def _to_float64(column: pa.Array) -> NDArray[np.float64]:
    # A leading plus sign is allowed, as in the label +1.
    return np.array(pc.ascii_ltrim(column, "+").cast(pa.float64()).to_numpy())


def _locate_error(block: Block, raw: bytes, detail: str, has_fields: bool) -> MesetaError:
    source = f"source {str(block.source.path)!r}"
    form = "field:index:value" if has_fields else "index:value"
    lines = raw.split(b"\n")[:-1]
    # The first row determines whether all rows have a qid.
    has_qid = lines[0].split()[1:2] and lines[0].split()[1].startswith(b"qid:")
    for number, line in enumerate(lines, start=block.first_line + 1):
        problem = _invalid_line_reason(line, form, has_qid=bool(has_qid))
        if problem:
            return MesetaError(f"{source}, line {number}: {problem}", remedy=FIX_LINE)
    return MesetaError(f"{source}, after line {block.first_line}: {detail}")


def _invalid_line_reason(line: bytes, form: str, *, has_qid: bool) -> str | None:
    """Return the rule that a line breaks, or `None`. `form` is that of its pairs. `has_qid` requires a qid."""
    try:
        text = line.decode()
    except UnicodeDecodeError:
        return "the line is not valid UTF-8"
    tokens = text.partition("#")[0].split()
    if not tokens:
        return "the line has no label"
    label = _parse_number(tokens[0])
    if label is None or not (0 <= label <= 1 or label == -1):
        return f"label {tokens[0][:40]!r} must be a number in 0..1, or -1, which counts as 0"
    if any(token.startswith("qid:") for token in tokens[1:2]) != has_qid:
        return f"either all rows or none must have a qid after the label; this row has {'none' if has_qid else 'one'}"
    if has_qid and not _is_integer(tokens[1][4:]):
        return f"{tokens[1][:40]!r} must be qid:group, where group is an integer"
    for token in tokens[2 if has_qid else 1 :]:
        *integers, value = token.split(":")
        if len(integers) != form.count(":") or not all(map(_is_integer, integers)) or _parse_number(value) is None:
            return f"{token[:40]!r} must be {form}, with integers before a finite value"
    return None


def _is_integer(text: str) -> bool:
    digits = text.removeprefix("-")
    return digits.isascii() and digits.isdigit() and -(2**63) <= int(text) < 2**63


def _parse_number(text: str) -> float | None:
    """Return the number that a text spells, or `None` if it is not finite in float32."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if "_" not in text and math.isfinite(number) and abs(number) < 2**128 else None


# Each field becomes a table. More fields than this indicate a mistake, such as indices in place of fields.
MAX_LIBFFM_FIELDS = 1000


def infer_svm_layout(
    sources: Sequence[Source], chosen: Sequence[str], on_rows: ScanProgress, *, skip_bad: bool, has_fields: bool
) -> RawLayout:
    """Return a layout with one multi-valued feature per field, in numeric order, or with the `chosen` features.

    A feature has weights if any of its values is not 1. With `skip_bad`, rows that cannot be parsed are skipped.
    `has_fields` means libffm. Raises MesetaError if a row cannot be parsed, no row has a chosen feature, or there are
    more than 1,000 fields.
    """
    weighted_fields, has_groups = _scan(
        sources, on_rows, partial(_scan_block, skip_bad=skip_bad, has_fields=has_fields)
    )
    where = f"source {str(sources[0].path)!r}"
    if has_fields:
        weighted = {f"{_FIELD_PREFIX}{field}": weighted_fields[field] for field in sorted(weighted_fields)}
    else:
        weighted = {LIBSVM_FEATURE: any(weighted_fields.values())} if weighted_fields else {}
    if not weighted:
        raise MesetaError(f"{where}: rows have only labels and no features; there is nothing to learn from")
    check_names(where, chosen, list(weighted))
    sparse = tuple(SparseColumn(name=name, multi_valued=True, weighted=weighted[name]) for name in chosen or weighted)
    return RawLayout(
        labels=("label",),
        dense=(),
        sparse=sparse,
        group=QID_COLUMN if has_groups else None,
        ignored=tuple(name for name in weighted if chosen and name not in chosen),
        reasons={name: "ids with weights" if has else "ids; all values are 1" for name, has in weighted.items()},
    )


@dataclass(frozen=True)
class _BlockScan:
    """Fields, weights and groups of one block."""

    block: Block
    weighted: dict[int, bool]
    """Whether any value is not 1, for each field. Libsvm has the single field 0."""
    has_groups: bool
    """Whether the rows have a qid."""


def _scan(
    sources: Sequence[Source], on_rows: ScanProgress, scan_block: Callable[[Block], list[_BlockScan]]
) -> tuple[dict[int, bool], bool]:
    weighted: dict[int, bool] = {}
    total_bytes = sum(source.size_bytes for source in sources)
    done_bytes: dict[str, int] = {}
    num_rows = 0
    has_groups = False
    num_threads = choose_num_threads(num_sharing=1).number  # Other ranks wait while one prepares.
    pool = ThreadPoolExecutor(num_threads, thread_name_prefix="meseta-scan")
    jobs = (partial(scan_block, block) for source in sources for block in read_blocks(source, []))
    try:
        for scanned in chain.from_iterable(run_in_order(pool, jobs, num_threads + 1)):
            block = scanned.block
            # The first block determines whether rows have groups.
            has_groups = scanned.has_groups if num_rows == 0 else has_groups
            if scanned.has_groups != has_groups:
                raise MesetaError(
                    f"source {str(block.source.path)!r}, line {block.first_line + 1}: either all rows or none must "
                    f"have a qid after the label; this row has {'none' if has_groups else 'one'}, unlike earlier rows"
                )
            for field, has_weights in scanned.weighted.items():
                weighted[field] = weighted.get(field, False) or has_weights
            if len(weighted) > MAX_LIBFFM_FIELDS:
                raise MesetaError(
                    f"source {str(block.source.path)!r}: more than {MAX_LIBFFM_FIELDS} fields up to line "
                    f"{block.first_line + block.num_rows}; are fields and indices swapped in field:index:value?"
                )
            num_rows += block.num_rows
            done_bytes[block.source.path] = block.position_bytes
            on_rows(num_rows, sum(done_bytes.values()) / total_bytes)
    finally:
        pool.shutdown(cancel_futures=True)
    return weighted, has_groups


def _scan_block(block: Block, *, skip_bad: bool, has_fields: bool) -> list[_BlockScan]:
    scan_rows = partial(_scan_rows, has_fields=has_fields)
    return parse_good_rows(block, scan_rows).results if skip_bad else [scan_rows(block)]


def _scan_rows(block: Block, *, has_fields: bool) -> _BlockScan:
    pairs = parse_svm_rows(block, raw_text(block), has_fields=has_fields)
    fields = np.zeros(pairs.weights.size, np.int64) if pairs.fields is None else pairs.fields
    others = set(np.unique(fields[pairs.weights != 1]).tolist())
    weighted = {field: field in others for field in np.unique(fields).tolist()}
    return _BlockScan(block, weighted, pairs.group is not None)


class Libsvm(TextFormat):
    """Text with lines `label index:value ...`. If rows have groups, `qid:group` follows the label."""

    name = "libsvm"
    title = "libsvm text"
    has_named_columns = False
    pair: ClassVar[re.Pattern[bytes]] = re.compile(rb"(-?\d+|qid):[^:]+")
    """Pattern of the first token after the label."""
    has_fields: ClassVar[bool] = False
    """Whether each index has a field before it."""

    def detect(self, head: FileHead) -> TextDialect | None:
        if head.is_declared_csv:
            # File names have no common suffix, so the first pair decides. A row without pairs has only a label.
            return None
        lines = (line.partition(b"#")[0].split() for line in head.text.splitlines())
        first = next((tokens for tokens in lines if len(tokens) > 1), None)
        # Delimited text may contain times, which look like pairs.
        is_delimited = first and (b"::" in first[0] or any(sign in first[0] for sign in b",;|"))
        return TextDialect() if first and self.pair.fullmatch(first[1]) and not is_delimited else None

    def columns(self, source: Source) -> tuple[str, ...]:
        """Raise MesetaError, because the format has no columns."""
        raise MesetaError(f"source {source.path!r} is {self.title}, which has no columns")

    def layout(self, sources: Sequence[Source], asked: ColumnRequest) -> RawLayout:
        """Return the layout, inferred from all rows. Options and schema may select some of the features."""
        layout = infer_svm_layout(
            sources, _chosen_features(asked), asked.on_scan, skip_bad=asked.skip_bad_rows, has_fields=self.has_fields
        )
        return replace(layout, encoding=sources[0].encoding)

    def columns_for(self, source: Source, layout: RawLayout) -> Sequence[str]:
        """Return the features, and the labels and the group if the first line has them."""
        line = read_first_line(source)
        labels = layout.labels if starts_with_label(line) else ()
        group = [layout.group] if layout.group is not None and b"qid:" in line else []
        return [*labels, *group, *layout.feature_columns]

    def can_hold(self, layout: RawLayout, earlier: RawFormat | None) -> bool:
        """Whether the rows of `layout` have the same format, or an unknown one."""
        return earlier in (self, None)

    def parse(self, block: Block, layout: RawLayout) -> RawRows:
        has_labels = bool(layout.labels)
        raw = raw_text(block) if has_labels else prepend_field(raw_text(block), b"0 ")
        # The parser requires a label.
        rows = parse_svm(block, raw, layout, has_fields=self.has_fields)
        return rows if has_labels else replace(rows, labels=[])

    def key_schema(self, where: str, source: Source, names: Sequence[str]) -> pa.Schema:
        """Return the type of the group of libsvm, which is the only key column."""
        if self.has_fields or set(names) != {QID_COLUMN}:
            raise MesetaError(f"{where} has no columns to pass through; libsvm has only {QID_COLUMN!r}")
        return pa.schema([pa.field(name, pa.int64()) for name in names])

    def key_columns(self, block: Block, names: Sequence[str], schema: pa.Schema) -> pa.RecordBatch:
        return pa.record_batch([_groups(block, raw_text(block)) for _ in names], schema)


class Libffm(Libsvm):
    """Text with lines `label field:index:value ...`."""

    name = "libffm"
    title = "libffm text"
    pair = re.compile(rb"-?\d+:-?\d+:[^:]+")
    has_fields = True


def _chosen_features(asked: ColumnRequest) -> Sequence[str]:
    """Return the features that the options or the schema select. Empty means all."""
    named, schema = asked.named_columns, asked.schema
    known = {"label", "categorical", "ignore", "group"}
    if (
        named.label
        or named.dense
        or named.multi_valued
        or named.ignore
        or named.time
        or named.time_features
        or (schema and (schema.label != "label" or schema.model_fields_set - known))
    ):
        raise MesetaError(
            "prepare: for libsvm and libffm, only --sparse or categorical in a --schema file may select features; the "
            "label is called 'label', there are no dense features and no times, weights are as in the file, and qid is "
            "the group"
        )
    if schema and not schema.categorical:
        raise MesetaError(
            "prepare: the --schema file has no categorical feature; add one, so that there is something to learn from"
        )
    return schema.categorical if schema else named.sparse


def _groups(block: Block, raw: bytes) -> pa.Array:
    groups = re.findall(rb"^(?:[^\s#]+[ \t]+)?qid:(-?\d+)", raw, re.MULTILINE)
    if len(groups) != block.num_rows:
        raise MesetaError(f"keys: source {block.source.path!r}: not all rows have a qid; remove it from the keys")
    return pa.array([int(group) for group in groups], pa.int64())
