"""Part 'bits': checksums of tables and dense weights after 20 steps, for all exchanges and sharding types."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from links import bits_training
from links.rank_pool import on_this_machine, start_ranks
from links.timing import Options, table
from links.variants import Layout, Variant

PRECISIONS = ("fp32", "fp16", "bf16", "fp8", "int8", "paper")
LAYOUTS = (Layout(2, 1), Layout(2, 2), Layout(2, 4), Layout(4, 2))
WAYS = (("flat", ""), ("hierarchical", "cross_host"), ("hierarchical", "chain"))
"""Exchange algorithms. A chain is used for fp32 only, because it would round at each hop."""
SCHEMES = ("table_wise", "column_wise")
CHUNKS = (2**20, 4096)
"""Bytes of a piece of a sum. The smaller one splits the sum of the dense part."""


@dataclass(frozen=True, kw_only=True)
class Case:
    variant: Variant
    order: int
    """Index of the order of ranks inside a host."""
    chunk_bytes: int


def cases(precision: str, layout: Layout, quick: bool) -> Iterator[Case]:
    """Yield all runs that must have equal bits."""
    orders = range(1 if quick else 3)
    for sharding in SCHEMES:
        for exchange, path in WAYS if precision == "fp32" else WAYS[:2]:
            variant = Variant(sharding=sharding, exchange=exchange, dense_path=path, precision=precision)
            for order in orders:
                for chunk_bytes in CHUNKS:
                    yield Case(variant=variant, order=order, chunk_bytes=chunk_bytes)


def compare_bits(options: Options) -> bool:
    """Compare all layouts and codecs. Returns whether each has a single checksum."""
    rows, good = [], True
    for layout in LAYOUTS[1:2] if options.quick else LAYOUTS:
        with start_ranks(layout.size, on_this_machine(layout.size, bind=True)) as ranks:
            for precision in PRECISIONS:
                runs: dict[str, list[Case]] = {}
                for case in cases(precision, layout, options.quick):
                    replies = ranks.ask(bits_training.train, case=case, layout=layout)
                    runs.setdefault(checksum(replies), []).append(case)
                num_cases = sum(map(len, runs.values()))
                good &= len(runs) == 1
                first, *others = sorted(runs.items(), key=lambda one: -len(one[1]))
                said = "" if not others else f"{others[0][1][0]}"
                rows.append([layout, precision, num_cases, len(runs), first[0][:16], said])
                options.record(f"{layout} {precision}", "checksums", len(runs), "of theirs", peer="asked", peer_value=1)
    table(
        f"Bits of all tables and dense weights after {bits_training.NUM_STEPS} steps",
        ("hosts x ranks", "codec", "runs", "checksums", "most have", "one that differs"), rows,
    )  # fmt: skip
    return good


def checksum(replies: Sequence[dict[str, Any]]) -> str:
    """Return a checksum of whole tables, states and dense weights, or a message if copies differ between ranks."""
    whole: dict[tuple[str, str], NDArray[Any]] = {}
    seen: dict[tuple[str, str], NDArray[Any]] = {}
    for reply in replies:
        for table_name, shape, rows, columns, key, values in reply["pieces"]:
            size = shape if values.ndim == 2 else shape[:1]
            place = (slice(*rows), slice(*columns))[: values.ndim]
            target = whole.setdefault((table_name, key), np.zeros(size, values.dtype))
            mask = seen.setdefault((table_name, key), np.zeros(size, bool))
            if not np.array_equal(target[place][mask[place]], values[mask[place]]):
                return f"copies of {table_name}.{key} differ"
            target[place], mask[place] = values, True
    if not all(mask.all() for mask in seen.values()):
        return "a table is not whole"
    if any(reply["dense"] != replies[0]["dense"] for reply in replies):
        return "dense weights differ between ranks"
    digest = hashlib.sha256(replies[0]["dense"])
    for name in sorted(whole):
        digest.update(repr(name).encode() + whole[name].tobytes())
    return digest.hexdigest()
