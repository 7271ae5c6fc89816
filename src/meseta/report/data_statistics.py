"""Section of a run's page about its data: splits, features, and reuse of table rows."""

from __future__ import annotations

from meseta.data.dataset.dataset import Dataset
from meseta.data.dataset.records import SparseFeature
from meseta.report.charts.chart import reuse_histogram
from meseta.report.charts.markup import escape, table, tag
from meseta.report.record import RunRecord
from meseta.telemetry.formatting import NO_VALUE, format_count, format_decimal

MAX_DRAWN_FEATURES = 100
"""Maximum number of sparse features with histograms of reuse."""
# The histograms of one feature take 7 kB of the page and a millisecond, and a dataset may have thousands of features.


def data_section(record: RunRecord) -> str:
    """Return tables of splits, sparse features and dense features, or an empty string without a dataset."""
    dataset = record.dataset
    if dataset is None:
        return ""
    return _splits_table(dataset) + _sparse_table(dataset) + _dense_table(dataset)


def _splits_table(dataset: Dataset) -> str:
    rows = []
    for name, split in dataset.splits.items():
        # With several labels, the table shows the base rate of the first one.
        rate = next(iter(split.base_rates.values())) if split.num_rows else None
        rows.append(
            [
                escape(name),
                format_count(split.num_rows),
                format_count(split.num_positives),
                escape(f"{100 * rate:.2f}%" if rate is not None else NO_VALUE),
            ]
        )
    return table(["split", "rows", "positives", "base rate"], rows, {1, 2, 3}, "compact") if rows else ""


def _sparse_table(dataset: Dataset) -> str:
    if not dataset.sparse:
        return ""
    total = sum(feature.num_embeddings for feature in dataset.sparse)
    window = f"{dataset.sparse[0].statistics.reuse.window_samples:,} samples"
    intro = (
        f"{len(dataset.sparse)} sparse features with {format_count(total)} rows in total. The bars show how often a "
        f"row is used within {window}: once, twice, 3–4 times, 5–8 times and so on, from left to right. The numbers "
        "next to the bars are the share and the uses of the tallest bar. If the bars of lookups are further to the "
        "right than those of rows, few rows take most lookups."
    )
    # Histograms of thousands of features would make the page too large.
    drawn = sorted(dataset.sparse, key=lambda feature: -feature.num_embeddings)[:MAX_DRAWN_FEATURES]
    if len(drawn) < len(dataset.sparse):
        intro += f" The {MAX_DRAWN_FEATURES} features with the most rows have bars."
    header = [
        "feature",
        "ids",
        "rows",
        "uniques",
        "lookups per sample",
        "share of lookups by uses",
        "share of rows by uses",
    ]
    with_bars = {feature.name for feature in drawn}
    rows = [_sparse_row(feature, has_bars=feature.name in with_bars) for feature in dataset.sparse]
    return tag("h3", "Sparse features") + tag("p", escape(intro)) + table(header, rows, {2, 3, 4}, "features")


def _sparse_row(feature: SparseFeature, *, has_bars: bool) -> list[str]:
    statistics = feature.statistics
    kinds = [feature.encoding, "multi-valued" * feature.multi_valued, "weighted" * feature.weighted]
    row = [
        escape(feature.name),
        escape(", ".join(kind for kind in kinds if kind)),
        format_count(feature.num_embeddings),
    ]
    reuse = statistics.reuse if has_bars else None
    return [
        *row,
        format_count(statistics.num_uniques),
        escape(format_decimal(statistics.mean_pooling_factor, 2)),
        reuse_histogram(reuse, reuse.lookups, "lookups", "bar-lookups") if reuse else "",
        reuse_histogram(reuse, reuse.rows, "rows", "bar-rows") if reuse else "",
    ]


def _dense_table(dataset: Dataset) -> str:
    if not dataset.dense:
        return ""
    rows = [[escape(f.name), *(escape(f"{v:.4g}") for v in (f.fill, f.mean, f.std))] for f in dataset.dense]
    summary = tag(
        "summary",
        escape(f"{len(dataset.dense)} dense features: fill value, mean and standard deviation before standardization"),
    )
    return tag("details", summary, table(["feature", "fill", "mean", "std"], rows, {1, 2, 3}, "compact"))
