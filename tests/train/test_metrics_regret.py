"""Regret compared with a loop over its definition, and with the expectation over labels."""

from __future__ import annotations

import math

import numpy as np
import pytest

from meseta.spec import MesetaError
from meseta.train.metrics import logloss, regret


def test_it_is_the_divergence_of_each_row() -> None:
    draw = np.random.default_rng(0)
    z, p = draw.normal(size=200), draw.random(200)
    rows = []
    for logit, true in zip(z, p, strict=True):
        q = 1 / (1 + math.exp(-logit))
        rows.append(true * math.log(true / q) + (1 - true) * math.log((1 - true) / (1 - q)))
    assert regret(z, p) == pytest.approx(sum(rows) / 200, rel=1e-12)
    assert regret(z[::-1], p[::-1]) == regret(z, p)


def test_it_is_what_logloss_is_expected_to_lose() -> None:
    draw = np.random.default_rng(1)
    p = draw.uniform(0.05, 0.95, 50)
    true, predicted = np.log(p / (1 - p)), draw.normal(size=50)
    labels, both = np.repeat([1, 0], 50), np.concatenate([p, 1 - p])  # each row with either label, by its chance
    lost = logloss(np.tile(predicted, 2), labels, both) - logloss(np.tile(true, 2), labels, both)
    assert regret(predicted, p) == pytest.approx(lost, rel=1e-10)


def test_the_truth_has_none_and_a_confident_error_costs_what_it_costs() -> None:
    p = np.array([0.2, 0.5, 0.999])
    assert regret(np.log(p / (1 - p)), p) == pytest.approx(0.0, abs=1e-15)
    assert regret([50.0], [0.5]) == pytest.approx(25 - math.log(2))
    assert math.isnan(regret([], []))


@pytest.mark.parametrize(
    ("logits", "probabilities", "words"),
    [([0.0], [0.1, 0.2], "got 1 logits and 2"), ([0.0], [1.0], "strictly"), ([math.inf], [0.5], "must be finite")],
)
def test_what_has_no_regret_is_refused(logits: list[float], probabilities: list[float], words: str) -> None:
    with pytest.raises(MesetaError, match=words):
        regret(logits, probabilities)
