"""What the training data looks like: splits, features, and how often rows are used again."""

from __future__ import annotations

from meseta.data.dataset.dataset import Dataset, SparseFeature
from meseta.report.charts.bars import reuse_histogram
from meseta.report.charts.markup import escape, table, tag
from meseta.report.record import RunRecord
from meseta.telemetry.formatting import NO_VALUE, format_count, format_decimal

MAX_DRAWN_FEATURES = 100
"""Features with bars: those of one take 7 kB of the page and a millisecond, and there may be thousands."""


def data_section(record: RunRecord) -> str:
    """Rows per split, then one line per sparse feature, then the dense features folded away."""
    dataset = record.dataset
    if dataset is None:
        return ""
    return _splits_table(dataset) + _sparse_table(dataset) + _dense_table(dataset)


def _splits_table(dataset: Dataset) -> str:
    rows = []
    for name, split in dataset.splits.items():
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
        f"{len(dataset.sparse)} sparse features with {format_count(total)} rows in all. The bars show how often a row "
        f"is used within {window}: once, twice, 3–4 times, 5–8 and so on, from left to right. The tallest bar has "
        "its share and its uses beside it. Lookups far to the right of the rows mean that few rows take most lookups."
    )
    drawn = sorted(dataset.sparse, key=lambda feature: -feature.num_embeddings)[:MAX_DRAWN_FEATURES]
    if len(drawn) < len(dataset.sparse):
        intro += f" Of these features, the {MAX_DRAWN_FEATURES} with the most rows have bars."
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
        "summary", escape(f"{len(dataset.dense)} dense features: fill, mean and standard deviation before scaling")
    )
    return tag("details", summary, table(["feature", "fill", "mean", "std"], rows, {1, 2, 3}, "compact"))
