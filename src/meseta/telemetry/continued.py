"""Typed records of a run that continues from another run."""

from __future__ import annotations

from pydantic import Field

from meseta.telemetry.metrics_file import Count, Entry, EvalMetrics


class BinnedMetrics(EvalMetrics):
    """Metrics with a possibly binned AUC."""

    auc_error_bound: float | None = None
    """Maximum error of a binned `auc`. `None` if it is exact."""


class GroupMetrics(BinnedMetrics):
    """Metrics of the first label over a group of samples."""

    tasks: dict[str, BinnedMetrics] = Field(default={})


class EpochMetricsRecord(Entry):
    """Metrics over the new rows, in total and by group."""

    total: GroupMetrics
    with_new_ids: GroupMetrics | None = None
    """Samples with at least one new id."""
    without_new_ids: GroupMetrics | None = None
    by_hour: dict[str, GroupMetrics] = Field(default={})
    """Metrics by UTC hour, such as 2026-11-27T14, or by hour of the day, such as 14. Rows without a time have the key
    `unknown`."""
    time_s: float | None = None


class DenseDrift(Entry):
    """Change of an encoded dense column."""

    mean_shift: float
    """Shift in standard deviations."""
    std_ratio: float
    fill_share: float
    """Share of rows encoded like a missing value, also those with 0."""
    fill_share_before: float | None = None


class SparseDrift(Entry):
    """Change of a sparse column."""

    new_row_share: float
    new_lookup_share: float
    num_lookups: Count
    num_added: Count
    """Number of looked-up new table rows."""
    num_retired: Count = 0


class LabelDrift(Entry):
    """Change of the rate of a label."""

    rate: float
    rate_before: float


class DriftRecord(Entry):
    """Changes since the rows of the parent."""

    num_rows: Count
    dense: dict[str, DenseDrift] = Field(default={})
    sparse: dict[str, SparseDrift] = Field(default={})
    labels: dict[str, LabelDrift] = Field(default={})
    large: tuple[str, ...] = ()
    """One line per large change."""


class ContinuedSummary(Entry):
    """Parent of a run, and metrics on its new rows."""

    parent: str
    checkpoint: str | None = None
    test_first: EpochMetricsRecord | None = None
    progressive: EpochMetricsRecord | None = None
    """Metrics of predictions made before each update."""
    drift: DriftRecord | None = None


class SourceRecord(Entry):
    """File of training rows."""

    path: str
    num_rows: Count | None = None
    sha256: str | None = Field(default=None, pattern="^[0-9a-f]{64}$")


class HistoryLine(Entry):
    """Run of a chain."""

    run: str
    data: str | None = None
    sources: tuple[SourceRecord, ...] = ()
    num_rows: Count | None = None
    num_steps: Count | None = None
    seconds: float | None = None
    finished_at: str | None = None
    """UTC time, such as 2026-11-27T14:03:59Z."""
    evaluation: EvalMetrics | None = None
    test_first: EpochMetricsRecord | None = None
    progressive: EpochMetricsRecord | None = None
    drift: DriftRecord | None = None
