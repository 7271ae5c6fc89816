"""Tests of inferred roles of columns against choices that a person wrote down before the rules existed."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from meseta.data.schema.infer import infer_role

ROWS = 5000
Draw = Callable[[random.Random], object]


def zipf(draw: random.Random, distinct: int) -> int:
    """A rank, of which the first are the likeliest."""
    return min(int(draw.paretovariate(0.7)), distinct) - 1


WORDS = [f"w{number}" for number in range(400)]
COLUMNS: list[tuple[str, Draw, str]] = [
    # Names that people give to categories.
    ("user_id", lambda d: d.randrange(900), "categorical"),
    ("userId", lambda d: 100_000 + 17 * zipf(d, 900), "categorical"),
    ("item", lambda d: zipf(d, 2000), "categorical"),
    ("C14", lambda d: 15_000 + d.randrange(700), "categorical"),
    ("hour", lambda d: d.randrange(24), "categorical"),
    ("day_of_week", lambda d: d.randrange(7), "categorical"),
    ("month", lambda d: 1 + d.randrange(12), "categorical"),
    ("zip", lambda d: 10_000 + 10 * d.randrange(900), "categorical"),
    ("device_type", lambda d: d.randrange(5), "categorical"),
    ("gender", lambda d: 1 + d.randrange(2), "categorical"),
    ("campaign", lambda d: zipf(d, 300), "categorical"),
    ("site_category", lambda d: zipf(d, 30), "categorical"),
    ("banner", lambda d: d.randrange(8), "categorical"),
    # Names that people give to measurements.
    ("age", lambda d: 18 + d.randrange(60), "dense"),
    ("price", lambda d: int(d.lognormvariate(4, 1)), "dense"),
    ("num_clicks", lambda d: int(d.expovariate(0.3)), "dense"),
    ("clicks_count", lambda d: int(d.expovariate(0.3)), "dense"),
    ("n_views", lambda d: int(d.expovariate(0.01)), "dense"),
    ("hours_since_last_click", lambda d: d.randrange(24), "dense"),
    ("duration_ms", lambda d: int(d.lognormvariate(8, 2)), "dense"),
    ("user_age", lambda d: 18 + d.randrange(60), "dense"),
    ("item_price", lambda d: 100 * d.randrange(1, 40), "dense"),
    ("width", lambda d: d.choice([300, 320, 728]), "dense"),
    ("I3", lambda d: int(d.lognormvariate(2, 2)), "dense"),
    # Values that speak for themselves, whatever the name.
    ("a", lambda d: 2**62 + d.randrange(10**9) % 700, "categorical"),
    ("a", lambda d: f"{d.randrange(900):05}", "categorical"),
    ("a", lambda d: d.choice(WORDS), "categorical"),
    ("a", lambda d: d.random(), "dense"),
    ("a", lambda d: d.choice(["1.5", "2.5", "", "inf"]), "dense"),
    ("a", lambda d: d.randrange(2), "dense"),
    ("a", lambda d: int(d.lognormvariate(9, 2)), "dense"),
    ("age", lambda d: f"{d.randrange(20, 30)} years", "categorical"),
    # Ambiguous columns get both roles.
    ("a", lambda d: d.randrange(24), "both"),
    ("a", lambda d: zipf(d, 900), "both"),
    ("f7", lambda d: 100_000 + d.randrange(700), "both"),
    ("level", lambda d: d.randrange(30), "both"),
    # One odd value among thousands makes no other kind.
    ("user_id", lambda d: d.randrange(900) if d.random() < 0.999 else "1e3", "categorical"),
    ("age", lambda d: d.randrange(90) if d.random() < 0.999 else "inf", "dense"),
    ("price", lambda d: d.random() if d.random() < 0.999 else "1e400", "dense"),
    ("a", lambda d: d.randrange(24) if d.random() < 0.999 else "nan", "both"),
    # Nothing to learn from.
    ("a", lambda d: "", "ignore"),
    ("a", lambda d: d.choice(["", "NA", "null"]), "ignore"),
    ("a", lambda d: "nan", "ignore"),
    ("a", lambda d: "inf", "ignore"),
    ("version", lambda d: "7", "ignore"),
    ("version", lambda d: "v7", "ignore"),
    ("price", lambda d: "9.99", "ignore"),
    ("request_id", lambda d: f"{d.getrandbits(64):016x}", "ignore"),
    ("request_id", lambda d: d.getrandbits(62), "ignore"),
    ("a", lambda d: d.getrandbits(62), "ignore"),
    ("a", lambda d: f"{d.getrandbits(128):032x}", "ignore"),
    # A missing value among equal ones is information.
    ("seen", lambda d: d.choice(["1", ""]), "dense"),
    ("mark", lambda d: d.choice(["x", ""]), "categorical"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "role"), COLUMNS)
def test_columns_are_what_a_person_would_choose(name: str, value: Draw, role: str) -> None:
    draw = random.Random(0)
    guess = infer_role(name, [str(value(draw)) for _ in range(ROWS)])
    assert guess.role == role, guess.reason
    assert guess.reason and "\n" not in guess.reason


def test_numbers_of_rows_are_left_out_under_any_name() -> None:
    rows = [str(1_000 + 3 * row) for row in range(ROWS)]
    assert infer_role("a", rows).role == "ignore"
    assert infer_role("row", rows).role == "ignore"
    assert infer_role("price", rows).role == "dense"  # prices in order
    random.Random(0).shuffle(rows)
    assert infer_role("id", rows).role == "ignore"


def test_a_few_rows_prove_no_key_and_no_constant() -> None:
    assert infer_role("user_id", [str(7 * row) for row in range(49)]).role == "categorical"
    assert infer_role("user_id", ["7"] * 49).role == "categorical"
    assert infer_role("user_id", ["7"] * 50).role == "ignore"


def test_a_doubtful_column_says_how_to_decide() -> None:
    guess = infer_role("a", [str(row % 24) for row in range(ROWS)])
    assert "--sparse" in guess.reason and "--dense" in guess.reason
