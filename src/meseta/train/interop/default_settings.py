"""Settings of a run on raw files for which the config has no values."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from meseta.config import TrainConfig, set_default
from meseta.config.load import get_value
from meseta.config.models import section_class
from meseta.data.dataset.dataset import Dataset
from meseta.data.schema.layout import NO_CATEGORY
from meseta.telemetry.metrics import VALID

NUM_STEPS_PER_EPOCH = 200
"""Desired number of steps per epoch on a small dataset."""
MIN_BATCH_SIZE = 32
MAX_EPOCHS = 20
"""Limit on epochs. Early stopping usually ends training earlier."""
NUM_EPOCHS_WITHOUT_VALID = 2
MAX_ROWS_BETWEEN_EVALUATIONS = 1_000_000
"""Maximum number of training rows between evaluations. A large log is evaluated several times per epoch."""

# Settings of data without sparse features, for which the MLP needs more capacity.
_SETTINGS_WITHOUT_TABLES = {"model.deep_mlp": [256, 128], "dense.optimizer.lr": 0.003}
_SUFFIX_PATTERN = r"\.(gz|bz2|xz|zst|zstd|zip|csv|tsv|txt|parquet|jsonl|ndjson|json|inter|ffm|libffm|svm|libsvm)\b"
# Settings for small datasets, if the model has them.
_SMALL_DATA_SIZES = {"dropout": 0.2, "embedding_dim": 8}
# Keys that imply another choice. If one of them is in the config, the default of the key is not set.
_ALTERNATIVE_KEYS: Mapping[str, Sequence[str]] = {
    "train.epochs": ("train.max_steps",),
    "train.eval_every_epochs": ("train.eval_every_steps",),
    "embedding.init.scale": ("embedding.init",),
    **dict.fromkeys(
        ("embedding.optimizer.lr", "embedding.optimizer.initial_accumulator"), ("embedding.optimizer.name",)
    ),
    "dense.optimizer.lr": ("dense.optimizer.name",),
    **dict.fromkeys(("schedule.kind", "schedule.plateau_patience", "schedule.step_factor"), ("schedule",)),
}


def default_run_dir(patterns: Sequence[str]) -> str:
    """Return 'runs/NAME': runs/clicks for 'logs/clicks.csv.gz', and runs/logs for 'logs/*.csv' (first pattern)."""
    parts = [part for part in re.split(r"[/\\]", patterns[0].partition("://")[2] or patterns[0]) if part]
    for part in reversed(parts):
        name = re.sub(_SUFFIX_PATTERN, "", re.sub(r"[*?]|\[.*?\]", "", part))
        name = re.sub(r"[^\w.-]+", "_", name).strip("._-")
        if name:
            return f"runs/{name}"
    return "runs/first"


def default_batch_size(num_rows: int) -> int:
    """Return a power of two, from 32 to the config's default, that divides `num_rows` into about 200 steps."""
    limit: int = TrainConfig.model_fields["batch_size"].default
    target = max(num_rows // NUM_STEPS_PER_EPOCH, 1)
    return min(max(1 << (target.bit_length() - 1), MIN_BATCH_SIZE), limit)


def choose_settings(document: dict[str, Any], dataset: Dataset) -> dict[str, Any]:
    """Set defaults for a run on prepared raw files in `document`. Return the keys that were set, with their values.

    The model is DeepFM (arXiv 1703.04247), or MMoE for several labels, unless the config names one. Training continues
    at falling learning rates while the validation metric improves, and ends with the best weights.
    """
    # DeepFM combines a linear model, all pairs of features and an MLP, so it suits data that needs any of the three.
    # benchmarks/bench_first_hour.py measures the metrics that these settings reach.
    settings = _settings(dataset, get_value(document, "model.name"))
    chosen = {key: settings[key] for key in find_free_keys(document, list(settings))}
    for key, value in chosen.items():
        set_default(document, key, value)
    return chosen


def find_free_keys(document: Mapping[str, Any], keys: Sequence[str]) -> list[str]:
    """Return the `keys` that a search may decide, because `document` has neither them nor another choice."""
    return [
        key
        for key in keys
        if all(get_value(document, other) is None for other in (key, *_ALTERNATIVE_KEYS.get(key, ())))
    ]


def _has_tables(dataset: Dataset) -> bool:
    return any(feature.name != NO_CATEGORY.name for feature in dataset.sparse)


def _settings(dataset: Dataset, model: Any) -> dict[str, Any]:
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
    # Rows start near zero, and the learning rate is large enough to move them.
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
