"""Click logs of eight planted laws with a known best AUC.

Each is a CSV with a header, and ids as whole numbers or text. Training and test rows follow the same law.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score

TEST_ROWS = 100_000
Columns = Mapping[str, NDArray[Any]]
Drawn = tuple[Columns, NDArray[np.float64]]
"""Columns of n rows, and logits of their labels [n]."""


@dataclass(frozen=True, kw_only=True)
class PlantedLog:
    name: str
    num_rows: int
    """Number of rows without the TEST_ROWS for testing."""
    sparse: tuple[str, ...]
    """Columns that a person who knows the data would declare as categories. All others are numbers."""
    draw: Callable[[np.random.Generator, int], Drawn]


@dataclass(frozen=True)
class WrittenLog:
    train: Path
    test: Path
    best_auc: float
    """AUC of the true probabilities on the test rows."""


def write_log(log: PlantedLog, folder: Path, seed: int, num_rows: int | None = None) -> WrittenLog:
    generator = np.random.default_rng([seed, *log.name.encode()])
    num_train, num_test = num_rows or log.num_rows, min(TEST_ROWS, (num_rows or TEST_ROWS))
    columns, logits = log.draw(generator, num_train + num_test)
    return write_rows(columns, logits, num_train, generator, folder)


def write_rows(
    columns: Mapping[str, Any],
    logits: NDArray[np.float64],
    num_train: int,
    generator: np.random.Generator,
    folder: Path,
) -> WrittenLog:
    """Draw labels, and write the first `num_train` rows to train.csv and the others to test.csv."""
    label = (generator.random(len(logits)) < 1 / (1 + np.exp(-logits))).astype(np.int8)
    table = pa.table({"label": label, **columns})
    folder.mkdir(parents=True, exist_ok=True)
    train, test = folder / "train.csv", folder / "test.csv"
    pyarrow.csv.write_csv(table.slice(0, num_train), train)
    pyarrow.csv.write_csv(table.slice(num_train), test)
    return WrittenLog(train, test, float(roc_auc_score(label[num_train:], logits[num_train:])))


def _effects(draw: np.random.Generator, num_values: int, size: float) -> NDArray[np.float64]:
    return draw.normal(0, size, num_values)


def draw_vectors(draw: np.random.Generator, num_values: int, width: int) -> NDArray[np.float64]:
    """Return rows whose dot products have a standard deviation of 1."""
    return draw.normal(0, width**-0.25, (num_values, width))


def _texts(prefix: str, ids: NDArray[np.int64]) -> NDArray[Any]:
    return np.char.add(prefix, ids.astype(np.str_))


def draw_ids(draw: np.random.Generator, num_values: int, power: float, num_rows: int) -> NDArray[np.int64]:
    """Return ids whose frequency is a power of their rank, in random order."""
    shares = np.arange(1, num_values + 1, dtype=np.float64) ** -power
    ranks = np.searchsorted(np.cumsum(shares) / shares.sum(), draw.random(num_rows))
    return draw.permutation(num_values)[np.minimum(ranks, num_values - 1)]


def _pairs(draw: np.random.Generator, num_rows: int) -> Drawn:
    user, item = draw_ids(draw, 2000, 0.6, num_rows), draw_ids(draw, 1000, 0.8, num_rows)
    hour = draw.integers(0, 24, num_rows)
    tastes, kinds, hours = draw_vectors(draw, 2000, 4), draw_vectors(draw, 1000, 4), draw_vectors(draw, 24, 4)
    logits = -1.2 + _effects(draw, 2000, 0.4)[user] + _effects(draw, 1000, 0.4)[item]
    logits += 1.2 * (tastes[user] * kinds[item]).sum(1) + 0.6 * (kinds[item] * hours[hour]).sum(1)
    price = np.round(draw.lognormal(3, 1, num_rows), 2)
    logits -= 0.2 * (np.log(price) - 3)
    columns = {"user_id": 100_000 + 7 * user, "item_id": item, "hour": hour, "price": price,
               "device": _texts("d", draw.integers(0, 5, num_rows))}  # fmt: skip
    return columns, logits


def _rare_ids(draw: np.random.Generator, num_rows: int) -> Drawn:
    user, item = draw.integers(0, 60_000, num_rows), draw_ids(draw, 3000, 0.9, num_rows)
    kind = draw.integers(0, 20, 3000)[item]
    logits = -1 + _effects(draw, 60_000, 1.0)[user] + _effects(draw, 3000, 0.6)[item]
    logits += 0.5 * (draw_vectors(draw, 20, 3)[kind] * draw_vectors(draw, 60_000, 3)[user]).sum(1)
    return {"user": _texts("u", user), "item": item, "category": kind, "age": draw.integers(18, 80, num_rows)}, logits


def _few_rows(draw: np.random.Generator, num_rows: int) -> Drawn:
    sizes = (5, 12, 30, 80, 150, 200)
    ids = [draw.integers(0, size, num_rows) for size in sizes]
    numbers = draw.normal(0, 1, (num_rows, 4))
    logits = -1 + sum(_effects(draw, size, 0.45)[column] for size, column in zip(sizes, ids, strict=True))
    logits += 0.7 * (draw_vectors(draw, 30, 2)[ids[2]] * draw_vectors(draw, 12, 2)[ids[1]]).sum(1)
    logits += 0.5 * numbers[:, 0] - 0.4 * numbers[:, 1] ** 2 + 0.4
    columns = {f"c{place}": _texts("v", column) for place, column in enumerate(ids)}
    return {**columns, **{f"x{place}": np.round(numbers[:, place], 3) for place in range(4)}}, logits


def _many_epochs(draw: np.random.Generator, num_rows: int) -> Drawn:
    ids = draw.integers(0, 40, (num_rows, 10))
    vectors = np.stack([draw_vectors(draw, 40, 3) for _ in range(10)])
    picked = vectors[np.arange(10), ids]
    total = picked.sum(1)
    logits = -0.5 + 0.22 * 0.5 * ((total**2).sum(1) - (picked**2).sum((1, 2)))
    logits += 0.15 * sum(_effects(draw, 40, 1.0)[ids[:, place]] for place in range(10))
    return {f"f{place}": _texts("k", ids[:, place]) for place in range(10)}, logits


def _one_strong(draw: np.random.Generator, num_rows: int) -> Drawn:
    score, ids = draw.normal(0, 1, num_rows), draw.integers(0, 300, (num_rows, 8))
    logits = -0.5 + 3.5 * np.tanh(1.5 * score)
    logits += sum(_effects(draw, 300, 0.12)[ids[:, place]] for place in range(8))
    columns = {"score": np.round(score, 4), **{f"tag_{place}": ids[:, place] for place in range(8)}}
    return columns, logits


def _dense_only(draw: np.random.Generator, num_rows: int) -> Drawn:
    x = draw.normal(0, 1, (num_rows, 10))
    logits = -0.3 + 1.2 * x[:, 0] * x[:, 1] + np.sin(2.5 * x[:, 2]) + 0.8 * np.abs(x[:, 3]) - 0.6
    logits += 0.9 * (x[:, 4] > 0.5) * (x[:, 5] < 0) + 0.5 * x[:, 6]
    return {f"x{place}": np.round(x[:, place], 4) for place in range(10)}, logits


def _long_tails(draw: np.random.Generator, num_rows: int) -> Drawn:
    users, items, words = 3_000_000, 300_000, 1_000_000
    user, item = draw_ids(draw, users, 0.8, num_rows), draw_ids(draw, items, 1.0, num_rows)
    word, hour = draw_ids(draw, words, 0.9, num_rows), draw.integers(0, 24, num_rows)
    logits = -1.5 + _effects(draw, users, 0.8)[user] + _effects(draw, items, 0.7)[item]
    logits += _effects(draw, words, 0.5)[word]
    logits += 0.8 * (draw_vectors(draw, items, 3)[item] * draw_vectors(draw, 24, 3)[hour]).sum(1)
    return {"user_id": user, "item_id": item, "query": _texts("q", word), "hour": hour}, logits


def _overfit(draw: np.random.Generator, num_rows: int) -> Drawn:
    ids, noise = draw.integers(0, 30, (num_rows, 3)), draw.integers(0, 4000, (num_rows, 10))
    logits = -0.8 + sum(_effects(draw, 30, 0.3)[ids[:, place]] for place in range(3))
    columns = {f"group_{place}": ids[:, place] for place in range(3)}
    return {**columns, **{f"id_{place}": noise[:, place] for place in range(10)}}, logits


def _named(prefix: str, number: int) -> tuple[str, ...]:
    return tuple(f"{prefix}{place}" for place in range(number))


LOGS = tuple(
    PlantedLog(name=name, num_rows=num_rows, sparse=sparse, draw=draw)
    for name, num_rows, sparse, draw in (
        ("pairs", 1_000_000, ("user_id", "item_id", "hour", "device"), _pairs),
        ("rare_ids", 300_000, ("user", "item", "category"), _rare_ids),
        ("few_rows", 20_000, _named("c", 6), _few_rows),
        ("many_epochs", 60_000, _named("f", 10), _many_epochs),
        ("one_strong", 100_000, _named("tag_", 8), _one_strong),
        ("dense_only", 100_000, (), _dense_only),
        ("long_tails", 1_000_000, ("user_id", "item_id", "query", "hour"), _long_tails),
        ("overfit", 200_000, (*_named("group_", 3), *_named("id_", 10)), _overfit),
    )
)
