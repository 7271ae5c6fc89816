"""Rows to which `report.baseline` is fitted, and their memory."""

from __future__ import annotations

from meseta.data.dataset.dataset import Dataset

MAX_ROWS = 1_000_000
MAX_VALUES = 25_000_000
"""Approximate maximum number of inputs of all rows."""
# Batches as they were read, joined, with ids joined by feature, and in the order of the sample.
_NUM_SAMPLE_COPIES = 4
# Columns and the matrix in float64, and histogram bins of LightGBM.
_MATRIX_BYTES_PER_INPUT = 8 + 8 + 2


def count_sample_rows(dataset: Dataset, num_rows: int) -> int:
    """Return how many of `num_rows` training rows are fitted. 0 if there are no inputs."""
    num_inputs = len(dataset.dense) + len(dataset.sparse)
    return min(MAX_ROWS, MAX_VALUES // num_inputs, num_rows) if num_inputs else 0


def sample_bytes(dataset: Dataset) -> int:
    """Return an upper bound of the host memory of rank 0 while the baseline is fitted."""
    # With 294,000 rows of 12 numbers and 12 ids, 409 MB are predicted, and 353 MB were measured.
    num_inputs = len(dataset.dense) + len(dataset.sparse)
    row_bytes = 4.0 * (len(dataset.dense) + 2 * len(dataset.labels) + 1)
    for feature in dataset.sparse:  # Lengths, offsets, ids and weights.
        row_bytes += 16 + (12 if feature.weighted else 8) * feature.statistics.mean_pooling_factor
    peak_bytes = max(_NUM_SAMPLE_COPIES * row_bytes, row_bytes + _MATRIX_BYTES_PER_INPUT * num_inputs)
    return int(count_sample_rows(dataset, dataset.num_training_rows) * peak_bytes)
