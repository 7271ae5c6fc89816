"""YAML and JSON files that users and commands write, parsed into dataclasses by the types of their fields."""

from __future__ import annotations

import enum
import types
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from meseta.errors import MAX_INT64, MesetaError, StorageError, check_choice, check_keys, format_value, is_int
from meseta.system.files import escape, is_read_failure, parse_json, read_bounded, write_atomic

T = TypeVar("T")


def read_mapping(path: str | Path) -> dict[Any, Any]:
    """Load a mapping from a YAML or JSON file.

    Raises StorageError if reading fails, and MesetaError if the path is not a regular file, or if its content is not
    UTF-8, not YAML, not a mapping, or has a duplicate key. The messages do not contain the path.
    """
    try:
        document = _parse_document(read_bounded(path))
    except MesetaError:
        raise
    except OSError as error:
        kind = StorageError if is_read_failure(error) else MesetaError
        raise kind(error.strerror or str(error)) from None
    except UnicodeDecodeError as error:
        raise MesetaError(f"it is not valid UTF-8 ({error.reason} at byte {error.start}); save it as UTF-8") from None
    except ValueError as error:
        raise MesetaError(f"its path is invalid ({error})") from None
    if not isinstance(document, dict):
        raise MesetaError(f"it must contain a mapping of keys to values, got {type(document).__name__}")
    return document


def _parse_document(content: bytes) -> Any:
    # JSON parses faster than the same text as YAML. If it is invalid, the YAML parser reports the error.
    if content.lstrip().startswith(b"{"):
        with suppress(ValueError):
            return parse_json(content)
    from meseta.system.yaml_text import parse_yaml  # A machine with only torch has no PyYAML.

    return parse_yaml(content.decode())


def load_document(kind: str, path: str | Path, parse: Callable[[dict[Any, Any]], T]) -> T:
    """Load a YAML or JSON file and `parse` it. Raises MesetaError, starting with `kind` and the path, on failure."""
    try:
        return parse(read_mapping(path))
    except MesetaError as error:
        raise MesetaError(escape(f"{kind} file {str(path)!r}: {error}")) from None


def write_yaml(path: str | Path, document: dict[str, Any]) -> None:
    """Write plain data to a YAML file atomically, with keys in their order. Raises MesetaError if writing fails."""
    import yaml

    write_atomic(path, yaml.safe_dump(document, sort_keys=False))


def strip_format(owner: str, document: Mapping[Any, Any], name: str, *, required: bool = False) -> dict[Any, Any]:
    """Copy `document` without 'format'. Raises MesetaError if the format is not `name`, or missing but `required`."""
    # Older files that users wrote have no format.
    content = dict(document)
    if content.pop("format", None if required else name) != name:
        raise MesetaError(f"{owner}: its format is unknown; this version reads {name!r}")
    return content


def rename_keys(where: str, document: Mapping[Any, Any], former: Mapping[str, str]) -> dict[Any, Any]:
    """Return a copy of `document` with the keys in `former` renamed to their current names, in the same order.

    Raises MesetaError if the document has a key under both names. The message starts with `where`.
    """
    for name, current in former.items():
        if name in document and current in document:
            raise MesetaError(f"{where}: {name!r} is the former name of {current!r}; remove {name!r}")
    return {rename_value(key, former): value for key, value in document.items()}


def rename_value(value: Any, former: Mapping[str, str]) -> Any:
    """Return the current name of `value`, which may be of any type."""
    return former.get(value, value) if isinstance(value, str) else value


def parse_dataclass(owner: str, form: type[T], document: Any, path: str = "") -> T:
    """Create an instance of the dataclass `form` from plain data, converting values to the types of its fields.

    Integers may be written as 1.0e9, lists become tuples, and null means the default. Raises MesetaError if a key is
    unknown or missing, a value has the wrong type, or the class rejects it. The message contains `owner` and the
    location of the key, which starts with `path`.
    """
    if not isinstance(document, Mapping):
        raise MesetaError(f"{owner}: {path} must be a mapping, got {document!r}")
    entries = {entry.name: entry for entry in fields(form)}  # type: ignore[arg-type]
    where = f"{owner}: {path}" if path else owner
    check_keys(where, document, entries)
    types_of = get_type_hints(form)
    values = {}
    for name, entry in entries.items():
        if document.get(name) is not None:
            values[name] = _parse_value(owner, f"{path}.{name}" if path else name, types_of[name], document[name])
        elif entry.default is MISSING and entry.default_factory is MISSING:
            raise MesetaError(f"{where}: key {name!r} is missing")
    try:
        return form(**values)
    except MesetaError as error:
        raise MesetaError(f"{where}: {error}" if path else str(error)) from None


def _parse_value(owner: str, path: str, kind: Any, value: Any) -> Any:
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        [kind] = [one for one in inner if one is not type(None)]
        return _parse_value(owner, path, kind, value)
    if is_dataclass(kind):
        return parse_dataclass(owner, kind, value, path)  # type: ignore[arg-type]
    if origin is tuple:
        if not isinstance(value, list | tuple):
            noun = "a list of integers" if inner[0] is int else "a list"
            raise MesetaError(f"{owner}: {path} must be {noun}, got {value!r}")
        numbered = get_origin(inner[0]) is tuple  # Error messages show other entries by value, without an index.
        paths = (f"{path}[{i}]" if numbered else path for i in range(len(value)))
        return tuple(_parse_value(owner, place, inner[0], entry) for place, entry in zip(paths, value, strict=True))
    if origin is Mapping:
        if not isinstance(value, Mapping):
            raise MesetaError(f"{owner}: {path} must be a mapping, got {value!r}")
        key_kind, value_kind = inner
        return {
            _parse_value(owner, f"a key of {path}", key_kind, key): _parse_value(
                owner, f"{path}.{key}", value_kind, entry
            )
            for key, entry in value.items()
        }
    if origin is Literal:
        check_choice(owner, path, value, inner)
        return value
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        check_choice(owner, path, value, [str(entry) for entry in kind])
        return kind(value)
    return _SCALAR_PARSERS[kind](owner, path, value)


def _parse_int(owner: str, path: str, value: Any) -> int:
    if isinstance(value, float) and value.is_integer():  # YAML reads 1.0e9 as a float.
        value = int(value)
    if not is_int(value):
        raise MesetaError(f"{owner}: {path} must be an integer, got {format_value(value)}")
    if abs(value) > MAX_INT64:
        raise MesetaError(f"{owner}: {path} must be at most {MAX_INT64}, got {format_value(value)}")
    return int(value)


def _parse_float(owner: str, path: str, value: Any) -> float:
    with suppress(ValueError, TypeError, OverflowError):
        if not isinstance(value, bool):
            return float(value)
    raise MesetaError(f"{owner}: {path} must be a number, got {value!r}")


def _parse_str(owner: str, path: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise MesetaError(f"{owner}: {path} must be a non-empty string, got {value!r}")
    return value


def _parse_bool(owner: str, path: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise MesetaError(f"{owner}: {path} must be true or false, got {value!r}")
    return value


_SCALAR_PARSERS: Mapping[Any, Callable[[str, str, Any], Any]] = {
    int: _parse_int,
    float: _parse_float,
    str: _parse_str,
    bool: _parse_bool,
}
