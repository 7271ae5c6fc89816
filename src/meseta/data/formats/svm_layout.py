"""The layout of libsvm and libffm text: a pass over all rows tells the fields, and which of them have weights."""

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
from meseta.machine.processors import num_cores
from meseta.spec import MesetaError

MAX_LIBFFM_FIELDS = 1000
"""More fields than this are taken for a mistake, such as indices where fields belong: each would be a table."""


def infer_svm_layout(
    sources: Sequence[Source], chosen: Sequence[str], on_rows: ScanProgress, *, skip_bad: bool, has_fields: bool
) -> RawLayout:
    """One multi-valued feature for each field, in the order of their numbers, or those that are `chosen`.

    A feature has weights where any of its values is not 1. With `skip_bad` a row that cannot be parsed is passed over.
    Raises MesetaError for a row that cannot be parsed, for a
    chosen feature that no row has, and for more than 1,000 fields.
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
        raise MesetaError(f"{where}: no row has a feature beside its label; there is nothing to learn from")
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
    """What one block tells."""

    block: Block
    weighted: dict[int, bool]
    """Field to whether any of its values is not 1; libsvm is one field 0."""
    has_groups: bool
    """Whether rows have a qid."""


def _scan(
    sources: Sequence[Source], on_rows: ScanProgress, scan_block: Callable[[Block], list[_BlockScan]]
) -> tuple[dict[int, bool], bool]:
    """Fields and whether any value of theirs is not 1; and whether rows have groups."""
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
            has_groups = scanned.has_groups if num_rows == 0 else has_groups
            if scanned.has_groups != has_groups:
                raise MesetaError(
                    f"source {str(block.source.path)!r}, line {block.first_line + 1}: a qid must stand behind the "
                    f"label of every row, or of none; here is {'none' if has_groups else 'one'}, unlike before"
                )
            for field, has_weights in scanned.weighted.items():
                weighted[field] = weighted.get(field, False) or has_weights
            if len(weighted) > MAX_LIBFFM_FIELDS:
                raise MesetaError(
                    f"source {str(block.source.path)!r}: more than {MAX_LIBFFM_FIELDS} fields up to line "
                    f"{block.first_line + block.num_rows}; are fields and indices exchanged in field:index:value?"
                )
            num_rows += block.num_rows
            done_bytes[block.source.path] = block.position_bytes
            on_rows(num_rows, sum(done_bytes.values()) / total_bytes)
    finally:
        pool.shutdown(cancel_futures=True)
    return weighted, has_groups


def _scan_block(block: Block, *, skip_bad: bool, has_fields: bool) -> list[_BlockScan]:
    """The whole block, or each stretch of rows between bad ones."""
    scan_rows = partial(_scan_rows, has_fields=has_fields)
    return parse_good_rows(block, scan_rows).results if skip_bad else [scan_rows(block)]


def _scan_rows(block: Block, *, has_fields: bool) -> _BlockScan:
    pairs = parse_svm_rows(block, raw_text(block), has_fields=has_fields)
    fields = np.zeros(pairs.weights.size, np.int64) if pairs.fields is None else pairs.fields
    others = set(np.unique(fields[pairs.weights != 1]).tolist())
    weighted = {field: field in others for field in np.unique(fields).tolist()}
    return _BlockScan(block, weighted, pairs.group is not None)
