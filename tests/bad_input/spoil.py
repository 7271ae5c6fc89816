"""Ways to spoil documents and files, drawn from a seeded generator."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from typing import Any

import yaml

VALUES: list[Any] = [
    *(
        None,
        True,
        False,
        "",
        " ",
        "auto",
        "table_wise",
        "dlrm",
        "sgd",
        "x" * 3000,
        "ünï-🎯",
        "[brackets] {0} %s",
        "a\nb",
        "a\0b",
    ),
    *(0, 1, 2, -1, 3, 17, 1.5, -0.0, 1e-300, 1e308, 2**31, 2**63, -(2**63) - 1, 10**20, 10**400),
    *(float("nan"), float("inf"), -float("inf")),
    *([], {}, [[]], [1, "two", None], {"a": {"b": {"c": 1}}}, {1: 2}, {None: 3}, {"*": "row_wise"}, [0], [2**40]),
    *("1e-3", "0x10", "1_000", "yes", "2020-01-01", "~", "nan", "/dev/null/x", "no/such/file", "."),
]
LINES = [
    *(
        "? [a, b]\n: c",
        "a: &x [*x]",
        "<<: {seed: 3}",
        "b: !!binary aGk=",
        "c: !!set {x, y}",
        "- 1",
        "\t- tab",
        "---",
        "...",
    ),
    *(
        "d: !!python/object/apply:os.system [exit]",
        "e: *nowhere",
        "f: 2020-01-01",
        "g: |\n  text",
        "%YAML 9.9",
        ": :",
        "{",
    ),
    *('run_dir: "\\ud800"', "f: 2020-13-45", "g: !!bool x", "seed: " + "9" * 5000, 'plan: "a\\0b"'),
    *(
        "h: &y {k: *y}",
        "seed: 1\nseed: 2",
        "train: {batch_size: 8}",
        "[" * 3000,
        "i: 'open",
        "\ufeff",
        "\x00",
        "\x85",
        "é: ü",
    ),
]
PIECES = [
    b"\x00",
    b"\xff\xfe",
    b"\n",
    b"\t",
    b": ",
    b"- ",
    b"{",
    b"}",
    b"[",
    b'"',
    b"'",
    b"&a ",
    b"*a",
    b"!!x ",
    b"#",
    b"9" * 40,
    b"\xc3",
]
KEYS = [
    "",
    " ",
    "x",
    "seed",
    "Seed",
    "train",
    "batch-size",
    "lr",
    "name",
    "ünï",
    "a.b",
    "__class__",
    "model_config",
    "*",
]


def places(document: Any) -> list[tuple[Any, Any]]:
    """Return every (container, key) inside a document."""
    pairs: list[tuple[Any, Any]] = []
    items = document.items() if isinstance(document, dict) else enumerate(document)
    for key, value in list(items):
        pairs.append((document, key))
        if isinstance(value, dict | list) and value:
            pairs += places(value)
    return pairs


def spoil_document(document: Any, draw: random.Random) -> Any:
    """Return a copy with one to three keys or values changed, removed, moved or added."""
    document = copy.deepcopy(document)
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        pairs = places(document)
        if not pairs:
            break
        container, key = draw.choice(pairs)
        kind = draw.choice(["value", "value", "drop", "name", "wrap", "move", "new", "near", "near", "near", "near"])
        value = container[key]
        if kind == "drop":
            del container[key]
        elif kind == "wrap":
            container[key] = draw.choice([[value], {"x": value}, [value, value], str(value)])
        elif kind == "move":
            other, place = draw.choice(pairs)
            container[key] = copy.deepcopy(other[place])
        elif kind == "near":
            container[key] = near(value, draw)
        elif kind in ("name", "new") and isinstance(container, dict):
            if kind == "name":
                del container[key]
            container[draw.choice([*KEYS, f"{key}s", str(key)[:-1]])] = draw.choice([value, draw.choice(VALUES)])
        else:
            container[key] = copy.deepcopy(draw.choice(VALUES))
    return document


def near(value: Any, draw: random.Random) -> Any:
    """Return a similar number, or the value itself if it is no number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    return draw.choice([value + 1, value - 1, -value, value * 2, float(value), value * 1000])


def spoil_bytes(data: bytes, draw: random.Random, pieces: list[bytes] = PIECES, times: int = 3) -> bytes:
    """Apply up to `times` insertions, flips, removals and truncations."""
    for _ in range(draw.randint(1, times)):
        at = draw.randrange(len(data) + 1)
        kind = draw.choice(["insert", "flip", "lose", "cut", "double"])
        if kind == "insert":
            data = data[:at] + draw.choice(pieces) + data[at:]
        elif kind == "flip" and at < len(data):
            data = data[:at] + bytes([data[at] ^ (1 << draw.randrange(8))]) + data[at + 1 :]
        elif kind == "lose":
            data = data[:at] + data[at + draw.randrange(1, 40) :]
        elif kind == "cut":
            data = data[:at]
        else:
            data = data[:at] + data[max(at - draw.randrange(1, 60), 0) :]
    return data


def as_yaml(document: Any, draw: random.Random) -> bytes:
    """Return YAML of a document in one of several styles, or JSON."""
    if draw.random() < 0.1:
        return json.dumps(document, default=str).encode()
    return yaml.safe_dump(document, default_flow_style=draw.choice([None, False, True]), allow_unicode=True).encode()


def spoiled_yaml(document: dict[str, Any], draw: random.Random) -> bytes:
    """Return a config file after changes to its document, its text, or lines of YAML."""
    kind = draw.random()
    if kind < 0.6:
        return as_yaml(spoil_document(document, draw), draw)
    data = as_yaml(document, draw)
    if kind < 0.8:
        lines = data.decode().splitlines()
        lines.insert(draw.randrange(len(lines) + 1), draw.choice(LINES))
        return "\n".join(lines).encode("utf-8", "surrogatepass")
    return spoil_bytes(data, draw)


def overrides(document: dict[str, Any], draw: random.Random) -> list[str]:
    """Return no settings of the command line, or some that are mostly wrong."""
    if draw.random() < 0.7:
        return []
    paths = {id(container): name for name, container in _sections("", document)}
    container, key = draw.choice([(c, k) for c, k in places(document) if id(c) in paths])
    name = ".".join(part for part in (paths[id(container)], str(key)) if part)
    value = draw.choice([*VALUES, "[", "{a: 1", "!!python/none", "&a [*a]", "'"])
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    damaged: list[Callable[[], str]] = [
        lambda: f"{name}={text}",
        lambda: f"{name}={text}",
        lambda: f"{name}.{draw.choice(KEYS)}={text}",
        lambda: f"{name}{text}"[:200],
        lambda: f"{name[:-1]}={text}",
        lambda: f"={text}",
    ]
    return [draw.choice(damaged)().lstrip("-")]


def _sections(name: str, document: dict[Any, Any]) -> list[tuple[str, dict[Any, Any]]]:
    sections = [(name, document)]
    for key, value in document.items():
        if isinstance(value, dict):
            sections += _sections(f"{name}.{key}".lstrip("."), value)
    return sections
