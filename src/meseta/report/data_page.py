"""HTML page about a prepared dataset."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime

import numpy as np

from meseta.data.dataset.dataset import Dataset
from meseta.data.dataset.describe import DatasetSummary, DenseSummary, SparseSummary, SplitSummary, ValueSummary
from meseta.data.schema.layout import signed_expm1, signed_log1p
from meseta.report.charts.chart import histogram, reuse_histogram
from meseta.report.charts.markup import escape, html_document, table, tag
from meseta.telemetry.formatting import NO_VALUE, format_count, format_percent, format_quantity, format_si

MIN_MARKED_SHIFT = 0.1
"""Smallest shift between training and test split for which a dense feature is highlighted, in standard deviations."""
MIN_MARKED_UNSEEN_SHARE = 0.1
"""Smallest share of test lookups with ids that do not occur in training for which a sparse feature is highlighted."""


def data_page(name: str, dataset: Dataset, description: DatasetSummary) -> str:
    """Return the HTML page about the dataset `name`."""
    sections = [
        ("Splits", _splits_table(dataset, description)),
        ("Dense features", _dense_table(description)),
        ("Sparse features", _sparse_table(dataset, description)),
        ("Most frequent ids", _top_ids_table(description)),
    ]
    body = [_header(name, dataset), _tiles(description)]
    for title, content in sections:
        if content:
            body.append(tag("section", tag("h2", escape(title)), content, id=title.lower().replace(" ", "-")))
    return html_document(f"{name}: Meseta data", *body)


_ENCODING_LABELS = {
    "hash": "hashed ids",
    "vocabulary": "vocabularies",
    "buckets": "buckets of numbers",
    "hour": "hours",
    "weekday": "weekdays",
}


def _header(name: str, dataset: Dataset) -> str:
    encodings = sorted({feature.encoding for feature in dataset.sparse})
    facts = [
        format_quantity(len(dataset.dense), "dense feature"),
        format_quantity(len(dataset.sparse), "sparse feature"),
        *(_ENCODING_LABELS[encoding] for encoding in encodings),
        "weighted samples" if dataset.weight else None,
        f"grouped by {dataset.group}" if dataset.group else None,
        format_quantity(len(dataset.sources), "source file") if dataset.sources else None,
    ]
    return tag(
        "header", tag("h1", escape(name)), tag("p", escape(" · ".join(fact for fact in facts if fact)), class_="facts")
    )


def _tiles(description: DatasetSummary) -> str:
    splits, sparse = description.splits, description.sparse
    num_rows = sum(split.num_rows for split in splits.values())
    table_rows, used = sum(f.num_embeddings for f in sparse), sum(f.num_uniques for f in sparse)
    unseen = [f.unseen_lookups for f in sparse if f.unseen_lookups is not None]
    shown = [("rows", format_si(num_rows), ", ".join(f"{format_si(s.num_rows)} {name}" for name, s in splits.items()))]
    train = splits.get("train")
    for label in train.labels if train else ():
        assert train is not None
        shown.append((f"{label} rate", _positive_rate(train, label), "in training"))
    if sparse:
        shown.append(
            ("table rows", format_si(table_rows), f"{format_percent(used / max(table_rows, 1))} of them occur")
        )
        shown.append(("ids per sample", f"{sum(f.mean_pooling_factor for f in sparse):.3g}", "sum over all features"))
    if unseen:
        shown.append(("new in test", format_percent(sum(unseen) / len(unseen)), "mean over features"))
    ranges = [split.time_range for split in splits.values() if split.time_range]
    if ranges:
        low, high = min(first for first, _ in ranges), max(last for _, last in ranges)
        shown.append(("time", _format_time_span(high - low), f"from {_format_utc(low)}"))
    return tag(
        "div",
        *(
            tag(
                "div",
                tag("div", escape(name), class_="tile-name"),
                tag("div", escape(value), class_="tile-value"),
                tag("div", escape(note), class_="tile-note"),
                class_="tile",
            )
            for name, value, note in shown
        ),
        class_="tiles",
    )


def _splits_table(dataset: Dataset, description: DatasetSummary) -> str:
    header = ["split", "rows", "files"]
    for label in dataset.label_columns:
        header += [f"{label}: sum", "rate"]
    rows = []
    for name, split in description.splits.items():
        row = [escape(name), format_count(split.num_rows), format_count(len(dataset.splits[name].files))]
        for label in dataset.label_columns:
            row += [format_count(split.labels[label]), escape(_positive_rate(split, label))]
        rows.append(row)
    return table(header, rows, set(range(1, len(header))), "compact unbroken") + _samples_table(dataset, description)


def _samples_table(dataset: Dataset, description: DatasetSummary) -> str:
    """Return a table of weights, groups and times, or an empty string if the samples have none of them."""
    header = ["split"]
    header += ["mean weight", "weights", "weight 0"] if dataset.weight else []
    header += [f"groups of {dataset.group}", "rows of the largest"] if dataset.group else []
    header += ["first (UTC)", "last (UTC)"] if dataset.time else []
    rows = []
    for name, split in description.splits.items():
        row = [escape(name)]
        if split.weights is not None:
            w = split.weights
            row += [
                escape(f"{w.mean:.4g}"),
                escape(f"{w.min:.4g} to {w.max:.4g}"),
                escape(format_percent(w.share_zero)),
            ]
        if split.num_groups is not None:
            row += [format_count(split.num_groups), format_count(split.max_group_rows)]
        if dataset.time:
            row += [escape(_format_utc(moment)) for moment in split.time_range or (math.nan, math.nan)]
        rows.append(row)
    shown = table(header, rows, set(range(1, len(header))), "compact unbroken")
    return tag("h3", "Samples") + shown if len(header) > 1 else ""


def _dense_table(description: DatasetSummary) -> str:
    if not description.dense:
        return ""
    intro = (
        "Values of all splits in the unit of the source. Missing values count as zero, and so do negative values of "
        "unsigned features. The bars are equal intervals of log(1 + x) from the smallest to the largest value. Shift: "
        "mean of log(1 + x) in the test split minus that in the training split, in standard deviations. It is "
        f"highlighted from {MIN_MARKED_SHIFT}."
    )
    header = ["feature", "distribution", "zero or missing", "mean", "std", "least", "largest", "shift"]
    rows = [_dense_row(feature) for feature in description.dense]
    return tag("p", escape(intro)) + table(header, rows, {2, 3, 4, 5, 6, 7}, "features")


def _dense_row(feature: DenseSummary) -> list[str]:
    v, shift = feature.values, feature.test_shift
    return [
        escape(feature.name),
        _distribution(v, feature.bins),
        escape(format_percent(v.share_zero)),
        *(escape(_format_value(x)) for x in (v.mean, v.std, v.min, v.max)),
        escape(NO_VALUE)
        if shift is None
        # Adding 0.0 turns -0.0 into 0.0, so that the text is "+0.000".
        else _highlight(f"{round(shift, 3) + 0.0:+.3f}", abs(shift) >= MIN_MARKED_SHIFT),
    ]


def _distribution(values: ValueSummary, bins: Sequence[int]) -> str:
    if values.max <= values.min:
        return escape("one value")
    # `bins` are equal intervals of the signed logarithm, so their edges are transformed back to values.
    low, high = signed_log1p(np.array([values.min, values.max]))
    edges, total = signed_expm1(np.linspace(low, high, len(bins) + 1)), max(sum(bins), 1)
    hovers = [
        f"{format_percent(n / total)}: {_format_value(edges[i])} to {_format_value(edges[i + 1])}"
        for i, n in enumerate(bins)
    ]
    return histogram("Distribution", [float(n) for n in bins], hovers, "bar-lookups", ("", ""))


def _sparse_table(dataset: Dataset, description: DatasetSummary) -> str:
    if not description.sparse:
        return ""
    window = f"{description.sparse[0].reuse.window_samples:,}"
    intro = (
        "Statistics of the training split. Used: share of the table's rows that occur. Top: shares of the lookups that "
        "belong to the most frequent id, the 10 most frequent and the 100 most frequent ids. Half: smallest number of "
        "ids that have half of the lookups. New in test: share of the test split's lookups whose ids do not occur in "
        f"training. It is highlighted from {format_percent(MIN_MARKED_UNSEEN_SHARE)}. The bars are shares of lookups "
        f"by how often their row is used within {window} samples: once, twice, 3–4 times, 5–8 times and so on. The "
        "numbers next to the bars are the share and the uses of the tallest bar."
    )
    header = ["feature", "ids", "rows", "distinct", "used", "ids per sample", "top 1", "top 10", "top 100", "half",
              "new in test", "share of lookups by uses"]  # fmt: skip
    kinds = {f.name: ["multi-valued" * f.multi_valued, "weighted" * f.weighted] for f in dataset.sparse}
    encodings = {f.name: f.encoding for f in dataset.sparse}
    rows = [_sparse_row(f, ", ".join(filter(None, [encodings[f.name], *kinds[f.name]]))) for f in description.sparse]
    return tag("p", escape(intro)) + table(header, rows, set(range(2, 11)), "features narrow")


def _sparse_row(feature: SparseSummary, kind: str) -> list[str]:
    reuse = feature.reuse
    new = feature.unseen_lookups
    pooling = f"{feature.mean_pooling_factor:.3g}"
    if feature.share_empty:
        pooling += f", {format_percent(feature.share_empty)} empty"
    return [
        escape(feature.name),
        escape(kind),
        format_count(feature.num_embeddings),
        format_count(feature.num_uniques),
        # A table with used rows must not appear unused.
        escape("<0.01%" if 0 < feature.coverage < 1e-4 else format_percent(feature.coverage)),
        escape(pooling),
        *(escape(format_percent(value)) for value in feature.top_shares),
        format_count(feature.num_half),
        escape(NO_VALUE) if new is None else _highlight(format_percent(new), new >= MIN_MARKED_UNSEEN_SHARE),
        reuse_histogram(reuse, reuse.lookups, "lookups", "bar-lookups"),
    ]


def _top_ids_table(description: DatasetSummary) -> str:
    if not description.sparse:
        return ""
    rows = []
    for feature in description.sparse:
        cells = []
        for top in feature.top:
            name = f"row {top.id}" if top.value is None else top.value
            # Values of a vocabulary may be long texts.
            name = name if len(name) <= 28 else f"{name[:27]}…"
            cells.append(
                escape(name) + " " + tag("small", escape(format_percent(top.count / max(feature.num_lookups, 1))))
            )
        rows.append([escape(feature.name), *cells, *[""] * (5 - len(cells))])
    note = (
        "The five most frequent ids with their shares of the training lookups. Hashed ids are shown as rows. Row 0 of "
        "a vocabulary is the row of all values that it does not contain."
    )
    return tag("p", escape(note)) + table(["feature", "1", "2", "3", "4", "5"], rows, set(), "features")


def _highlight(shown: str, is_marked: bool) -> str:
    return tag("b", escape(shown), class_="marked") if is_marked else escape(shown)


def _positive_rate(split: SplitSummary, label: str) -> str:
    rate = split.base_rates[label]
    return NO_VALUE if rate is None else f"{100 * rate:.2f}%"


def _format_value(value: float) -> str:
    # Large values have no decimals, and other values four significant digits.
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"


def _format_utc(seconds: float) -> str:
    """Format a time in seconds since 1970-01-01 as UTC with minutes. Times beyond the calendar are shown in seconds."""
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M")
    except (ValueError, OverflowError, OSError):
        return NO_VALUE if math.isnan(seconds) else f"{seconds:.6g} s"


def _format_time_span(seconds: float) -> str:
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.3g} {unit}"
    return f"{seconds:.3g} s"
