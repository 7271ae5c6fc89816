"""benchmarks/step_bytes.py counts the bytes that kernels need and request."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("Triton compiles for the GPU here", allow_module_level=True)

import step_bytes
import triton
import triton.language as tl
from dcnv2.compiled import decode
from dcnv2.requests import Signature, count_requests
from dcnv2.shape import TINY
from dcnv2.step_kernels import Launch, LaunchRequests, StepKernel, scale_launch, step_kernels, total
from gpu_path.records import Record, TensorRecord
from record import ROOT

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NaN and infinity in masked lanes


@triton.jit
def copy(out, x, n, SIZE: tl.constexpr) -> None:  # type: ignore[no-untyped-def]
    index = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out + index, tl.load(x + index, mask=index < n, other=0.0), mask=index < n)
    tl.atomic_add(out, tl.load(x))


def test_requests_are_counted() -> None:
    x, out = torch.ones(1000, dtype=torch.bfloat16), torch.zeros(1000)
    with count_requests() as counter:
        copy[(8,)](out, x, 1000, SIZE=128)
        copy[(1,)](out, x, 10, SIZE=128)
    assert [launch.kernel for launch in counter.launches] == ["copy", "copy"]
    assert counter.launches[0].signature.arguments == {"out": "*fp32", "x": "*bf16", "n": "i32", "SIZE": 128}
    assert (counter.launches[0].load_bytes, counter.launches[0].store_bytes) == (2 * 1008 + 4 * 8, 4 * 1008)
    assert counter.launches[1].num_bytes == 2 * 11 + 4 + 4 * 11
    assert out[1:].equal(torch.ones(999)) and out[0] == 2.0


def test_sampled_programs_represent_all() -> None:
    x, out = torch.ones(32_768), torch.zeros(32_768)
    with count_requests(["copy"]) as counter:
        copy[(1024,)](out, x, 32_768, SIZE=32)
    assert counter.launches[0].num_bytes == pytest.approx(2 * 4 * (32_768 + 1024) + 4 * 1024, rel=1e-6)
    assert out[32:64].sum() == 0.0 and out[9 * 32 : 10 * 32].equal(torch.ones(32))


class Pair(NamedTuple):
    x: Any
    weights: Any


def test_signatures_are_decoded() -> None:
    arguments = {"out": Pair(torch.ones(1), None), "x": (torch.ones(1).int(), 3), "n": 1 << 40, "SIZE": (tl.float16, 2)}
    encoded = json.loads(json.dumps(Signature.from_launch(copy, {**arguments, "num_warps": 4})))
    decoded = {name: decode(value) for name, value in Signature(*encoded).arguments.items()}
    assert decoded == {
        "out": Pair("*fp32", None),
        "x": ("*i32", "i32"),
        "n": "i64",
        "SIZE": (tl.float16, 2),
        "num_warps": 4,
    }
    assert isinstance(decoded["out"], Pair)


SIGNATURE = Signature("module", "kernel", {})


def tensor(dtype: str, *shape: int) -> TensorRecord:
    return TensorRecord(dtype, shape, (1,) * len(shape), 0, "")


def test_launches_are_scaled() -> None:
    recorded, shape = TINY.with_batch_size(9), replace(TINY, batch_size=90)
    product = Record(
        "kernel", "aten::mm", tensors=(tensor("bfloat16", 9, 8), tensor("bfloat16", 8, 4), tensor("bfloat16", 9, 4))
    )
    one = scale_launch(Launch(product, None), recorded, shape)
    assert (one.num_bytes, one.num_flops, one.num_requested) == (2 * (90 * 8 + 8 * 4 + 90 * 4), 2 * 90 * 8 * 4, None)
    words = Record("kernel", "_write_words", tensors=(tensor("int64", 8),))
    one = scale_launch(Launch(words, LaunchRequests("_write_words", SIGNATURE, 0.0, 64.0)), recorded, shape)
    assert (one.num_bytes, one.num_requested) == (64, 64.0)
    mask = Record("kernel", "_mask", tensors=(tensor("float32", 9, 8), tensor("float32", 9, 8)))
    one = scale_launch(Launch(mask, LaunchRequests("_mask", SIGNATURE, 288.0, 300.0)), recorded, shape)
    assert (one.num_bytes, one.num_requested) == (2 * 4 * 90 * 8, 5880.0)


@pytest.mark.soak
def test_a_recorded_step_has_all_products() -> None:
    kernels = step_kernels(TINY, 11, 11)
    count, num_bytes, num_flops = total(kernels)
    assert num_flops == pytest.approx(TINY.product_flops)
    assert count > 30 and num_bytes > 0
    requested = {kernel.name for kernel in kernels if kernel.num_requested}
    assert {"_pool", "update"} <= requested


@pytest.mark.soak
def test_the_command_prints_each_kernel() -> None:
    command = [sys.executable, "benchmarks/step_bytes.py", "--tiny"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = [[cell.strip() for cell in line.split("|")] for line in done.stdout.splitlines()]
    [update] = [row for row in rows if row[1:2] == ["update"]]
    assert update[2] == "1" and update[-2] == "16; 16"


def test_small_kernels_share_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_bytes, "widest_accesses", lambda signatures, _: [(16, 8) for _ in signatures])
    kernels = [
        StepKernel("_pool", "lookup", 1, 4e6, 0.0, 5e6, (SIGNATURE, SIGNATURE)),
        StepKernel("aten::mm", "forward", 2, 2e6, 3e9, None),
        StepKernel("aten::mm", "backward", 1, 2e6, 1e9, None),
        StepKernel("_small", "agree", 3, 5e5, 0.0, 5e5, (SIGNATURE,)),
    ]
    assert step_bytes.make_rows(kernels, "sgd", 1.0) == [
        ("_pool", "1", "4", "5 (1.25)", "", "16; 8"),
        ("mm, forward", "2", "2", "", "3", ""),
        ("mm, backward", "1", "2", "", "1", ""),
        ("others", "3", "0", "", "", ""),
        ("total", "7", "8", "", "4", ""),
    ]
