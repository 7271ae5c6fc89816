"""The layout of libsvm and libffm text: a pass over all rows tells the fields, and which of them have weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain

import numpy as np

from meseta.data.formats.bad_rows import good_parts
from meseta.data.formats.parse_svm import LIBSVM_FEATURE, QID, field_name, read_pairs
from meseta.data.layout import RawLayout, SparseColumn
from meseta.data.prepare.sources import Block, Source, read_blocks
from meseta.data.schema.schema import check_names
from meseta.data.workers import in_order
from meseta.machine.processors import num_cores
from meseta.spec import MesetaError

MAX_FIELDS = 1000
"""More fields than this are taken for a mistake, such as indices where fields belong: each would be a table."""

OnRows = Callable[[int, float], None]
"""Called with the rows scanned so far, and the share of the bytes that they take, 0 to 1."""


def svm_layout(
    sources: Sequence[Source], wanted: Sequence[str], on_rows: OnRows, *, skip_bad: bool = False
) -> RawLayout:
    """One multi-valued feature for each field, in the order of their numbers, or those that `wanted` names.

    A feature has weights where any of its values is not 1. With `skip_bad` a row that cannot be parsed is passed over.
    Raises MesetaError for a row that cannot be parsed, for a
    wanted feature that no row has, and for more than 1,000 fields.
    """
    weighted, has_groups = _scan(sources, on_rows, skip_bad)
    where = f"source {str(sources[0].path)!r}"
    if not weighted:
        raise MesetaError(f"{where}: no row has a feature beside its label; there is nothing to learn from")
    check_names(where, wanted, list(weighted))
    sparse = tuple(SparseColumn(name=name, multi_valued=True, weighted=weighted[name]) for name in wanted or weighted)
    return RawLayout(
        labels=("label",),
        dense=(),
        sparse=sparse,
        group=QID if has_groups else None,
        ignored=tuple(name for name in weighted if wanted and name not in wanted),
        reasons={name: "ids with weights" if has else "ids; all values are 1" for name, has in weighted.items()},
    )


@dataclass(frozen=True)
class _Scanned:
    """What one block tells."""

    block: Block
    weighted: dict[int, bool]
    """Field to whether any of its values is not 1; libsvm is one field 0."""
    has_groups: bool
    """Whether rows have a qid."""


def _scan(sources: Sequence[Source], on_rows: OnRows, skip_bad: bool) -> tuple[dict[str, bool], bool]:
    """Features in the order of their fields, and whether any value of theirs is not 1; and whether rows have groups."""
    weighted: dict[int, bool] = {}
    total_bytes = sum(source.size_bytes for source in sources)
    done_bytes: dict[str, int] = {}
    num_rows = 0
    has_groups = False
    pool = ThreadPoolExecutor(num_cores(), thread_name_prefix="meseta-scan")
    jobs = (partial(_scan_block, block, skip_bad) for source in sources for block in read_blocks(source, []))
    try:
        for scanned in chain.from_iterable(in_order(pool, jobs, num_cores() + 1)):
            block = scanned.block
            has_groups = scanned.has_groups if num_rows == 0 else has_groups
            if scanned.has_groups != has_groups:
                raise MesetaError(
                    f"source {str(block.source.path)!r}, line {block.first_line + 1}: a qid must stand behind the "
                    f"label of every row, or of none; here is {'none' if has_groups else 'one'}, unlike before"
                )
            for field, other in scanned.weighted.items():
                weighted[field] = weighted.get(field, False) or other
            if len(weighted) > MAX_FIELDS:
                raise MesetaError(
                    f"source {str(block.source.path)!r}: more than {MAX_FIELDS} fields up to line "
                    f"{block.first_line + block.num_rows}; are fields and indices exchanged in field:index:value?"
                )
            num_rows += block.num_rows
            done_bytes[block.source.path] = block.position_bytes
            on_rows(num_rows, sum(done_bytes.values()) / total_bytes)
    finally:
        pool.shutdown(cancel_futures=True)
    if sources[0].kind == "libsvm":
        return ({LIBSVM_FEATURE: any(weighted.values())} if weighted else {}), has_groups
    return {field_name(field): weighted[field] for field in sorted(weighted)}, has_groups


def _scan_block(block: Block, skip_bad: bool) -> list[_Scanned]:
    """The whole block, or each stretch of rows between bad ones."""
    return good_parts(block, _scan_rows).results if skip_bad else [_scan_rows(block)]


def _scan_rows(block: Block) -> _Scanned:
    assert isinstance(block.raw, bytes)
    pairs = read_pairs(block, block.raw)
    fields = np.zeros(pairs.weights.size, np.int64) if pairs.fields is None else pairs.fields
    others = set(np.unique(fields[pairs.weights != 1]).tolist())
    found = {field: field in others for field in np.unique(fields).tolist()}
    return _Scanned(block, found, pairs.group is not None)
