"""Comparison of two checkpoints by tables, rows and dense tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meseta.checkpoint.failures import check_files
from meseta.checkpoint.files.block import Values, group_files_by_block, read_chain, read_tensors
from meseta.checkpoint.files.digest import TABLE_SHAPE_KEYS, content_digest
from meseta.checkpoint.files.layout import BlockSchema, widen_bfloat16
from meseta.checkpoint.manifest import PREFETCHED, file_entries, read_manifest
from meseta.storage import ROW
from meseta.system.remote import Location, to_location


@dataclass(frozen=True, kw_only=True)
class CheckpointDifference:
    """Difference between two checkpoints in one table column, table property or tensor."""

    name: str
    """Table or tensor that differs, for example "table 'user_id'"."""
    description: str


def compare(first: Location | str, second: Location | str) -> Iterator[CheckpointDifference]:
    """Yield the differences between the models in two checkpoints. Step and plan may differ.

    Blocks whose files have equal checksums must exist, but are not read. For all other blocks and tensors, a difference
    states the number of differing rows or elements and the largest difference, and for rows also the first one. Values
    are compared bit by bit, so 0 and -0 differ, by 0. Of tables with different numbers of rows, the rows with common
    numbers are compared.

    Raises MesetaError if a checkpoint is damaged. Each file that is read is checked.
    """
    roots = to_location(first), to_location(second)
    manifests = read_manifest(roots[0]), read_manifest(roots[1])
    for root, manifest in zip(roots, manifests, strict=True):
        check_files(root, file_entries(manifest))
    tables = manifests[0]["tables"], manifests[1]["tables"]
    for name in sorted(set(tables[0]) | set(tables[1])):
        entries = tables[0].get(name), tables[1].get(name)
        label = f"table {name!r}"
        if entries[0] is None or entries[1] is None:
            there = roots[0] if entries[1] is None else roots[1]
            yield CheckpointDifference(name=label, description=f"is only in {str(there)!r}")
        elif content_digest(entries[0]) != content_digest(entries[1]):
            yield from _compare_tables(label, roots, (entries[0], entries[1]))
    for key in ("dense", PREFETCHED):
        sums = [manifest.get(key, {}).get("checksum") for manifest in manifests]
        if sums[0] != sums[1]:
            # Checkpoints without prefetched embeddings lack the key.
            each = zip(roots, manifests, strict=True)
            one, other = (read_tensors(root, manifest[key]) if key in manifest else {} for root, manifest in each)
            yield from _compare_tensors(key, roots, one, other)


def _compare_tables(
    label: str, roots: tuple[Location, Location], entries: tuple[Mapping[str, Any], Mapping[str, Any]]
) -> Iterator[CheckpointDifference]:
    for field in TABLE_SHAPE_KEYS:
        if entries[0][field] != entries[1][field]:
            texts = [_describe_columns(e[field]) if field == "columns" else str(e[field]) for e in entries]
            yield CheckpointDifference(name=label, description=f"{field}: {texts[0]}, and {texts[1]}")
    if any(entries[0][field] != entries[1][field] for field in TABLE_SHAPE_KEYS if field != "num_embeddings"):
        return
    counts = {column["name"]: _DifferenceCount() for column in entries[0]["columns"]}
    schema = BlockSchema.from_dict(entries[0])
    for one, other in zip(*map(group_files_by_block, entries), strict=False):  # A larger table has more blocks.
        if [file["checksum"] for file in one] != [file["checksum"] for file in other]:
            # The next `read_chain` of this thread may overwrite the values, so copy them.
            values = read_chain(roots[0], schema, one, copy=True)
            _count_differences(counts, schema, one[0]["first_row"], values, read_chain(roots[1], schema, other))
    total = min(entry["num_embeddings"] for entry in entries)
    for name, count in counts.items():
        if count.num_different:
            what = "rows" if name == "row" else f"state {name!r}"
            yield CheckpointDifference(name=label, description=f"{what}: {count.describe(total)}")


@dataclass
class _DifferenceCount:
    """Differing rows of one column, counted over blocks."""

    num_different: int = 0
    first_row: int = -1
    max_difference: float = 0.0

    def describe(self, total: int) -> str:
        return (
            f"{self.num_different:,} of {total:,} differ, the first is row {self.first_row:,}; "
            f"the largest difference is {self.max_difference:.3g}"
        )


def _count_differences(
    counts: Mapping[str, _DifferenceCount], schema: BlockSchema, first_row: int, one: Values, other: Values
) -> None:
    num_rows = min(len(one[ROW]), len(other[ROW]))
    for column in schema.columns:
        a, b = (np.ascontiguousarray(values[column.name][:num_rows]).reshape(num_rows, -1) for values in (one, other))
        rows = np.flatnonzero((a.view(np.uint8) != b.view(np.uint8)).any(axis=1))
        if not rows.size:
            continue
        count = counts[column.name]
        if not count.num_different:
            count.first_row = first_row + int(rows[0])
        count.num_different += rows.size
        count.max_difference = max(
            count.max_difference,
            _max_abs_difference(_to_float64(a[rows], column.dtype), _to_float64(b[rows], column.dtype)),
        )


def _to_float64(stored: np.ndarray, dtype: str) -> np.ndarray:
    # A stored bfloat16 has the upper half of the bits of a float32.
    if dtype == "bfloat16":
        stored = widen_bfloat16(stored)
    with np.errstate(invalid="ignore"):  # Arbitrary bits may be signaling NaNs.
        return stored.astype(np.float64)


def _max_abs_difference(a: np.ndarray, b: np.ndarray) -> float:
    # The difference is infinite if only one of two values is NaN.
    with np.errstate(invalid="ignore"):
        distance = np.abs(a - b)
    # Equal infinities have the difference NaN, which counts as 0.
    distance[np.isnan(a) & np.isnan(b) | (a == b)] = 0.0
    distance[np.isnan(distance)] = np.inf
    return float(distance.max(initial=0.0))


def _compare_tensors(
    kind: str, roots: tuple[Location, Location], one: Mapping[str, Tensor], other: Mapping[str, Tensor]
) -> Iterator[CheckpointDifference]:
    for name in sorted(set(one) | set(other)):
        label = f"{kind} tensor {name!r}"
        if name not in one or name not in other:
            yield CheckpointDifference(
                name=label, description=f"is only in {str(roots[0] if name in one else roots[1])!r}"
            )
            continue
        a, b = one[name], other[name]
        if a.shape != b.shape or a.dtype != b.dtype:
            yield CheckpointDifference(name=label, description=f"is {_describe_tensor(a)}, and {_describe_tensor(b)}")
            continue
        flat = a.reshape(-1), b.reshape(-1)
        if torch.equal(flat[0].view(torch.uint8), flat[1].view(torch.uint8)):
            continue
        numbers = flat[0].double().numpy(), flat[1].double().numpy()
        same = (numbers[0] == numbers[1]) | (np.isnan(numbers[0]) & np.isnan(numbers[1]))
        num_different, largest = int((~same).sum()), _max_abs_difference(*numbers)
        text = f"{num_different:,} of {a.numel():,} elements differ; the largest difference is {largest:.3g}"
        yield CheckpointDifference(name=label, description=text)


def _describe_tensor(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _describe_columns(columns: list[Mapping[str, str]]) -> str:
    return ", ".join(f"{c['name']} {c['dtype']} per {c['kind']}" for c in columns)
