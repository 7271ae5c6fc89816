"""Tests of codecs on a GPU: bytes of the reference, no synchronization, CUDA graphs, and speed relative to a copy."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from codec_cases import NAMES, check_decode, decode_case, make_case, same_as_reference
from meseta.ops.codec import HalfRange, StochasticRounding, decode_columns, encode_columns
from meseta.spec.codecs import CODECS
from sampling import product, sample
from triton_cases import no_wait

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here")

PIECES = [(16,), (33, 3), (5,), (64, 0, 16, 7), (), (130,), (64,) * 26]
MATRIX = product(name=NAMES, num_rows=[0, 1, 19, 3000], pieces=PIECES, drawn=[False, True], seed=[0, 1, 2])


@pytest.mark.parametrize("case", sample(MATRIX, 80, seed=0))
def test_encodes_the_bytes_of_the_reference(case: dict[str, Any]) -> None:
    made = make_case(case["seed"], case["name"], case["num_rows"], case["pieces"], drawn=case["drawn"])
    same_as_reference(made, *made.encoded("cuda"))


@pytest.mark.parametrize("case", sample(MATRIX, 80, seed=1))
def test_decodes_the_numbers_of_the_reference(case: dict[str, Any]) -> None:
    pieces = [case["pieces"], (20,), (3, 17)][: 1 + case["seed"]]
    check_decode(decode_case(case["seed"], case["name"], case["num_rows"], pieces), "cuda")


def call(name: str, drawn: bool = False) -> tuple[Any, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (function that encodes and decodes 4096 x 1664 numbers, numbers, codes, decoded numbers)."""
    codec, pieces, whole = CODECS[name], (64,) * 26, (0, 0, 0, 1664, 0)  # type: ignore[index]
    values, back = torch.randn(4096, 1664, device="cuda"), torch.zeros(4096, 1664, device="cuda")
    codes = torch.zeros(4096, codec.row_bytes(pieces), dtype=torch.uint8, device="cuda")
    half = HalfRange(0, torch.zeros(1, dtype=torch.int64, device="cuda"))
    rounding = StochasticRounding(tuple(range(26)), (0,) * 26, 0) if drawn else None

    def run() -> None:
        encode_columns(codes, [values], whole, codec, pieces, rounding=rounding, half_range=half)
        decode_columns(back, [codes], whole, codec, [pieces])

    return run, values, codes, back


@pytest.mark.parametrize("name", NAMES)
def test_the_host_does_not_wait_and_a_graph_follows_its_inputs(name: str) -> None:
    run, values, _, back = call(name, drawn=name in ("fp8", "int8"))
    run()
    with no_wait():
        run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    values.neg_()
    graph.replay()
    captured = back.clone()
    run()
    assert torch.equal(captured, back)


def seconds(run: Any) -> float:
    """Return the mean seconds of a call."""
    for _ in range(3):
        run()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(50):
        run()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 50e3


@pytest.mark.parametrize("name", NAMES)
def test_speed_is_printed(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Speed is printed without a limit, because other work may share the device."""
    for drawn in [False, True] if name in ("fp8", "int8") else [False]:
        run, values, codes, back = call(name, drawn)
        num_bytes = values.nbytes + 2 * codes.nbytes + back.nbytes
        rate, copy = (
            num_bytes / seconds(run),
            2 * values.nbytes / seconds(lambda values=values, back=back: back.copy_(values)),
        )
        with capsys.disabled():
            print(f"{name}{' stochastic' * drawn}: there and back {rate / 1e9:.0f} GB/s, {rate / copy:.2f} of a copy's")
