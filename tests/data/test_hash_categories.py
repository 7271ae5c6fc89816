"""XXH64: against its reference, the xxhash package and literal values that must never change."""

import sys

import numpy as np
import pyarrow as pa
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from meseta.data.hash_categories import feature_seed, hash_categories, hash_to_rows, reference
from meseta.spec import MesetaError

SEEDS = st.integers(0, 2**64 - 1)
STRINGS = st.lists(st.binary(max_size=100))
LITERAL_HASHES = ["0xef46db3751d8e999", "0xd24ec4f1a98c6e5b", "0x5d3ccd85c9c22fe4", "0xed714233c5a9a792"]
LITERAL_ROWS = [58569, 86089, 72033, 87782]
LITERAL_SEED = "0xd43d5153ee4f5a8f"


@given(strings=STRINGS, seed=SEEDS)
def test_agrees_with_reference_and_xxhash(strings: list[bytes], seed: int) -> None:
    expected = [xxhash.xxh64_intdigest(s, seed) for s in strings]
    for kind in (pa.binary(), pa.large_binary()):
        assert hash_categories(pa.array(strings, kind), seed).tolist() == expected
    assert reference.hash_categories(strings, seed).tolist() == expected


def test_strings_of_all_short_lengths() -> None:
    """XXH64 handles 1, 4, 8 and 32 bytes at a time."""
    strings = [bytes(range(1, length + 1)) for length in range(100)]
    expected = [xxhash.xxh64_intdigest(s, 5) for s in strings]
    assert hash_categories(pa.array(strings), 5).tolist() == expected
    assert reference.hash_categories(strings, 5).tolist() == expected


@given(strings=STRINGS, seed=SEEDS, num_rows=st.sampled_from([1, 2, 1000, 2**31, 2**31 + 1, 2**63]))
def test_rows_agree_with_reference(strings: list[bytes], seed: int, num_rows: int) -> None:
    rows = hash_to_rows(pa.array(strings, pa.binary()), num_rows, seed)
    assert rows.dtype == (np.int32 if num_rows <= 2**31 else np.int64)
    assert rows.tolist() == reference.hash_to_rows(strings, num_rows, seed).tolist()
    assert all(0 <= row < num_rows for row in rows.tolist())


def test_literal_values() -> None:
    """Stable across machines and versions: a trained table depends on them."""
    strings = pa.array(["", "a", "68fd1e64", "the quick brown fox jumps over the lazy dog"])
    assert [hex(h) for h in hash_categories(strings).tolist()] == LITERAL_HASHES
    assert hash_to_rows(strings, 100_000, seed=7).tolist() == LITERAL_ROWS
    assert hex(feature_seed("cat_0", 0)) == LITERAL_SEED


def test_slices_nulls_and_string_types() -> None:
    array = pa.array(["x", "yy", None, "", "zzz"])
    whole = hash_categories(array, 3)
    assert hash_categories(array.slice(1, 3), 3).tolist() == whole[1:4].tolist()
    assert whole[2] == whole[3]
    assert hash_categories(array.cast(pa.large_string()), 3).tolist() == whole.tolist()
    assert hash_categories(pa.array([], pa.string())).size == 0


def test_wrong_input_is_named() -> None:
    with pytest.raises(MesetaError, match="got int64; cast it first"):
        hash_categories(pa.array([1, 2]))
    with pytest.raises(MesetaError, match="num_rows must be in"):
        hash_to_rows(pa.array(["a"]), 0)


def test_offsets_outside_the_data_are_refused() -> None:
    from meseta import _C

    data, out = np.zeros(4, np.uint8), np.zeros(1, np.uint64)
    for offsets in ([0, 5], [-1, 2], [3, 2]):
        with pytest.raises(ValueError, match="spans bytes"):
            _C.hash_categories(data, np.array(offsets, np.int32), 0, out)
    with pytest.raises(ValueError, match="n \\+ 1 offsets"):
        _C.hash_categories(data, np.zeros(1, np.int64), 0, out)


def test_missing_core_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import meseta

    monkeypatch.delattr(meseta, "_C", raising=False)
    monkeypatch.setitem(sys.modules, "meseta._C", None)
    with pytest.raises(MesetaError, match="pip install"):
        hash_categories(pa.array(["a"]))
