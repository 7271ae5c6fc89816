"""LightGBM with its defaults and with random settings, each in a process with one thread.

    python -m common.lightgbm_trials ROWS PARAMETERS MIN_VALID_AUC

ROWS is a file of `save_rows`, PARAMETERS a JSON document. Prints a JSON document with the results.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.measure_command import measure_command

NUM_TRIALS = 20
MAX_TREES, PATIENCE = 1000, 50
VALID_SHARE = 0.1
SHARED_PARAMETERS = {
    "objective": "binary", "metric": "auc", "verbosity": -1, "seed": 0, "num_threads": 1, "deterministic": True,
    "force_row_wise": True,
}  # fmt: skip
"""Parameters of LightGBM that are not those of a model. Runs are reproducible on one thread."""
Columns = Mapping[str, NDArray[Any]]


def _between(draw: random.Random, low: float, high: float) -> float:
    """Draw a number whose logarithm is uniform."""
    return low * (high / low) ** draw.random()


def draw_parameters(number: int) -> dict[str, Any]:
    draw = random.Random(f"lightgbm {number}")
    return {
        "num_leaves": round(_between(draw, 15, 255)),
        "learning_rate": _between(draw, 0.02, 0.2),
        "min_data_in_leaf": round(_between(draw, 5, 200)),
        "feature_fraction": draw.uniform(0.4, 1),
        "bagging_fraction": draw.uniform(0.5, 1),
        "bagging_freq": 1,
        "cat_smooth": _between(draw, 1, 200),
        "cat_l2": _between(draw, 1, 200),
    }


def valid_rows(seconds: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return the mask [n] of the last tenth in time. Rows with equal times stay together."""
    num_valid = int(len(seconds) * VALID_SHARE)
    return seconds > np.sort(seconds)[len(seconds) - num_valid - 1]


def save_rows(path: Path, train: Columns, test: Columns, ids: Sequence[str], time_column: str) -> None:
    """Write the inputs [n, number of columns + 2] and labels of the splits.

    Columns have ids (-1 if missing), numbers (NaN if missing), `label`, and seconds in `time_column`. Ids become
    categories of the training rows, the time its hour, weekday and age. Missing and unseen values are NaN.
    """
    origin = int(train[time_column].min())
    categories = {name: np.unique(train[name][train[name] >= 0]) for name in ids}
    numbers = [name for name in train if name not in {*ids, time_column, "label"}]

    def inputs(columns: Columns) -> NDArray[np.float32]:
        seconds = columns[time_column]
        parts = [_codes(columns[name], categories[name]) for name in ids] + [columns[name] for name in numbers]
        parts += [seconds // 3600 % 24, seconds // 86_400 % 7, (seconds - origin) / 86_400]
        return np.stack(parts, axis=1).astype(np.float32)

    rows, is_valid = inputs(train), valid_rows(train[time_column])
    splits = {
        "train": (rows[~is_valid], train["label"][~is_valid]),
        "valid": (rows[is_valid], train["label"][is_valid]),
        "test": (inputs(test), test["label"]),
    }
    arrays = {f"{name}_{part}": array for name, pair in splits.items() for part, array in zip("xy", pair, strict=True)}
    np.savez(path, num_ids=len(ids), **arrays)


def _codes(ids: NDArray[np.int64], categories: NDArray[np.int64]) -> NDArray[np.float64]:
    places = np.minimum(np.searchsorted(categories, ids), len(categories) - 1)
    return np.where(categories[places] == ids, places, np.nan)


def run_trial(rows: Path, parameters: Mapping[str, Any], min_valid_auc: float) -> dict[str, Any]:
    """Fit in a process. Test rows are predicted if the validation AUC is at least `min_valid_auc`.

    `processor_s` leaves out the time for predicting the test rows.
    """
    document = json.dumps(parameters)
    command = [sys.executable, "-m", "common.lightgbm_trials", rows, document, min_valid_auc]
    measured = measure_command(command, PYTHONPATH=str(Path(__file__).parents[1]))
    result = json.loads(measured.output.splitlines()[-1])
    numbers = measured.numbers()
    return {**result, **numbers, "processor_s": numbers["processor_s"] - result["test_processor_s"]}


def fit(path: Path, parameters: Mapping[str, Any], min_valid_auc: float) -> dict[str, Any]:
    """Fit with `parameters` and early stopping, or with the defaults if there are none. Return AUCs and times."""
    import lightgbm
    from sklearn.metrics import roc_auc_score

    arrays = np.load(path)
    start_s = time.process_time()
    categorical = [*range(int(arrays["num_ids"]))]
    shared: dict[str, Any] = SHARED_PARAMETERS
    training = lightgbm.Dataset(arrays["train_x"], arrays["train_y"], categorical_feature=categorical, params=shared)
    if parameters:
        valid = lightgbm.Dataset(arrays["valid_x"], arrays["valid_y"], reference=training)
        stop = lightgbm.early_stopping(PATIENCE, verbose=False)
        booster = lightgbm.train(
            {**shared, **parameters}, training, num_boost_round=MAX_TREES, valid_sets=[valid], callbacks=[stop]
        )
    else:
        booster = lightgbm.train(shared, training)
    auc = lambda split: float(roc_auc_score(arrays[f"{split}_y"], booster.predict(arrays[f"{split}_x"])))  # noqa: E731
    result: dict[str, Any] = {"valid": auc("valid"), "trees": booster.best_iteration or booster.num_trees()}
    result["fit_processor_s"] = time.process_time() - start_s
    start_s = time.process_time()
    if result["valid"] >= min_valid_auc:
        result["test"] = auc("test")
    return {**result, "test_processor_s": time.process_time() - start_s}


def main() -> None:
    path, document, min_valid_auc = sys.argv[1:]
    print(json.dumps(fit(Path(path), json.loads(document), float(min_valid_auc))))


if __name__ == "__main__":
    main()
