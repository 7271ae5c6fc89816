"""`prepare` of libsvm and libffm text: rows as scikit-learn or plain Python reads them, weights, errors by line."""

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.datasets import dump_svmlight_file, load_svmlight_file
from xxhash import xxh64_intdigest

from data.click_log import read_split
from meseta.data import Dataset, Reader, ReaderOptions
from meseta.data.formats import svm
from meseta.data.formats import text as text_format
from meseta.data.prepare import PrepareOptions, prepare, read_layout
from meseta.data.schema.schema import format_schema
from meseta.spec import MesetaError


def run(tmp_path: Path, *patterns: str, **options: Any) -> Dataset:
    settings = {"test_fraction": 0.0, "hash_rows": 500, "out": tmp_path / "out", **options}
    return prepare(PrepareOptions(sources=[f"{tmp_path}/{p}" for p in patterns or ["log.txt"]], **settings))


def hashed(feature: str, value: int) -> int:
    return xxh64_intdigest(str(value).encode(), xxh64_intdigest(feature.encode(), 0)) * 500 >> 64


@pytest.mark.parametrize("name", ["log.svm", "log.svm.gz"])
@pytest.mark.parametrize("block_bytes", [8 << 20, 200])
def test_rows_are_those_of_scikit_learn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, block_bytes: int
) -> None:
    monkeypatch.setattr(text_format, "BLOCK_BYTES", block_bytes)
    draw = np.random.default_rng(0)
    dense = draw.normal(size=(150, 30)) * (draw.random((150, 30)) < 0.2)
    dense[0] = 0  # a label alone
    path = tmp_path / name
    with gzip.open(path, "wb") if name.endswith("gz") else path.open("wb") as file:
        dump_svmlight_file(dense, draw.choice([-1, 1], 150), file, zero_based=False)
    matrix, label = load_svmlight_file(str(path), zero_based=True)
    dataset = run(tmp_path, name)
    assert [(s.name, s.multi_valued, s.weighted) for s in dataset.sparse] == [("features", True, True)]
    table = read_split(tmp_path / "out", "train")
    assert table.column("label").to_pylist() == [float(value == 1) for value in label]
    assert table.column("features").to_pylist() == [[hashed("features", i) for i in row.indices] for row in matrix]
    np.testing.assert_array_equal(
        np.concatenate(table.column("features.weight").to_pylist()), matrix.data.astype(np.float32)
    )


Row = tuple[str, list[tuple[int, int, str]]]
VALUES = {"1": 1.0, "+1": 1.0, "0.5": 0.5, "-2e-3": -2e-3, "0": 0.0}
PAIRS = st.tuples(st.integers(0, 4), st.integers(-3, 10**12), st.sampled_from(sorted(VALUES)))
ROWS = st.lists(st.tuples(st.sampled_from(["0", "1", "+1", "-1", "0.25"]), st.lists(PAIRS, max_size=5)), min_size=1)


@given(
    ROWS,
    st.sampled_from([" ", "\t", "  "]),
    st.sampled_from(["", " ", "\r", " # note: 1:2:3"]),
    st.sampled_from([60, 8 << 20]),
)
def test_fields_become_features(
    tmp_path_factory: pytest.TempPathFactory, rows: list[Row], space: str, end: str, block_bytes: int
) -> None:
    rows = [("1", [(3, 7, "1")]), *rows]
    folder = tmp_path_factory.mktemp("ffm")
    lines = [space.join([label, *(":".join(map(str, pair)) for pair in pairs)]) + end for label, pairs in rows]
    (folder / "log.txt").write_text("\n".join(lines), newline="")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_format, "BLOCK_BYTES", block_bytes)
        dataset = run(folder)
    fields = sorted({field for _, pairs in rows for field, _, _ in pairs})
    weighted = {f for _, pairs in rows for f, _, value in pairs if VALUES[value] != 1}
    assert [(s.name, s.multi_valued, s.weighted) for s in dataset.sparse] == [
        (f"field_{f}", True, f in weighted) for f in fields
    ]
    table = read_split(folder / "out", "train")
    assert table.column("label").to_pylist() == [max(float(label), 0.0) for label, _ in rows]
    for field in fields:
        name = f"field_{field}"
        field_pairs = [[(index, value) for f, index, value in pairs if f == field] for _, pairs in rows]
        assert table.column(name).to_pylist() == [[hashed(name, index) for index, _ in bag] for bag in field_pairs]
        if field in weighted:
            expected = [[np.float32(VALUES[value]).item() for _, value in bag] for bag in field_pairs]
            assert table.column(f"{name}.weight").to_pylist() == expected
    (batch,) = Reader(dataset, "train", ReaderOptions(batch_size=1000)).epoch()
    assert (batch.sparse.weights is not None) == bool(weighted)


def test_features_can_be_chosen(tmp_path: Path) -> None:
    (tmp_path / "a.ffm").write_text("1 0:1:1 2:5:1\n0 1:1:0.5\n")
    (tmp_path / "b.ffm").write_text("0\n1 10:3:1 2:9:1\n")
    options = PrepareOptions(sources=[f"{tmp_path}/*.ffm"], out=tmp_path / "out")
    layout = read_layout(options)
    assert format_schema(layout).split("\n")[:3] == [
        "label: label",
        "categorical:",
        "  - field_0                     # ids; all values are 1",
    ]
    assert [s.name for s in layout.sparse] == ["field_0", "field_1", "field_2", "field_10"]
    (tmp_path / "schema.yaml").write_text("label: label\ncategorical: [field_10, field_1]\n")
    for chosen in ({"sparse": ["field_10", "field_1"]}, {"schema": tmp_path / "schema.yaml"}):
        dataset = run(tmp_path, "*.ffm", force=True, **chosen)
        assert [(s.name, s.weighted) for s in dataset.sparse] == [("field_10", False), ("field_1", True)]
        bags = read_split(tmp_path / "out", "train").column("field_10").to_pylist()
        assert bags == [[], [], [], [hashed("field_10", 3)]]
    with pytest.raises(MesetaError, match="no column 'field_3'"):
        run(tmp_path, "*.ffm", force=True, sparse=["field_3"])
    with pytest.raises(MesetaError, match="'field_1' is used twice"):
        run(tmp_path, "*.ffm", force=True, sparse=["field_1", "field_1"])
    for refused in ({"dense": ["field_1"]}, {"time_features": ["field_1"]}):
        with pytest.raises(MesetaError, match="there are no dense features and no times"):
            run(tmp_path, "*.ffm", force=True, **refused)
    (tmp_path / "schema.yaml").write_text("label: label\n")
    with pytest.raises(MesetaError, match="has no categorical feature"):
        run(tmp_path, "*.ffm", force=True, schema=tmp_path / "schema.yaml")


SVM, FFM = "1 3:0.5\n0 1:1\n", "1 0:3:0.5\n0 1:1:1\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (SVM + "2 1:1\n", r"log.txt', line 3: label '2' must be a number in 0..1, or -1"),
        (SVM + "nan 1:1\n", "line 3: label 'nan' must be"),
        (SVM + "yes 1:1\n", "line 3: label 'yes' must be"),
        (SVM + "\n1 1:1\n", "line 3: the line has no label"),
        (SVM + "# note\n1 1:1\n", "line 3: the line has no label"),
        (SVM + "1 1:1 4\n", "line 3: '4' must be index:value"),
        (SVM + "1 1:2:3\n", "line 3: '1:2:3' must be index:value"),
        (SVM + "1 a:2\n", "line 3: 'a:2' must be index:value, with integers before a finite value"),
        (SVM + "1 1.5:2\n", "line 3: '1.5:2' must be"),
        (SVM + "1 99999999999999999999:2\n", "line 3: '99999999999999999999:2' must be"),
        (SVM + "1 1:\n", "line 3: '1:' must be"),
        (SVM + "1 1:inf\n", "line 3: '1:inf' must be"),
        (SVM + "1 1:1e39\n", "line 3: '1:1e39' must be"),
        (SVM + "1 \xff:1\n", "line 3: the line is not valid UTF-8"),
        (SVM + "1 qid:3 1:1\n", "line 3: either all rows or none must have a qid after the label; this row has one"),
        (
            "1 qid:3 1:1\n0 qid:3\n0 1:1\n",
            "line 3: either all rows or none must have a qid after the label; this row has none",
        ),
        ("1 qid:3 1:1\n0 1:1 qid:3\n", "line 2: "),
        ("1 qid:3 1:1\n0 qid:a 1:1\n", "line 2: 'qid:a' must be qid:group, where group is an integer"),
        ("1 qid:3 qid:4\n", "line 1: 'qid:4' must be index:value"),
        (FFM + "1 2:1\n", "line 3: '2:1' must be field:index:value"),
        (FFM + "1 1:b:1\n", "line 3: '1:b:1' must be field:index:value"),
    ],
)
@pytest.mark.parametrize("block_bytes", [8 << 20, 10])
def test_bad_rows_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str, block_bytes: int
) -> None:
    monkeypatch.setattr(text_format, "BLOCK_BYTES", block_bytes)
    (tmp_path / "log.txt").write_bytes(text.encode("latin-1"))
    with pytest.raises(MesetaError, match=message) as error:
        run(tmp_path)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_too_many_fields_and_mixed_kinds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(svm, "MAX_LIBFFM_FIELDS", 2)
    (tmp_path / "log.txt").write_text("1 0:1:1 1:1:1\n0 2:1:1\n")
    with pytest.raises(MesetaError, match="more than 2 fields up to line 2; are fields and indices swapped"):
        run(tmp_path)
    (tmp_path / "other.txt").write_text("1 0:1\n")
    with pytest.raises(MesetaError, match=r"other.txt' is libsvm text; prepare one format at a time"):
        run(tmp_path, "log.txt", "other.txt")
