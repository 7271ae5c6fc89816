"""Detection of delimiters, and of column types in headers, in the first lines of text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from meseta.data.formats.tsv import CRITEO_FIELD_COUNTS
from meseta.data.schema.infer import ColumnRole, infer_role

UNIT_SEPARATOR = b"\x1f"
"""Delimiter of the CSV to which text with a longer delimiter is converted."""
_CANDIDATES = (b"::", b"\t", b";", b"|", b",", b" ")
_MAX_LINES = 50
_TYPED_NAME = re.compile(r"(.+):(token|token_seq|float|float_seq)")
_QUOTED = re.compile(rb'"[^"]*"')


def find_delimiter(head: bytes) -> str | None:
    """Return the delimiter of the lines at the beginning of a file, or `None`.

    At least two lines must contain the delimiter equally often. Returns `None` for Criteo logs, which have no header.
    """
    lines = [_QUOTED.sub(b"", line) for line in head.split(b"\n")[:_MAX_LINES]]
    lines = lines[:-1]  # The last element is empty, or an incomplete line.
    if len(lines) < 2:
        return None
    for sign in _CANDIDATES:
        counts = {line.count(sign) for line in lines}
        if len(counts) == 1 and (count := counts.pop()):
            return None if sign == b"\t" and count + 1 in CRITEO_FIELD_COUNTS else sign.decode()
    return None


def is_typed_header(names: Sequence[str]) -> bool:
    """Whether all names have a type of RecBole's atomic files, such as `user_id:token`."""
    return len(names) > 1 and all(map(_TYPED_NAME.fullmatch, names))


def strip_types(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names of a typed header without their types."""
    return tuple(name.rpartition(":")[0] for name in names)


def typed_header_roles(
    names: Sequence[str], columns: Mapping[str, Sequence[str]]
) -> tuple[dict[str, ColumnRole], list[str]]:
    """Return (roles, list columns) of a typed header. Roles are by column name without its type.

    `columns` has sampled values of each column. A column recognized as time, weight or group by its name keeps that
    role.
    """
    types = {name.rpartition(":")[0]: name.rpartition(":")[2] for name in names}
    guesses = {}
    for name, kind in types.items():
        role = infer_role(name, columns[name]).role
        if kind == "float_seq":
            guesses[name] = ColumnRole("ignore", "float_seq, by the header: no feature holds lists of numbers")
        elif kind == "float" and role not in ("time", "weight", "group"):
            guesses[name] = ColumnRole("dense", "float, by the header")
        elif kind in ("token", "token_seq"):
            guesses[name] = ColumnRole("categorical", f"{kind}, by the header")
    return guesses, [name for name, kind in types.items() if kind == "token_seq"]


def convert_to_csv(lines: bytes, delimiter: str) -> bytes:
    """Convert complete lines to CSV with the delimiter `UNIT_SEPARATOR`. Quotes in the lines have no meaning."""
    sign = delimiter.encode()
    if b"\r" in lines:
        lines = lines.replace(b"\r\n", b"\n")
    if not any(special in lines for special in (b'"', b"\r", UNIT_SEPARATOR)):
        return lines.replace(sign, UNIT_SEPARATOR)
    return b"\n".join(UNIT_SEPARATOR.join(map(_quote_field, line.split(sign))) for line in lines.split(b"\n"))


def _quote_field(field: bytes) -> bytes:
    if any(special in field for special in (b'"', b"\r", UNIT_SEPARATOR)):
        return b'"' + field.replace(b'"', b'""') + b'"'
    return field
