"""Manifest of a checkpoint, `manifest.json`. It is written last, and has the checksums of all other files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from meseta.checkpoint.failures import DamagedCheckpoint, malformed_manifest_error, read_with_retry, wrap_write_errors
from meseta.checkpoint.files import digest
from meseta.checkpoint.files.block import DenseFileName, PrefetchedFileName, group_files_by_block
from meseta.checkpoint.files.direct_io import WriteRateLimiter, write_buffered
from meseta.checkpoint.files.layout import BlockSchema, StoredType
from meseta.checkpoint.files.paths import (
    CHECKPOINT_NAME_PATTERN,
    is_block_path,
    parse_folder_step,
    possible_block_paths,
    rows_path,
    split_path,
    table_folder,
)
from meseta.checkpoint.files.quantization import invalid_formats_reason, quantized_row_bytes
from meseta.errors import StorageError, format_value
from meseta.spec import MesetaError, Plan
from meseta.spec.tables import TableDtype, invalid_table_name_reason
from meseta.system.files import (
    check_json_limits,
    first_name_collision,
    format_json,
    is_read_failure,
    parse_json,
    to_json_types,
)
from meseta.system.remote import Location, read_inner_file

CHECKPOINT_FORMAT = "meseta.checkpoint/1"
# Checkpoints list their optional features, so that older versions can report a feature they lack.
CHECKPOINT_FORMAT_WITH_FEATURES = "meseta.checkpoint/2"
PREFETCHED = "carried"
"""Feature name and manifest key of prefetched embeddings."""
DELTAS = "deltas"
"""Feature name and manifest key of deltas, which need files of older checkpoints."""
QUANTIZED = "quantised"
"""Feature name and manifest key of quantized rows. The value has the largest quantization error by table and column."""
FEATURES = (PREFETCHED, DELTAS, QUANTIZED)
"""Optional features that this version supports."""
MANIFEST_PATH = "manifest.json"
RUN_ID = "run_id"
"""State key of the random id of the saving run. Checkpoints of early versions lack it."""
# A manifest lists the size of each delta since the last full checkpoint.
MAX_DELTAS = 1 << 16
"""Maximum number of deltas after a full checkpoint."""
Count = Annotated[int, Field(ge=0, lt=1 << 53)]
PositiveCount = Annotated[int, Field(ge=1, lt=1 << 53)]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
_RUN_ID_PATTERN = re.compile("[0-9a-f]{32}")
# Default of an optional key. If the key is present, its value must have the declared type.
_OPTIONAL: Any = None


# Entries of which a manifest may have a million are validated one by one, because pydantic collects all errors before
# it reports the first.
class ManifestPart(BaseModel):
    """Base class of manifest entries. All keys without a default are required, and unknown keys are rejected."""

    model_config = ConfigDict(strict=True, extra="forbid")


class _FileEntry(ManifestPart):
    path: str
    num_bytes: PositiveCount
    checksum: Sha256


class _BlockEntry(_FileEntry):
    first_row: Count
    num_rows: PositiveCount
    codes: dict[str, str] = _OPTIONAL
    error: dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]] = _OPTIONAL


class _DenseEntry(_FileEntry):
    path: DenseFileName


class _PrefetchedEntry(_FileEntry):
    path: PrefetchedFileName


class ColumnEntry(ManifestPart):
    """Manifest entry of a table column."""

    name: str
    kind: Literal["row", "element"]
    dtype: StoredType


class OptimizerEntry(ManifestPart, extra="allow"):
    """Manifest entry of a row optimizer and its constants."""

    name: str


class _TableEntry(ManifestPart):
    num_embeddings: PositiveCount
    embedding_dim: Annotated[int, Field(ge=1, lt=1 << 31)]
    dtype: TableDtype
    optimizer: OptimizerEntry
    columns: Annotated[list[ColumnEntry], Field(min_length=1, max_length=1000)]
    block_rows: PositiveCount
    blocks: list[Any]
    checksum: Sha256 = _OPTIONAL
    chain: Sha256 = _OPTIONAL


class _DeltasEntry(ManifestPart):
    policy: Literal["one_shot", "consecutive", "intermittent", "rolling"]
    whole_step: Count
    delta_bytes: Annotated[list[Count], Field(min_length=1, max_length=MAX_DELTAS)]


class _PlanEntry(ManifestPart, extra="allow"):
    num_ranks: PositiveCount
    tables: dict[str, Any]


class _Manifest(ManifestPart):
    format: str
    step: Count
    tables: dict[str, Any]
    dense: _DenseEntry
    plan: _PlanEntry
    reader: Any
    state: dict[str, Any]
    checksum: Sha256 = _OPTIONAL
    manifest_checksum: Sha256


class _ManifestWithFeatures(_Manifest):
    features: Annotated[list[str], Field(min_length=1, max_length=len(FEATURES))]
    carried: _PrefetchedEntry = _OPTIONAL
    deltas: _DeltasEntry = _OPTIONAL
    quantised: dict[str, Any] = _OPTIONAL
    chain: Sha256 = _OPTIONAL


def build_manifest(
    *,
    step: int,
    tables: Mapping[str, Any],
    dense: Mapping[str, Any],
    prefetched: Mapping[str, Any] | None = None,
    deltas: Mapping[str, Any] | None = None,
    plan: Plan,
    state: Mapping[str, Any],
) -> dict[str, Any]:
    """Build the manifest of a checkpoint whose files are written, including the checksums of tables, model and
    manifest.

    Args:
        step: Number of steps trained.
        tables: Entries of the tables with their blocks, by name.
        dense: Entry of the file with dense tensors.
        prefetched: Entry of the file with prefetched embeddings, if there is one.
        deltas: Policy, step of the last full checkpoint, and sizes of the deltas since then. `None` for a full
            checkpoint.
        plan: Plan of the run.
        state: State of the trainer. The manifest stores its key 'reader', the position in the data, separately.
    """
    manifest: dict[str, Any] = {
        "format": CHECKPOINT_FORMAT,
        "step": step,
        "tables": {name: {**entry, **_table_digest(entry)} for name, entry in sorted(tables.items())},
        "dense": dict(dense),
        "plan": plan.to_dict(),
        "reader": state.get("reader"),
        "state": {key: value for key, value in state.items() if key != "reader"},
    }
    return _finalize_manifest(
        manifest, {PREFETCHED: prefetched, DELTAS: deltas, QUANTIZED: _max_quantization_errors(manifest) or None}
    )


def full_manifest(manifest: Mapping[str, Any], tables: Mapping[str, Any]) -> dict[str, Any]:
    """Build the manifest of a full checkpoint with the content of `manifest`. `tables` have one file per block."""
    entries = {}
    for name, table in sorted(tables.items()):
        entry = {key: value for key, value in table.items() if key not in ("checksum", "chain")}
        entries[name] = {**entry, **_table_digest(entry)}
    whole = {"format": CHECKPOINT_FORMAT, "step": manifest["step"], "tables": entries}
    whole |= {key: manifest[key] for key in ("dense", "plan", "reader", "state")}
    return _finalize_manifest(whole, {PREFETCHED: manifest.get(PREFETCHED)})


def _finalize_manifest(manifest: dict[str, Any], features: Mapping[str, Mapping[str, Any] | None]) -> dict[str, Any]:
    held = {name: dict(value) for name, value in features.items() if value is not None}
    if held:
        manifest |= {"format": CHECKPOINT_FORMAT_WITH_FEATURES, "features": sorted(held), **held}
    manifest |= _model_digest(manifest)
    # Convert tuples to lists and keys to strings first, so that the checksum is that of the manifest as read.
    manifest = to_json_types(manifest, finite=True)
    manifest["manifest_checksum"] = digest.hash_manifest(manifest)
    return manifest


def _max_quantization_errors(manifest: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    largest: dict[str, dict[str, float]] = {}
    for name, table in manifest["tables"].items():
        for file in table["blocks"]:
            for column, error in file.get("error", {}).items():
                of_table = largest.setdefault(name, {})
                of_table[column] = max(error, of_table.get(column, 0.0))
    return largest


def full_step(manifest: Mapping[str, Any]) -> int:
    """Return the step of the newest full checkpoint among this one and its base checkpoints."""
    return int(manifest[DELTAS]["whole_step"] if DELTAS in manifest else manifest["step"])


def _table_digest(entry: Mapping[str, Any]) -> dict[str, str]:
    # A table with one exact file per block has a checksum, others the digest of their chain.
    blocks = group_files_by_block(entry)
    if all(len(files) == 1 and is_block_path(files[0]["path"]) for files in blocks):
        return {"checksum": digest.hash_table(entry)}
    return {"chain": digest.hash_chain(entry)}


def _model_digest(manifest: Mapping[str, Any]) -> dict[str, str]:
    is_known = all("checksum" in entry for entry in manifest["tables"].values())
    return {"checksum" if is_known else "chain": digest.hash_model(manifest)}


def check_state(state: Mapping[str, Any]) -> None:
    """Raise MesetaError if JSON cannot represent a value of the trainer's state."""
    for key, value in state.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise MesetaError(
                f"checkpoint: state {key!r} cannot be written as JSON ({error}); "
                "use numbers that are finite, strings, lists and dicts"
            ) from None


def write_manifest(root: Location, manifest: Mapping[str, Any], rate: WriteRateLimiter | None = None) -> None:
    """Write and sync the manifest, which must not exist at a URL. Raises MesetaError if writing fails, or if it is too
    large to be read again."""
    path = root / MANIFEST_PATH
    content = format_json(manifest).encode()
    try:
        check_json_limits(content)
    except ValueError as error:
        raise MesetaError(f"checkpoint file {str(path)!r} exceeds the limits of a manifest: {error}") from None
    with wrap_write_errors(path):
        write_buffered(path, content, rate)


def read_manifest(root: Location) -> dict[str, Any]:
    """Read and check a manifest.

    Raises DamagedCheckpoint if the manifest is missing, malformed, changed, or of another step, MesetaError if it has
    another format, and StorageError if reading fails.
    """
    path = root / MANIFEST_PATH
    where = f"checkpoint file {str(path)!r}"
    manifest = check_manifest(
        where, parse_manifest(where, read_with_retry(root, path, partial(_read_manifest_bytes, root)))
    )
    name = CHECKPOINT_NAME_PATTERN.fullmatch(root.name)
    if name is not None and int(name["step"]) != manifest["step"]:
        raise malformed_manifest_error(where, f"its step is {manifest['step']}")
    return manifest


def _read_manifest_bytes(root: Location) -> bytes:
    try:
        return read_inner_file(root, MANIFEST_PATH)
    except OSError as error:
        if is_read_failure(error):
            raise
        reason = f"{MANIFEST_PATH}: {error.strerror}"
        raise DamagedCheckpoint(f"checkpoint {str(root)!r}: {reason}; choose a folder step-...") from None


def parse_manifest(where: str, content: bytes) -> dict[str, Any]:
    """Parse a manifest and verify its own checksum. `check_manifest` checks its content.

    Raises MesetaError if the format is unknown, and DamagedCheckpoint if the manifest is truncated or changed.
    """
    try:
        manifest = parse_json(content)
        del content  # Free memory: both the content and the text to be hashed may be large.
    except ValueError as error:
        raise DamagedCheckpoint(f"{where} is not JSON ({error}); use an older checkpoint") from None
    file_format = manifest.get("format") if isinstance(manifest, dict) else None
    if file_format not in (CHECKPOINT_FORMAT, CHECKPOINT_FORMAT_WITH_FEATURES):
        raise MesetaError(
            f"{where}: format must be {CHECKPOINT_FORMAT!r} or {CHECKPOINT_FORMAT_WITH_FEATURES!r}, got "
            f"{format_value(file_format)}; read the checkpoint with the version that wrote it"
        )
    features = manifest.get("features") if file_format == CHECKPOINT_FORMAT_WITH_FEATURES else []
    for name in features if isinstance(features, list) else ():
        if not isinstance(name, str) or name not in FEATURES:
            raise MesetaError(
                f"{where}: feature {format_value(name)} is not supported by this version, which supports "
                f"{', '.join(map(repr, FEATURES))}; read the checkpoint with the version that wrote it"
            )
    _check_checksum(where, "manifest_checksum", manifest.get("manifest_checksum"), digest.hash_manifest(manifest))
    return dict(manifest)


def check_manifest(where: str, manifest: dict[str, Any]) -> dict[str, Any]:
    """Check the content of a manifest and return it. Call it before any other use of an untrusted manifest.

    Raises DamagedCheckpoint unless all values have the declared types and ranges, the files match the shapes of the
    tables, and the checksums of tables and model match those of their blocks.
    """
    # Anyone can write a manifest whose own checksum is valid.
    _validate(where, "", manifest, _Manifest if manifest.get("format") == CHECKPOINT_FORMAT else _ManifestWithFeatures)
    features = sorted(key for key in FEATURES if manifest.get(key) is not None)
    if manifest.get("features", []) != features or any(key in manifest for key in FEATURES if key not in features):
        raise malformed_manifest_error(
            where, f"'features' must be {features}, got {format_value(manifest.get('features'))}"
        )
    if odd := manifest["tables"].keys() ^ manifest["plan"]["tables"].keys():
        raise malformed_manifest_error(where, f"its tables and those of its plan differ in {format_value(min(odd))}")
    collision = first_name_collision(table_folder(name) for name in manifest["tables"])
    if collision:
        raise malformed_manifest_error(
            where, f"folders {collision[0]!r} and {collision[1]!r} have the same name on file systems that ignore case"
        )
    oldest, newest = full_step(manifest), manifest["step"]
    if DELTAS in manifest and oldest >= newest:
        raise malformed_manifest_error(where, f"'deltas.whole_step' must be less than step {newest}, got {oldest}")
    for name, entry in manifest["tables"].items():
        _validate(where, f"tables.{name}.", entry, _TableEntry)
        fault = invalid_table_name_reason(name) or _invalid_table_reason(where, name, entry, oldest, newest)
        if fault:
            raise malformed_manifest_error(where, f"table {format_value(name)}: {fault}")
        _check_digest(where, f"table {name!r}", entry, _table_digest(entry))
    if manifest.get(QUANTIZED, {}) != _max_quantization_errors(manifest):
        raise malformed_manifest_error(
            where, f"{QUANTIZED!r} must have the largest error of each column that its files state"
        )
    _check_digest(where, "", manifest, _model_digest(manifest))
    return manifest


def file_entries(manifest: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the entries (path, num_bytes and checksum) of all files of a checkpoint except the manifest."""
    yield manifest["dense"]
    if PREFETCHED in manifest:
        yield manifest[PREFETCHED]
    for table in manifest["tables"].values():
        yield from table["blocks"]


def get_run_id(manifest: Mapping[str, Any]) -> str | None:
    """Return the id of the run that saved a checkpoint, or `None` if its state has no valid id."""
    value = manifest["state"].get(RUN_ID)
    return value if isinstance(value, str) and _RUN_ID_PATTERN.fullmatch(value) else None


def own_file_entries(manifest: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the entries of files in the checkpoint's own folder."""
    return (entry for entry in file_entries(manifest) if split_path(entry["path"])[0] is None)


def _validate(where: str, place: str, value: Any, kind: type[ManifestPart]) -> None:
    """Raise DamagedCheckpoint unless `value` has the types and ranges of `kind`."""
    if problem := invalid_value_reason(place, value, kind):
        raise malformed_manifest_error(where, problem)


def invalid_value_reason(place: str, value: Any, kind: type[ManifestPart]) -> str | None:
    """Return the key of `value` that violates the types or ranges of `kind`, with the reason, or `None` if valid."""
    unknown = value.keys() - kind.model_fields.keys() if isinstance(value, dict) else ()
    if unknown:
        return f"{format_value(place + min(unknown))} is an unknown key"
    try:
        kind.model_validate(value)
    except ValidationError as error:
        problem = error.errors()[0]
        key = place + ".".join(map(str, problem["loc"]))
        return f"{format_value(key)}: {problem['msg'].lower()}"
    return None


def _check_checksum(where: str, name: str, expected: object, actual: str) -> None:
    if expected != actual:
        raise DamagedCheckpoint(
            f"{where} was changed: {name} must be {format_value(expected)}, but its content has {actual!r}; "
            "copy the checkpoint again, or use an older one"
        )


def _check_digest(where: str, part: str, entry: Mapping[str, Any], expected: Mapping[str, str]) -> None:
    # The entry must have exactly one digest, `expected`.
    [(key, value)] = expected.items()
    for other in {"checksum", "chain"} - {key}:
        if other in entry:
            raise malformed_manifest_error(where, f"{part or 'the model'} must have {key!r} instead of {other!r}")
    _check_checksum(where, part or key, entry.get(key), value)


def _invalid_table_reason(where: str, name: str, entry: Mapping[str, Any], oldest: int, newest: int) -> str | None:
    # `oldest` and `newest` are the first and last step of the checkpoints that may contain the table's files. They are
    # equal for a full checkpoint.
    schema = BlockSchema.from_dict(entry)
    if fault := schema.invalid_reason():
        return fault
    if schema.columns[0].dtype != entry["dtype"]:
        return f"its dtype is {entry['dtype']}, but its rows are {schema.columns[0].dtype}"
    rows, total = entry["block_rows"], entry["num_embeddings"]
    if rows > schema.block_rows or rows & (rows - 1):
        return f"block_rows must be a power of two of at most {schema.block_rows}, got {rows}"
    for number, block in enumerate(entry["blocks"]):
        _validate(where, f"tables.{name}.blocks.{number}.", block, _BlockEntry)
    blocks, num_blocks = group_files_by_block(entry), -(-total // rows)
    if len(blocks) != num_blocks or (oldest == newest and len(entry["blocks"]) != num_blocks):
        return f"its {total} rows must be in {num_blocks} blocks, got {len(entry['blocks'])}"
    frame_bytes = schema.max_frame_bytes
    for number, files in enumerate(blocks):
        span = number * rows, min(rows, total - number * rows)
        former = oldest - 1
        for age, file in enumerate(files):
            if fault := _invalid_file_reason(name, number, span, file, is_first=age == 0) or invalid_formats_reason(
                schema, file
            ):
                return fault
            folder = split_path(file["path"])[0]
            step = newest if folder is None else parse_folder_step(folder)
            if step is None or (folder is not None and not former < step < newest):
                return (
                    f"block {number} needs {format_value(file['path'])}, which must be a file of an older checkpoint, "
                    f"in ascending order of steps"
                )
            if former == newest:
                return f"block {number} has two files in this checkpoint"
            former = step
            codes = file.get("codes", {})
            row_bytes = schema.row_bytes if is_block_path(file["path"]) else quantized_row_bytes(schema, codes)

            least = file["num_rows"] * row_bytes
            if not least <= file["num_bytes"] <= least + frame_bytes:
                return f"block {number} must have {least} to {least + frame_bytes} bytes, got {file['num_bytes']}"
    return None


def _invalid_file_reason(
    name: str, number: int, span: tuple[int, int], file: Mapping[str, Any], *, is_first: bool
) -> str | None:
    # `span` is (first row of the block, number of rows).
    first, num_rows = span
    _, inner = split_path(file["path"])
    if file["first_row"] != first or (file["num_rows"] == num_rows) != is_first or file["num_rows"] > num_rows:
        return (
            f"block {number} must begin at row {first} and hold {num_rows}"
            f"{'' if is_first else ', and fewer in later files'}, got {file['first_row']} and {file['num_rows']}"
        )
    # Quantized files have the name of changed rows even if they hold all rows of a block.
    paths = possible_block_paths(name, number) if is_first and "codes" not in file else (rows_path(name, number),)
    if inner not in paths:
        return f"block {number} must have the path {paths[0]!r}, got {format_value(file['path'])}"
    return None


def referenced_files(checkpoints: Iterable[Location]) -> set[Location] | None:
    """Return all files that the checkpoints need, or `None` if a later version wrote one of them, so that its files are
    unknown.

    Damaged checkpoints need no files. Raises StorageError if a manifest cannot be read, because any file may be needed.
    """
    needed: set[Location] = set()
    for path in checkpoints:
        try:
            needed |= {resolve_file(path, entry["path"]) for entry in file_entries(read_manifest(path))}
        except DamagedCheckpoint:
            continue
        except StorageError:
            raise
        except MesetaError:
            return None
    return needed


def resolve_file(path: Location, inner: str) -> Location:
    """Return the location of a file that the manifest of the checkpoint at `path` names."""
    folder, inner = split_path(inner)
    if folder is None:
        return path / inner
    return path.with_name(folder) / inner if isinstance(path, Path) else path.parent / folder / inner
