"""The synthetic click log against its law, sklearn, pyarrow and itself under other cuts."""

import gzip
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import csv
from scipy import stats
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss, roc_auc_score
from typer.testing import CliRunner

from meseta.cli.data import app
from meseta.data.synth import (
    CARDINALITIES,
    CHUNK_ROWS,
    MAX_COUNT,
    MISSING_COUNT,
    MISSING_DENSE,
    MISSING_SPARSE,
    ZIPF_EXPONENTS,
    ZIPF_SHIFT,
    ClickLog,
    LogRows,
    SynthOptions,
    category_codes,
    encode_tsv,
    write_click_log,
    zipf_probabilities,
)
from meseta.data.synth.teacher import NUM_BINS, PROBABILITIES, Tally
from meseta.spec import MesetaError
from sampling import diagonal

LOG = ClickLog(seed=3, scale=0.01)


@pytest.fixture(scope="module")
def rows() -> LogRows:
    """131,072 rows."""
    pieces = [LOG.chunk(index) for index in range(4)]
    return LogRows(
        *(
            np.concatenate([getattr(piece, name) for piece in pieces], axis=-1)
            for name in ("label", "dense", "ids", "bins")
        )
    )


def write(out: Path, **options: Any) -> dict[str, Any]:
    return write_click_log(SynthOptions(out=out, log=options.pop("log", LOG), **options))


def text(out: Path) -> bytes:
    """All files of a log one after another."""
    files = sorted(out.glob("day_*.tsv*"), key=lambda path: int(path.name[4:].partition(".")[0]))
    return b"".join(gzip.decompress(p.read_bytes()) if p.suffix == ".gz" else p.read_bytes() for p in files)


def test_cardinalities_scale() -> None:
    assert ClickLog(scale=1.0).cardinalities == CARDINALITIES
    assert sum(CARDINALITIES) == 33_762_577  # the number of categories of the Criteo Kaggle log
    small = ClickLog(scale=0.001).cardinalities
    assert small[2] == 10_131
    assert min(small) == 3
    assert all(n <= 3 or abs(n - true * 0.001) <= 0.5 for n, true in zip(small, CARDINALITIES, strict=True))


def test_ids_follow_the_zipf_law(rows: LogRows) -> None:
    for f, ids in enumerate(rows.ids):
        num_ids = LOG.cardinalities[f]
        present = ids[ids >= 0]
        assert present.max() < num_ids
        expected = zipf_probabilities(num_ids, ZIPF_EXPONENTS[f])
        assert math.isclose(expected.sum(), 1.0)
        # Frequent ids one by one, the others together, so that every cell expects at least 100.
        head = min(int((expected * len(present) >= 100).sum()), num_ids)
        counts = np.bincount(present, minlength=num_ids)
        observed = np.append(counts[:head], counts[head:].sum())
        shares = np.append(expected[:head], expected[head:].sum())
        keep = shares > 1e-12
        assert stats.chisquare(observed[keep], shares[keep] / shares[keep].sum() * len(present)).pvalue > 1e-5, f


def test_zipf_is_close_to_the_plain_power_law() -> None:
    exponent = 1.2
    weights = (np.arange(10_000) + 1.5 + ZIPF_SHIFT) ** -exponent
    np.testing.assert_allclose(zipf_probabilities(10_000, exponent), weights / weights.sum(), rtol=0.02)


def test_missing_shares(rows: LogRows) -> None:
    shares = [*(rows.dense == MISSING_COUNT).mean(axis=1), *(rows.ids == -1).mean(axis=1)]
    for share, expected in zip(shares, [*MISSING_DENSE, *MISSING_SPARSE], strict=True):
        noise = 5 * math.sqrt(expected * (1 - expected) / len(rows))
        assert abs(share - expected) <= noise + 0.5 / 2048


def test_columns_are_independent(rows: LogRows) -> None:
    ranks = np.concatenate([rows.dense, rows.ids]).astype(np.float64)
    correlations = np.corrcoef(stats.rankdata(ranks, axis=1))
    np.fill_diagonal(correlations, 0.0)
    assert np.abs(correlations).max() < 6 / math.sqrt(len(rows))


def test_labels_follow_the_probabilities(rows: LogRows) -> None:
    p = rows.probability
    order = np.argsort(p)
    for part in np.array_split(order, 20):
        z = (rows.label[part].sum() - p[part].sum()) / math.sqrt((p[part] * (1 - p[part])).sum())
        assert abs(z) < 4.5
    assert abs(p.mean() - 0.25) < 0.01


@pytest.mark.parametrize("log", diagonal(seed=[0, 1, 2], scale=[0.001, 0.01, 1.0]))
def test_teacher_is_as_good_under_any_seed_and_scale(log: dict[str, Any]) -> None:
    rows = ClickLog(**log).chunk(0)
    tally = Tally.empty()
    tally.add(rows.bins, rows.label)
    summary = tally.summary()
    assert 0.80 < summary["expected_auc"] < 0.85
    assert 0.23 < rows.label.mean() < 0.27


def test_seeds_differ() -> None:
    one, other = ClickLog(0).chunk(0), ClickLog(1).chunk(0)
    assert (one.ids[2] == other.ids[2]).mean() < 0.1
    # The same inputs, another teacher.
    bins = ClickLog(1).teacher.bins(one.dense, one.ids)
    assert abs(np.corrcoef(bins, one.bins)[0, 1]) < 0.6


def test_effects_of_pairs_are_invisible_one_feature_at_a_time(rows: LogRows) -> None:
    teacher = LOG.teacher
    pair_part = teacher._parts(rows.dense, rows.ids)[2]
    for f in LOG.synth_world.planted_features:
        ids = rows.ids[f]
        counts = np.bincount(ids + 1)
        means = np.bincount(ids + 1, pair_part) / np.maximum(counts, 1)
        explained = (counts * (means - pair_part.mean()) ** 2).sum() / (len(rows) * pair_part.var())
        # What as many random groups would explain, and a little for the calibration on a sample.
        assert explained < (counts > 0).sum() / len(rows) + 0.01


def test_a_linear_model_on_the_teachers_inputs_misses_the_interactions(rows: LogRows) -> None:
    """An upper bound on logistic regression: it is given the true main effects."""
    teacher = LOG.teacher
    inputs = np.stack(teacher._parts(rows.dense, rows.ids)[:2], axis=1)
    score = LogisticRegression().fit(inputs, rows.label).predict_proba(inputs)[:, 1]
    assert roc_auc_score(rows.label, rows.probability) - roc_auc_score(rows.label, score) > 0.05


def test_summary_against_sklearn(rows: LogRows) -> None:
    tally = Tally.empty()
    for part in (slice(0, 1000), slice(1000, 1001), slice(1001, None)):
        piece = Tally.empty()
        piece.add(rows[part].bins, rows[part].label)
        tally.merge(piece)
    summary = tally.summary()
    p, label = rows.probability, rows.label
    logloss = log_loss(label, p)
    base = label.mean()
    assert summary["num_rows"] == len(rows)
    assert summary["num_positives"] == label.sum()
    assert summary["auc"] == pytest.approx(roc_auc_score(label, p), abs=1e-12)
    assert summary["logloss"] == pytest.approx(logloss, rel=1e-12)
    assert summary["ne"] == pytest.approx(logloss / stats.bernoulli(base).entropy(), rel=1e-12)
    both = np.concatenate([np.ones_like(label), np.zeros_like(label)])
    expected = roc_auc_score(both, np.tile(p, 2), sample_weight=np.concatenate([p, 1 - p]))
    assert summary["expected_auc"] == pytest.approx(expected, abs=1e-9)
    assert summary["expected_logloss"] == pytest.approx(stats.bernoulli(p).entropy().mean(), rel=1e-9)
    assert abs(summary["auc"] - summary["expected_auc"]) < 0.01


def test_summary_of_one_class() -> None:
    tally = Tally.empty()
    tally.add(np.array([0, 5, NUM_BINS - 1], np.int32), np.zeros(3, np.int8))
    summary = tally.summary()
    assert summary["auc"] is None
    assert summary["ne"] is None
    assert summary["logloss"] == pytest.approx(-np.log1p(-PROBABILITIES[[0, 5, -1]]).mean())


def test_codes_are_distinct() -> None:
    ids = np.arange(300_000)
    codes = [category_codes(f, ids) for f in (0, 25)]
    assert all(len(np.unique(column)) == len(ids) for column in codes)
    assert len(np.intersect1d(codes[0][:1000], codes[1][:1000])) < 3


def test_text_reads_back(rows: LogRows) -> None:
    part = rows[:5000]
    types = {
        "label": pa.int8(),
        **{f"i{j}": pa.int32() for j in range(13)},
        **{f"c{f}": pa.string() for f in range(26)},
    }
    table = csv.read_csv(
        pa.BufferReader(encode_tsv(part)),
        read_options=csv.ReadOptions(column_names=list(types)),
        parse_options=csv.ParseOptions(delimiter="\t"),
        convert_options=csv.ConvertOptions(column_types=types),
    )
    np.testing.assert_array_equal(table["label"], part.label)
    for j in range(13):
        np.testing.assert_array_equal(table[f"i{j}"].fill_null(MISSING_COUNT), part.dense[j])
    assert part.dense[1].min() in (-1, MISSING_COUNT)
    assert (part.dense[1] == -1).any()
    for f in range(26):
        codes = category_codes(f, part.ids[f])
        expected = ["" if rank < 0 else f"{code:08x}" for rank, code in zip(part.ids[f], codes, strict=True)]
        assert table[f"c{f}"].to_pylist() == expected


def test_extreme_counts_are_written() -> None:
    dense = np.full((13, 2), MISSING_COUNT, np.int32)
    dense[0], dense[1] = [0, MAX_COUNT], [-1, 9999]
    rows = LogRows(np.array([0, 1], np.int8), dense, np.full((26, 2), -1), np.zeros(2, np.int32))
    assert encode_tsv(rows) == b"0\t0\t-1" + b"\t" * 37 + b"\n1\t65535\t9999" + b"\t" * 37 + b"\n"


def test_any_cut_gives_the_same_rows(tmp_path: Path) -> None:
    num_rows = CHUNK_ROWS + 777
    write(tmp_path / "one", num_rows=num_rows)
    write(tmp_path / "many", num_rows=num_rows, num_files=13)
    write(tmp_path / "halves", num_rows=CHUNK_ROWS, num_files=2)
    write(tmp_path / "zipped", num_rows=1000, num_files=2, gzip=True)
    whole = text(tmp_path / "one")
    assert whole.count(b"\n") == num_rows
    assert text(tmp_path / "many") == whole
    assert whole.startswith(text(tmp_path / "halves"))
    assert whole.startswith(text(tmp_path / "zipped"))
    assert sorted(p.name for p in (tmp_path / "zipped").iterdir()) == ["day_0.tsv.gz", "day_1.tsv.gz", "teacher.json"]
    lines = [p.read_bytes().count(b"\n") for p in (tmp_path / "many").glob("*.tsv")]
    assert len(lines) == 13
    assert max(lines) - min(lines) <= 1
    middle = np.concatenate([rows.bins for rows in LOG.rows(CHUNK_ROWS - 5, CHUNK_ROWS + 5)])
    np.testing.assert_array_equal(middle, np.append(LOG.chunk(0).bins[-5:], LOG.chunk(1).bins[:5]))


def test_teacher_file_against_the_probabilities(tmp_path: Path) -> None:
    document = write(tmp_path, num_rows=CHUNK_ROWS + 10_000, num_files=3, probabilities=True)
    assert document == json.loads((tmp_path / "teacher.json").read_text())
    assert document["format"] == "meseta.teacher/1"
    tables = []
    for k in range(3):
        table = pq.read_table(tmp_path / f"day_{k}.probability.parquet")
        lines = (tmp_path / f"day_{k}.tsv").read_bytes().splitlines()
        assert [line[:1] for line in lines] == [b"%d" % y for y in table["label"].to_pylist()]
        summary = document["files"][f"day_{k}.tsv"]
        assert summary["auc"] == pytest.approx(roc_auc_score(table["label"], table["probability"]), abs=1e-12)
        assert summary["num_rows"] == table.num_rows == len(lines)
        tables.append(table)
    whole = pa.concat_tables(tables)
    assert document["all"]["auc"] == pytest.approx(roc_auc_score(whole["label"], whole["probability"]), abs=1e-12)
    assert document["all"]["logloss"] == pytest.approx(log_loss(whole["label"], whole["probability"]), rel=1e-12)


def test_directory_in_use_is_refused(tmp_path: Path) -> None:
    write(tmp_path, num_rows=100, num_files=3)
    (tmp_path / ".day_7.tsv.tmp").touch()  # as a killed run leaves
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(MesetaError, match=r"not empty.*--force"):
        write(tmp_path, num_rows=100)
    write(tmp_path, num_rows=100, force=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["day_0.tsv", "notes.txt", "teacher.json"]


def test_file_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    with pytest.raises(MesetaError, match=r"not a directory"):
        write(tmp_path / "out", num_rows=100, force=True)
    with pytest.raises(MesetaError, match="cannot write"):
        write(tmp_path / "out" / "below", num_rows=100)


def test_interrupt_leaves_whole_files_only(tmp_path: Path) -> None:
    seen = 0

    def stop(num_rows: int) -> None:
        nonlocal seen
        seen += num_rows
        if seen > 60_000:
            raise KeyboardInterrupt

    options = SynthOptions(out=tmp_path, num_rows=3 * CHUNK_ROWS, num_files=3, log=LOG, probabilities=True)
    with pytest.raises(KeyboardInterrupt):
        write_click_log(options, stop)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["day_0.probability.parquet", "day_0.tsv"]


@pytest.mark.parametrize(
    "bad",
    [
        lambda out: ClickLog(scale=0.0),
        lambda out: ClickLog(scale=float("nan")),
        lambda out: ClickLog(scale=1.5),
        lambda out: ClickLog(seed=-1),
        lambda out: SynthOptions(out=out, num_rows=0),
        lambda out: SynthOptions(out=out, num_rows=3, num_files=4),
        lambda out: SynthOptions(out=out, num_rows=3, num_files=0),
    ],
)
def test_bad_options_are_refused(bad: Any, tmp_path: Path) -> None:
    with pytest.raises(MesetaError, match=r"data synth: .*(must|every file needs)"):
        bad(tmp_path)


def test_command(tmp_path: Path) -> None:
    out = tmp_path / "log"
    arguments = ["synth", "--out", str(out), "--rows", "2_000", "--files", "2", "--seed", "5", "--scale", "0.001"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "2,000 rows" in result.output
    assert f"AUC {json.loads((out / 'teacher.json').read_text())['all']['auc']:.4f}" in result.output
    assert text(out) == encode_tsv(ClickLog(5, 0.001).chunk(0)[:2000])
    again = CliRunner().invoke(app, arguments)
    assert isinstance(again.exception, MesetaError)
    assert CliRunner().invoke(app, [*arguments, "--force", "--gzip"]).exit_code == 0
    assert sorted(p.name for p in out.iterdir()) == ["day_0.tsv.gz", "day_1.tsv.gz", "teacher.json"]


def test_command_names_a_bad_number(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["synth", "--out", str(tmp_path), "--rows", "many"])
    assert isinstance(result.exception, MesetaError)
    assert "--rows 'many'" in str(result.exception)
