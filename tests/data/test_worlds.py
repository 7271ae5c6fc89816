"""Tests of the worlds of synthetic logs: unchanged bytes of `pairs`, and statistics that match the formulas."""

import hashlib
import json
import math
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats
from typer.testing import CliRunner

from meseta.cli.data import app
from meseta.data.synth import (
    CHUNK_ROWS,
    NUM_SPARSE,
    WORLDS,
    ZIPF_EXPONENTS,
    ClickLog,
    LogRows,
    SynthOptions,
    encode_tsv,
    find_world,
    write_click_log,
    zipf_probabilities,
)
from meseta.data.synth.columns import id_probabilities
from meseta.data.synth.teacher import PLANTED_STD
from meseta.data.synth.worlds import BLOCKS, SHARED_CAUSE_SHARE, planted_sum
from meseta.spec import MesetaError
from sampling import diagonal

NUM_CHUNKS = 4


def join(log: ClickLog) -> LogRows:
    pieces = [log.chunk(index) for index in range(NUM_CHUNKS)]
    fields = ("label", "dense", "ids", "bins")
    return LogRows(*(np.concatenate([getattr(piece, name) for piece in pieces], axis=-1) for name in fields))


def latents(log: ClickLog, rows: LogRows) -> dict[int, NDArray[np.float32]]:
    """[latent_dim, n] by feature, as the teacher sees them."""
    teacher, values = log.teacher, {}
    for f in log.synth_world.planted_features:
        effects = teacher._effects(f, rows.ids[f])
        values[f] = effects[1:]
    return values


@pytest.fixture(scope="module")
def orders() -> tuple[ClickLog, LogRows]:
    """131,072 rows."""
    log = ClickLog(3, 0.001, "orders")
    return log, join(log)


BYTES_BEFORE_WORLDS = {
    (0, 0.01, 40_000): (
        "20a4c554594d78d65b715f3854037c7407ee9d69c08ebb4b28a548608f1a9b42",
        "ea1cc0e8a7fdd4d27305cf9b4451e818e60c35bf3c08037c9afaa64b44f62ee7",
    ),
    (3, 0.001, 3000): (
        "f931232bf5e60e8b5e04f56ffe51d238928dcdab2c9c4c364b3ece4596331a66",
        "d60056a826974522bb17e96aeea75da85d5c1834383c7d5a8b5cffaea55c9b48",
    ),
    (1, 1.0, 3000): (
        "db154e9fd5577523b36e952cc71f755dba81540765ff4b89846b398300a88232",
        "cf0079f4d4de5a6d12235cf2badcc41cca361986cd658a83632a94813b1b5fbd",
    ),
}
"""SHA-256 of day_0.tsv and day_1.tsv, by (seed, scale, rows): of the log that was there before there were worlds."""


@pytest.mark.parametrize("made_of", BYTES_BEFORE_WORLDS)
def test_pairs_writes_the_bytes_of_earlier_versions(made_of: tuple[int, float, int], tmp_path: Path) -> None:
    seed, scale, num_rows = made_of
    write_click_log(SynthOptions(out=tmp_path, num_rows=num_rows, num_files=2, log=ClickLog(seed, scale)))
    digests = [hashlib.sha256((tmp_path / f"day_{k}.tsv").read_bytes()).hexdigest() for k in range(2)]
    assert tuple(digests) == BYTES_BEFORE_WORLDS[made_of]


def test_structure_of_planted_products() -> None:
    pairs, orders = WORLDS["pairs"], WORLDS["orders"]
    assert {len(product.features) for product in pairs.planted} == {2}
    assert len({product.features for product in pairs.planted}) == 20
    assert sorted(feature for block in BLOCKS for feature in block) == list(range(NUM_SPARSE))
    block_of = {feature: b for b, block in enumerate(BLOCKS) for feature in block}
    sizes = [len(product.features) for product in orders.planted]
    assert (sizes.count(3), sizes.count(4), len(sizes)) == (4, 2, 6)
    for product in orders.planted:
        assert len({block_of[feature] for feature in product.features}) == len(product.features)
    assert all(product.sign in (-1, 1) for world in WORLDS.values() for product in world.planted)


def test_popularity_of_coupled_ids_follows_the_zipf_law(orders: tuple[ClickLog, LogRows]) -> None:
    log, rows = orders
    for f, ids in enumerate(rows.ids):
        present = ids[ids >= 0]
        expected = zipf_probabilities(log.cardinalities[f], ZIPF_EXPONENTS[f]) * len(present)
        head = int((expected >= 100).sum())
        counts = np.bincount(present, minlength=len(expected))
        observed, expected_counts = (np.append(x[:head], x[head:].sum()) for x in (counts, expected))
        keep = expected_counts > 0
        assert stats.chisquare(observed[keep], expected_counts[keep]).pvalue > 1e-5, f


def test_causes_couple_the_columns_of_a_block_and_no_others() -> None:
    stream = np.random.Philox(5)
    uniforms = np.random.Generator(np.random.Philox(6)).random((NUM_SPARSE, 100_000))
    coupled = WORLDS["orders"].correlate(uniforms, stream)
    expected = np.zeros((NUM_SPARSE, NUM_SPARSE))
    for block in BLOCKS:
        expected[np.ix_(block, block)] = SHARED_CAUSE_SHARE**2
    np.fill_diagonal(expected, 1.0)
    np.testing.assert_allclose(np.corrcoef(coupled), expected, atol=5 / math.sqrt(100_000))
    assert all(stats.chisquare(np.histogram(column, 100, (0, 1))[0]).pvalue > 1e-5 for column in coupled)


def test_ids_correlate_inside_a_block_and_not_across(orders: tuple[ClickLog, LogRows]) -> None:
    rows = orders[1][:CHUNK_ROWS]
    block_of = {feature: b for b, block in enumerate(BLOCKS) for feature in block}
    for f, g in combinations(range(NUM_SPARSE), 2):
        both = (rows.ids[f] >= 0) & (rows.ids[g] >= 0)
        correlation = stats.spearmanr(rows.ids[f][both], rows.ids[g][both]).statistic
        if block_of[f] == block_of[g]:
            assert 0.3 < correlation < SHARED_CAUSE_SHARE**2 + 0.04, (f, g)
        else:
            assert abs(correlation) < 5 / math.sqrt(both.sum()), (f, g)


@pytest.mark.parametrize("scale", [0.001, 0.01, 1.0])
def test_latents_of_orders_are_centred_by_enumeration(scale: float) -> None:
    log = ClickLog(7, scale, "orders")
    for f in log.synth_world.planted_features:
        every_id, probabilities = id_probabilities(f, log.cardinalities[f])
        assert math.isclose(probabilities.sum(), 1.0)
        teacher = log.teacher
        effects = teacher._effects(f, every_id)
        z = effects[1].astype(np.float64)
        assert abs(z @ probabilities) < 1e-6
        assert z**2 @ probabilities == pytest.approx(1.0, abs=1e-5)


def predict_part(part: NDArray[np.float32], columns: Sequence[NDArray[np.int64]]) -> float:
    """Return how many standard errors the second half of rows is predicted by means of id cells in the first half."""
    cells = np.zeros(len(part), np.int64)
    for ids in columns:
        cells = cells * (int(ids.max()) + 2) + ids + 1
    _, cells = np.unique(cells, return_inverse=True)
    half = len(part) // 2
    part = part - part.mean()
    counts, sums = (np.bincount(cells[:half], weights, cells.max() + 1) for weights in (None, part[:half]))
    products = (sums / np.maximum(counts, 1))[cells[half:]] * part[half:]
    return float(products.mean() / (products.std() / math.sqrt(half)))


def test_lower_orders_do_not_predict_the_planted_part_of_orders(orders: tuple[ClickLog, LogRows]) -> None:
    """Neither single ids nor cells of ids predict the planted part, for effects of any shape."""
    log, rows = orders
    values, ids = latents(log, rows), rows.ids
    whole = planted_sum(log.synth_world.planted, values)
    scores = [predict_part(whole, [ids[f] for f in columns]) for k in (1, 2) for columns in combinations(range(26), k)]
    assert max(np.abs(scores)) < 4.5  # of 351
    triples = [product for product in log.synth_world.planted if len(product.features) == 3]
    quadruples = [product for product in log.synth_world.planted if len(product.features) == 4]
    assert all(predict_part(whole, [ids[f] for f in product.features]) > 10 for product in triples)
    fourth = planted_sum(quadruples, values)
    scores = [
        predict_part(fourth, [ids[f] for f in columns])
        for product in quadruples
        for columns in combinations(product.features, 3)
    ]
    assert max(np.abs(scores)) < 4
    assert all(predict_part(fourth, [ids[f] for f in product.features]) > 10 for product in quadruples)


def test_no_product_of_fewer_latents_correlates(orders: tuple[ClickLog, LogRows]) -> None:
    log, rows = orders
    values = latents(log, rows)

    def score(part: NDArray[np.float32], features: tuple[int, ...]) -> float:
        products = part * np.prod([values[f][0] for f in features], axis=0)
        return float(products.mean() / (products.std() / math.sqrt(len(products))))

    whole = planted_sum(log.synth_world.planted, values)
    fewer = [score(whole, features) for k in (1, 2) for features in combinations(values, k)]
    assert max(np.abs(fewer)) < 4.5  # of 55
    for product in log.synth_world.planted:
        assert product.sign * score(whole, product.features) > 20


def test_a_pair_of_ids_predicts_the_planted_part_of_pairs() -> None:
    log = ClickLog(3, 0.001)
    rows = join(log)
    part = planted_sum(log.synth_world.planted, latents(log, rows))
    assert all(predict_part(part, [rows.ids[f] for f in product.features]) > 10 for product in log.synth_world.planted)


@pytest.mark.parametrize("case", diagonal(seed=[0, 1], scale=[0.001, 0.01]))
def test_planted_part_of_orders_is_as_large_as_stated(case: dict[str, Any]) -> None:
    log = ClickLog(**case, world="orders")
    rows = join(log)
    part = planted_sum(log.synth_world.planted, latents(log, rows))
    # Products of different features do not correlate, and each has a variance of 1 under the law.
    assert part.std() == pytest.approx(math.sqrt(len(log.synth_world.planted)), rel=0.04)
    assert log.teacher._gains[-1] * part.std() == pytest.approx(PLANTED_STD, rel=0.04)


@pytest.mark.parametrize("world", WORLDS)
def test_strength_scales_the_planted_part_alone(world: str) -> None:
    """Logits are affine in the strength, up to the bias that keeps the click rate."""
    logs = {strength: ClickLog(4, 0.001, world, strength) for strength in (0.0, 0.3, 1.0)}
    rows = {strength: log.chunk(1) for strength, log in logs.items()}
    logits = {
        strength: log.teacher._logits(rows[0.0].dense, rows[0.0].ids) - np.float32(log.teacher.bias)
        for strength, log in logs.items()
    }
    np.testing.assert_allclose(logits[0.3], 0.7 * logits[0.0] + 0.3 * logits[1.0], atol=2e-5)
    planted = logits[1.0] - logits[0.0]
    assert planted.std() == pytest.approx(PLANTED_STD, rel=0.05)
    without = logits[0.0]
    dense_and_main = log_parts(logs[0.0], rows[0.0])
    np.testing.assert_allclose(without, dense_and_main, atol=2e-5)
    for strength in logs:
        np.testing.assert_array_equal(rows[strength].dense, rows[0.0].dense)
        np.testing.assert_array_equal(rows[strength].ids, rows[0.0].ids)
        p = rows[strength].probability
        assert abs(p.mean() - 0.25) < 5 * p.std() / math.sqrt(CHUNK_ROWS)


def log_parts(log: ClickLog, rows: LogRows) -> NDArray[np.float64]:
    """The dense part and the main effects, at the gains and means of the teacher."""
    teacher = log.teacher
    parts = teacher._parts(rows.dense, rows.ids)[:2]
    return sum(gain * (part - mean) for part, gain, mean in zip(parts, teacher._gains, teacher._means, strict=False))


def test_command(tmp_path: Path) -> None:
    arguments = ["synth", "--rows", "33_000", "--files", "3", "--seed", "5", "--scale", "0.001"]
    law = ["--world", "orders", "--strength", "0.5"]
    result = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path), *law])
    assert result.exit_code == 0, result.output
    log = ClickLog(5, 0.001, "orders", 0.5)
    expected = encode_tsv(log.chunk(0)) + encode_tsv(log.chunk(1)[: 33_000 - CHUNK_ROWS])
    assert b"".join((tmp_path / f"day_{k}.tsv").read_bytes() for k in range(3)) == expected
    document = json.loads((tmp_path / "teacher.json").read_text())
    assert (document["world"], document["strength"], document["latent_dim"]) == ("orders", 0.5, 1)
    assert document["planted"][0] == {"features": ["cat_0", "cat_9", "cat_17"], "sign": 1}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--world", "order"], "data synth: world 'order' is unknown; did you mean 'orders'?"),
        (["--world", "moon"], "data synth: world 'moon' is unknown; available: orders, pairs"),
        (["--strength", "1.5"], "data synth: strength must be in 0..1, got 1.5; 1 keeps all planted effects"),
        (["--strength", "-0.1"], "data synth: strength must be in 0..1, got -0.1; 1 keeps all planted effects"),
        (["--strength", "nan"], "data synth: strength must be in 0..1, got nan; 1 keeps all planted effects"),
    ],
)
def test_unknown_worlds_and_strengths_outside_are_refused(arguments: list[str], message: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["synth", "--out", str(tmp_path / "log"), *arguments])
    assert isinstance(result.exception, MesetaError)
    assert str(result.exception) == message
    assert not (tmp_path / "log").exists()


def test_a_world_is_found_by_its_name() -> None:
    assert {name: find_world(name).name for name in WORLDS} == {name: name for name in WORLDS}
