"""`prepare` of Parquet files: columns by name, lists, weights, kinds of categories, errors that name the row."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from xxhash import xxh64_intdigest

from data.click_log import read_split, reuse_shares
from meseta.data import Dataset, Reader, ReaderOptions
from meseta.data.prepare import PrepareOptions, prepare, read_layout
from meseta.data.schema.schema import format_schema
from meseta.spec import MesetaError

NUM_ROWS = 200


def columns() -> dict[str, Any]:
    draw = np.random.default_rng(0)
    bags = [[f"v{i}" for i in draw.integers(0, 30, size)] for size in draw.integers(0, 6, NUM_ROWS)]
    return {
        "click": draw.random(NUM_ROWS) < 0.3,
        "price": pa.array(draw.normal(3, 5, NUM_ROWS), mask=draw.random(NUM_ROWS) < 0.2),
        "age": pa.array(draw.integers(-2, 90, NUM_ROWS), pa.int16()),
        "city": pa.array([f"city {i}" for i in draw.integers(0, 9, NUM_ROWS)]).dictionary_encode(),
        "item": pa.array(10**12 * draw.integers(-5, 90, NUM_ROWS), mask=draw.random(NUM_ROWS) < 0.1),
        "history": pa.array([None if len(b) == 5 else b for b in bags], pa.list_(pa.string())),
        "basket": pa.array([[len(v) * 7 for v in b] for b in bags], pa.large_list(pa.int64())),
        "basket.weight": pa.array([[float(k) for k, _ in enumerate(b)] for b in bags], pa.list_(pa.float64())),
    }


def run(tmp_path: Path, table: dict[str, Any], **options: Any) -> Dataset:
    pq.write_table(pa.table(table), tmp_path / "log.parquet")
    settings = {"label": "click", "test_fraction": 0.0, "hash_rows": 500, "out": tmp_path / "out", **options}
    return prepare(PrepareOptions(sources=[f"{tmp_path}/log.parquet"], **settings))


def hashed(feature: str, value: object) -> int:
    text = "" if value is None else str(value)
    return xxh64_intdigest(text.encode(), xxh64_intdigest(feature.encode(), 0)) * 500 >> 64


def test_columns_by_name(tmp_path: Path) -> None:
    source = columns()
    dataset = run(tmp_path, source)
    table = read_split(tmp_path / "out", "train")
    assert [d.name for d in dataset.dense] == ["price", "age"]
    assert [(s.name, s.multi_valued, s.weighted) for s in dataset.sparse] == [
        ("city", False, False),
        ("item", False, False),
        ("history", True, False),
        ("basket", True, True),
    ]
    assert table.column("label").to_pylist() == source["click"].astype(float).tolist()
    for name in ("price", "age"):
        numbers = np.array([v or 0 for v in source[name].to_pylist()])
        values = np.sign(numbers) * np.log1p(np.abs(numbers))
        expected = (values - values.mean()) / values.std()
        np.testing.assert_allclose(table.column(name).to_numpy(), expected, rtol=1e-5, atol=1e-6)
    for name in ("item", "city"):
        assert table.column(name).to_pylist() == [hashed(name, v) for v in source[name].to_pylist()]
    for name in ("basket", "history"):
        assert table.column(name).to_pylist() == [[hashed(name, v) for v in b or []] for b in source[name].to_pylist()]
    assert table.column("basket.weight").to_pylist() == source["basket.weight"].to_pylist()


def test_statistics_of_lists(tmp_path: Path) -> None:
    source = columns()
    bag_statistics = next(f for f in run(tmp_path, source).sparse if f.name == "history").statistics
    bags = [[hashed("history", v) for v in b or []] for b in source["history"].to_pylist()]
    rows, lookups = reuse_shares(bags)
    num_lookups = sum(map(len, bags))
    assert (bag_statistics.num_rows, bag_statistics.num_lookups) == (NUM_ROWS, num_lookups)
    assert bag_statistics.mean_pooling_factor == num_lookups / NUM_ROWS
    assert bag_statistics.num_uniques == len({i for b in bags for i in b})
    np.testing.assert_allclose(bag_statistics.reuse.rows, rows)
    np.testing.assert_allclose(bag_statistics.reuse.lookups, lookups)


def test_options_choose_by_name_and_by_pattern(tmp_path: Path) -> None:
    dataset = run(tmp_path, columns(), dense=["item", "a*"], sparse=["age", "item", "h*"], ignore=["*"])
    assert [d.name for d in dataset.dense] == ["item"]  # a name goes before a pattern
    made_of = {"age": (), "item.category": ("item",), "history": ()}
    assert {feature.name: feature.made_of for feature in dataset.sparse} == made_of


def test_vocabulary_of_lists(tmp_path: Path) -> None:
    dataset = run(tmp_path, columns(), ignore=["city", "basket*"], vocabulary=True, min_count=2, test_fraction=0.3)
    history = read_split(tmp_path / "out", "train").column("history").to_pylist()
    counts = pq.read_table(tmp_path / "out" / "vocabulary" / "history.parquet").column("count").to_pylist()
    id_counts = np.bincount([i for b in history for i in b], minlength=dataset.sparse[1].num_embeddings)
    assert id_counts.tolist() == counts


def test_the_reader_takes_it_from_here(tmp_path: Path) -> None:
    dataset = run(tmp_path, columns(), ignore=["city"], test_fraction=0.5)
    table = read_split(tmp_path / "out", "test")
    (batch,) = Reader(dataset, "test", ReaderOptions(batch_size=1000)).epoch()
    assert batch.sparse.keys == ("item", "history", "basket")
    for name in ("history", "basket"):
        bags = table.column(name).to_pylist()
        assert batch.sparse[name].lengths.tolist() == [len(b) for b in bags]
        assert batch.sparse[name].values.tolist() == [i for b in bags for i in b]


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("click", [0.0, 1.5], r"row 2, column 'click': 1.5 is outside 0..1"),
        ("click", [0.0, None], r"row 2, column 'click': a missing value is not a label: labels must be"),
        ("click", [[0], [1]], "column 'click' must hold numbers or words, to be a label, but is list"),
        ("click", ["0", "maybe"], "row 2, column 'click': 'maybe' is not a label: labels must be"),
        ("bag.weight", [[1.0], [1.0, 2.0]], r"row 2, column 'bag.weight': a list must be as long as the list of 'bag'"),
        ("bag.weight", [[1.0], [None]], r"row 2, column 'bag.weight': a weight is missing or not finite"),
        ("bag.weight", [1.0, 2.0], "'bag.weight' must contain lists of numbers, but is double"),
    ],
)
def test_bad_values_are_named(tmp_path: Path, column: str, values: list[Any], message: str) -> None:
    table = {"click": [0.0, 1.0], "price": [1.0, 2.0], "bag": [[1], [2]], "bag.weight": [[1.0], [1.0]]}
    with pytest.raises(MesetaError, match=message):
        run(tmp_path, {**table, column: values})
    assert not (tmp_path / "out").exists()


def test_unknown_columns_are_named(tmp_path: Path) -> None:
    table = {"click": [0.0, 1.0], "price": [1.0, 2.0]}
    with pytest.raises(MesetaError, match="no column 'prize' for --dense; did you mean 'price'"):
        run(tmp_path, table, dense=["prize"])
    with pytest.raises(MesetaError, match="no column 'label' for --label"):
        run(tmp_path, table, label="label")
    with pytest.raises(MesetaError, match="column 'price' is named by --ignore and as a feature"):
        run(tmp_path, table, dense=["price"], ignore=["price"])
    with pytest.raises(MesetaError, match="has no feature besides the label"):
        run(tmp_path, {"click": [0.0, 1.0]})


def test_files_with_other_columns_are_named(tmp_path: Path) -> None:
    pq.write_table(pa.table({"label": [0.0], "a": [1.0]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"label": [0.0], "a": [1.0], "b": ["x"]}), tmp_path / "b.parquet")
    with pytest.raises(MesetaError, match=r"b.parquet' has other columns than .*column 'b' is extra"):
        prepare(PrepareOptions(sources=[f"{tmp_path}/*.parquet"], out=tmp_path / "out"))


@pytest.mark.parametrize("form", ["history.weight", "history_weight", "history_weights", "schema", "pairs"])
def test_weights_in_a_list_or_in_another_column(tmp_path: Path, form: str) -> None:
    source = columns()
    bags = [bag or [] for bag in source["history"].to_pylist()]
    weights = [[0.5 * k - 1 for k, _ in enumerate(bag)] for bag in bags]
    table = {"click": source["click"], "city": source["city"], "history": pa.array(bags, pa.list_(pa.string()))}
    options: dict[str, Any] = {"label": None}
    if form == "pairs":
        pair = pa.struct([("item", pa.string()), ("seconds", pa.float32())])
        rows = [[(v, w) for v, w in zip(b, ws, strict=True)] for b, ws in zip(bags, weights, strict=True)]
        table["history"] = pa.array(rows, pa.list_(pair))
    else:
        table["times" if form == "schema" else form] = pa.array(weights, pa.list_(pa.float64()))
    if form == "schema":
        options["schema"] = tmp_path / "schema.yaml"
        text = "label: click\ncategorical: [city, history]\nweights: {history: times}\n"
        options["schema"].write_text(text)
    dataset = run(tmp_path, table, **options)
    assert [(s.name, s.multi_valued, s.weighted) for s in dataset.sparse] == [
        ("city", False, False),
        ("history", True, True),
    ]
    prepared = read_split(tmp_path / "out", "train")
    assert prepared.column("history").to_pylist() == [[hashed("history", v) for v in bag] for bag in bags]
    assert prepared.column("history.weight").to_pylist() == weights
    (batch,) = Reader(dataset, "train", ReaderOptions(batch_size=1000)).epoch()
    assert batch.sparse.weights is not None
    assert batch.sparse["history"].weights.tolist() == [w for bag in weights for w in bag]
    assert (batch.sparse["city"].weights == 1).all()


def test_two_columns_of_one_name(tmp_path: Path) -> None:
    table = pa.table([[0.0, 1.0], [1, 2], [3, 4]], names=["click", "a", "a"])
    pq.write_table(table, tmp_path / "log.parquet")
    with pytest.raises(MesetaError, match="'a' is the name of two columns; rename one"):
        prepare(PrepareOptions(sources=[f"{tmp_path}/log.parquet"], out=tmp_path / "out"))


def test_a_list_that_is_named_is_no_weight(tmp_path: Path) -> None:
    table = {"click": [0.0, 1.0], "a": [["x"], ["y"]], "a_weight": [[1], [2]]}
    dataset = run(tmp_path, table, sparse=["a", "a_weight"])
    assert [(s.name, s.weighted) for s in dataset.sparse] == [("a", False), ("a_weight", False)]


@pytest.mark.parametrize("values", [["x", "y"], [["x"], ["y"]], [True, False], [0.5, 1.5]])
def test_a_column_without_a_name_is_left_out(tmp_path: Path, values: list[Any]) -> None:
    dataset = run(tmp_path, {"click": [0, 1], "": values, "city": ["a", "b"]})
    assert ([d.name for d in dataset.dense], [s.name for s in dataset.sparse]) == ([], ["city"])


def test_codes_are_categories_with_the_types_of_the_schema(tmp_path: Path) -> None:
    table = pa.table({"click": [0, 1], "age": [1, 2], "user_id": [1, 2], "__index_level_0__": [0, 1]})
    pq.write_table(table, tmp_path / "log.parquet")
    layout = read_layout(PrepareOptions(sources=[f"{tmp_path}/log.parquet"], out=tmp_path / "out"))
    assert (layout.labels, layout.dense, [s.name for s in layout.sparse]) == (("click",), ("age",), ["user_id"])
    assert format_schema(layout).splitlines()[2].split("#")[1] == " int64: numbers, by its name: '1', '2'"


@pytest.mark.parametrize(
    ("weights", "history", "message"),
    [
        ("{history: times}", [[("a", 1.0)], [("b", 2.0)]], "has weights in its lists and in 'times'; remove one"),
        ("{history: times}", ["a", "b"], "has weights, so it must contain lists, but is string"),
        ("{}", [[("a", 1.0)], [("b", None)]], "row 2, column 'history': a weight is missing or not finite"),
        ("{}", [[("a", "x")], [("b", "y")]], r"or lists of \(id, weight\), but is"),
    ],
)
def test_bad_weights_are_named(tmp_path: Path, weights: str, history: list[Any], message: str) -> None:
    if isinstance(history[0], list):
        kind = pa.string() if isinstance(history[0][0][1], str) else pa.float64()
        column = pa.array(history, pa.list_(pa.struct([("id", pa.string()), ("weight", kind)])))
    else:
        column = pa.array(history)
    (tmp_path / "schema.yaml").write_text(f"label: click\ncategorical: [history]\nweights: {weights}\n")
    with pytest.raises(MesetaError, match=message):
        run(
            tmp_path,
            {"click": [0.0, 1.0], "history": column, "times": [[1.0], [1.0]]},
            label=None,
            schema=tmp_path / "schema.yaml",
        )
