"""A run straight from raw files: what is chosen where the config says nothing."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from typing import Any

from meseta.config import TrainConfig, set_default
from meseta.config.load import get_value
from meseta.config.models import section_class
from meseta.data.dataset.dataset import Dataset
from meseta.data.layout import NO_CATEGORY
from meseta.telemetry.splits import VALID

NUM_STEPS_PER_EPOCH = 200
"""Steps of an epoch that a small dataset should have."""
MIN_BATCH_SIZE = 32
MAX_EPOCHS = 20
"""A limit: training ends where the valid figure gains no more."""
NUM_EPOCHS_WITHOUT_VALID = 2
MIN_VALID_ROWS = 200
"""With fewer, the best of several trials is a matter of chance."""
MAX_ROWS_BETWEEN_EVALUATIONS = 1_000_000
"""At most: an epoch of a large log has several."""

_SETTINGS_WITHOUT_TABLES = {"model.deep_mlp": [256, 128], "dense.optimizer.lr": 0.003}
"""Of data without categories, where the MLP has to do it all."""
_SUFFIX_PATTERN = r"\.(gz|bz2|xz|zst|zstd|zip|csv|tsv|txt|parquet|jsonl|ndjson|json|inter|ffm|libffm|svm|libsvm)\b"
_SMALL_DATA_SIZES = {"dropout": 0.2, "embedding_dim": 8}
"""Of small data, for a model that has these keys."""
_ALTERNATIVE_KEYS: Mapping[str, Sequence[str]] = {
    "train.epochs": ("train.max_steps",),
    "train.eval_every_epochs": ("train.eval_every_steps",),
    "embedding.init.scale": ("embedding.init",),
    "embedding.optimizer.lr": ("embedding.optimizer.name",),
    **dict.fromkeys(("schedule.kind", "schedule.plateau_patience", "schedule.step_factor"), ("schedule",)),
}
"""A key -> others that a config may have instead, which say that it wants something else."""


def default_run_dir(patterns: Sequence[str]) -> str:
    """runs/<name>, after the first file or pattern: 'logs/clicks.csv.gz' gives runs/clicks, 'logs/*.csv' runs/logs."""
    parts = [part for part in re.split(r"[/\\]", patterns[0].partition("://")[2] or patterns[0]) if part]
    for part in reversed(parts):
        name = re.sub(_SUFFIX_PATTERN, "", re.sub(r"[*?]|\[.*?\]", "", part))
        name = re.sub(r"[^\w.-]+", "_", name).strip("._-")
        if name:
            return f"runs/{name}"
    return "runs/first"


def default_batch_size(num_rows: int) -> int:
    """A power of two that cuts an epoch of `num_rows` into about 200 steps, from 32 to the config's own default."""
    limit: int = TrainConfig.model_fields["batch_size"].default
    wanted = max(num_rows // NUM_STEPS_PER_EPOCH, 1)
    return min(max(1 << (wanted.bit_length() - 1), MIN_BATCH_SIZE), limit)


def choose_settings(document: dict[str, Any], dataset: Dataset) -> dict[str, Any]:
    """Give a config values for a run on prepared raw files where it is silent; returns the keys that got one.

    DeepFM (arXiv 1703.04247) unless it names a model, or MMoE for several labels: a linear model and all pairs stand
    beside an MLP, so that it has what a log needs of the three. Rows begin near zero and take steps of a size that
    moves them. Training goes on while the valid figure gains, at falling rates, and ends with the best weights.
    benchmarks/bench_first_hour.py measures what that reaches.
    """
    given = copy.deepcopy(document)
    chosen = {
        key: value
        for key, value in _settings(dataset, get_value(given, "model.name")).items()
        if all(get_value(given, other) is None for other in (key, *_ALTERNATIVE_KEYS.get(key, ())))
    }
    for key, value in chosen.items():
        set_default(document, key, value)
    return chosen


def can_tune_table_rate(dataset: Dataset) -> bool:
    """Whether there are tables, and rows to judge their rate by."""
    has_valid = VALID in dataset.splits and dataset.splits[VALID].num_rows >= MIN_VALID_ROWS
    return has_valid and _has_tables(dataset)


def _has_tables(dataset: Dataset) -> bool:
    return any(feature.name != NO_CATEGORY.name for feature in dataset.sparse)


def _settings(dataset: Dataset, model: Any) -> dict[str, Any]:
    """All of them, by key, for the model that the config names."""
    num_rows = dataset.splits["train"].num_rows
    settings: dict[str, Any] = {"train.batch_size": default_batch_size(num_rows)}
    if model is None:
        model = settings["model.name"] = "deepfm" if len(dataset.labels) == 1 else "mmoe"
    section = section_class(model)
    sizes = {
        **section.small_sizes,
        **{key: size for key, size in _SMALL_DATA_SIZES.items() if key in section.model_fields},
    }
    settings |= {f"model.{key}": size for key, size in sizes.items()}
    if model == "deepfm" and not _has_tables(dataset):
        settings |= _SETTINGS_WITHOUT_TABLES
    settings |= {"embedding.init.scale": 0.01, "embedding.optimizer.lr": 0.05}
    if VALID not in dataset.splits or not dataset.splits[VALID].num_rows:
        return settings | {"train.epochs": NUM_EPOCHS_WITHOUT_VALID}
    return settings | {
        "train.epochs": MAX_EPOCHS,
        "train.eval_every_epochs": min(1.0, MAX_ROWS_BETWEEN_EVALUATIONS / num_rows),
        "train.early_stopping.metric": "auc",
        "train.early_stopping.patience": 3,
        "train.finish": "best",
        "schedule.kind": "plateau",
        "schedule.plateau_patience": 1,
        "schedule.step_factor": 0.3,
    }
