"""Messages with one thing wrong."""

from __future__ import annotations

import json
import os
import random
from typing import Any


def spoiled(draw: random.Random, ticket: dict[str, Any]) -> bytes:
    """A message with one thing wrong, or none at all."""
    places: list[tuple[Any, Any]] = []

    def walk(value: Any) -> None:
        for key in value if isinstance(value, dict) else range(len(value)):
            places.append((value, key))
            if isinstance(value[key], dict | list):
                walk(value[key])

    walk(ticket)
    where, key = draw.choice(places)
    odd = [None, -1, 1 << 60, 1.5, "", "../../etc/passwd", "x" * 5000, [], {}, True, "\ud800", float("1e308")]
    match draw.randrange(5):
        case 0:
            where[key] = draw.choice(odd)
        case 1 if isinstance(where, dict):
            del where[key]
        case 2 if isinstance(where, dict):
            where["more"] = draw.choice(odd)
        case 3:
            content = bytearray(json.dumps(ticket).encode())
            content[draw.randrange(len(content))] = draw.randrange(256)
            return bytes(content)
        case _:
            return draw.choice([b"", b"\0" * 100, b"[" * 100_000, b"{}", os.urandom(200), b" " * 2_000_000])
    return json.dumps(ticket).encode()
