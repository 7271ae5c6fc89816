"""A run trained on one day, and the rows of the next day with new ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from meseta.data.dataset.dataset import Dataset
from meseta.data.prepare import PrepareOptions, prepare
from meseta.data.prepare.prepare_like import PrepareLikeOptions, prepare_like
from small_run import settings, train

SCHEMA = "label: click\ntime: ts\ndense: [price, clicks]\ncategorical: [user, city, tags]\nmulti_valued: {tags: ' '}\n"


def draw_day(day: int, num_rows: int = 600) -> pd.DataFrame:
    """Return raw rows. Users and tags of later days are partly new, and prices rise."""
    draw = np.random.default_rng(day)
    price = draw.lognormal(2 + day, 1, num_rows)
    return pd.DataFrame(
        {
            "click": (draw.random(num_rows) < 0.2 + 0.2 * day).astype(int),
            "ts": 1.7e9 + 86400 * day + np.arange(num_rows) * 20,
            "price": np.where(draw.random(num_rows) < 0.1, np.nan, price),
            "clicks": draw.poisson(1, num_rows),
            "user": [f"u{day * 20 + k}" for k in draw.integers(0, 60, num_rows)],
            "city": [f"c{k}" for k in draw.integers(0, 8, num_rows)],
            "tags": [
                " ".join(f"t{day * 5 + k}" for k in draw.integers(0, 15, size))
                for size in draw.integers(0, 4, num_rows)
            ],
        }
    )


class Days(NamedTuple):
    """Run of the first day, and two datasets of the second day."""

    run: Path
    raw: pd.DataFrame
    raw_path: Path
    like: Dataset
    """Second day as the run encodes it, in the split test."""
    grown: Dataset
    """Second day in the split train, in which new users and tags have rows."""
    masks: dict[str, NDArray[np.bool_]]
    """New rows of `grown`."""


def make_days(folder: Path, **changes: Any) -> Days:
    days = [draw_day(0), draw_day(1)]
    for number, rows in enumerate(days):
        rows.to_csv(folder / f"day{number}.csv", index=False)
    (folder / "schema.yaml").write_text(SCHEMA)
    prepare(
        PrepareOptions(
            sources=[str(folder / "day0.csv")], out=folder / "data0", schema=folder / "schema.yaml", vocabulary=True,
            min_count=1, test_fraction=0.2,
        )
    )  # fmt: skip
    train(settings(folder / "data0", folder / "run", train__max_steps=3, **changes))
    raw_path = folder / "day1.csv"
    like, _ = prepare_like(PrepareLikeOptions(sources=[str(raw_path)], out=folder / "like", like=folder / "run"))
    return Days(folder / "run", days[1], raw_path, like, *_grow(like, days[1], folder / "grown"))


def _grow(like: Dataset, raw: pd.DataFrame, out: Path) -> tuple[Dataset, dict[str, NDArray[np.bool_]]]:
    """Write the rows of `like` with new rows for unknown users and tags, except for the last new value of each."""
    table = pq.read_table([like.resolve_file(file.path) for file in like.splits["test"].files])
    document = like.to_dict()
    masks = {}
    for feature in document["sparse"]:
        name, before = feature["name"], feature["num_embeddings"]
        column = table[name].to_pylist()
        bags = column if feature["multi_valued"] else [[id] for id in column]
        values = [text.split() if text else [] for text in raw[name].fillna("")]
        assert [len(bag) for bag in bags] == [len(texts) for texts in values]
        unknown = {
            v: None for bag, texts in zip(bags, values, strict=True) for id, v in zip(bag, texts, strict=True) if not id
        }
        numbers = {value: before + place for place, value in enumerate([*unknown][:-1])}
        grown = [
            [id or numbers.get(v, 0) for id, v in zip(bag, texts, strict=True)]
            for bag, texts in zip(bags, values, strict=True)
        ]
        place = table.schema.get_field_index(name)
        ids = grown if feature["multi_valued"] else [id for [id] in grown]
        table = table.set_column(place, name, pa.array(ids, table.schema.field(name).type))
        feature["num_embeddings"] = before + len(numbers)
        masks[name] = np.arange(before + len(numbers)) >= before
    (out / "train").mkdir(parents=True)
    pq.write_table(table, out / "train" / "0.parquet", row_group_size=170)
    split = document["splits"].pop("test")
    document["splits"]["train"] = {**split, "files": [{"path": "train/0.parquet", "num_rows": len(table)}]}
    (out / "dataset.json").write_text(json.dumps(document))
    return Dataset.load(out), masks
