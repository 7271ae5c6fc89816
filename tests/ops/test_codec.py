"""Tests of codecs against torch's casts, the reference and Triton's interpreter, and of the mean of stochastic
rounding."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from codec_cases import NAMES, Case, check_decode, check_encode, decode_case, make_case, same_as_reference
from instruction_sets import each_core
from meseta.measure.threads import use_num_threads
from meseta.ops import codec as package
from meseta.ops.codec import HalfRange, StochasticRounding, decode_columns, encode_columns, reference, rounding_key
from meseta.ops.codec.layout import pack_layouts
from meseta.spec import MesetaError
from meseta.spec.codecs import CODECS

BLOCKS = ["fp8", "int8"]
pieces_of = st.lists(st.integers(0, 40), max_size=4).map(tuple)
cases = {
    "seed": st.integers(0, 2**32),
    "name": st.sampled_from(NAMES),
    "num_rows": st.sampled_from([0, 1, 5, 64, 700]),
    "num_threads": st.sampled_from([1, 2]),
}


@given(pieces=pieces_of, drawn=st.booleans(), **cases)
def test_encodes_as_torch_casts(
    seed: int, name: str, num_rows: int, num_threads: int, pieces: tuple[int, ...], drawn: bool
) -> None:
    with use_num_threads(num_threads):
        # A generator for each row is slow.
        check_encode(make_case(seed, name, min(num_rows, 64) if drawn else num_rows, pieces, drawn=drawn))


@given(pieces=pieces_of, drawn=st.booleans(), **cases)
def test_has_the_bytes_of_the_reference(
    seed: int, name: str, num_rows: int, num_threads: int, pieces: tuple[int, ...], drawn: bool
) -> None:
    case = make_case(seed, name, num_rows, pieces, drawn=drawn)
    with use_num_threads(num_threads):
        codes, overflows = case.encoded()
    same_as_reference(case, codes, overflows)


@given(all_pieces=st.lists(pieces_of, min_size=1, max_size=3), **cases)
def test_decodes_the_moved_columns(
    seed: int, name: str, num_rows: int, num_threads: int, all_pieces: list[tuple[int, ...]]
) -> None:
    case = decode_case(seed, name, num_rows, all_pieces)
    with use_num_threads(num_threads):
        check_decode(case)
    check_decode(case, implementation=reference)


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("drawn", [False, True])
def test_a_table_in_pieces_has_the_numbers_of_the_whole(name: str, drawn: bool) -> None:
    codec, table, columns = CODECS[name], torch.randn(50, 48), (0, 0, 0, 48, 0)  # type: ignore[index]

    def decoded(pieces: tuple[int, ...], firsts: tuple[int, ...]) -> torch.Tensor:
        rounding = StochasticRounding((9,) * len(pieces), firsts, 7) if drawn else None
        out, back = torch.empty(50, codec.row_bytes(pieces), dtype=torch.uint8), torch.empty(50, 48)
        encode_columns(out, [table], columns, codec, pieces, rounding=rounding)
        decode_columns(back, [out], columns, codec, [pieces])
        return back

    whole = decoded((48,), (0,))
    assert torch.equal(decoded((16, 32), (0, 16)), whole)
    turned = torch.empty(50, codec.row_bytes((32, 16)), dtype=torch.uint8)
    rounding = StochasticRounding((9, 9), (16, 0), 7) if drawn else None
    encode_columns(turned, [table], (0, 16, 0, 32, 0, 0, 0, 32, 16, 0), codec, (32, 16), rounding=rounding)
    back = torch.empty(50, 48)
    decode_columns(back, [turned], (0, 32, 0, 16, 0, 0, 0, 16, 32, 0), codec, [(32, 16)])
    assert torch.equal(back, whole)


@pytest.mark.parametrize("name", BLOCKS)
def test_stochastic_rounding_is_right_on_average(name: str) -> None:
    num_rows, num_keys = 20, 100
    row = torch.randn(1, 64) * torch.tensor([1.0, 0.01]).repeat(32)
    rows = row.repeat(num_rows, 1)
    codec, columns, back = CODECS[name], (0, 0, 0, 64, 0), torch.empty(num_rows, 64)  # type: ignore[index]
    out = torch.empty(num_rows, codec.row_bytes((64,)), dtype=torch.uint8)
    many = []
    for step in range(num_keys):
        key = rounding_key(3, step, "t")
        encode_columns(out, [rows], columns, codec, (64,), rounding=StochasticRounding((key,), (32,), 11))
        decode_columns(back, [out], columns, codec, [(64,)])
        many.append(back.clone())
    drawn = torch.cat(many).double()
    assert all(len(column.unique()) <= 2 for column in drawn.T)
    # Hoeffding: a mean of n numbers in a gap leaves `bound` with probability 2 exp(-2 n (bound / gap)^2), 1e-7 for all
    # 64. The generator has 24 bits, and quotient and product are rounded once each. A scale is 2^-7 too large at most.
    exact = row[0].double().abs()
    scale = exact.view(4, 16).amax(1).repeat_interleave(16) / codec.max_scaled_value * (1 + 2.0**-7)
    gap = scale if name == "int8" else torch.maximum(exact / 8, scale * 2.0**-9)
    bound = gap * math.sqrt(math.log(2 * 64 / 1e-7) / (2 * num_rows * num_keys)) + 2.0**-22 * gap + 2.0**-22 * exact
    assert ((drawn.mean(0) - row[0].double()).abs() <= bound).all()


@pytest.mark.parametrize("name", BLOCKS)
def test_a_non_finite_number_spreads_to_its_block(name: str) -> None:
    values = torch.ones(3, 40)
    values[0, 17], values[1, 3], values[2, 39] = math.inf, math.nan, -math.inf
    codec, columns, back = CODECS[name], (0, 0, 0, 40, 0), torch.empty(3, 40)  # type: ignore[index]
    out = torch.empty(3, codec.row_bytes((40,)), dtype=torch.uint8)
    encode_columns(out, [values], columns, codec, (40,))
    decode_columns(back, [out], columns, codec, [(40,)])
    expected = torch.ones(3, 40)
    expected[0, 16:32], expected[1, :16], expected[2, 32:] = math.nan, math.nan, math.nan
    # 1 over a scale that was rounded up may not be a number of the codec: within half a step.
    torch.testing.assert_close(back, expected, rtol=0.5 / 127 * 2 if name == "int8" else 1 / 16, atol=0, equal_nan=True)
    assert out[0, 16:32].tolist() == [0] * 16


def test_halves_saturate_and_are_counted() -> None:
    values = torch.tensor([[65504.0, 65505.0, -7e4, math.inf, -math.inf, math.nan, 3e38, 1.0]])
    out, count, back = torch.empty(1, 16, dtype=torch.uint8), torch.tensor([2]), torch.empty(1, 8)
    encode_columns(out, [values], (0, 0, 0, 8, 0), CODECS["fp16"], (8,), half_range=HalfRange(0, count))
    decode_columns(back, [out], (0, 0, 0, 8, 0), CODECS["fp16"], [(8,)])
    top = 65504.0
    assert back[0, :5].tolist() == [top, top, -top, math.inf, -math.inf] and back[0, 6:].tolist() == [top, 1.0]
    assert bool(back[0, 5].isnan()) and count.tolist() == [5]
    encode_columns(out, [values], (0, 0, 0, 8, 0), CODECS["fp16"], (8,), half_range=HalfRange(-2, count))
    decode_columns(back, [out], (0, 0, 0, 8, 0), CODECS["fp16"], [(8,)], exponent=-2)
    assert back[0, :3].tolist() == [65504.0, 65504.0, -70016.0] and count.tolist() == [6]


def test_rounding_keys() -> None:
    keys = {rounding_key(seed, step, name) for seed in range(3) for step in range(3) for name in ("a", "b")}
    assert len(keys) == 18 and all(0 <= key < 2**64 for key in keys)
    assert rounding_key(1, 2, "t") == rounding_key(1, 2, "t")


def test_every_instruction_set_gives_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = set()
    for _ in each_core(package, monkeypatch):
        outcome = []
        for seed, code in enumerate(NAMES * 6):
            case = make_case(seed, code, 40, (33, 1, 0, 70, 16)[: seed % 5 + 1], drawn=seed % 2 == 0)
            codes, count = case.encoded()
            back = torch.zeros(40, sum(case.pieces))
            decode_columns(back, [codes], (0, 0, 0, back.shape[1], 0), case.codec, [case.pieces], scale=1 / 3)
            outcome += [codes.numpy().tobytes(), back.nan_to_num(0.5).numpy().tobytes(), str(count).encode()]
        outcomes.add(b"".join(outcome))
    assert len(outcomes) == 1


def encode(**changed: Any) -> None:
    arguments: dict[str, Any] = {
        "out": torch.zeros(2, 6, dtype=torch.uint8), "sources": [torch.ones(2, 3)], "moves": (0, 0, 0, 3, 0),
        "codec": CODECS["int8"], "pieces": (3,),
    }  # fmt: skip
    encode_columns(**arguments | changed)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"codec": CODECS["fp32"]}, "encode_columns: fp32 needs no encoding; call .*place_columns"),
        ({"sources": [torch.ones(2, 3).double()]}, r"matrix 0 is torch.float64 \[2, 3\], but codecs need float32"),
        ({"sources": [torch.ones(3, 3)]}, r"matrix 0 is torch.float32 \[3, 3\]"),
        ({"sources": []}, "source 0 is outside 0..-1"),
        ({"moves": (0, 1, 0, 3, 0)}, "3 columns from column 1 of 3 cannot move to column 0 of 3"),
        ({"moves": (0, 0, 1, 3, 0)}, "3 columns from column 0 of 3 cannot move to column 1 of 3"),
        ({"moves": (0, 0)}, "moves have 2 numbers, not 5 per move"),
        ({"pieces": (4,)}, r"rows of pieces \[4\] need contiguous uint8 \[2, 6\]|int8 rows"),
        ({"pieces": (5,)}, r"need contiguous uint8 \[2, 8\] at an even address"),
        ({"pieces": (-1, 4)}, "pieces are .*at least 0"),
        ({"out": torch.zeros(2, 6)}, "the encoded matrix is torch.float32"),
        ({"out": torch.zeros(6, 2, dtype=torch.uint8).t()}, "with strides"),
        ({"out": torch.zeros(13, dtype=torch.uint8)[1:].view(2, 6)}, "at an even address"),
        ({"half_range": HalfRange(127)}, "exponent 127 must be in -126..126"),
        ({"half_range": HalfRange(0, torch.zeros(1))}, "overflows are torch.float32"),
        ({"rounding": StochasticRounding((2**64,), (0,), 0)}, "key 18446744073709551616 must be in"),
        ({"rounding": StochasticRounding((1, 2), (0,), 0)}, "rounding has 3 keys and columns for 1 pieces"),
        (
            {"rounding": StochasticRounding((1,), (8,), 0)},
            "rounding.columns contains 8; a piece must start at a multiple of 16",
        ),
        ({"rounding": StochasticRounding((1,), (0,), -1)}, "the first row has number -1"),
        ({"rounding": StochasticRounding((1,), (0,), torch.zeros(3, dtype=torch.int64))}, "numbers of rows are"),
        (
            {"codec": CODECS["bf16"], "rounding": StochasticRounding((1,), (0,), 0)},
            "bf16 has no stochastic rounding; pass no rounding",
        ),
    ],
)
def test_calls_that_do_not_fit_are_refused(changed: dict[str, Any], words: str) -> None:
    if changed.get("pieces") == (4,):
        changed = {**changed, "out": torch.zeros(2, 7, dtype=torch.uint8)}
    with pytest.raises(MesetaError, match=words):
        encode(**changed)


def test_decoding_refuses_mismatched_arguments() -> None:
    out, codes, whole, int8 = torch.zeros(2, 3), torch.zeros(2, 6, dtype=torch.uint8), (0, 0, 0, 3, 0), CODECS["int8"]
    with pytest.raises(MesetaError, match="fp32 needs no encoding"):
        decode_columns(out, [codes], whole, CODECS["fp32"], [(3,)])
    with pytest.raises(MesetaError, match="2 lists of pieces for 1 matrices"):
        decode_columns(out, [codes], whole, int8, [(3,), (3,)])
    with pytest.raises(MesetaError, match=r"matrix 0 is torch\.float64"):
        decode_columns(out.double(), [codes], whole, int8, [(3,)])
    with pytest.raises(MesetaError, match=r"need contiguous uint8 \[2, 6\]"):
        decode_columns(out, [codes[:, :5]], whole, int8, [(3,)])
    with pytest.raises(MesetaError, match="columns must be contiguous"):
        decode_columns(torch.zeros(3, 2).t(), [codes], whole, int8, [(3,)])
    with pytest.raises(MesetaError, match="3 columns from column 2 of 3"):
        decode_columns(out, [codes], (0, 2, 0, 3, 0), int8, [(3,)])


@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name: str) -> None:
    case = make_case(4, name, 3, (20, 3), drawn=True)
    torch.library.opcheck(torch.ops.meseta.encode_columns.default, (case.empty(), *case.arguments()))
    layout = pack_layouts(case.codec, 0, [case.pieces])
    arguments = (torch.zeros(3, 9), [case.encoded()[0]], [0, 1, 0, 9, 1], layout, 0.5)
    torch.library.opcheck(torch.ops.meseta.decode_columns.default, arguments)


TRITON = [
    pytest.param(
        seed,
        name,
        (0, 1, 19, 40)[seed % 4],
        ((16,), (33, 3), (5,), (64, 0, 16, 7), (), (130,))[seed % 6],
        bool(seed % 2),
        marks=pytest.mark.soak if seed > 5 else (),
    )
    for seed in range(12)
    for name in NAMES
]


def triton_implementation() -> Any:
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("Triton compiles for the GPU here: see tests/gpu")
    from meseta.ops.codec import triton

    return triton


@pytest.mark.parametrize(("seed", "name", "num_rows", "pieces", "drawn"), TRITON)
def test_triton_encodes_the_same_bytes(
    seed: int, name: str, num_rows: int, pieces: tuple[int, ...], drawn: bool
) -> None:
    case: Case = make_case(seed, name, num_rows, pieces, drawn=drawn)
    same_as_reference(case, *case.by(triton_implementation()))


@pytest.mark.parametrize(("seed", "name", "num_rows", "pieces", "drawn"), TRITON)
def test_triton_decodes_the_same_numbers(
    seed: int, name: str, num_rows: int, pieces: tuple[int, ...], drawn: bool
) -> None:
    case = decode_case(seed, name, num_rows, [pieces, (20,), (3, 17)][: 1 + seed % 3])
    check_decode(case, implementation=triton_implementation())


def test_triton_refuses_columns_outside() -> None:
    triton, codes = triton_implementation(), torch.zeros(2, 6, dtype=torch.uint8)
    layout = pack_layouts(CODECS["int8"], 0, [(3,)])
    with pytest.raises(MesetaError, match="3 columns from column 1 of 3 cannot move to column 0 of 3"):
        triton.encode_columns(codes, [torch.ones(2, 3)], [0, 1, 0, 3, 0], layout, 1.0, [], None, None)
    with pytest.raises(MesetaError, match="source 1 is outside"):
        triton.decode_columns(torch.ones(2, 3), [codes], [1, 0, 0, 3, 0], layout, 1.0)
