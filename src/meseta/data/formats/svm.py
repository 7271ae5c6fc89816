"""Text of libsvm and libffm: a label, then pairs or triples whose index is an id and whose value is its weight."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import pyarrow as pa

from meseta.data.formats.format import Block, ColumnRequest, FileHead, RawFormat, Source, TextDialect
from meseta.data.formats.parse_svm import QID_COLUMN, parse_svm, starts_with_label
from meseta.data.formats.svm_layout import infer_svm_layout
from meseta.data.formats.text import TextFormat, prepend_field, raw_text, read_first_line
from meseta.data.layout import RawLayout
from meseta.data.raw_rows import RawRows
from meseta.spec import MesetaError


class Libsvm(TextFormat):
    """`label index:value ...`, with `qid:group` behind the labels where rows have groups."""

    name = "libsvm"
    title = "libsvm text"
    has_named_columns = False
    pair: ClassVar[re.Pattern[bytes]] = re.compile(rb"(-?\d+|qid):[^:]+")
    """What follows the first label."""
    has_fields: ClassVar[bool] = False
    """Whether a field stands in front of each index."""

    def detect(self, head: FileHead) -> TextDialect | None:
        """By the first pair, since the files have no usual names."""
        if head.is_declared_csv:
            return None
        lines = (line.partition(b"#")[0].split() for line in head.text.splitlines())
        first = next((tokens for tokens in lines if len(tokens) > 1), None)  # a label alone is a row without pairs
        is_delimited = first and (b"::" in first[0] or any(sign in first[0] for sign in b",;|"))  # beside a time
        return TextDialect() if first and self.pair.fullmatch(first[1]) and not is_delimited else None

    def columns(self, source: Source) -> tuple[str, ...]:
        """Raises MesetaError: there are none."""
        raise MesetaError(f"source {source.path!r} is {self.title}, which has no columns")

    def layout(self, sources: Sequence[Source], asked: ColumnRequest) -> RawLayout:
        """By all rows; options and schema may choose some of the features."""
        layout = infer_svm_layout(
            sources, _chosen_features(asked), asked.on_scan, skip_bad=asked.skip_bad_rows, has_fields=self.has_fields
        )
        return replace(layout, encoding=sources[0].encoding)

    def columns_for(self, source: Source, layout: RawLayout) -> Sequence[str]:
        """The features, and label and group where the first line has such."""
        line = read_first_line(source)
        labels = layout.labels if starts_with_label(line) else ()
        group = [layout.group] if layout.group is not None and b"qid:" in line else []
        return [*labels, *group, *layout.feature_columns]

    def can_hold(self, layout: RawLayout, earlier: RawFormat | None) -> bool:
        """Rows of the same format alone."""
        return earlier in (self, None)

    def parse(self, block: Block, layout: RawLayout) -> RawRows:
        """As described by `RawFormat.parse`; without labels, lines begin with a pair."""
        has_labels = bool(layout.labels)
        raw = raw_text(block) if has_labels else prepend_field(raw_text(block), b"0 ")
        rows = parse_svm(block, raw, layout, has_fields=self.has_fields)
        return rows if has_labels else replace(rows, labels=[])

    def key_schema(self, where: str, source: Source, names: Sequence[str]) -> pa.Schema:
        """The group of libsvm alone."""
        if self.has_fields or set(names) != {QID_COLUMN}:
            raise MesetaError(f"{where} has no columns to hand through; of libsvm there is {QID_COLUMN!r}")
        return pa.schema([pa.field(name, pa.int64()) for name in names])

    def key_columns(self, block: Block, names: Sequence[str], schema: pa.Schema) -> pa.RecordBatch:
        """Groups."""
        return pa.record_batch([_groups(block, raw_text(block)) for _ in names], schema)


class Libffm(Libsvm):
    """`label field:index:value ...`."""

    name = "libffm"
    title = "libffm text"
    pair = re.compile(rb"-?\d+:-?\d+:[^:]+")
    has_fields = True


def _chosen_features(asked: ColumnRequest) -> Sequence[str]:
    """The features that the options or the schema choose of libsvm or libffm; empty for all."""
    named, schema = asked.named_columns, asked.schema
    known = {"label", "categorical", "ignore", "group"}
    if (
        named.label
        or named.dense
        or named.ignore
        or named.time
        or (schema and (schema.label != "label" or schema.model_fields_set - known))
    ):
        raise MesetaError(
            "prepare: of libsvm and libffm, --sparse or the categorical of a --schema file may choose features; the "
            "label is called 'label', nothing is dense, weights are as found, and qid is the group"
        )
    if schema and not schema.categorical:
        raise MesetaError("prepare: the --schema file names no categorical feature; there is nothing to learn from")
    return schema.categorical if schema else named.sparse


def _groups(block: Block, raw: bytes) -> pa.Array:
    """What stands behind qid: in each row."""
    groups = re.findall(rb"^(?:[^\s#]+[ \t]+)?qid:(-?\d+)", raw, re.MULTILINE)
    if len(groups) != block.num_rows:
        raise MesetaError(f"keys: source {block.source.path!r}: not every row has a qid; leave it out of the keys")
    return pa.array([int(group) for group in groups], pa.int64())
