"""The processors of this process: how many, which, and what they can do."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from meseta.machine.environment_variables import environ

_X86_LEVELS = (
    ("AVX2", ("avx2", "fma")),
    ("AVX-512", ("avx512f", "avx512bw", "avx512dq", "avx512vl")),
    ("AVX-512 BF16", ("avx512_bf16",)),
    ("AMX", ("amx_tile", "amx_bf16")),
)
"""Instruction sets of x86, each with the ones before it, and the kernel's words for them."""
_ARM_LEVELS = (("NEON", ("asimd",)), ("NEON BF16", ("bf16",)))
_BFLOAT16_LEVELS = frozenset({"AVX-512 BF16", "AMX", "NEON BF16"})
"""Levels that multiply bfloat16."""
_ATEN_LEVEL_LIMITS = {"default": 0, "avx2": 1}
"""What ATEN_CPU_CAPABILITY leaves of `_X86_LEVELS`; other values take nothing away."""
_ONEDNN_LEVEL_LIMITS = {
    **dict.fromkeys(("SSE41", "AVX"), 0),
    **dict.fromkeys(("AVX2", "AVX2_VNNI", "AVX2_VNNI_2"), 1),
    **dict.fromkeys(("AVX512_CORE", "AVX512_CORE_VNNI"), 2),
    **dict.fromkeys(("AVX512_CORE_BF16", "AVX512_CORE_FP16", "AVX10_1_512"), 3),
}
"""What oneDNN's variables leave of `_X86_LEVELS`."""


@dataclass(frozen=True)
class Processor:
    """What the kernel says of the first processor; all are taken to be like it."""

    name: str
    """'AMD EPYC 7763', or the architecture where the kernel does not name it."""
    flags: frozenset[str] = frozenset()
    """The kernel's words for its instructions; empty where it does not tell."""

    def instruction_set(self, environment: Mapping[str, str] | None = None) -> str:
        """The widest instruction set that products may use: 'AVX2', 'AVX-512', 'AVX-512 BF16', 'AMX', 'NEON',
        'NEON BF16' or 'baseline'.

        What the variables of torch and oneDNN forbid (ATEN_CPU_CAPABILITY, ONEDNN_MAX_CPU_ISA) counts as missing;
        None: those of this process.
        """
        is_arm = "asimd" in self.flags
        levels = (
            _ARM_LEVELS
            if is_arm
            else _X86_LEVELS[: _num_allowed_levels(environ if environment is None else environment)]
        )
        found = "baseline"
        for name, flags in levels:
            if not self.flags.issuperset(flags):
                break
            found = name
        return found

    def bfloat16_unavailable_reason(self, environment: Mapping[str, str] | None = None) -> str | None:
        """Why products in bfloat16 are slower here than in float32, None where they are faster.

        It follows from instructions alone. A clock would choose by the load of the moment, and the choice is one of
        bits.
        """
        level, best = self.instruction_set(environment), self.instruction_set({})
        if level in _BFLOAT16_LEVELS:
            return None
        if best in _BFLOAT16_LEVELS:
            return f"{self.name} multiplies bfloat16, but ATEN_CPU_CAPABILITY or ONEDNN_MAX_CPU_ISA leaves it {level}"
        return f"{self.name} ({level}) has no instructions that multiply bfloat16 (AVX512_BF16, AMX; BF16 of ARM)"

    def thread_dependence_reason(self, environment: Mapping[str, str] | None = None) -> str | None:
        """Why products in bfloat16 may have other bits with another number of threads, and what to do; None where they
        have the same.

        Seen with oneDNN 3.10 on an Intel Xeon with AMX: from 2 threads on, and from 700 terms on. Its kernels for
        AVX-512 BF16 had the same bits for up to 16 threads in all shapes of the tests.
        """
        if self.instruction_set(environment) != "AMX":
            return None
        return (
            "products in bfloat16 take AMX, whose sums follow the number of threads; for the same bits with any, "
            "export ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16, which is slower"
        )


def read_processor(cpuinfo: str | None = None) -> Processor:
    """The processor of this machine; `cpuinfo` is the text of /proc/cpuinfo, None: read it."""
    if cpuinfo is None:
        try:
            cpuinfo = Path("/proc/cpuinfo").read_text(errors="replace")
        except OSError:
            cpuinfo = ""
    fields: dict[str, str] = {}
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    name = fields.get("model name") or platform.processor() or platform.machine() or "this processor"
    return Processor(name, frozenset((fields.get("flags") or fields.get("Features") or "").split()))


def num_cores() -> int:
    """Cores that this process may use, where the system tells; else those of the machine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def batch_scheduled_threads(names: Sequence[str] = ()) -> Iterator[None]:
    """Threads of this process that begin while this is entered, and those that are called so, wait until a processor is
    free, where the system can.

    A thread that wakes up else takes the processor of one that computes. If that one holds a lock, and the other tries
    to have it without sleeping, it goes on trying until its slice ends: 4 ms, on a processor that both share.
    """
    before = {int(task.name) for task in _TASK_FOLDER.glob("*")}
    yield
    if not hasattr(os, "SCHED_BATCH"):
        return
    for task in _TASK_FOLDER.glob("*"):
        # A thread may end meanwhile; where a system forbids it, it stays as it is.
        with suppress(OSError):
            if int(task.name) not in before or (task / "comm").read_text().strip() in names:
                os.sched_setscheduler(int(task.name), os.SCHED_BATCH, os.sched_param(0))


_TASK_FOLDER = Path("/proc/self/task")


def _num_allowed_levels(environment: Mapping[str, str]) -> int:
    """How many of `_X86_LEVELS` the variables leave."""
    aten = environment.get("ATEN_CPU_CAPABILITY", "")
    return min(
        _ATEN_LEVEL_LIMITS.get(aten, len(_X86_LEVELS)),
        _ONEDNN_LEVEL_LIMITS.get(_onednn_max_isa(environment).upper(), len(_X86_LEVELS)),
    )


def _onednn_max_isa(environment: Mapping[str, str]) -> str:
    """What oneDNN is told, in either case; it reads its own name for the variable first."""
    return environment.get("ONEDNN_MAX_CPU_ISA") or environment.get("DNNL_MAX_CPU_ISA") or ""
