"""Tests of learning-rate factors against values computed by hand and MLPerf's rule."""

import pytest

from meseta.config import ScheduleConfig
from meseta.optim.dense import learning_rate_factor


def factors(num_steps: int, **keys: object) -> list[float]:
    schedule = ScheduleConfig.model_validate(keys)
    return [learning_rate_factor(schedule, step, num_steps) for step in range(num_steps)]


def test_constant() -> None:
    assert factors(3) == [1.0, 1.0, 1.0]
    assert factors(6, warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert factors(3, warmup_steps=1) == [1.0, 1.0, 1.0]


def test_warm_up_hold_and_decay() -> None:
    keys = {"kind": "polynomial", "warmup_steps": 2, "decay_start_step": 4, "decay_steps": 4}
    assert factors(10, power=1.0, **keys) == [0.5, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    assert factors(10, power=2.0, **keys) == [0.5, 1.0, 1.0, 1.0, 1.0, 0.5625, 0.25, 0.0625, 0.0, 0.0]
    assert factors(10, power=1.0, end_factor=0.2, **keys) == pytest.approx(
        [0.5, 1.0, 1.0, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2]
    )


def test_decay_until_the_end_of_training() -> None:
    assert factors(4, kind="polynomial", power=1.0) == [1.0, 0.75, 0.5, 0.25]
    assert factors(6, kind="polynomial", power=1.0, decay_start_step=2) == [1.0, 1.0, 1.0, 0.75, 0.5, 0.25]
    assert factors(1, kind="polynomial") == [1.0]  # a run of one step learns


def test_a_plateau_falls_at_each_signal_down_to_its_floor() -> None:
    schedule = ScheduleConfig(kind="plateau", warmup_steps=2, step_factor=0.5, end_factor=0.2)
    factors = [[learning_rate_factor(schedule, step, 9, falls) for falls in range(5)] for step in (0, 1, 2, 8)]
    assert factors == [[0.5] * 5, [1.0] * 5, *[[1.0, 0.5, 0.25, 0.2, 0.2]] * 2]


def test_the_decay_waits_for_the_warm_up() -> None:
    assert factors(6, kind="polynomial", power=1.0, warmup_steps=2, decay_start_step=0) == [
        0.5,
        1.0,
        1.0,
        0.75,
        0.5,
        0.25,
    ]


def test_steps_after_the_end_and_a_training_shorter_than_the_warm_up() -> None:
    schedule = ScheduleConfig(kind="polynomial", warmup_steps=8, end_factor=0.125)
    assert [learning_rate_factor(schedule, step, 4) for step in (0, 3, 7, 8, 100)] == [0.125, 0.5, 1.0, 0.125, 0.125]


def test_cosine() -> None:
    half = 0.5**0.5
    assert factors(8, kind="cosine", decay_steps=4) == pytest.approx(
        [1.0, (1 + half) / 2, 0.5, (1 - half) / 2, *[0.0] * 4]
    )
    assert factors(5, kind="cosine", warmup_steps=1, end_factor=0.2) == pytest.approx(
        [1.0, 1.0, 0.2 + 0.4 * (1 + half), 0.6, 0.2 + 0.4 * (1 - half)]
    )


def test_steps_down() -> None:
    keys = {"kind": "step", "step_every": 2, "step_factor": 0.5}
    assert factors(7, **keys) == [1.0, 1.0, 0.5, 0.5, 0.25, 0.25, 0.125]
    assert factors(7, **keys, warmup_steps=2, decay_start_step=3) == [0.5, 1.0, 1.0, 1.0, 1.0, 0.5, 0.5]
    assert factors(7, **keys, end_factor=0.3) == [1.0, 1.0, 0.5, 0.5, 0.3, 0.3, 0.3]


def test_equals_mlperf_at_its_own_settings() -> None:
    # MLPerf counts steps from 1, so that its decay begins one later: warm-up to w, then ((d - (k - s)) / d)^2.
    warmup, start, decay = 2750, 49315, 27772
    schedule = ScheduleConfig(
        kind="polynomial", warmup_steps=warmup, decay_start_step=start - 1, decay_steps=decay, power=2.0
    )
    for k in (1, 2, 2749, 2750, 2751, 49314, 49315, 49316, 60000, start + decay - 1):
        expected = 1.0
        if k < warmup:
            expected = 1.0 - (warmup - k) / warmup
        elif k >= start:
            expected = ((decay - (k - start)) / decay) ** 2
        assert learning_rate_factor(schedule, k - 1, 75868) == pytest.approx(expected, abs=1e-15)
