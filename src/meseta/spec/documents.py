"""YAML and JSON files that people write, read with an error for everything that is silently lost elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from meseta.spec.errors import MesetaError


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


def read_mapping(path: str | Path) -> dict[Any, Any]:
    """The mapping in a YAML or JSON file.

    Raises MesetaError, without the name of the file, for one that cannot be read, is not UTF-8 or not YAML, gives a key
    twice, or holds something else than a mapping.
    """
    try:
        # _UniqueKeys is a SafeLoader: it builds plain data only.
        document = yaml.load(Path(path).read_text(encoding="utf-8"), Loader=_UniqueKeys)
    except OSError as error:
        raise MesetaError(error.strerror or str(error)) from None
    except UnicodeDecodeError as error:
        raise MesetaError(f"it is not text in UTF-8 ({error.reason} at byte {error.start})") from None
    except yaml.YAMLError as error:
        raise MesetaError(f"it is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(document, dict):
        raise MesetaError(f"it must hold a mapping of keys to values, but holds {type(document).__name__}")
    return document
