"""Names of checkpoint folders, and paths of files inside a checkpoint and in older checkpoints."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from meseta.system.files import legacy_file_name, to_file_name
from meseta.system.remote import Location

# file                                                path in the manifest of step 600
# -------------------------------------------------   ----------------------------------------------------
# step-000000600/tables/user_id/rows-00003.arrow      tables/user_id/rows-00003.arrow
# step-000000500/tables/user_id/block-00003.arrow     ../step-000000500/tables/user_id/block-00003.arrow
CHECKPOINT_NAME_PATTERN = re.compile(r"(?P<old>\.old-)?step-(?P<step>[0-9]{9}|[1-9][0-9]{9,15})")
"""Folder name of a checkpoint. Each step has exactly one name. While a new checkpoint of its step replaces it, a former
one has the prefix '.old-'."""


def table_folder(table: str) -> str:
    """Return the folder of a table's blocks inside the checkpoint, such as 'tables/user_id'."""
    return f"tables/{to_file_name(table)}"


def possible_block_paths(table: str, number: int) -> tuple[str, str]:
    """Return the paths at which a table's block may be: its current name, and the name in earlier versions."""
    now = block_path(table, number)
    return now, f"tables/{legacy_file_name(table)}/{now.rpartition('/')[2]}"


def block_path(table: str, number: int) -> str:
    """Return the path of a complete block inside the checkpoint, such as 'tables/user_id/block-00003.arrow'."""
    return f"{table_folder(table)}/block-{number:05d}.arrow"


def rows_path(table: str, number: int) -> str:
    """Return the path of a file with some or quantized rows of a block, such as 'tables/user_id/rows-00003.arrow'."""
    return f"{table_folder(table)}/rows-{number:05d}.arrow"


def relative_to_sibling(entry: Mapping[str, Any], step: int) -> dict[str, Any]:
    """Return a file entry of the checkpoint `step` with the path that other checkpoints use for the file."""
    return {**entry, "path": sibling_path(entry_step(entry, step), split_path(entry["path"])[1])}


def is_block_path(path: str) -> bool:
    """Whether the file holds all rows of a block exactly."""
    return path.rpartition("/")[2].startswith("block-")


def sibling_path(step: int, path: str) -> str:
    """Return the path of a file in another checkpoint's folder, such as '../step-000000500/tables/...'."""
    return f"../step-{step:09d}/{path}"


def split_path(path: str) -> tuple[str | None, str]:
    """Return (name of the other checkpoint's folder, or `None` for the checkpoint itself; path inside that folder)."""
    if not path.startswith("../"):
        return None, path
    folder, _, inner = path[3:].partition("/")
    return folder, inner


def parse_folder_step(folder: str) -> int | None:
    """Return the step of a checkpoint folder, or `None` unless the name is that of a current checkpoint."""
    name = CHECKPOINT_NAME_PATTERN.fullmatch(folder)
    return None if name is None or name["old"] else int(name["step"])


def entry_step(entry: Mapping[str, Any], step: int) -> int:
    """Return the step of the checkpoint that contains a file. The entry is from the manifest of a checkpoint of
    `step`."""
    folder, _ = split_path(entry["path"])
    return step if folder is None else int(folder.removeprefix("step-"))


# A quarantined checkpoint is not loaded, counted or deleted, until a new checkpoint of its step replaces it.
QUARANTINE_MARKER = "quarantined.txt"
"""File in the folder of a quarantined checkpoint, with the reason. The checkpoint is damaged or needs a damaged
file."""
QUARANTINE_MARKERS = (QUARANTINE_MARKER, "passed-over.txt")
"""Names of files that mark a quarantined checkpoint. Earlier versions wrote the second one."""


def checkpoint_path(parent: Location, step: int) -> Location:
    """Return the location of the checkpoint of a step, such as 'checkpoints/step-000000500'."""
    return parent / checkpoint_name(step)


def checkpoint_name(step: int) -> str:
    """Return the folder name for a step, such as 'step-000000500'."""
    return f"step-{step:09d}"


def parse_step(path: Location) -> int:
    """Return the step in a checkpoint's folder name."""
    return int(path.name.rpartition("-")[2])
