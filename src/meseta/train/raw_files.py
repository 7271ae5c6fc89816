"""A run straight from raw files: what is chosen where the config says nothing."""

from __future__ import annotations

import re
from collections.abc import Sequence

from meseta.config import TrainConfig

WANTED_STEPS = 200
"""Steps of an epoch that a small dataset should have."""
MIN_BATCH_SIZE = 32


def default_run_dir(patterns: Sequence[str]) -> str:
    """runs/<name>, after the first file or pattern: 'logs/clicks.csv.gz' gives runs/clicks, 'logs/*.csv' runs/logs."""
    parts = [part for part in re.split(r"[/\\]", patterns[0].partition("://")[2] or patterns[0]) if part]
    for part in reversed(parts):
        name = re.sub(r"\.(gz|csv|tsv|txt|parquet|ffm|libffm|svm|libsvm)\b", "", re.sub(r"[*?]|\[.*?\]", "", part))
        name = re.sub(r"[^\w.-]+", "_", name).strip("._-")
        if name:
            return f"runs/{name}"
    return "runs/first"


def default_batch_size(num_rows: int) -> int:
    """A power of two that cuts an epoch of `num_rows` into about 200 steps, from 32 to the config's own default."""
    limit: int = TrainConfig.model_fields["batch_size"].default
    wanted = max(num_rows // WANTED_STEPS, 1)
    return min(max(1 << (wanted.bit_length() - 1), MIN_BATCH_SIZE), limit)
