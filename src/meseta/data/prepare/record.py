"""Record of the sources and options of a dataset: `prepare.json`, stored next to dataset.json."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from meseta.data.formats.format import Source
from meseta.data.prepare.options import PrepareOptions
from meseta.spec import MesetaError
from meseta.system.files import parse_json, read_if_exists, to_json_types
from meseta.system.remote import is_url

PREPARE_RECORD_FILE = "prepare.json"
_IRRELEVANT_OPTIONS = {"sources", "test_files", "valid_files", "out", "force", "num_threads"}


def make_record(options: PrepareOptions, sources: Sequence[Source]) -> dict[str, Any]:
    """Return everything that determines the rows of a dataset as plain data: the options, and the files with size and
    change time.

    Includes the content of a schema file. Raises MesetaError if it cannot be read.
    """
    chosen = {f.name: getattr(options, f.name) for f in fields(options) if f.name not in _IRRELEVANT_OPTIONS}
    chosen["valid_fraction"] = options.valid_fraction or None  # Both mean that there is no valid split.
    # Earlier versions did not have these options, so their records agree if the option is not used.
    for name in ("recipe_only", "encoding"):
        if not chosen[name]:
            del chosen[name]
    if options.schema is not None:
        try:
            chosen["schema"] = options.schema.read_text(errors="replace")
        except OSError as error:
            raise MesetaError(f"schema {str(options.schema)!r}: {error.strerror}") from None
    document: dict[str, Any] = to_json_types({"options": chosen, "sources": source_entries(sources)})
    return document


def source_entries(sources: Sequence[Source]) -> dict[str, dict[str, Any]]:
    """Return the recorded properties of each file by absolute path or URL."""
    return {
        # Absolute paths, so that a file matches from another working directory.
        (source.path if is_url(source.path) else os.path.abspath(source.path)): {
            "split": source.split,
            "size_bytes": source.size_bytes,
            "changed": source.changed,
            "partition": dict(source.partition),
        }
        for source in sources
    }


def save_record(record: Mapping[str, Any], folder: Path) -> None:
    """Write `folder`/prepare.json."""
    (folder / PREPARE_RECORD_FILE).write_text(json.dumps(record, indent=1) + "\n")


def load_record(folder: Path) -> dict[str, Any] | None:
    """Return the record of a folder, or `None` if there is none or it is invalid. Raises StorageError if reading
    fails."""
    content = read_if_exists(folder / PREPARE_RECORD_FILE)
    try:
        record = parse_json(content or b"", finite=False)
        return {"options": dict(record["options"]), "sources": dict(record["sources"])}
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def record_difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Describe the first difference between two records, or return `None` if they agree."""
    for name, entry in now["sources"].items():
        if name not in before["sources"]:
            return f"{name!r} was not one of its sources"
        former = before["sources"][name]
        # Earlier versions did not make columns from folders.
        if {key: entry[key] for key in entry if key != "partition" or key in former} != former:
            return f"{name!r} has changed, or is in another split"
    for name in before["sources"]:
        if name not in now["sources"]:
            return f"{name!r} is not one of the sources now"
    if list(before["sources"]) != list(now["sources"]):
        return "its sources were in another order"
    for name in {**before["options"], **now["options"]}:
        was, now_value = before["options"].get(name), now["options"].get(name)
        if was != now_value and (was or now_value):  # Records of earlier versions lack newer options.
            return f"the option {name} was {_format_value(was)} and is {_format_value(now_value)} now"
    return None


def _format_value(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."
