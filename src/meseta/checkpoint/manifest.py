"""manifest.json: what a checkpoint holds. It is written last and says how everything else is checked."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from meseta.checkpoint.failures import DamagedCheckpoint, malformed, writing
from meseta.checkpoint.files import digest
from meseta.checkpoint.files.layout import BlockSchema, StoredType, block_path, block_paths, table_folder
from meseta.checkpoint.files.rate import WriteRate
from meseta.checkpoint.files.raw import write_cached
from meseta.checkpoint.files.tensors import CarriedPath, DensePath
from meseta.errors import shown
from meseta.machine.files import (
    DOCUMENT_BYTES,
    first_alike,
    inside,
    json_text,
    parse_json,
    plain_data,
    read_bounded,
)
from meseta.spec import MesetaError, Plan
from meseta.spec.tables import TableDtype, table_name_fault

FORMAT = "meseta.checkpoint/1"
FORMAT_OF_FEATURES = "meseta.checkpoint/2"
"""Of those that hold more than the first: they name it, so that a version that lacks it says so."""
CARRIED = "carried"
"""The feature, and the key, of answers that were looked up before the last update."""
FEATURES = (CARRIED,)
"""That this version has."""
MANIFEST_PATH = "manifest.json"
Count = Annotated[int, Field(ge=0, lt=1 << 53)]
Size = Annotated[int, Field(ge=1, lt=1 << 53)]
Sum = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class _Part(BaseModel):
    """Of a manifest, with all keys that every version has written, and no others.

    What there may be a million of is validated one by one: pydantic gathers every fault before it tells the first.
    """

    model_config = ConfigDict(strict=True, extra="forbid")


class _FileEntry(_Part):
    path: str
    num_bytes: Size
    checksum: Sum


class _BlockEntry(_FileEntry):
    first_row: Count
    num_rows: Size


class _DenseEntry(_FileEntry):
    path: DensePath


class _CarriedEntry(_FileEntry):
    path: CarriedPath


class _ColumnEntry(_Part):
    name: str
    kind: Literal["row", "element"]
    dtype: StoredType


class _OptimizerEntry(_Part, extra="allow"):
    name: str


class _TableEntry(_Part):
    num_embeddings: Size
    embedding_dim: Annotated[int, Field(ge=1, lt=1 << 31)]
    dtype: TableDtype
    optimizer: _OptimizerEntry
    columns: Annotated[list[_ColumnEntry], Field(min_length=1, max_length=1000)]
    block_rows: Size
    blocks: list[Any]
    checksum: Sum


class _PlanEntry(_Part, extra="allow"):
    num_ranks: Size
    tables: dict[str, Any]


class _Manifest(_Part):
    format: str
    step: Count
    tables: dict[str, Any]
    dense: _DenseEntry
    plan: _PlanEntry
    reader: Any
    state: dict[str, Any]
    checksum: Sum
    manifest_checksum: Sum


class _ManifestOfFeatures(_Manifest):
    features: Annotated[list[str], Field(min_length=1, max_length=1)]
    carried: _CarriedEntry


def build_manifest(
    *,
    step: int,
    tables: Mapping[str, Any],
    dense: Mapping[str, Any],
    carried: Mapping[str, Any] | None = None,
    plan: Plan,
    state: Mapping[str, Any],
) -> dict[str, Any]:
    """The manifest of a checkpoint whose files are written; fills in the checksums of tables, model and manifest.

    The key 'reader' of the trainer's state, the position in the data, stands on its own in the manifest.
    """
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "step": step,
        "tables": {name: {**entry, "checksum": digest.of_table(entry)} for name, entry in sorted(tables.items())},
        "dense": dict(dense),
        "plan": plan.to_dict(),
        "reader": state.get("reader"),
        "state": {key: value for key, value in state.items() if key != "reader"},
    }
    if carried is not None:
        manifest |= {"format": FORMAT_OF_FEATURES, "features": [CARRIED], CARRIED: dict(carried)}
    manifest["checksum"] = digest.of_model(manifest)
    # What is read back is what was meant: tuples become lists and keys strings before they are summed.
    manifest = plain_data(manifest, finite=True)
    manifest["manifest_checksum"] = digest.of_manifest(manifest)
    return manifest


def check_state(state: Mapping[str, Any]) -> None:
    """Raise MesetaError for a trainer's state that JSON cannot hold, naming the key."""
    for key, value in state.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise MesetaError(
                f"checkpoint: state {key!r} cannot be written as JSON ({error}); "
                "use numbers that are finite, strings, lists and dicts"
            ) from None


def write_manifest(root: Path, manifest: Mapping[str, Any], rate: WriteRate | None = None) -> None:
    """Write and fsync. Raises MesetaError, for example on a full disk, and for more than what is read of one."""
    path = root / MANIFEST_PATH
    content = json_text(manifest).encode()
    try:
        parse_json(content)
    except ValueError as error:
        raise MesetaError(f"checkpoint file {str(path)!r} would not be read again: {error}") from None
    if len(content) > DOCUMENT_BYTES:
        raise MesetaError(f"checkpoint file {str(path)!r} would have {len(content):,} bytes, over {DOCUMENT_BYTES:,}")
    with writing(path):
        write_cached(path, content, rate)


def read_manifest(root: Path) -> dict[str, Any]:
    """Read and check; raises MesetaError when it is missing, of another format, malformed or changed."""
    where = f"checkpoint file {str(root / MANIFEST_PATH)!r}"
    try:
        return check_manifest(where, parse_manifest(where, read_bounded(inside(root, MANIFEST_PATH))))
    except OSError as error:
        raise DamagedCheckpoint(
            f"checkpoint {str(root)!r}: {MANIFEST_PATH}: {error.strerror}; give a directory step-..."
        ) from None


def parse_manifest(where: str, content: bytes) -> dict[str, Any]:
    """What was written as a manifest, and not changed since; all else in it is for `check_manifest` to say.

    Raises MesetaError for another format, DamagedCheckpoint for what is cut off or changed.
    """
    try:
        manifest = parse_json(content)
        del content  # which may be long, as what the digest is over
    except ValueError as error:
        raise DamagedCheckpoint(f"{where} is not JSON ({error}); use an older checkpoint") from None
    found = manifest.get("format") if isinstance(manifest, dict) else None
    if found not in (FORMAT, FORMAT_OF_FEATURES):
        raise MesetaError(
            f"{where} has the format {shown(found)}, and this version reads {FORMAT!r} and {FORMAT_OF_FEATURES!r}; "
            "read it with the version that wrote it"
        )
    features = manifest.get("features") if found == FORMAT_OF_FEATURES else []
    for name in features if isinstance(features, list) else ():
        if name not in FEATURES:
            raise MesetaError(
                f"{where} has the feature {shown(name)}, and this version knows {', '.join(map(repr, FEATURES))}; read "
                "it with the version that wrote it"
            )
    _check_sum(where, "manifest_checksum", manifest.get("manifest_checksum"), digest.of_manifest(manifest))
    return dict(manifest)


def check_manifest(where: str, manifest: dict[str, Any]) -> dict[str, Any]:
    """The manifest itself. Raises DamagedCheckpoint unless its fields have the types and ranges of _Manifest, blocks
    and files are those that such tables have, and the digests of tables and model those of their blocks.

    To be called before anything that a manifest says is used: its checksum is right whoever wrote it.
    """
    _validate(where, "", manifest, _Manifest if manifest.get("format") == FORMAT else _ManifestOfFeatures)
    if odd := manifest["tables"].keys() ^ manifest["plan"]["tables"].keys():
        raise malformed(where, f"its tables and those of its plan differ in {shown(min(odd))}")
    alike = first_alike(table_folder(name) for name in manifest["tables"])
    if alike:
        raise malformed(where, f"file systems that ignore case take {alike[0]!r} and {alike[1]!r} for one")
    for name, entry in manifest["tables"].items():
        _validate(where, f"tables.{name}.", entry, _TableEntry)
        fault = table_name_fault(name) or _table_fault(where, name, entry)
        if fault:
            raise malformed(where, f"table {shown(name)}: {fault}")
        _check_sum(where, f"table {name!r}", entry["checksum"], digest.of_table(entry))
    _check_sum(where, "checksum", manifest["checksum"], digest.of_model(manifest))
    return manifest


def entries_of(manifest: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Of every file of a checkpoint but the manifest, with its path, num_bytes and checksum."""
    yield manifest["dense"]
    if CARRIED in manifest:
        yield manifest[CARRIED]
    for table in manifest["tables"].values():
        yield from table["blocks"]


def _validate(where: str, place: str, value: Any, kind: type[_Part]) -> None:
    """Raise DamagedCheckpoint, naming the key below `place`, unless a value has the types and ranges of `kind`."""
    unknown = value.keys() - kind.model_fields.keys() if isinstance(value, dict) else ()
    if unknown:
        raise malformed(where, f"{shown(place + min(unknown))} is no key of it")
    try:
        kind.model_validate(value)
    except ValidationError as error:
        problem = error.errors()[0]
        key = place + ".".join(map(str, problem["loc"]))
        raise malformed(where, f"{shown(key)}: {problem['msg'].lower()}") from None


def _check_sum(where: str, name: str, expected: object, found: str) -> None:
    if expected != found:
        raise DamagedCheckpoint(
            f"{where} was changed: {name} must be {shown(expected)}, but its content has {found!r}; "
            "copy the checkpoint again, or use an older one"
        )


def _table_fault(where: str, name: str, entry: Mapping[str, Any]) -> str | None:
    """In what a table's entry is not that of a table of its shape; None where it is."""
    schema = BlockSchema.from_dict(entry)
    if fault := schema.fault():
        return fault
    if schema.columns[0].dtype != entry["dtype"]:
        return f"its dtype is {entry['dtype']}, and its rows are {schema.columns[0].dtype}"
    rows, total = entry["block_rows"], entry["num_embeddings"]
    if rows > schema.block_rows or rows & (rows - 1):
        return f"block_rows must be a power of two of at most {schema.block_rows}, got {rows}"
    if len(entry["blocks"]) != -(-total // rows):
        return f"its {total} rows must lie in {-(-total // rows)} blocks, got {len(entry['blocks'])}"
    frame_bytes = schema.frame_bytes
    for number, block in enumerate(entry["blocks"]):
        _validate(where, f"tables.{name}.blocks.{number}.", block, _BlockEntry)
        span = number * rows, min(rows, total - number * rows)
        least = span[1] * schema.row_bytes
        if (block["first_row"], block["num_rows"]) != span:
            return (
                f"block {number} must begin at row {span[0]} and hold {span[1]}, "
                f"got {block['first_row']} and {block['num_rows']}"
            )
        if block["path"] not in block_paths(name, number):
            return f"block {number} must have the path {block_path(name, number)!r}, got {shown(block['path'])}"
        if not least <= block["num_bytes"] <= least + frame_bytes:
            return f"block {number} must have {least} to {least + frame_bytes} bytes, got {block['num_bytes']}"
    return None
