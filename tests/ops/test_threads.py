"""Any number of threads gives the same bits in all products and sums of a step, also with older instruction sets."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import thread_cases
from meseta.ops.core import MODULES, instruction_set
from meseta.ops.mlp import reference
from meseta.system.processors import read_processor
from thread_cases import CASES, differing

LESSER = {
    "no AMX": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"},
    "avx2": {"MESETA_ISA": "avx2", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "baseline": {"MESETA_ISA": "baseline", "ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"},
}
KNOWN = [
    {"call": "layer", "batch": 700, "inputs": 70, "outputs": 1, "dtype": torch.float32},
    {"call": "layer", "batch": 16384, "inputs": 13, "outputs": 1, "dtype": torch.float32},
    {"call": "layer", "batch": 1, "inputs": 70, "outputs": 256, "dtype": torch.float32},
    {"call": "layer", "batch": 3, "inputs": 100_000, "outputs": 3, "dtype": torch.float32},
    {"call": "layer", "batch": 64, "inputs": 1000, "outputs": 256, "dtype": torch.float64},
    {"call": "interaction", "batch": 1, "inputs": 64, "outputs": 39, "dtype": torch.float64},
    {"call": "sums", "batch": 100_000, "inputs": 1, "outputs": 1, "dtype": torch.float32},
    {"call": "loss", "batch": 32768, "inputs": 1, "outputs": 1, "dtype": torch.float32},
    {"call": "softmax", "batch": 700, "inputs": 13, "outputs": 1, "dtype": torch.float32},
]
"""Cases in which torch's products, sums or softmax differ between numbers of threads, or may differ by their source."""
SMALL = 3e6
"""Maximum number of multiplications of a case that `make test` draws."""
PARTS = 24
"""Number of tests of `make soak` per instruction set, which together run all cases."""


def numbers(part: int | None) -> list[int]:
    """Return the indices of the cases of a part, or of the known cases and a sample of the small ones."""
    if part is not None:
        return list(range(part, len(CASES), PARTS))
    known = [number for number, case in enumerate(CASES) if {k: v for k, v in case.items() if k != "work"} in KNOWN]
    assert len(known) == len(KNOWN)
    small = [number for number, case in enumerate(CASES) if case["work"] <= SMALL and number not in known]
    return [*known, *random.Random(14).sample(small, 30)]


SAMPLE_AND_PARTS = [None, *(pytest.param(part, marks=pytest.mark.soak) for part in range(PARTS))]


@pytest.mark.parametrize("part", SAMPLE_AND_PARTS)
def test_threads_change_no_bit(part: int | None) -> None:
    """Layers of bfloat16 with AMX are exempt, because the processor reports its thread dependence."""
    cases = [CASES[number] for number in numbers(part)]
    if read_processor().thread_dependence_reason():
        cases = [case for case in cases if case["dtype"] != torch.bfloat16 or case["call"] != "layer"]
    assert differing(cases) == []


@pytest.mark.parametrize("part", SAMPLE_AND_PARTS)
@pytest.mark.parametrize("name", ["no AMX", pytest.param("avx2", marks=pytest.mark.soak), "baseline"])
def test_threads_change_no_bit_with_older_instruction_sets(name: str, part: int | None) -> None:
    if name == "no AMX":
        if not read_processor().thread_dependence_reason():
            pytest.skip("the processor, or ONEDNN_MAX_CPU_ISA, has no AMX")
        chosen = [number for number in numbers(part) if CASES[number]["dtype"] == torch.bfloat16]
    else:
        if list(MODULES).index(name) <= list(MODULES).index(instruction_set()):
            pytest.skip("the processor, or MESETA_ISA, has no more than this one")
        chosen = numbers(part)
    tests = Path(thread_cases.__file__).parent
    run = subprocess.run(
        [sys.executable, thread_cases.__file__],
        input=" ".join(map(str, chosen)),
        env={**os.environ, **LESSER[name], "PYTHONPATH": str(tests)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.stdout.splitlines() == [f"{len(chosen)} cases"], run.stdout + run.stderr


def test_a_difference_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        y = reference.mlp(x, parameters[:1], parameters[1:], relu_last=False)
        return y if torch.get_num_threads() < 4 else y + 1

    monkeypatch.setitem(thread_cases.CALLS, "layer", other)
    chosen = [CASES[number] for number in numbers(None)]
    layers = [case for case in chosen if case["call"] == "layer"][-2:]
    assert differing(layers) == [thread_cases.case_id(case) for case in layers]
