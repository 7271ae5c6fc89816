"""Parsing of untrusted YAML to plain data, with unique keys and numbers as in YAML 1.2."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import yaml
from yaml.composer import Composer
from yaml.constructor import SafeConstructor
from yaml.resolver import Resolver

from meseta.errors import MesetaError
from meseta.system.files import MAX_DOCUMENT_DEPTH, MAX_DOCUMENT_VALUES, MAX_NUMBER_LENGTH

# A value takes more time and memory to parse than in JSON.
MAX_YAML_VALUES = 400_000
"""Maximum number of values in a YAML text, counted by separators."""

_NUMBER_TAGS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")


class _Rules(SafeConstructor, Resolver):
    # PyYAML keeps the last of several equal keys.

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise MesetaError(f"key {key.value!r} is given twice, again in line {key.start_mark.line + 1}")
                seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


# PyYAML implements YAML 1.1, in which 2e-9 is a string because it has no decimal point. In YAML 1.2 it is a number.
_EXPONENT_PATTERN = re.compile(r"[-+]?(?:\.[0-9]+|[0-9][0-9_]*(?:\.[0-9_]*)?)[eE][-+]?[0-9]+$")
_Rules.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT_PATTERN, list("-+.0123456789"))


class _PythonLoader(_Rules, yaml.SafeLoader):
    pass  # PyYAML's own parser, for error messages and installations without libyaml


_LOADERS: list[type] = [_PythonLoader]
if yaml.__with_libyaml__:

    class _LibyamlLoader(_Rules, Composer, yaml.CSafeLoader):
        # Five times as fast or more. `Composer` builds the nodes, because that of CSafeLoader recurses without a limit.

        def __init__(self, text: str) -> None:
            yaml.CSafeLoader.__init__(self, text)
            Composer.__init__(self)

    _LOADERS.insert(0, _LibyamlLoader)

# PyYAML passes on the errors of int, float and datetime for values like 2020-13-01, !!bool x or 1:59:59:....5.
_PARSE_ERRORS = (yaml.YAMLError, ValueError, KeyError, AttributeError, TypeError, OverflowError)


def parse_yaml(text: str) -> Any:
    """Parse a YAML or JSON text to plain data.

    Raises MesetaError if the text is invalid, has a duplicate key or a number over `MAX_NUMBER_LENGTH`, or exceeds
    `MAX_DOCUMENT_VALUES` or `MAX_DOCUMENT_DEPTH` after expansion of aliases.
    """
    if sum(map(text.count, (",", "[", "{", ":", "\n"))) > MAX_YAML_VALUES:
        raise MesetaError(f"it has more than {MAX_YAML_VALUES:,} values")
    for loader in _LOADERS[:-1]:
        with contextlib.suppress(*_PARSE_ERRORS, RecursionError):
            return _parse(loader, text)
    try:
        return _parse(_LOADERS[-1], text)
    except MesetaError:
        raise
    except RecursionError:
        raise MesetaError("it is not YAML: it is nested too deeply") from None
    except _PARSE_ERRORS as error:
        raise MesetaError(f"it is not YAML: {' '.join(str(error).split())}") from None


def _parse(loader_type: type, text: str) -> Any:
    loader = loader_type(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _check_size(node, {})
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _check_size(node: yaml.Node, known: dict[int, tuple[int, int]]) -> tuple[int, int]:
    """Return (number of values, depth) of a node with all aliases expanded.

    `known` caches results by node id. Raises MesetaError for too many or too deeply nested values, or a long number.
    """
    if not isinstance(node, yaml.CollectionNode):
        if node.tag in _NUMBER_TAGS and len(node.value) > MAX_NUMBER_LENGTH:
            raise MesetaError(
                f"it is not YAML: a number of more than {MAX_NUMBER_LENGTH} characters, in line "
                f"{node.start_mark.line + 1}"
            )
        return 1, 0
    if id(node) not in known:
        # A node that contains an alias of itself finds this entry and is rejected.
        known[id(node)] = (MAX_DOCUMENT_VALUES, 0)
        inner = [i for pair in node.value for i in pair] if isinstance(node, yaml.MappingNode) else node.value
        measured = [_check_size(i, known) for i in inner]
        depth = 1 + max((depth for _, depth in measured), default=0)
        known[id(node)] = (1 + sum(count for count, _ in measured), depth)
    count, depth = known[id(node)]
    if count > MAX_DOCUMENT_VALUES:
        raise MesetaError(f"it is not YAML: its aliases expand to more than {MAX_DOCUMENT_VALUES:,} values")
    if depth > MAX_DOCUMENT_DEPTH:
        raise MesetaError("it is not YAML: it is nested too deeply")
    return count, depth
