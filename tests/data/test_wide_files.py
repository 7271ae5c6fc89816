"""Files with thousands of columns, and names that no table can have: refused before any work, or prepared and read."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from meseta.data.dataset.dataset import Dataset
from meseta.data.dataset.statistics import (
    MAX_CATEGORICAL_FEATURES,
    MAX_DENSE_BYTES,
    MAX_DENSE_VALUES,
    MAX_SPARSE_BYTES,
    MAX_SPARSE_VALUES,
)
from meseta.data.prepare import PrepareOptions, prepare
from meseta.spec import MesetaError
from meseta.system.files import count_json_values


def write_wide(path: Path, num_columns: int) -> None:
    names = [f"column{place}" for place in range(num_columns)]
    rows = [[str(row % 2), *(f"v{row}" for _ in names)] for row in range(4)]
    path.write_text("\n".join(map(",".join, [["label", *names], *rows])) + "\n")


def refuse(folder: Path, message: str, source: str, **options: object) -> None:
    with pytest.raises(MesetaError, match=message):
        prepare(PrepareOptions(sources=[str(folder / source)], out=folder / "out", test_fraction=0.0, **options))
    assert not list(folder.glob("out*"))


def test_too_many_columns(tmp_path: Path) -> None:
    write_wide(tmp_path / "wide.csv", 16_000)
    refuse(tmp_path, "0 numeric and 16,000 categorical features are too many for one dataset", "wide.csv")


@pytest.mark.soak
def test_as_many_columns_as_are_stated(tmp_path: Path) -> None:
    write_wide(tmp_path / "wide.csv", MAX_CATEGORICAL_FEATURES)
    prepare(PrepareOptions(sources=[str(tmp_path / "wide.csv")], out=tmp_path / "out", test_fraction=0.0))
    assert len(Dataset.load(tmp_path / "out").sparse) == MAX_CATEGORICAL_FEATURES


def test_features_take_no_more_than_is_counted(tiny: Path) -> None:
    document = json.loads((tiny / "dataset.json").read_text())
    for kind, most_values, most_bytes in (
        ("dense", MAX_DENSE_VALUES, MAX_DENSE_BYTES),
        ("sparse", MAX_SPARSE_VALUES, MAX_SPARSE_BYTES),
    ):
        for feature in document[kind]:
            if kind == "sparse":  # the longest that statistics can be
                reuse = feature["statistics"]["reuse"]
                reuse.update({key: [0.12345678901234567e-300] * len(reuse["edges"]) for key in ("rows", "lookups")})
                feature.update(vocabulary="vocabulary/x.parquet", vocabulary_digest="f" * 64)
                feature.update(candidates="vocabulary/x+candidates.parquet", num_added=1 << 40, num_retired=1 << 40)
                feature.update(test_lookups={"num_lookups": 1 << 40, "num_unseen": 1 << 40})
            text = json.dumps({**feature, "name": ""}).encode()
            in_source_form, in_not_finite = (2, 0) if kind == "sparse" else (0, 1)
            assert count_json_values(text) + 1 + in_source_form + in_not_finite <= most_values
            assert len(text) + 100 <= most_bytes


@pytest.mark.parametrize("name", ["a\x1bb", "a\x00b", "a\u2028b", "a\x7fb"])
@pytest.mark.parametrize("kind", ["csv", "parquet", "schema", "label", "cross"])
def test_names_that_no_table_can_have(tmp_path: Path, name: str, kind: str) -> None:
    columns = {"label": [0, 1, 0, 1], name: ["x", "y", "x", "z"], "age": [1.5, 2.5, 3.5, 4.5]}
    source, options = "log.csv", {}
    if kind == "label":
        columns = {name: columns["label"], "age": columns["age"], "b": columns[name]}
        options["label"] = name
    if kind == "parquet":
        source = "log.parquet"
        pq.write_table(pa.table(columns), tmp_path / source)
    else:
        rows = zip(*columns.values(), strict=True)
        lines = [",".join(columns), *(",".join(map(str, row)) for row in rows)]
        (tmp_path / source).write_text("\n".join(lines) + "\n")
    if kind in ("schema", "cross"):
        schema: dict[str, object] = {"label": "label", "dense": ["age"], "categorical": [name]}
        if kind == "cross":
            (tmp_path / source).write_text("label,age,b,c\n0,1.5,x,y\n1,2.5,y,x\n0,1,x,x\n")
            schema.update(categorical=["b", "c"], crosses={name: ["b", "c"]})
        (tmp_path / "schema.yaml").write_text(yaml.safe_dump(schema))
        options["schema"] = tmp_path / "schema.yaml"
    refuse(tmp_path, "the name of column .* contain control characters", source, **options)


def test_a_column_named_as_all_tables_of_a_plan(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("label,*,age\n0,x,1.5\n1,y,2.5\n0,z,1\n")
    refuse(tmp_path, r"the name of column '\*': it must not be '\*', which means all other tables", "log.csv")


def test_columns_that_are_left_out_have_any_name(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("label,a\x1bb,price\n0,x,1.5\n1,y,2.5\n0,z,1\n")
    options = PrepareOptions(
        sources=[str(tmp_path / "log.csv")], out=tmp_path / "out", ignore=["a*"], test_fraction=0.0
    )
    assert [column.name for column in prepare(options).dense] == ["price"]
