"""Settings that a search tries, one change at a time."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from meseta.config import RunConfig
from meseta.config.load import get_value

Settings = Mapping[str, Any]
"""Values of config keys that differ from the config of the search."""

TABLE_RATE, DENSE_RATE, ACCUMULATOR = (
    "embedding.optimizer.lr",
    "dense.optimizer.lr",
    "embedding.optimizer.initial_accumulator",
)
WIDTH, DROPOUT, BATCH_NORM = "model.embedding_dim", "model.dropout", "model.batch_norm"
WITHOUT, INTERVAL = "data.without", "train.eval_every_epochs"
TABLE_L2, DENSE_DECAY = "embedding.regularization.l2", "dense.optimizer.weight_decay"
SEARCHED_KEYS = (
    TABLE_RATE, DENSE_RATE, ACCUMULATOR, WIDTH, DROPOUT, BATCH_NORM, WITHOUT, INTERVAL, TABLE_L2, DENSE_DECAY
)  # fmt: skip
"""Keys whose values a search decides, unless the config has them."""

RATE_STEP = 10**0.5
"""Factor between neighbours of the grid of learning rates."""
MAX_RATE_EXTENSIONS = 4
INTERVALS_PER_EPOCH = 4
"""Evaluations per epoch if the first one was the best."""
MAX_RECIPE_ROWS = 200_000
"""Training rows up to which one trial is the recipe of papers on small data sets."""
# A row-wise Adagrad with this accumulator needs several gradients of a row before it moves it by the learning rate, so
# that ids seen once or twice keep small embeddings. Gradients of a row are of the order 1 / batch size.
_ACCUMULATOR_GRADIENTS = 8


def rate_key(free: Collection[str], *, has_tables: bool) -> str | None:
    """Return the learning rate to search, that of tables if there are any, or `None` if the config has it."""
    key = TABLE_RATE if has_tables else DENSE_RATE
    return key if key in free else None


def scaled_rate(rate: float, num_steps: int) -> float:
    """Return the rate `num_steps` grid steps away, with three significant digits."""
    return float(f"{rate * RATE_STEP**num_steps:.3g}")


def single_changes(
    config: RunConfig, free: Collection[str], *, has_tables: bool, overfits: bool, num_rows: int
) -> list[Settings]:
    """Return changes of one aspect each, the most promising first.

    Args:
        config: Config to change.
        free: Keys that may change.
        has_tables: Whether the data has sparse features.
        overfits: Whether the first evaluation of the first trial was the best, so that more regularization may help.
        num_rows: Number of training rows.
    """
    document = config.model_dump(mode="json")
    changes: list[Settings] = []
    if has_tables:
        changes.append({DENSE_RATE: scaled_rate(config.dense.optimizer.lr, 1)})
    width, dropout = get_value(document, WIDTH), get_value(document, DROPOUT)
    if width is not None and has_tables:
        narrower, wider = {WIDTH: max(width // 2, 2)}, {WIDTH: width * 2}
        changes += [narrower] if overfits else [wider, narrower]
    if dropout is not None:
        more, less = {DROPOUT: min(dropout + 0.3, 0.6)}, {DROPOUT: 0.0}
        changes += [more] if overfits else [less, more]
    if has_tables and config.embedding.optimizer.name == "rowwise_adagrad":
        accumulator = _ACCUMULATOR_GRADIENTS * 0.25 / config.train.batch_size**2
        changes.append({ACCUMULATOR: float(f"{accumulator:.3g}")})
    if num_rows <= MAX_RECIPE_ROWS and get_value(document, BATCH_NORM) is False and dropout is not None:
        changes.append({BATCH_NORM: True, DROPOUT: max(dropout, 0.2), TABLE_L2: 1e-5, WIDTH: 16})
    changes += [{TABLE_L2: 1e-4, DENSE_DECAY: 1e-5}] if has_tables else [{DENSE_DECAY: 1e-5}]
    return [change for change in changes if set(change) <= set(free)]


def merge(changes: Sequence[Settings]) -> Settings:
    """Return all changes together. Of two that change a key, the first one counts."""
    merged: dict[str, Any] = {}
    for change in changes:
        if not set(change) & set(merged):
            merged |= change
    return merged
