"""The matrix of sharded training against one process: schemes x poolings x row optimizers x ranks.

`make soak PART=exactness` runs all of it, cell by cell (test_sharded.py), and then
`python tests/distributed/exactness.py RECORD docs/exactness.md`, which writes the table.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

if __package__ is None or __package__ == "":  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    __package__ = "distributed"

from distributed.pool import RankPool
from distributed.scenario import IS_SOAK, Scenario, train, whole_tables
from sampling import product

SIZES = (2, 4, 8)
"""Numbers of ranks. Each run has two hosts."""
SCHEMES = [
    "table_wise", "row_wise", "column_wise", "data_parallel", "table_row_wise", "table_column_wise", "grid",
    "hot_replicated", "mixed", "mixed of hosts",
]  # fmt: skip
POOLINGS = ["sum", "sum weighted", "mean", "mean weighted", "none"]
OPTIMIZERS = ["sgd", "adagrad", "rowwise_adagrad", "adam"]
MATRIX = product(ranks=list(SIZES), sharding=SCHEMES, pooling=POOLINGS, optimizer=OPTIMIZERS)
TOLERANCES = (("float64", 20 if IS_SOAK else 3, 1e-10), ("float32", 4 if IS_SOAK else 2, 1e-5))
"""(dtype, steps, largest difference) of the contract in docs/design.md. `make test` runs fewer steps."""

Ranks = Callable[[int], RankPool]


def scenario_of(sharding: str, pooling: str, optimizer: str) -> Scenario:
    kind, _, weighted = pooling.partition(" ")
    return Scenario(sharding=sharding, pooling=kind, weighted=bool(weighted), optimizer=optimizer)


def bitwise(scenario: Scenario) -> Scenario | None:
    """Return the form of a cell that the contract requires to be bitwise equal, or `None` if it requires none.

    No bag may be summed across row shards, so bags of row-wise tables get at most one id. No table may be replicated.
    """
    if scenario.sharding in ("data_parallel", "hot_replicated", "mixed", "mixed of hosts"):
        return None
    by_rows = scenario.sharding in ("row_wise", "table_row_wise", "grid")
    return scenario.but(max_ids=1) if by_rows and scenario.pooling != "none" else scenario


BITWISE = [cell for cell in MATRIX if bitwise(scenario_of(cell["sharding"], cell["pooling"], cell["optimizer"]))]


def difference(ranks: Ranks, size: int, scenario: Scenario) -> float:
    """Return the largest difference in losses, dense weights, rows and optimizer state between `size` ranks and one."""
    alone, results = train(scenario), ranks(size).run(train, scenario)
    losses = [torch.tensor([r["losses"] for r in runs], dtype=torch.float64).sum(0) for runs in (results, [alone])]
    differences = [_largest(*losses)]
    differences += [_largest(a, b) for r in results for a, b in zip(r["dense"], alone["dense"], strict=True)]
    return worst_of([*differences, _largest_in_tables(results, [alone], scenario)])


def bit_difference(ranks: Ranks, size: int, scenario: Scenario) -> float:
    """Return the largest difference in outputs, rows and state under identical upstream gradients."""
    alone, results = train(scenario, True), ranks(size).run(train, scenario, True)
    differences = [
        _largest(torch.cat([r["outputs"][step] for r in results]), alone["outputs"][step])
        for step in range(scenario.num_steps)
    ]
    return worst_of([*differences, _largest_in_tables(results, [alone], scenario)])


def _largest_in_tables(results: list[Any], others: list[Any], scenario: Scenario) -> float:
    got, expected = whole_tables(results, scenario), whole_tables(others, scenario)
    assert {t: p.keys() for t, p in got.items()} == {t: p.keys() for t, p in expected.items()}
    return worst_of([_largest(got[t][name], value) for t, parts in expected.items() for name, value in parts.items()])


def worst_of(differences: list[float]) -> float:
    """Return the largest difference, or NaN if there is one. NaN exceeds every tolerance, but Python's `max` would lose
    it."""
    return float(torch.tensor(differences, dtype=torch.float64).max())


def _largest(got: torch.Tensor, expected: torch.Tensor) -> float:
    assert got.shape == expected.shape
    return float((got.double() - expected.double()).abs().max()) if got.numel() else 0.0


def table(measured: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return a Markdown table with the largest differences of each sharding over all ranks and poolings.

    `measured` are the properties that the tests of the matrix record. Raises ValueError if cells are missing.
    """
    worst: dict[tuple[str, ...], dict[str, float]] = {}
    num_values = 0
    for record in measured:
        _, sharding, _, optimizer = record["cell"].values()
        for name, value in record["differences"].items():
            num_values += 1
            cell = worst.setdefault((sharding,) if name == "bits" else (sharding, optimizer), {})
            cell[name] = worst_of([cell.get(name, 0.0), value])
    expected = len(TOLERANCES) * len(MATRIX) + len(BITWISE)
    if num_values != expected:
        raise ValueError(f"the record has {num_values} of {expected} values; run the rest of the matrix first")
    lines = ["| sharding | " + " | ".join(OPTIMIZERS) + " | equal bits |", "| --- " * (len(OPTIMIZERS) + 2) + "|"]
    for sharding in SCHEMES:
        cells = [", ".join(f"{worst[sharding, o][dtype]:.0e}" for dtype, *_ in TOLERANCES) for o in OPTIMIZERS]
        lines.append(f"| {sharding} | " + " | ".join([*cells, _bits_text(worst.get((sharding,)))]) + " |")
    return lines


def _bits_text(worst: Mapping[str, float] | None) -> str:
    if worst is None:
        return "not promised"
    return "yes" if worst["bits"] == 0 else f"no, by {worst['bits']:.0e}"


HEAD = """# Sharded equals unsharded, measured

This page shows by how much sharded training differs from training in one process. `make soak PART=exactness` writes it.

The table has a row for each sharding type, and a column for each row optimizer. The first value of a cell is the
largest absolute difference of losses, dense weights, rows and optimizer states in 20 steps in float64. The second value
is the same for 4 steps in float32. The [contract](design.md#contract-on-numbers) allows 1e-10 and 1e-5.

Each cell covers runs on 2, 4 and 8 gloo ranks, in two groups that act as hosts, with five poolings: `sum` and `mean`,
each with and without weights, and `none`. The model has five features and four tables of 1 to 101 rows and 48 columns.

The last column shows whether outputs, rows and states are bitwise equal for the same upstream gradients. If tables are
divided by rows, bags have at most one id, or no pooling. `mixed` and `mixed of hosts` shard each of the four tables
differently.
"""


def main(record: str, page: str) -> None:
    lines = [json.loads(line) for line in Path(record).read_text().splitlines()]
    Path(page).write_text(HEAD + "\n" + "\n".join(table(line for line in lines if "cell" in line)) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
