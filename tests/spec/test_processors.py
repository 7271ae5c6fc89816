"""Tests of detected processor features, from the kernel's flags and the variables that lower them."""

from __future__ import annotations

import pytest

from meseta.system.processors import Processor, read_processor

AVX2 = "fpu sse4_2 avx avx2 fma"
AVX512 = f"{AVX2} avx512f avx512bw avx512dq avx512vl avx512_vnni"
ZEN4 = f"{AVX512} avx512_bf16"
SAPPHIRE = f"{ZEN4} amx_tile amx_bf16 amx_int8"
GRAVITON3 = "fp asimd sve i8mm bf16"


@pytest.mark.parametrize(
    ("flags", "variables", "level", "pays"),
    [
        ("", {}, "baseline", False),
        ("fpu sse4_2 avx", {}, "baseline", False),
        (AVX2, {}, "AVX2", False),
        (AVX512, {}, "AVX-512", False),
        (ZEN4, {}, "AVX-512 BF16", True),
        (SAPPHIRE, {}, "AMX", True),
        ("fp asimd", {}, "NEON", False),
        (GRAVITON3, {}, "NEON BF16", True),
        (SAPPHIRE, {"ATEN_CPU_CAPABILITY": "avx2"}, "AVX2", False),
        (SAPPHIRE, {"ATEN_CPU_CAPABILITY": "default"}, "baseline", False),
        (SAPPHIRE, {"ATEN_CPU_CAPABILITY": "avx512"}, "AMX", True),
        (SAPPHIRE, {"ONEDNN_MAX_CPU_ISA": "AVX2"}, "AVX2", False),
        (SAPPHIRE, {"ONEDNN_MAX_CPU_ISA": "avx512_core_vnni"}, "AVX-512", False),
        (SAPPHIRE, {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}, "AVX-512 BF16", True),
        (SAPPHIRE, {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_AMX"}, "AMX", True),
        (SAPPHIRE, {"DNNL_MAX_CPU_ISA": "SSE41"}, "baseline", False),
        (SAPPHIRE, {"ONEDNN_MAX_CPU_ISA": "ALL", "DNNL_MAX_CPU_ISA": "AVX2"}, "AMX", True),
        (AVX2, {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_AMX", "ATEN_CPU_CAPABILITY": "avx512"}, "AVX2", False),
    ],
)
def test_levels(flags: str, variables: dict[str, str], level: str, pays: bool) -> None:
    processor = Processor("Fast 9", frozenset(flags.split()))
    assert processor.instruction_set(variables) == level
    why = processor.bfloat16_unavailable_reason(variables)
    assert (why is None) == pays and (why is None or "Fast 9" in why)


def test_who_is_to_blame() -> None:
    fast, plain = Processor("Fast 9", frozenset(SAPPHIRE.split())), Processor("Old 1", frozenset(AVX2.split()))
    assert "ONEDNN_MAX_CPU_ISA limits it to AVX2" in str(
        fast.bfloat16_unavailable_reason({"ONEDNN_MAX_CPU_ISA": "AVX2"})
    )
    assert "has no instructions" in str(plain.bfloat16_unavailable_reason({"ONEDNN_MAX_CPU_ISA": "AVX2"}))


def test_flags_of_the_kernel() -> None:
    two = "processor : 0\nmodel\t: 17\nmodel name\t: Fast 9\nflags\t\t: avx2 fma\n\nmodel name\t: Other\nflags : sse\n"
    assert read_processor(two) == Processor("Fast 9", frozenset({"avx2", "fma"}))
    assert read_processor("processor : 0\nFeatures : fp asimd bf16\n").flags == {"fp", "asimd", "bf16"}
    unknown = read_processor("")
    assert unknown.name and unknown.instruction_set({}) == "baseline" and unknown.bfloat16_unavailable_reason({})


@pytest.mark.parametrize(
    ("flags", "environment", "follow"),
    [
        (SAPPHIRE, {}, True),
        (SAPPHIRE, {"ONEDNN_MAX_CPU_ISA": "avx512_core_bf16"}, False),
        (SAPPHIRE, {"DNNL_MAX_CPU_ISA": "AVX512_CORE"}, False),
        (ZEN4, {}, False),
        (AVX2, {}, False),
    ],
)
def test_bits_follow_the_threads_with_amx_alone(flags: str, environment: dict[str, str], follow: bool) -> None:
    why = read_processor(f"flags : {flags}\n").thread_dependence_reason(environment)
    assert (why is not None) == follow
    assert why is None or "ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16" in why
