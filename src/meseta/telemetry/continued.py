"""Typed records of a run that continues from another run: its measurements on the new rows."""

from __future__ import annotations

from pydantic import Field

from meseta.telemetry.metrics_file import Count, Entry, EvalMetrics


class BinnedMetrics(EvalMetrics):
    """Metrics over a set of samples whose AUC may be binned."""

    auc_error_bound: float | None = None
    """Maximum difference between `auc` and the exact AUC. `None` if `auc` is exact."""


class GroupMetrics(BinnedMetrics):
    """Metrics over a group of samples, for the first label."""

    tasks: dict[str, BinnedMetrics] = Field(default={})
    """Metrics by label, if there are several."""


class EpochMetricsRecord(Entry):
    """Metrics over the new rows, also by group. The groups of each kind add up to all rows."""

    total: GroupMetrics
    with_new_ids: GroupMetrics | None = None
    """Samples in which at least one id is new. `None` if new ids are unknown."""
    without_new_ids: GroupMetrics | None = None
    by_hour: dict[str, GroupMetrics] = Field(default={})
    """Metrics by UTC hour, such as 2026-11-27T14, in ascending order. Rows of more hours than `MAX_HOURS` are grouped
    by hour of the day, such as 14. Rows without a time have the key `unknown`. Empty if there are no times."""
    time_s: float | None = None
    """Seconds of the evaluation. `None` for metrics of training."""


class DenseDrift(Entry):
    """Change of a dense column, as it is encoded: the logarithm of its values."""

    mean_shift: float
    """Mean of the new rows minus that of the encoding, in standard deviations of the encoding."""
    std_ratio: float
    """Standard deviation of the new rows divided by that of the encoding."""
    fill_share: float
    """Share of rows that are encoded like a missing value: missing, 0, or negative in an unsigned column."""
    fill_share_before: float | None = None
    """`fill_share` of the parent's rows. `None` if the parent did not measure it."""


class SparseDrift(Entry):
    """Change of a sparse column."""

    new_row_share: float
    """Share of rows with a value that is new to the parent."""
    new_lookup_share: float
    """Share of lookups of values that are new to the parent."""
    num_lookups: Count
    num_added: Count
    """Number of table rows that the new rows look up and that the parent never did."""
    num_retired: Count = 0
    """Number of table rows whose values were retired."""


class LabelDrift(Entry):
    """Change of the rate of a label."""

    rate: float
    rate_before: float
    """Rate in the rows on which the parent was trained."""


class DriftRecord(Entry):
    """Changes of the new rows since those of the parent."""

    num_rows: Count
    dense: dict[str, DenseDrift] = Field(default={})
    sparse: dict[str, SparseDrift] = Field(default={})
    labels: dict[str, LabelDrift] = Field(default={})
    large: tuple[str, ...] = ()
    """One line for each large change, see `meseta.train.daily.drift`."""


class ContinuedSummary(Entry):
    """Parent of a run, and measurements on the new rows."""

    parent: str
    """Run folder or checkpoint that the run started from."""
    checkpoint: str | None = None
    """Checkpoint of the parent."""
    test_first: EpochMetricsRecord | None = None
    """Metrics of the parent on all new rows. `None` for `train.test_first: false`."""
    progressive: EpochMetricsRecord | None = None
    """Metrics of the predictions that were made before the update of each step, on the rows that were trained on."""
    drift: DriftRecord | None = None


class SourceRecord(Entry):
    """File whose rows a run was trained on."""

    path: str
    num_rows: Count | None = None
    sha256: str | None = Field(default=None, pattern="^[0-9a-f]{64}$")
    """Checksum of the file. `None` if it was not computed."""


class HistoryLine(Entry):
    """Run of a chain in which each run continues from the previous one."""

    run: str
    """Name of the run folder."""
    data: str | None = None
    """Folder of the dataset."""
    sources: tuple[SourceRecord, ...] = ()
    num_rows: Count | None = None
    """Number of training rows."""
    num_steps: Count | None = None
    seconds: float | None = None
    """Seconds of training."""
    finished_at: str | None = None
    """UTC time at which the run ended, as 2026-11-27T14:03:59Z."""
    evaluation: EvalMetrics | None = None
    """Final evaluation on a split of the run's own data. `None` if it has none."""
    test_first: EpochMetricsRecord | None = None
    progressive: EpochMetricsRecord | None = None
    drift: DriftRecord | None = None
