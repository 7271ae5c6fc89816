"""Files that people and commands write, YAML or JSON: read by the types of what they describe, with an error for all
that is silently lost elsewhere, and written whole."""

from __future__ import annotations

import enum
import types
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from meseta.errors import MAX_INT64, MesetaError, StorageError, check_choice, check_keys, format_value, is_int
from meseta.machine.files import escape, is_read_failure, parse_json, read_bounded, write_atomic

T = TypeVar("T")


def read_mapping(path: str | Path) -> dict[Any, Any]:
    """The mapping in a YAML or JSON file.

    Raises StorageError, without the name of the file, for one that cannot be read; MesetaError for one that is not
    there, is no regular file, is not UTF-8 or not YAML, gives a key twice, or holds something else than a mapping.
    """
    try:
        document = _parse_document(read_bounded(path))
    except MesetaError:
        raise
    except OSError as error:
        kind = StorageError if is_read_failure(error) else MesetaError
        raise kind(error.strerror or str(error)) from None
    except UnicodeDecodeError as error:
        raise MesetaError(f"it is not text in UTF-8 ({error.reason} at byte {error.start})") from None
    except ValueError as error:
        raise MesetaError(f"it has no such name ({error})") from None
    if not isinstance(document, dict):
        raise MesetaError(f"it must hold a mapping of keys to values, but holds {type(document).__name__}")
    return document


def _parse_document(content: bytes) -> Any:
    """JSON as such, which is read faster than as YAML; all else as YAML, which tells what is wrong with it."""
    if content.lstrip().startswith(b"{"):
        with suppress(ValueError):
            return parse_json(content)
    from meseta.machine.yaml_text import parse_yaml  # Needs PyYAML, which a machine with bare torch lacks.

    return parse_yaml(content.decode())


def load_document(kind: str, path: str | Path, parse: Callable[[dict[Any, Any]], T]) -> T:
    """What `parse` makes of the mapping in a YAML or JSON file; its MesetaError, and those of `read_mapping`, name the
    file as '`kind` file'."""
    try:
        return parse(read_mapping(path))
    except MesetaError as error:
        raise MesetaError(escape(f"{kind} file {str(path)!r}: {error}")) from None


def write_yaml(path: str | Path, document: dict[str, Any]) -> None:
    """Write plain data, keys in their order, whole or not at all. Raises MesetaError where it cannot be written."""
    import yaml

    write_atomic(path, yaml.safe_dump(document, sort_keys=False))


def strip_format(owner: str, document: Mapping[Any, Any], name: str, *, required: bool = False) -> dict[Any, Any]:
    """A document without the key 'format'. Raises MesetaError where that is another than `name`; where it is not there,
    which older files of people do not have, if it is `required`."""
    found = dict(document)
    if found.pop("format", None if required else name) != name:
        raise MesetaError(f"{owner}: its format is unknown; this version reads {name!r}")
    return found


def parse_dataclass(owner: str, form: type[T], document: Any, path: str = "") -> T:
    """An object of the dataclass `form` from plain data, by the types of its fields; `path` is its place in these.

    Whole numbers may be written with a power of ten, lists stand for tuples, and what is null has its default. Raises
    MesetaError, naming `owner` and the key, for an unknown or missing key, another type, and what the class refuses.
    """
    if not isinstance(document, Mapping):
        raise MesetaError(f"{owner}: {path} must be a mapping, got {document!r}")
    known = {entry.name: entry for entry in fields(form)}  # type: ignore[arg-type]
    where = f"{owner}: {path}" if path else owner
    check_keys(where, document, known)
    types_of = get_type_hints(form)
    values = {}
    for name, entry in known.items():
        if document.get(name) is not None:
            values[name] = _parse_value(owner, f"{path}.{name}" if path else name, types_of[name], document[name])
        elif _is_required(entry):
            raise MesetaError(f"{where}: key {name!r} is missing")
    try:
        return form(**values)
    except MesetaError as error:
        raise MesetaError(f"{where}: {error}" if path else str(error)) from None


def _is_required(entry: Field[Any]) -> bool:
    return entry.default is MISSING and entry.default_factory is MISSING


def _parse_value(owner: str, path: str, kind: Any, value: Any) -> Any:
    """A value of a type: a dataclass, a choice, a number, text, or lists, mappings and options of these."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        [kind] = [one for one in inner if one is not type(None)]
        return _parse_value(owner, path, kind, value)
    if is_dataclass(kind):
        return parse_dataclass(owner, kind, value, path)  # type: ignore[arg-type]
    if origin is tuple:
        if not isinstance(value, list | tuple):
            noun = "a list of whole numbers" if inner[0] is int else "a list"
            raise MesetaError(f"{owner}: {path} must be {noun}, got {value!r}")
        numbered = get_origin(inner[0]) is tuple  # of other entries the value tells which it is
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
    if isinstance(value, float) and value.is_integer():  # people write 1.0e9
        value = int(value)
    if not is_int(value):
        raise MesetaError(f"{owner}: {path} must be a whole number, got {format_value(value)}")
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
        raise MesetaError(f"{owner}: {path} must be text, got {value!r}")
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
