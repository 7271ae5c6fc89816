"""YAML and JSON files that people write, read with an error for everything that is silently lost elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import yaml

from meseta.spec.errors import MesetaError
from meseta.spec.files import DOCUMENT_VALUES, parse_json, read_bounded, write_whole

T = TypeVar("T")
YAML_VALUES = 400_000
"""The most values in a YAML text, by its separators: each takes more time and memory to parse than one of JSON."""


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
    """The plain data in a YAML or JSON text. Raises MesetaError where it is none, gives a key twice, or is more than a
    document may hold, as its aliases count up to."""
    if sum(map(text.count, (",", "[", "{", ":", "\n"))) > YAML_VALUES:
        raise MesetaError(f"it has more than {YAML_VALUES:,} values")
    try:
        loader = _UniqueKeys(text)  # a SafeLoader: it builds plain data only
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            _count_values(node, {})
            return loader.construct_document(node)
        finally:
            loader.dispose()
    except MesetaError:
        raise
    except RecursionError:
        raise MesetaError("it is not YAML: it is nested too deeply") from None
    except (yaml.YAMLError, ValueError, KeyError, AttributeError, TypeError) as error:
        # PyYAML lets through what int, float and datetime say of a value like 2020-13-01 or !!bool x.
        raise MesetaError(f"it is not YAML: {' '.join(str(error).split())}") from None


def _count_values(node: yaml.Node, known: dict[int, int]) -> int:
    """Values of a node where every alias stands for all of what it names. Raises MesetaError for too many."""
    if not isinstance(node, yaml.CollectionNode):
        return 1
    if id(node) not in known:
        known[id(node)] = DOCUMENT_VALUES  # what is met on the way down again holds itself
        inner = [i for pair in node.value for i in pair] if isinstance(node, yaml.MappingNode) else node.value
        known[id(node)] = 1 + sum(_count_values(i, known) for i in inner)
    if known[id(node)] > DOCUMENT_VALUES:
        raise MesetaError(f"it is not YAML: its aliases stand for more than {DOCUMENT_VALUES:,} values")
    return known[id(node)]


def read_mapping(path: str | Path) -> dict[Any, Any]:
    """The mapping in a YAML or JSON file.

    Raises MesetaError, without the name of the file, for one that cannot be read, is not UTF-8 or not YAML, gives a key
    twice, or holds something else than a mapping.
    """
    try:
        document = _parse(read_bounded(path))
    except MesetaError:
        raise
    except OSError as error:
        raise MesetaError(error.strerror or str(error)) from None
    except UnicodeDecodeError as error:
        raise MesetaError(f"it is not text in UTF-8 ({error.reason} at byte {error.start})") from None
    except ValueError as error:
        raise MesetaError(f"it has no such name ({error})") from None
    if not isinstance(document, dict):
        raise MesetaError(f"it must hold a mapping of keys to values, but holds {type(document).__name__}")
    return document


def _parse(content: bytes) -> Any:
    """JSON as such, which is read faster than as YAML; all else as YAML, which tells what is wrong with it."""
    if content.lstrip().startswith(b"{"):
        with suppress(ValueError):
            return parse_json(content)
    return parse_yaml(content.decode())


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
