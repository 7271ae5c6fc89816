"""Tests of any cache size and any ids: the bits of rows in memory, or a named error before any row moves."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given, settings
from hypothesis import strategies as st

from meseta.spec import MesetaError
from storage.test_tiers import ROWS, batch, collection, contents, loss_of, placed, same


@settings(deadline=None)
@given(
    big=st.integers(1, ROWS["big"]),
    small=st.integers(1, ROWS["small"]),
    tier=st.sampled_from(["cached", "disk"]),
    seed=st.integers(0, 1 << 20),
    size=st.integers(1, 60),
    drift=st.sampled_from([0, 1, 37]),
)
def test_any_near_size_and_ids(big: int, small: int, tier: str, seed: int, size: int, drift: int) -> None:
    resident = collection("rowwise_adagrad", "float32")
    with TemporaryDirectory() as folder:
        tiered = placed(tier, {"big": big, "small": small}, "rowwise_adagrad", "float32", Path(folder))
        for number in range(4):
            kjt = batch(seed + number, size, drift)
            try:
                loss = loss_of(tiered, kjt)
            except MesetaError as error:
                assert "distinct rows" in str(error) and "cache_rows" in str(error)
                continue
            expected = loss_of(resident, kjt)
            assert float(loss.detach()) == float(expected.detach())
            loss.backward()
            expected.backward()
        assert same(contents(tiered), contents(resident))
