"""Policies that choose between full and delta checkpoints, and the blocks that a delta writes in full.

A policy depends only on the newest manifest, so a resumed run saves the same checkpoints as a run that never stopped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from meseta.checkpoint.files.block import FileEntry, group_files_by_block
from meseta.checkpoint.files.digest import TABLE_SHAPE_KEYS
from meseta.checkpoint.files.layout import BlockSchema, TableLayout
from meseta.checkpoint.files.paths import entry_step, relative_to_sibling
from meseta.checkpoint.files.quantization import estimate_row_bytes
from meseta.checkpoint.manifest import DELTAS, MAX_DELTAS, full_step, read_manifest
from meseta.config.row_bits import RowBits
from meseta.ops.row_marks.row_set import RowSet
from meseta.spec import MesetaError, Shard
from meseta.system.files import MAX_DOCUMENT_BYTES
from meseta.system.remote import Location

# Upper bound for the size of a file's entry in a manifest, without its path.
_MAX_ENTRY_BYTES = 512
DeltaPolicy = Literal["one_shot", "consecutive", "intermittent", "rolling"]
FilesByBlock = Mapping[str, Mapping[int, Sequence[FileEntry]]]
"""Files of each block, oldest first, by table and first row of the block."""


@dataclass(frozen=True, kw_only=True)
class DeltaBase:
    """Base checkpoint of a delta."""

    policy: DeltaPolicy
    full_blocks: Mapping[str, Sequence[tuple[int, int]]]
    """Row ranges of the blocks that the delta writes in full, by table, in ascending order."""
    manifest: Mapping[str, Any] = field(default_factory=dict)
    """Manifest of the previous checkpoint. Empty on ranks other than 0."""
    files: FilesByBlock = field(default_factory=dict)
    """Older files that the delta needs, with paths relative to its folder. Empty on ranks other than 0."""
    full_step: int = 0
    """Step of the last full checkpoint. Only valid on rank 0."""
    delta_bytes: tuple[int, ...] = ()
    """Size of each delta since the last full checkpoint, in bytes. Empty on ranks other than 0."""

    def for_other_ranks(self) -> DeltaBase:
        """Return a copy with only the fields that ranks other than 0 need."""
        return DeltaBase(policy=self.policy, full_blocks=self.full_blocks)

    def select_rows(self, shard: Shard, changed: RowSet) -> RowSet:
        """Return the rows of a shard that the delta writes: changed rows, and all rows of blocks that are written in
        full."""
        selected = changed.copy()
        for first, stop in self.full_blocks.get(shard.table, ()):
            begin, end = (min(max(row - shard.rows[0], 0), shard.num_rows) for row in (first, stop))
            selected.add_range(begin, end)
        return selected

    def manifest_entry(self, written: Mapping[str, Sequence[FileEntry]]) -> dict[str, Any]:
        """Return the entry `deltas` of the delta's manifest. `written` has the files that the delta wrote, by table."""
        own_bytes = sum(file["num_bytes"] for files in written.values() for file in files)
        base_entry = {"policy": self.policy, "whole_step": self.full_step}
        return {**base_entry, "delta_bytes": [*self.delta_bytes, own_bytes]}

    def chain_files(self, written: Mapping[str, Sequence[FileEntry]]) -> dict[str, list[FileEntry]]:
        """Return all files that the delta needs, by table, in the order of a manifest.

        For each block, the files of the base precede the file that the delta wrote. A written file with all rows of the
        block replaces them.
        """
        chains: dict[str, list[FileEntry]] = {}
        for name, blocks in self.files.items():
            new = {file["first_row"]: file for file in written.get(name, ())}
            for first, files in blocks.items():
                file = new.get(first)
                former = () if file is not None and file["num_rows"] == files[0]["num_rows"] else files
                chains.setdefault(name, []).extend([*former, *([] if file is None else [file])])
        return chains


def is_cumulative(policy: str) -> bool:
    """Whether a delta has the rows changed since the last full checkpoint, instead of those changed since the previous
    one."""
    return policy in ("one_shot", "intermittent")


def choose_base(
    path: Location, policy: DeltaPolicy, max_chain: int, bits: Mapping[str, RowBits] | None = None
) -> DeltaBase | None:
    """Return the base of a delta that follows the checkpoint at `path`, or `None` if a full checkpoint is due.

    `max_chain` limits the number of files that any block needs. `bits` are the bits per value of quantized rows, by
    table. Policies 'one_shot', 'consecutive' and 'intermittent' are those of Check-N-Run (arXiv 2010.08679, section
    5.1):

        one_shot        rows changed since the last full checkpoint
        consecutive     rows changed since the previous checkpoint
        intermittent    as one_shot, with a new full checkpoint as soon as it is predicted to be cheaper
        rolling         as consecutive, and each delta also writes the blocks with the oldest first file in full

    A rolling delta rewrites blocks with at least 1 / (max_chain - 1) of all bytes, if as many have several files. No
    chain then exceeds `max_chain`, and no save is large.

    Raises MesetaError if the manifest cannot be read.
    """
    manifest = read_manifest(path)
    tables = {name: group_files_by_block(entry) for name, entry in manifest["tables"].items()}
    longest = max((len(files) for blocks in tables.values() for files in blocks), default=1)
    schemas = {name: BlockSchema.from_dict(entry) for name, entry in manifest["tables"].items()}
    row_bytes = {name: estimate_row_bytes(schema, (bits or {}).get(name)) for name, schema in schemas.items()}
    whole_bytes = sum(row_bytes[name] * entry["num_embeddings"] for name, entry in manifest["tables"].items())
    delta_bytes = tuple(manifest[DELTAS]["delta_bytes"]) if DELTAS in manifest else ()
    rewritten: dict[str, list[tuple[int, int]]] = {}
    if any(schemas[name].block_rows != entry["block_rows"] for name, entry in manifest["tables"].items()):
        return None  # An earlier version divided tables into other blocks.
    if len(delta_bytes) == MAX_DELTAS or not _fits_in_manifest(tables):
        return None
    if max_chain < 2 or (policy == "consecutive" and longest >= max_chain):
        return None
    if policy == "intermittent" and _is_full_cheaper([size / whole_bytes for size in delta_bytes]):
        return None
    if policy == "rolling":
        rewritten = _choose_full_blocks(manifest, tables, row_bytes, max_chain)
    # A cumulative delta replaces all earlier deltas, so it needs only the first file of each block.
    num_needed = 1 if is_cumulative(policy) else None
    files = {
        name: {
            block[0]["first_row"]: [relative_to_sibling(entry, manifest["step"]) for entry in block[:num_needed]]
            for block in blocks
        }
        for name, blocks in tables.items()
    }
    known: dict[str, Any] = {"manifest": manifest, "files": files, "full_step": full_step(manifest)}
    return DeltaBase(policy=policy, full_blocks=rewritten, **known, delta_bytes=delta_bytes)


def _fits_in_manifest(tables: Mapping[str, Sequence[Sequence[FileEntry]]]) -> bool:
    # A reader rejects larger manifests. A delta adds up to one file per block.
    num_bytes = sum(
        (len(files) + 1) * (len(files[0]["path"]) + _MAX_ENTRY_BYTES) for blocks in tables.values() for files in blocks
    )
    return num_bytes <= MAX_DOCUMENT_BYTES // 2


def check_base(base: DeltaBase, step: int, layouts: Mapping[str, TableLayout]) -> None:
    """Raise MesetaError unless the base is older than `step` and has tables with the same layouts."""
    before = base.manifest["tables"]
    if base.manifest["step"] >= step:
        raise MesetaError(
            f"checkpoint: the base of a delta must be older than step {step}, got step {base.manifest['step']}; set "
            "checkpoint.deltas to 'none' to save full checkpoints"
        )
    for name in sorted(before.keys() | layouts.keys()):
        entries = before.get(name), layouts[name].to_dict() if name in layouts else None
        if any(
            entries[0] is None or entries[1] is None or entries[0][key] != entries[1][key] for key in TABLE_SHAPE_KEYS
        ):
            raise MesetaError(
                f"checkpoint: a delta must have the tables of its base, the checkpoint of step "
                f"{base.manifest['step']}, but table {name!r} differs; set checkpoint.deltas to 'none' to save full "
                "checkpoints"
            )


def _is_full_cheaper(shares: Sequence[float]) -> bool:
    # `shares` has the size of each delta since the last full checkpoint, relative to a full one.
    # Section 5.1 of the paper: compare a full checkpoint and deltas like those since the last full one with as many
    # deltas of at least the size of the last one.
    return bool(shares) and 1 + sum(shares) <= (len(shares) + 1) * shares[-1]


def _choose_full_blocks(
    manifest: Mapping[str, Any],
    tables: Mapping[str, Sequence[Sequence[FileEntry]]],
    row_bytes: Mapping[str, int],
    max_chain: int,
) -> dict[str, list[tuple[int, int]]]:
    blocks = []
    total_bytes = 0
    for name, table in tables.items():
        for files in table:
            first, num_rows = files[0]["first_row"], files[0]["num_rows"]
            total_bytes += num_rows * row_bytes[name]
            if len(files) > 1:
                step = entry_step(files[0], manifest["step"])
                blocks.append((len(files) < max_chain, step, name, first, first + num_rows, num_rows * row_bytes[name]))
    rewritten: dict[str, list[tuple[int, int]]] = {}
    num_bytes = 0
    # Blocks with chains of maximum length come first, then those with the oldest first file.
    for is_short, _, name, first, stop, size in sorted(blocks):
        if is_short and num_bytes * (max_chain - 1) >= total_bytes:
            break
        rewritten.setdefault(name, []).append((first, stop))
        num_bytes += size
    return {name: sorted(spans) for name, spans in rewritten.items()}
