"""Tests of initial rows: the published generator, equal cells in any rectangle, and the moments of the
distributions."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meseta.measure.threads import use_num_threads
from meseta.ops.random_rows import CHUNK_CELLS, initial_rows, initial_rows_at, random_bits, reference, table_key
from meseta.spec import InitSpec, MesetaError, TableSpec

# Counter, key and result of Philox4x32-10 in the known-answer file of Random123 (Salmon et al., SC 2011).
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_reference_gives_the_published_words(counter: str, key: str, expected: str) -> None:
    low, high = words(key)
    c0, c1, c2, c3 = (torch.tensor([word]) for word in words(counter))
    got = reference.philox((c0, c1, c2, c3), low | high << 32)
    assert [int(word) for word in got] == words(expected)


def test_compiled_core_gives_the_published_words() -> None:
    # Row 0, columns 0..3 and key 0 are the counter of zeros; the other two have a fourth word, which cells leave at 0.
    assert random_bits(0, (0, 1), (0, 4)).tolist() == [words(KNOWN_ANSWERS[0][2])]


@st.composite
def rectangles(draw: st.DrawFn) -> tuple[tuple[int, int], tuple[int, int]]:
    """Draw up to 9 rows, some beyond 2^32, and up to 11 columns at any alignment."""
    row = draw(st.integers(0, 40) | st.integers(2**32 - 5, 2**32 + 5) | st.integers(2**40, 2**41))
    column = draw(st.integers(0, 300))
    return (row, row + draw(st.integers(1, 9))), (column, column + draw(st.integers(1, 11)))


@given(key=st.integers(0, 2**64 - 1), rectangle=rectangles())
def test_compiled_core_equals_reference(key: int, rectangle: tuple[tuple[int, int], tuple[int, int]]) -> None:
    rows, columns = rectangle
    got = random_bits(key, rows, columns)
    assert torch.equal(got, reference.random_bits(key, rows, columns, "cpu"))
    assert got.min() >= 0 and got.max() < 2**32


def spec(kind: str, rows: int = 64, columns: int = 48, dtype: str = "float32", scale: float | None = None) -> TableSpec:
    return TableSpec(
        name="t", num_embeddings=rows, embedding_dim=columns, dtype=dtype, init=InitSpec(kind=kind, scale=scale)
    )


def cut(table: TableSpec, rows: tuple[int, int], columns: tuple[int, int], seed: int = 3) -> torch.Tensor:
    return initial_rows(table, rows=rows, columns=columns, seed=seed, device="cpu")


@given(
    data=st.data(),
    kind=st.sampled_from(["uniform", "normal", "constant"]),
    dtype=st.sampled_from(["float32", "float64"]),
)
def test_a_shard_is_cut_from_the_whole(data: st.DataObject, kind: str, dtype: str) -> None:
    table = spec(kind, data.draw(st.integers(1, 50)), data.draw(st.integers(1, 50)), dtype)
    whole = cut(table, (0, table.num_embeddings), (0, table.embedding_dim))
    r0, c0 = data.draw(st.integers(0, table.num_embeddings - 1)), data.draw(st.integers(0, table.embedding_dim - 1))
    r1 = data.draw(st.integers(r0 + 1, table.num_embeddings))
    c1 = data.draw(st.integers(c0 + 1, table.embedding_dim))
    piece = cut(table, (r0, r1), (c0, c1))
    assert piece.shape == (r1 - r0, c1 - c0) and piece.dtype == getattr(torch, dtype)
    assert torch.equal(piece, whole[r0:r1, c0:c1])


@given(
    rectangle=rectangles(),
    dtype=st.sampled_from(["float32", "float64", "float16", "bfloat16"]),
    scale=st.floats(1e-6, 100),
)
def test_compiled_uniform_rows_equal_reference(
    rectangle: tuple[tuple[int, int], tuple[int, int]], dtype: str, scale: float
) -> None:
    rows, columns = rectangle
    got = cut(spec("uniform", rows[1], columns[1], dtype, scale), rows, columns)
    bits = reference.random_bits(table_key(3, "t"), rows, columns, "cpu")
    expected = torch.empty(bits.shape, dtype=getattr(torch, dtype)).copy_(reference.uniform(bits, scale))
    assert torch.equal(got, expected)


@given(
    data=st.data(),
    kind=st.sampled_from(["uniform", "normal", "constant"]),
    dtype=st.sampled_from(["float32", "float64", "float16", "bfloat16"]),
)
def test_any_rows_are_those_of_the_whole(data: st.DataObject, kind: str, dtype: str) -> None:
    table = spec(kind, data.draw(st.integers(1, 300)), data.draw(st.integers(1, 50)), dtype)
    c0 = data.draw(st.integers(0, table.embedding_dim - 1))
    columns = c0, data.draw(st.integers(c0 + 1, table.embedding_dim))
    rows = data.draw(st.lists(st.integers(0, table.num_embeddings - 1), max_size=40))
    computed = initial_rows_at(table, torch.tensor(rows, dtype=torch.int64), columns=columns, seed=3)
    assert torch.equal(computed, cut(table, (0, table.num_embeddings), columns)[rows])


@pytest.mark.parametrize("kind", ["uniform", "normal"])
def test_many_distant_rows_on_several_threads(kind: str) -> None:
    table, rows = spec(kind, 2**40, 24), torch.arange(0, 2**40, 2**26 + 12345)[:9000]
    with use_num_threads(3):
        computed = initial_rows_at(table, rows, columns=(5, 24), seed=3)
    for place in (0, 1, 4097, 8999):
        row = int(rows[place])
        assert torch.equal(computed[place], cut(table, (row, row + 1), (5, 24))[0])


def test_rows_are_spread_over_threads() -> None:
    table = spec("uniform", 3000, 13)
    whole = cut(table, (0, 3000), (0, 13))
    for count in (2, 3):
        with use_num_threads(count):
            assert torch.equal(cut(table, (0, 3000), (0, 13)), whole)


@pytest.mark.parametrize("kind", CHUNK_CELLS)
def test_chunks_leave_no_seam(kind: str) -> None:
    num_rows = CHUNK_CELLS[kind] // 16 + 5
    table = spec(kind, num_rows, 16)
    whole = cut(table, (0, num_rows), (0, 16))
    assert torch.equal(cut(table, (num_rows - 9, num_rows), (0, 16)), whole[-9:])


def test_moments() -> None:
    num_rows, scale = 4000, 0.25
    uniform = cut(spec("uniform", num_rows, 50, "float64", scale), (0, num_rows), (0, 50)).flatten()
    assert uniform.min() >= -scale and uniform.max() < scale
    n = uniform.numel()
    assert abs(uniform.mean()) < 5 * scale / math.sqrt(3 * n)
    assert abs(uniform.var() / (scale**2 / 3) - 1) < 5 * math.sqrt(0.8 / n)  # kurtosis of the uniform law: 1.8
    normal = cut(spec("normal", num_rows, 50, "float64", scale), (0, num_rows), (0, 50)).flatten() / scale
    assert abs(normal.mean()) < 5 / math.sqrt(n)
    assert abs(normal.var() - 1) < 5 * math.sqrt(2 / n)
    assert abs((normal**3).mean()) < 5 * math.sqrt(15 / n)
    assert abs((normal**4).mean() - 3) < 5 * math.sqrt(96 / n)
    share = (normal.abs() < 1).double().mean()
    assert abs(share - math.erf(1 / math.sqrt(2))) < 5 * math.sqrt(0.22 / n)


def test_cells_do_not_repeat_and_neighbours_are_uncorrelated() -> None:
    bits = random_bits(table_key(0, "t"), (0, 500), (0, 40)).double()
    assert bits.unique().numel() > 0.9999 * bits.numel()
    for a, b in ((bits[:, :-1], bits[:, 1:]), (bits[:-1], bits[1:])):
        correlation = torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]
        assert abs(correlation) < 5 / math.sqrt(a.numel())


def test_default_scale_is_one_over_the_root_of_the_rows() -> None:
    whole = cut(spec("uniform", 100, 400), (0, 100), (0, 400))
    assert 0.0999 < whole.abs().max() <= 0.1


def test_constant_fills() -> None:
    assert torch.equal(cut(spec("constant", scale=2.5), (0, 3), (0, 2)), torch.full((3, 2), 2.5))


def test_key_depends_on_seed_and_name() -> None:
    keys = {table_key(seed, name) for seed in range(3) for name in ("a", "b", "1/a")}
    assert len(keys) == 9
    table = spec("uniform")
    assert not torch.equal(cut(table, (0, 4), (0, 4), seed=0), cut(table, (0, 4), (0, 4), seed=1))


NO_RANGES = [((-1, 1), (0, 4)), ((2, 1), (0, 4)), ((0, 1), (-4, 4)), ((0, 1), (4, 0))]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(("rows", "columns"), NO_RANGES)
def test_ranges_that_are_none_are_refused(rows: tuple[int, int], columns: tuple[int, int], device: str) -> None:
    with pytest.raises(MesetaError, match=r"random_bits: invalid rows .* pass ascending ranges"):
        random_bits(1, rows, columns, device)
