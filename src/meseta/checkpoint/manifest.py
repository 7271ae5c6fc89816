"""manifest.json: what a checkpoint holds. It is written last and says how everything else is checked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from meseta.checkpoint import digest
from meseta.checkpoint.broken import DamagedCheckpoint, writing
from meseta.checkpoint.layout import BlockSchema
from meseta.spec import MesetaError, Plan
from meseta.spec.files import sync

FORMAT = "meseta.checkpoint/1"
MANIFEST_PATH = "manifest.json"


def build_manifest(
    *, step: int, tables: Mapping[str, Any], dense: Mapping[str, Any], plan: Plan, state: Mapping[str, Any]
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
    manifest["checksum"] = digest.of_model(manifest)
    # What is read back is what was meant: tuples become lists and keys strings before they are summed.
    manifest = json.loads(json.dumps(manifest, allow_nan=False))
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


def write_manifest(root: Path, manifest: Mapping[str, Any]) -> None:
    """Write and fsync. Raises MesetaError, for example on a full disk."""
    path = root / MANIFEST_PATH
    with writing(path):
        with path.open("w") as file:
            json.dump(manifest, file, indent=1, allow_nan=False)
            file.write("\n")
        sync(path)


def read_manifest(root: Path) -> dict[str, Any]:
    """Read and check; raises MesetaError when it is missing, of another format, malformed or changed."""
    path = root / MANIFEST_PATH
    try:
        manifest = json.loads(path.read_bytes())
    except OSError as error:
        raise DamagedCheckpoint(
            f"checkpoint {str(root)!r}: {path.name}: {error.strerror}; give a directory step-..."
        ) from None
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpoint(
            f"checkpoint file {str(path)!r} is not JSON ({error}); use an older checkpoint"
        ) from None
    found = manifest.get("format") if isinstance(manifest, dict) else None
    if found != FORMAT:
        raise MesetaError(
            f"checkpoint file {str(path)!r} has the format {found!r}, and this version reads {FORMAT!r}; "
            "read it with the version that wrote it"
        )
    try:
        _check_sums(path, manifest)
        _check_entries(path, manifest)
    except MesetaError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError, NotImplementedError) as error:
        raise DamagedCheckpoint(
            f"checkpoint file {str(path)!r} is malformed ({error!r}); use an older checkpoint"
        ) from None
    return manifest


def _check_sums(path: Path, manifest: Mapping[str, Any]) -> None:
    """Raise MesetaError when any digest in the manifest differs from what the manifest says it is over."""
    sums = [("manifest_checksum", manifest["manifest_checksum"], digest.of_manifest(manifest))]
    sums += [(f"table {n!r}", entry["checksum"], digest.of_table(entry)) for n, entry in manifest["tables"].items()]
    sums += [("checksum", manifest["checksum"], digest.of_model(manifest))]
    for name, expected, found in sums:
        if expected != found:
            raise DamagedCheckpoint(
                f"checkpoint file {str(path)!r} was changed: {name} must be {expected}, but its content has {found}; "
                "copy the checkpoint again, or use an older one"
            )


def _check_entries(path: Path, manifest: Mapping[str, Any]) -> None:
    """Raise MesetaError unless blocks follow each other without a gap and paths stay inside the checkpoint.

    Columns that are none raise KeyError, TypeError, ValueError or NotImplementedError.
    """
    paths = [manifest["dense"]["path"]]
    for name, entry in manifest["tables"].items():
        BlockSchema.from_dict(entry).to_arrow()
        next_row = 0
        for block in entry["blocks"]:
            if block["first_row"] != next_row:
                raise MesetaError(
                    f"checkpoint file {str(path)!r}: table {name!r}: a block begins at row {block['first_row']}, "
                    f"and {next_row} was expected"
                )
            next_row += block["num_rows"]
            paths.append(block["path"])
        if next_row != entry["num_embeddings"]:
            raise MesetaError(
                f"checkpoint file {str(path)!r}: table {name!r}: its blocks hold {next_row} of "
                f"{entry['num_embeddings']} rows"
            )
    for inner in map(PurePosixPath, paths):
        if inner.is_absolute() or ".." in inner.parts:
            raise MesetaError(f"checkpoint file {str(path)!r}: the path {str(inner)!r} leaves the checkpoint")
