"""Parser of one block of libsvm or libffm text. Its errors name the file and line.

A line of libsvm is `label index:value ...`. If rows have groups, `qid:group` follows the label. A line of libffm is
`label field:index:value ...` (Juan et al., "Field-aware Factorization Machines for CTR Prediction", RecSys 2016). An
index is an id, and its value is the weight. Text after '#' is a comment.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from meseta.data.formats.format import FIX_LINE, Block
from meseta.data.layout import RawLayout
from meseta.data.raw_rows import RawRows, RawSparse, is_label
from meseta.errors import error_summary
from meseta.spec import MesetaError

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


def field_name(field: int) -> str:
    """Return the name of the feature for a field of libffm."""
    return f"{_FIELD_PREFIX}{field}"


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
    """Parse and check all rows, and keep the fields that the layout has. Raises MesetaError as `parse_svm_rows`
    does."""
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
    """Return writable float64 [n]. A leading plus sign is allowed, as in the label +1."""
    return np.array(pc.ascii_ltrim(column, "+").cast(pa.float64()).to_numpy())


def _locate_error(block: Block, raw: bytes, detail: str, has_fields: bool) -> MesetaError:
    """Return an error that names the first bad token of a block that could not be parsed."""
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
    """Return the rule that a line breaks, or `None`. `form` is the form of its pairs.

    If the first line of a block has a qid, all lines must have one.
    """
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
