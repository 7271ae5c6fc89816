"""Whether a save is whole or a delta, and which blocks a delta writes whole: decided from the newest manifest alone, so
that a run which is resumed goes on as one that never stopped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from meseta.checkpoint.files.chain import FileEntry, group_files_by_block
from meseta.checkpoint.files.digest import TABLE_SHAPE_KEYS
from meseta.checkpoint.files.layout import BlockSchema, TableLayout
from meseta.checkpoint.files.paths import entry_step, relative_to_sibling
from meseta.checkpoint.files.quantization import estimate_row_bytes
from meseta.checkpoint.manifest import DELTAS, MAX_DELTAS, full_step, read_manifest
from meseta.config.row_bits import RowBits
from meseta.machine.files import MAX_DOCUMENT_BYTES
from meseta.machine.remote import Location
from meseta.ops.row_marks.row_set import RowSet
from meseta.spec import MesetaError, Shard

_MAX_ENTRY_BYTES = 512
"""The most that a manifest says of a file, beside its path."""
DeltaPolicy = Literal["one_shot", "consecutive", "intermittent", "rolling"]
FilesByBlock = Mapping[str, Mapping[int, Sequence[FileEntry]]]
"""Files by table and first row of a block, oldest first."""


@dataclass(frozen=True, kw_only=True)
class DeltaBase:
    """What a delta stands on."""

    policy: DeltaPolicy
    full_blocks: Mapping[str, Sequence[tuple[int, int]]]
    """Rows of the blocks that the delta writes whole, by table, ascending."""
    manifest: Mapping[str, Any] = field(default_factory=dict)
    """Of the checkpoint before; rank 0 alone needs it."""
    files: FilesByBlock = field(default_factory=dict)
    """Those of its files that the delta needs as well, as they are named in a sibling; rank 0 alone needs them."""
    full_step: int = 0
    """Of the last whole checkpoint; likewise."""
    delta_bytes: tuple[int, ...] = ()
    """Of the files that each delta since then has written; likewise."""

    def for_other_ranks(self) -> DeltaBase:
        """What other ranks than the first need."""
        return DeltaBase(policy=self.policy, full_blocks=self.full_blocks)

    def select_rows(self, shard: Shard, changed: RowSet) -> RowSet:
        """Return the rows of a shard that the delta writes: changed ones, and all of blocks that it writes whole."""
        selected = changed.copy()
        for first, stop in self.full_blocks.get(shard.table, ()):
            begin, end = (min(max(row - shard.rows[0], 0), shard.num_rows) for row in (first, stop))
            selected.add_range(begin, end)
        return selected

    def manifest_entry(self, written: Mapping[str, Sequence[FileEntry]]) -> dict[str, Any]:
        """What the manifest of a delta says of itself, which has `written` files."""
        own_bytes = sum(file["num_bytes"] for files in written.values() for file in files)
        told = {"policy": self.policy, "whole_step": self.full_step}
        return {**told, "delta_bytes": [*self.delta_bytes, own_bytes]}

    def chain_files(self, written: Mapping[str, Sequence[FileEntry]]) -> dict[str, list[FileEntry]]:
        """All files that the delta needs, by table, in the order of a manifest: of each block those of the base, and
        the one written, which stands alone where it has all rows."""
        chains: dict[str, list[FileEntry]] = {}
        for name, blocks in self.files.items():
            new = {file["first_row"]: file for file in written.get(name, ())}
            for first, files in blocks.items():
                file = new.get(first)
                former = () if file is not None and file["num_rows"] == files[0]["num_rows"] else files
                chains.setdefault(name, []).extend([*former, *([] if file is None else [file])])
        return chains


def is_cumulative(policy: str) -> bool:
    """Whether a delta holds what has changed since the last whole checkpoint, not since the one before."""
    return policy in ("one_shot", "intermittent")


def choose_base(
    path: Location, policy: DeltaPolicy, max_chain: int, bits: Mapping[str, RowBits] | None = None
) -> DeltaBase | None:
    """What a delta after the checkpoint at `path` stands on, with at most `max_chain` files for any row; None where a
    whole checkpoint is due. `bits` are those that it writes. Raises MesetaError where the manifest cannot be read.

    'one_shot', 'consecutive' and 'intermittent' are those of Check-N-Run (arXiv 2010.08679, section 5.1): what has
    changed since the last whole checkpoint, since the one before, and as the first, with a whole one as soon as that is
    predicted to be cheaper. 'rolling' is as 'consecutive', and each delta writes the blocks whole whose first file is
    the oldest, until they have 1 / (max_chain - 1) of all bytes: no row ever needs more files, and no save is large.
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
        return None  # a former version cut blocks otherwise
    if len(delta_bytes) == MAX_DELTAS or not _fits_in_manifest(tables):
        return None
    if max_chain < 2 or (policy == "consecutive" and longest >= max_chain):
        return None
    if policy == "intermittent" and _is_full_cheaper([size / whole_bytes for size in delta_bytes]):
        return None
    if policy == "rolling":
        rewritten = _choose_full_blocks(manifest, tables, row_bytes, max_chain)
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
    """Whether the manifest of a delta is read again, in which each block has a file more than here."""
    num_bytes = sum(
        (len(files) + 1) * (len(files[0]["path"]) + _MAX_ENTRY_BYTES) for blocks in tables.values() for files in blocks
    )
    return num_bytes <= MAX_DOCUMENT_BYTES // 2


def check_base(base: DeltaBase, step: int, layouts: Mapping[str, TableLayout]) -> None:
    """Raise MesetaError unless the checkpoint that a delta of `step` stands on is older, and has tables of these
    layouts."""
    before = base.manifest["tables"]
    if base.manifest["step"] >= step:
        raise MesetaError(
            f"checkpoint: a delta of step {step} cannot stand on the checkpoint of step {base.manifest['step']}; save "
            "a whole one (deltas 'none')"
        )
    for name in sorted(before.keys() | layouts.keys()):
        entries = before.get(name), layouts[name].to_dict() if name in layouts else None
        if any(
            entries[0] is None or entries[1] is None or entries[0][key] != entries[1][key] for key in TABLE_SHAPE_KEYS
        ):
            raise MesetaError(
                f"checkpoint: a delta stands on that of step {base.manifest['step']}, which has another table "
                f"{name!r}; save a whole one (deltas 'none')"
            )


def _is_full_cheaper(shares: Sequence[float]) -> bool:
    """Of a whole checkpoint's bytes, what each delta since the last one had: whether to write one now, and deltas as
    those after it, is expected to write less than to go on with deltas of the last one's share, or more."""
    return bool(shares) and 1 + sum(shares) <= (len(shares) + 1) * shares[-1]


def _choose_full_blocks(
    manifest: Mapping[str, Any],
    tables: Mapping[str, Sequence[Sequence[FileEntry]]],
    row_bytes: Mapping[str, int],
    max_chain: int,
) -> dict[str, list[tuple[int, int]]]:
    """Rows of the blocks that a rolling delta writes whole, by table."""
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
    for is_short, _, name, first, stop, size in sorted(blocks):
        if is_short and num_bytes * (max_chain - 1) >= total_bytes:
            break
        rewritten.setdefault(name, []).append((first, stop))
        num_bytes += size
    return {name: sorted(spans) for name, spans in rewritten.items()}
