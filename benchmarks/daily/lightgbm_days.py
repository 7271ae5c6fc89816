"""LightGBM with its defaults on the rows of a day, and continued from the day before, in a process with one thread.

    python -m daily.lightgbm_days TRAIN NEXT MODEL [BEFORE]

Fits to TRAIN, continues the booster in the file BEFORE if it is named, and writes MODEL. Prints a JSON document with
the NE on NEXT.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
from common.lightgbm_trials import SHARED_PARAMETERS
from common.measure_command import measure_command
from common.processes import script_environment
from numpy.typing import NDArray

NUM_NUMBERS, NUM_IDS = 13, 26
"""Columns of a log in Criteo's format, after the label."""
NAMES = (*(f"int_{number}" for number in range(NUM_NUMBERS)), *(f"cat_{number}" for number in range(NUM_IDS)))
Categories = dict[str, pa.Array]
"""Texts of each column of ids, in the order of their categories."""


def measure_day(train: Path, next_day: Path, model: Path, before: Path | None) -> dict[str, Any]:
    """Fit in a process. Return its NE, times and peak memory."""
    files = [train, next_day, model, *([] if before is None else [before])]
    paths = script_environment()["PYTHONPATH"]
    measured = measure_command([sys.executable, "-m", "daily.lightgbm_days", *files], PYTHONPATH=paths)
    return {**json.loads(measured.output.splitlines()[-1]), **measured.numbers()}


def read_rows(path: Path) -> pa.Table:
    """Return the label, numbers (float64) and ids (string) of a file."""
    names = ["label", *NAMES]
    types = {name: pa.string() if name.startswith("cat") else pa.float64() for name in names}
    return pyarrow.csv.read_csv(
        path,
        read_options=pyarrow.csv.ReadOptions(column_names=names),
        parse_options=pyarrow.csv.ParseOptions(delimiter="\t"),
        convert_options=pyarrow.csv.ConvertOptions(column_types=types, strings_can_be_null=True, null_values=[""]),
    ).combine_chunks()


def add_categories(categories: Categories, rows: pa.Table) -> Categories:
    """Return `categories` with new texts of the rows at the end, so that the categories of a booster stay."""
    grown = {}
    for name in NAMES[NUM_NUMBERS:]:
        texts = pc.unique(rows[name]).drop_null()
        before = categories.get(name, pa.array([], pa.string()))
        grown[name] = pa.concat_arrays([before, texts.filter(pc.invert(pc.is_in(texts, value_set=before)))])
    return grown


def inputs_of(rows: pa.Table, categories: Categories) -> NDArray[np.float64]:
    """Return the inputs [n, 39]. Missing values and ids without a category are NaN."""
    numbers = [rows[name] for name in NAMES[:NUM_NUMBERS]]
    ids = [pc.index_in(rows[name], value_set=categories[name]).cast(pa.float64()) for name in NAMES[NUM_NUMBERS:]]
    return np.stack([pc.fill_null(column, np.nan).to_numpy() for column in (*numbers, *ids)], axis=1)


def normalized_entropy(labels: NDArray[np.float64], probabilities: NDArray[np.float64]) -> float:
    from sklearn.metrics import log_loss

    constant = np.full(len(labels), labels.mean())
    return float(log_loss(labels, probabilities) / log_loss(labels, constant))


def _categories_file(model: Path) -> Path:
    return model.with_suffix(".categories.json")


def main() -> None:
    import lightgbm

    train, next_day, model, *before = map(Path, sys.argv[1:])
    categories: Categories = {}
    if before:
        documents = json.loads(_categories_file(before[0]).read_text())
        categories = {name: pa.array(texts, pa.string()) for name, texts in documents.items()}
    rows = read_rows(train)
    categories = add_categories(categories, rows)
    _categories_file(model).write_text(json.dumps({name: texts.to_pylist() for name, texts in categories.items()}))
    training = lightgbm.Dataset(
        inputs_of(rows, categories), rows["label"].to_numpy(), params=SHARED_PARAMETERS,
        categorical_feature=[*range(NUM_NUMBERS, len(NAMES))],
    )  # fmt: skip
    booster = lightgbm.train(SHARED_PARAMETERS, training, init_model=str(before[0]) if before else None)
    booster.save_model(model)
    scored = read_rows(next_day)
    ne = normalized_entropy(scored["label"].to_numpy(), booster.predict(inputs_of(scored, categories)))
    print(json.dumps({"ne": ne, "trees": booster.num_trees()}))


if __name__ == "__main__":
    main()
