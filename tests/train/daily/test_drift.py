"""Drift of new rows against pandas."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from meseta.comm import World
from meseta.data.dataset.dataset import Dataset
from meseta.spec import MesetaError
from meseta.telemetry.continued import DenseDrift, DriftRecord
from meseta.train.daily.drift import measure_drift
from meseta.train.daily.new_ids import NewIds
from train.daily.day_cases import Days, make_days


@pytest.fixture(scope="module")
def days(tmp_path_factory: pytest.TempPathFactory) -> Days:
    return make_days(tmp_path_factory.mktemp("days"))


def measure(days: Days, **options: Any) -> Any:
    parent = Dataset.load(days.run)
    return measure_drift(days.grown, parent, NewIds(days.grown, days.masks), World.single(), {"user": 3}, **options)


def test_changes_equal_pandas(days: Days) -> None:
    record, unseen = measure(days)
    parent, raw = Dataset.load(days.run), days.raw
    assert record.num_rows == len(raw)
    for feature in parent.dense:
        logs = (np.log1p(raw[feature.name].fillna(0)) - feature.mean) / feature.std
        assert record.dense[feature.name].mean_shift == pytest.approx(logs.mean(), abs=1e-6)
        assert record.dense[feature.name].std_ratio == pytest.approx(logs.std(ddof=0), abs=1e-6)
        fills = raw[feature.name].isna() | (raw[feature.name] == 0)
        assert record.dense[feature.name].fill_share == fills.mean()
    rates = record.labels["label"]
    assert (rates.rate, rates.rate_before) == (raw["click"].mean(), parent.splits["train"].base_rates[""])
    first = {
        name: {text for row in rows for text in row.split()}
        for name, rows in ((n, read_first_day(days, n)) for n in ("user", "city", "tags"))
    }
    for name, known in first.items():
        bags = [text.split() for text in raw[name].fillna("")]
        new = [[value not in known for value in bag] for bag in bags]
        change = record.sparse[name]
        assert change.num_lookups == sum(map(len, bags))
        assert change.new_row_share == np.mean([any(bag) for bag in new])
        assert change.new_lookup_share == sum(map(sum, new)) / change.num_lookups
        num_new = len({value for bag in bags for value in bag if value not in known})
        assert change.num_added == max(num_new - 1, 0)  # The last one has no row.
        assert change.num_retired == (3 if name == "user" else 0)
        assert unseen.unseen_counts[name] == sum(map(sum, new))


def read_first_day(days: Days, name: str) -> list[str]:
    """Return the texts of the training rows, by the vocabulary of the run."""
    [feature] = [feature for feature in Dataset.load(days.run).sparse if feature.name == name]
    assert feature.vocabulary is not None
    values = pq.read_table(days.run / feature.vocabulary)["value"].to_pylist()
    return [value.decode() if isinstance(value, bytes) else value for value in values if value is not None]


def test_large_changes_are_one_line_each(days: Days) -> None:
    earlier = DriftRecord(num_rows=1, dense={"price": DenseDrift(mean_shift=0.0, std_ratio=1.0, fill_share=0.5)})
    record, _ = measure(days, before=earlier)
    assert [line for line in record.large if "user" not in line and "tags" not in line] == [
        f"the mean of 'price' has shifted by {record.dense['price'].mean_shift:+.2f} standard deviations",
        f"the share of rows in which 'price' is missing or 0 is {record.dense['price'].fill_share:.0%}, before 50%",
        f"the rate of label 'label' is {record.labels['label'].rate:.4g}, "
        f"before {record.labels['label'].rate_before:.4g}",
    ]
    assert record.dense["price"].fill_share_before == 0.5
    assert not any("\n" in line for line in record.large)


def test_the_first_day_has_not_changed(days: Days) -> None:
    parent = Dataset.load(days.run.with_name("data0"))
    record, unseen = measure_drift(parent, parent, NewIds(parent, {}), World.single(), {})
    assert record.large == ()
    assert all(abs(change.mean_shift) < 1e-6 for change in record.dense.values())
    assert record.sparse == {}
    assert unseen.uncounted_features == ("user", "city", "tags")


def test_values_that_are_spelled_differently(days: Days) -> None:
    """The rule of `meseta predict` with the name of another command."""
    masks = {name: np.ones_like(mask) for name, mask in days.masks.items()}
    parent = Dataset.load(days.run)
    many = days.grown.model_copy(
        update={
            "splits": {
                "train": days.grown.splits["train"].model_copy(
                    update={"files": days.grown.splits["train"].files * 2, "num_rows": 1200}
                )
            }
        }
    )
    _, unseen = measure_drift(many, parent, NewIds(many, masks), World.single(), {})
    with pytest.raises(MesetaError, match=r"^train: 100\.00% of the .* or train with --allow-unseen"):
        unseen.check("train")


def test_a_damaged_file_is_named(days: Days, tmp_path: Path) -> None:

    shutil.copytree(days.grown.dir, tmp_path / "copy")
    damaged = Dataset.load(tmp_path / "copy")
    (tmp_path / "copy/train/0.parquet").write_bytes(b"PAR1")
    with pytest.raises(MesetaError, match=r"0\.parquet"):
        measure_drift(damaged, damaged, NewIds(damaged, {}), World.single(), {})
