"""Bits of rows in checkpoints: the choice against all combinations, the loss against a model that is quantized by
hand."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meseta.config import load_config
from meseta.config.row_bits import ROW_BIT_WIDTHS, RowBits
from meseta.ops.quantize import reference
from meseta.spec import MesetaError
from meseta.train.advise import MeasuredWidth, check_advice, choose_widths, open_advisor
from meseta.train.evaluate import evaluate
from meseta.train.trained_model import open_trained
from small_run import settings, tiny_data, tiny_with_valid, train

losses_of = st.lists(st.floats(-1e-5, 3e-4), min_size=4, max_size=4)


def measured(losses: list[list[float]]) -> dict[str, list[MeasuredWidth]]:
    """Return sizes of tables with 100, 200, ... bytes per bit, and these losses."""
    return {
        f"t{number}": [
            MeasuredWidth(bits=None, num_bytes=3200 * (number + 1), ne_loss=0.0),
            *(
                MeasuredWidth(bits=bits, num_bytes=100 * bits * (number + 1), ne_loss=loss)
                for bits, loss in zip(ROW_BIT_WIDTHS, of, strict=True)
            ),
        ]
        for number, of in enumerate(losses)
    }


def added(widths: Mapping[str, list[MeasuredWidth]], factor: float = 1.0) -> Any:
    """Return a measurement that adds the losses of tables, times a factor if tables affect each other."""

    def measure(narrow: Mapping[str, RowBits]) -> float:
        losses = [max(w.ne_loss, 0.0) for name, of in widths.items() for w in of if w.bits == narrow.get(name, 0)]
        return sum(losses) * factor

    return measure


@given(st.lists(losses_of, min_size=1, max_size=4))
def test_the_fewest_bytes_within_the_budget(losses: list[list[float]]) -> None:
    widths = measured(losses)
    chosen, together = choose_widths(widths, 1e-4, added(widths))
    assert together <= 1e-4
    least = 1e-4 / (1000 * len(widths))
    choices = [
        sum(width.num_bytes for width in choice)
        for choice in itertools.product(*widths.values())
        if sum(0 if width.bits is None else max(width.ne_loss, least) for width in choice) <= 1e-4
    ]
    assert sum(width.num_bytes for width in chosen.values()) == min(choices)


@given(st.lists(losses_of, min_size=1, max_size=4), st.sampled_from([2.0, 50.0, math.inf]))
def test_tables_that_affect_each_other(losses: list[list[float]], factor: float) -> None:
    widths = measured(losses)
    measure = added(widths, factor) if factor < math.inf else lambda narrow: 1.0
    chosen, together = choose_widths(widths, 1e-4, measure)
    assert together <= 1e-4
    if factor == math.inf:
        assert all(width.bits is None for width in chosen.values())


def test_many_tables() -> None:
    random = np.random.default_rng(0)
    widths = measured((random.random((150, 1)) * 6e-6 * np.array([0.01, 0.1, 0.4, 1])).tolist())
    chosen, together = choose_widths(widths, 1e-4, added(widths))
    assert 0.9e-4 < together <= 1e-4
    sizes = {bits: sum(w.num_bytes for of in widths.values() for w in of if w.bits == bits) for bits in ROW_BIT_WIDTHS}
    assert sizes[2] < sum(width.num_bytes for width in chosen.values()) < sizes[4]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("advise") / "run"
    data = tiny_with_valid(tiny_data(tmp_path_factory.getbasetemp()))
    train(settings(data, path, train__epochs=1))
    return path


@pytest.mark.parametrize("restores", [1, 9])
def test_the_loss_of_a_table(run: Path, restores: int) -> None:
    with open_trained(run, "valid") as trained:
        exact = evaluate(trained.model, trained.reader, trained.world).tasks["label"].ne
        item = next(piece for piece in trained.model.embeddings.shards if piece.spec.name == "item")
        codes = reference.quantize_rows(item.weight, "int2", True, False, 0, 0, 0)
        error = reference.dequantize_rows(codes, "int2", item.weight.shape[1]) - item.weight
        item.weight.add_(error, alpha=math.sqrt(restores))
        expected = evaluate(trained.model, trained.reader, trained.world).tasks["label"].ne / exact - 1
    with open_advisor(run, restores) as advisor:
        assert advisor.split == "valid"
        assert advisor.ne_loss({"item": 2}) == pytest.approx(expected, rel=1e-5)
        assert advisor.ne_loss({}) == 0.0  # the exact rows are restored


def test_the_config_accepts_the_file(run: Path, tmp_path: Path) -> None:
    shown = []
    with open_advisor(run, 3) as advisor:
        advice = advisor.advise(1e9, lambda *width: shown.append(width))
        narrow = advisor.advise(1e-12, lambda *width: None)
        assert (advice.num_bytes, advice.exact_bytes) == (
            sum(rows * (4 + (4 * 2 + 7) // 8 + 4 + 4) for rows in (300, 40, 7, 60)),  # id, codes, scales, a state
            sum(rows * (8 + 4 * 4 + 4) for rows in (300, 40, 7, 60)),
        )
        together = advisor.ne_loss(dict.fromkeys(["user", "item", "city", "tags"], 2))
        assert advice.ne_loss == advice.bits_file.ne_loss == together
    assert len(shown) == 16
    assert narrow.ne_loss <= 1e-12
    advice.bits_file.write(tmp_path / "bits.yaml")
    config = load_config(run / "config.yaml", [f"checkpoint.tables={tmp_path / 'bits.yaml'}"])
    assert {name: table.bits for name, table in config.checkpoint.tables.items()} == dict.fromkeys(
        ["user", "item", "city", "tags"], 2
    )


@pytest.mark.parametrize(
    ("budget", "restores", "out", "words"),
    [
        (0.0, 3, "bits.yaml", "--budget must be a positive number, got 0.0"),
        (math.nan, 3, "bits.yaml", "--budget must be a positive number, got nan"),
        (1e-4, 0, "bits.yaml", "--restores must be at least 1, got 0"),
        (1e-4, 3, "nowhere/bits.yaml", "cannot be a file"),
    ],
)
def test_invalid_options_are_refused(tmp_path: Path, budget: float, restores: int, out: str, words: str) -> None:
    with pytest.raises(MesetaError, match=words):
        check_advice(budget, restores, tmp_path / out)
