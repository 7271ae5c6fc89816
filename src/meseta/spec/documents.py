"""YAML and JSON files that people write, read with an error for everything that is silently lost elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import yaml

from meseta.spec.errors import MesetaError
from meseta.spec.files import write_whole

T = TypeVar("T")


class _UniqueKeys(yaml.SafeLoader):
    """PyYAML keeps the last of two equal keys; here the second one is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise MesetaError(f"key {key.value!r} is given twice, again in line {key.start_mark.line + 1}")
                seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


def parse_yaml(text: str) -> Any:
    """The plain data in a YAML or JSON text. Raises MesetaError where it is none, or gives a key twice."""
    try:
        return yaml.load(text, Loader=_UniqueKeys)  # a SafeLoader: it builds plain data only
    except MesetaError:
        raise
    except RecursionError:
        raise MesetaError("it is not YAML: it is nested too deeply") from None
    except (yaml.YAMLError, ValueError, KeyError, AttributeError, TypeError) as error:
        # PyYAML lets through what int, float and datetime say of a value like 2020-13-01 or !!bool x.
        raise MesetaError(f"it is not YAML: {' '.join(str(error).split())}") from None


def read_mapping(path: str | Path) -> dict[Any, Any]:
    """The mapping in a YAML or JSON file.

    Raises MesetaError, without the name of the file, for one that cannot be read, is not UTF-8 or not YAML, gives a key
    twice, or holds something else than a mapping.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise MesetaError(error.strerror or str(error)) from None
    except UnicodeDecodeError as error:
        raise MesetaError(f"it is not text in UTF-8 ({error.reason} at byte {error.start})") from None
    except ValueError as error:
        raise MesetaError(f"it has no such name ({error})") from None
    document = parse_yaml(text)
    if not isinstance(document, dict):
        raise MesetaError(f"it must hold a mapping of keys to values, but holds {type(document).__name__}")
    return document


def load_document(kind: str, path: str | Path, parse: Callable[[dict[Any, Any]], T]) -> T:
    """What `parse` makes of the mapping in a YAML or JSON file; its MesetaError, and those of `read_mapping`, name the
    file as '`kind` file'."""
    try:
        return parse(read_mapping(path))
    except MesetaError as error:
        raise MesetaError(f"{kind} file {str(path)!r}: {error}") from None


def write_yaml(path: str | Path, document: dict[str, Any]) -> None:
    """Write plain data, keys in their order, whole or not at all. Raises MesetaError where it cannot be written."""
    write_whole(path, yaml.safe_dump(document, sort_keys=False))
