"""Libsvm and libffm text: a label, then pairs or triples of an index and a value. The index is an id, the value its
weight."""

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
        or named.ignore
        or named.time
        or (schema and (schema.label != "label" or schema.model_fields_set - known))
    ):
        raise MesetaError(
            "prepare: for libsvm and libffm, only --sparse or categorical in a --schema file may select features; the "
            "label is called 'label', there are no dense features, weights are as in the file, and qid is the group"
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
