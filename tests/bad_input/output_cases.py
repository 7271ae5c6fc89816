"""Bad inputs of docs/errors.md that concern predictions, exports and their import."""

from __future__ import annotations

import shutil
from typing import Any
from zipfile import ZipFile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from bad_input.cases import Place, cut
from meseta import checkpoint
from meseta.data.dataset.dataset import Dataset
from meseta.data.dataset.statistics import read_touched
from meseta.data.hash_categories import hash_to_rows
from small_run import settings, write_config


def predict_columns(place: Place, columns: str, *options: str) -> list[Any]:
    return ["predict", place.run(), "--out", place.folder / "p.csv", "--columns", columns, *options]


def output_column_of_no_name(place: Place) -> list[Any]:
    return predict_columns(place, "user,score=")


def output_columns_of_one_name(place: Place) -> list[Any]:
    return predict_columns(place, "user,user=item")


def unknown_output_column(place: Place) -> list[Any]:
    return predict_columns(place, "score=predicton")


def unknown_output_label(place: Place) -> list[Any]:
    return predict_columns(place, "score=prediction.click")


def key_without_a_column(place: Place) -> list[Any]:
    return predict_columns(place, "user", "--keys", "item")


def unseen_values(place: Place) -> list[Any]:
    """Write 1,000 users whose hashes are rows that no training row looks up."""
    run = Dataset.load(place.run())
    user = next(feature for feature in run.sparse if feature.name == "user")
    names = pa.array([f"u{number}" for number in range(20_000)])
    rows = hash_to_rows(names, user.num_embeddings, int(user.hash_seed or "", 16))
    is_seen = np.unpackbits(read_touched(run)["user"], bitorder="little")[rows]
    table = pq.read_table(place.tiny.with_name("tiny.parquet")).slice(0, 1000)
    users = names.filter(pa.array(is_seen == 0))[:1000]
    at = table.schema.get_field_index("user")
    pq.write_table(table.set_column(at, "user", users), place.folder / "new.parquet")
    return ["predict", run.dir, "--out", place.folder / "p.csv", "--data", place.folder / "new.parquet"]


def option_of_raw_files(place: Place) -> list[Any]:
    return ["predict", place.run(), "--out", place.folder / "p.csv", "--allow-unseen"]


def key_that_doubles_lose(place: Place) -> list[Any]:
    rows = pq.read_table(place.tiny.parent / "tiny.parquet").slice(0, 50)
    command = ["predict", place.run(), "--out", place.folder / "p.csv", "--keys", "order"]
    for name, orders in (("a", [2**53 + 1] * 50), ("b", [0.5] * 50)):
        pq.write_table(rows.append_column("order", [orders]), place.folder / f"{name}.parquet")
        command += ["--data", place.folder / f"{name}.parquet"]
    return command


def import_export(place: Place, *options: str, states: bool = False, table: str = "*") -> list[Any]:
    """Return `meseta checkpoint import` of an export."""
    checkpoint.export(
        checkpoint.find_checkpoint(place.run()), place.folder / "out", "numpy", tables=[table], states=states
    )
    shutil.rmtree(place.folder / "run")
    return [*_import(place), *options]


def _import(place: Place) -> list[Any]:
    config = write_config(place.folder / "c.yaml", settings(place.tiny, place.folder / "run"))
    return ["checkpoint", "import", place.folder / "out", "--from", "meseta", "--config", config]


def no_export(place: Place) -> list[Any]:
    (place.folder / "out").mkdir()
    return _import(place)


def export_of_another_version(place: Place) -> list[Any]:
    command = import_export(place)
    (place.folder / "out/export.json").write_text('{"format": "meseta.export/9"}')
    return command


def malformed_export(place: Place) -> list[Any]:
    command = import_export(place)
    (place.folder / "out/export.json").write_text('{"format": "meseta.export/1", "step": "1"}')
    return command


def export_without_states(place: Place) -> list[Any]:
    return import_export(place, "--states")


def export_of_some_tables(place: Place) -> list[Any]:
    return import_export(place, table="user")


def damaged_export(place: Place) -> list[Any]:
    command = import_export(place)
    cut(place.folder / "out/tables/user/row.npy")
    return command


def export_with_other_moments(place: Place) -> list[Any]:
    command = import_export(place, "--states", states=True)
    with ZipFile(place.folder / "out/dense.npz", "a") as archive, archive.open("optimizer.x.exp_avg.npy", "w") as file:
        np.lib.format.write_array(file, np.zeros(2, np.float32))
    return command


def export_by_another_name(place: Place) -> list[Any]:
    return [word if word != "meseta" else "torch" for word in import_export(place)]


PREDICTING = (output_column_of_no_name, output_columns_of_one_name, unknown_output_column, unknown_output_label)
PREDICTING += (key_without_a_column, unseen_values, option_of_raw_files)
SCORING = (key_that_doubles_lose,)
"""Predictions of raw rows. The launcher ends the other ranks."""
IMPORTING = (no_export, export_of_another_version, malformed_export, export_without_states, export_of_some_tables)
IMPORTING += (damaged_export, export_with_other_moments, export_by_another_name)
