"""Where the files of a checkpoint lie: inside it, or inside an older one beside it.

step-000000600/manifest.json
               tables/user_id/rows-00003.arrow          its own: tables/user_id/rows-00003.arrow
step-000000500/tables/user_id/block-00003.arrow         ../step-000000500/tables/user_id/block-00003.arrow
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from meseta.machine.files import legacy_file_name, to_file_name

CHECKPOINT_NAME_PATTERN = re.compile(r"(?P<old>\.old-)?step-(?P<step>[0-9]{9}|[1-9][0-9]{9,15})")
"""Of the folder of a checkpoint: one name for each step, of digits that are ASCII; with '.old-' while a new one of its
step takes its place."""


def table_folder(table: str) -> str:
    """Of a table's blocks, inside the checkpoint, for example 'tables/user_id'."""
    return f"tables/{to_file_name(table)}"


def possible_block_paths(table: str, number: int) -> tuple[str, str]:
    """Where a table's block may be: as blocks are named now, and as they were."""
    now = block_path(table, number)
    return now, f"tables/{legacy_file_name(table)}/{now.rpartition('/')[2]}"


def block_path(table: str, number: int) -> str:
    """Of a table's block, inside the checkpoint, for example 'tables/user_id/block-00003.arrow'."""
    return f"{table_folder(table)}/block-{number:05d}.arrow"


def rows_path(table: str, number: int) -> str:
    """Of some rows of a table's block, inside the checkpoint, for example 'tables/user_id/rows-00003.arrow'."""
    return f"{table_folder(table)}/rows-{number:05d}.arrow"


def relative_to_sibling(entry: Mapping[str, Any], step: int) -> dict[str, Any]:
    """The entry of a file as another checkpoint has it, which lies beside that of `step`."""
    return {**entry, "path": sibling_path(entry_step(entry, step), split_path(entry["path"])[1])}


def is_block_path(path: str) -> bool:
    """Whether a file holds all rows of a block as they are."""
    return path.rpartition("/")[2].startswith("block-")


def sibling_path(step: int, path: str) -> str:
    """Of a file of another checkpoint that lies beside, for example '../step-000000500/tables/...'."""
    return f"../step-{step:09d}/{path}"


def split_path(path: str) -> tuple[str | None, str]:
    """The folder beside a checkpoint that the path of a file leads to, None for its own, and the path inside."""
    if not path.startswith("../"):
        return None, path
    folder, _, inner = path[3:].partition("/")
    return folder, inner


def parse_folder_step(folder: str) -> int | None:
    """Of the checkpoint in a folder of this name; None where none that stays is called so."""
    name = CHECKPOINT_NAME_PATTERN.fullmatch(folder)
    return None if name is None or name["old"] else int(name["step"])


def entry_step(entry: Mapping[str, Any], step: int) -> int:
    """Of the checkpoint that has written a file, in the manifest of one of `step`."""
    folder, _ = split_path(entry["path"])
    return step if folder is None else int(folder.removeprefix("step-"))
