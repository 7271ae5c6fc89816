"""From which files, and with which options, a dataset was prepared: `prepare.json` beside its dataset.json."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from meseta.data.formats.format import Source
from meseta.data.prepare.options import PrepareOptions
from meseta.machine.files import parse_json, read_if_exists, to_json_types
from meseta.machine.remote import is_url
from meseta.spec import MesetaError

PREPARE_RECORD_FILE = "prepare.json"
_IRRELEVANT_OPTIONS = {"sources", "test_files", "valid_files", "out", "force", "num_threads"}


def make_record(options: PrepareOptions, sources: Sequence[Source]) -> dict[str, Any]:
    """All that the rows of a dataset depend on, as plain data: files by name, size and time of change, and options.

    A schema file counts by its text. Raises MesetaError where that cannot be read.
    """
    chosen = {f.name: getattr(options, f.name) for f in fields(options) if f.name not in _IRRELEVANT_OPTIONS}
    chosen["valid_fraction"] = options.valid_fraction or None  # a share of 0 is no valid split
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
    """Files by their whole names, with what changes when they do."""
    return {
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
    """What `save_record` has written; None where there is no such file, or something else in it. Raises StorageError
    if reading failed."""
    content = read_if_exists(folder / PREPARE_RECORD_FILE)
    try:
        record = parse_json(content or b"", finite=False)
        return {"options": dict(record["options"]), "sources": dict(record["sources"])}
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def record_difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """The first difference between two records, for people; None where they agree."""
    for name, entry in now["sources"].items():
        if name not in before["sources"]:
            return f"{name!r} was not among its sources"
        former = before["sources"][name]
        # Former versions made no columns of folders.
        if {key: entry[key] for key in entry if key != "partition" or key in former} != former:
            return f"{name!r} has changed since, or goes to another split"
    for name in before["sources"]:
        if name not in now["sources"]:
            return f"its source {name!r} is not given now"
    if list(before["sources"]) != list(now["sources"]):
        return "its sources were given in another order"
    for name in {**before["options"], **now["options"]}:
        was, wanted = before["options"].get(name), now["options"].get(name)
        if was != wanted and (was or wanted):  # options of later versions are missing in records of earlier ones
            return f"the option {name} was {_format_value(was)} and is {_format_value(wanted)} now"
    return None


def _format_value(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."
