"""The matrix of sharded training against one process: schemes x poolings x row optimizers x ranks.

`python tests/distributed/exactness.py docs/exactness.md` runs all of it (some minutes) and writes the table.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

if __package__ is None or __package__ == "":  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    __package__ = "distributed"

from distributed.pool import RankPool
from distributed.scenario import Scenario, train, whole_tables
from sampling import product

SIZES = (2, 4, 8)
"""Ranks; half of them are a host."""
SCHEMES = [
    "table_wise", "row_wise", "column_wise", "data_parallel", "table_row_wise", "table_column_wise", "grid",
    "hot_replicated", "mixed", "mixed of hosts",
]  # fmt: skip
POOLINGS = ["sum", "sum weighted", "mean", "mean weighted", "none"]
OPTIMIZERS = ["sgd", "adagrad", "rowwise_adagrad", "adam"]
MATRIX = product(ranks=list(SIZES), sharding=SCHEMES, pooling=POOLINGS, optimizer=OPTIMIZERS)
TOLERANCES = (("float64", 20, 1e-10), ("float32", 4, 1e-5))
"""(dtype, steps, largest difference): the contract of docs/design.md."""

Ranks = Callable[[int], RankPool]


def scenario_of(sharding: str, pooling: str, optimizer: str) -> Scenario:
    """The scenario of one cell."""
    kind, _, weighted = pooling.partition(" ")
    return Scenario(sharding=sharding, pooling=kind, weighted=bool(weighted), optimizer=optimizer)


def bitwise(scenario: Scenario) -> Scenario | None:
    """The form of a cell that the contract wants equal bit for bit; None where it wants none.

    No bag may be summed across row shards, so bags of row-wise tables get at most one id, and no table may be
    replicated.
    """
    if scenario.sharding in ("data_parallel", "hot_replicated", "mixed", "mixed of hosts"):
        return None
    by_rows = scenario.sharding in ("row_wise", "table_row_wise", "grid")
    return scenario.but(max_ids=1) if by_rows and scenario.pooling != "none" else scenario


def difference(ranks: Ranks, size: int, scenario: Scenario) -> float:
    """The largest absolute difference in losses, dense weights, rows and optimizer state between `size` ranks and
    one."""
    alone, results = train(scenario), ranks(size).run(train, scenario)
    losses = [torch.tensor([r["losses"] for r in runs], dtype=torch.float64).sum(0) for runs in (results, [alone])]
    found = [_largest(*losses)]
    found += [_largest(a, b) for r in results for a, b in zip(r["dense"], alone["dense"], strict=True)]
    return worst_of([*found, _largest_in_tables(results, [alone], scenario)])


def bit_difference(ranks: Ranks, size: int, scenario: Scenario) -> float:
    """The same for outputs, rows and state, when both get the same upstream gradients."""
    alone, results = train(scenario, True), ranks(size).run(train, scenario, True)
    found = [
        _largest(torch.cat([r["outputs"][step] for r in results]), alone["outputs"][step])
        for step in range(scenario.num_steps)
    ]
    return worst_of([*found, _largest_in_tables(results, [alone], scenario)])


def _largest_in_tables(results: list[Any], others: list[Any], scenario: Scenario) -> float:
    got, expected = whole_tables(results, scenario), whole_tables(others, scenario)
    assert {t: p.keys() for t, p in got.items()} == {t: p.keys() for t, p in expected.items()}
    return worst_of([_largest(got[t][name], value) for t, parts in expected.items() for name, value in parts.items()])


def worst_of(differences: list[float]) -> float:
    """The largest; NaN where there is one, which is within no tolerance (Python's max would lose it)."""
    return float(torch.tensor(differences, dtype=torch.float64).max())


def _largest(got: torch.Tensor, expected: torch.Tensor) -> float:
    assert got.shape == expected.shape
    return float((got.double() - expected.double()).abs().max()) if got.numel() else 0.0


def table(ranks: Ranks) -> list[str]:
    """A Markdown table: the worst of 2, 4 and 8 ranks for each cell."""
    lines = ["| scheme, pooling | " + " | ".join(OPTIMIZERS) + " |", "| --- " * (len(OPTIMIZERS) + 1) + "|"]
    for row in product(sharding=SCHEMES, pooling=POOLINGS):
        cells = []
        for optimizer in OPTIMIZERS:
            scenario = scenario_of(**row, optimizer=optimizer)
            worst = [
                worst_of([difference(ranks, size, scenario.but(dtype=d, num_steps=n)) for size in SIZES])
                for d, n, _ in TOLERANCES
            ]
            exact = bitwise(scenario)
            bits = [] if exact is None else [bit_difference(ranks, size, exact) for size in SIZES]
            cells.append(", ".join([*(f"{largest:.0e}" for largest in worst), *_bits(bits)]))
        lines.append(f"| {row['sharding']}, {row['pooling']} | " + " | ".join(cells) + " |")
        print(lines[-1], file=sys.stderr, flush=True)
    return lines


def _bits(differences: list[float]) -> list[str]:
    if not differences:
        return []
    return ["equal bits" if worst_of(differences) == 0 else f"bits differ by {worst_of(differences):.0e}"]


HEAD = """# Sharded equals unsharded, measured

Written by `python tests/distributed/exactness.py docs/exactness.md`, which `make soak` runs. Each cell trains a model
of four tables (1 to 101 rows, 48 columns) and five features on 2, 4 and 8 gloo ranks, half of which are a host, and in
one process. It gives the largest absolute difference in losses, dense weights, rows and optimizer state, the worst of
2, 4 and 8 ranks: first for
20 steps in float64 (the contract allows 1e-10), then for 4 steps in float32 (1e-5). Then, where the
[contract](design.md) promises it, whether outputs, rows and state are equal bit for bit when the upstream gradients are
the same (cut by rows: bags of at most one id, or no pooling). `mixed` and `mixed of hosts` put one table each under
four schemes; of a table under `hot_replicated` a third of the rows is hot.
"""


def main(path: str) -> None:
    pools = {size: RankPool(size) for size in SIZES}
    lines = table(pools.__getitem__)
    for pool in pools.values():
        pool.close()
    Path(path).write_text(HEAD + "\n" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1])
