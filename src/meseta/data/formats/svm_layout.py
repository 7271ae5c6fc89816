"""Inference of the layout of libsvm and libffm text. One scan over all rows finds the fields and which have weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain

import numpy as np

from meseta.data.formats.bad_rows import parse_good_rows
from meseta.data.formats.format import Block, ScanProgress, Source, read_blocks
from meseta.data.formats.parse_svm import LIBSVM_FEATURE, QID_COLUMN, field_name, parse_svm_rows
from meseta.data.formats.text import raw_text
from meseta.data.layout import RawLayout, SparseColumn
from meseta.data.schema.schema import check_names
from meseta.data.workers import run_in_order
from meseta.spec import MesetaError
from meseta.system.processors import num_cores

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
        weighted = {field_name(field): weighted_fields[field] for field in sorted(weighted_fields)}
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
    pool = ThreadPoolExecutor(num_cores(), thread_name_prefix="meseta-scan")
    jobs = (partial(scan_block, block) for source in sources for block in read_blocks(source, []))
    try:
        for scanned in chain.from_iterable(run_in_order(pool, jobs, num_cores() + 1)):
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
