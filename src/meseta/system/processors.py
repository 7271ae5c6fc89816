"""Processors that this process may use: number, name and instruction sets."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from meseta.system.environment_variables import environ

_X86_LEVELS = (
    ("AVX2", ("avx2", "fma")),
    ("AVX-512", ("avx512f", "avx512bw", "avx512dq", "avx512vl")),
    ("AVX-512 BF16", ("avx512_bf16",)),
    ("AMX", ("amx_tile", "amx_bf16")),
)
"""Instruction sets of x86 with the CPU flags that they need. Each includes the preceding ones."""
_ARM_LEVELS = (("NEON", ("asimd",)), ("NEON BF16", ("bf16",)))
_BFLOAT16_LEVELS = frozenset({"AVX-512 BF16", "AMX", "NEON BF16"})
_ATEN_LEVEL_LIMITS = {"default": 0, "avx2": 1}
"""Number of `_X86_LEVELS` that a value of ATEN_CPU_CAPABILITY allows. Other values allow all."""
_ONEDNN_LEVEL_LIMITS = {
    **dict.fromkeys(("SSE41", "AVX"), 0),
    **dict.fromkeys(("AVX2", "AVX2_VNNI", "AVX2_VNNI_2"), 1),
    **dict.fromkeys(("AVX512_CORE", "AVX512_CORE_VNNI"), 2),
    **dict.fromkeys(("AVX512_CORE_BF16", "AVX512_CORE_FP16", "AVX10_1_512"), 3),
}
"""Number of `_X86_LEVELS` that a value of ONEDNN_MAX_CPU_ISA allows. Other values allow all."""


@dataclass(frozen=True)
class Processor:
    """Model and instructions of the first processor. All processors of a machine are assumed to be equal."""

    name: str
    """Model name such as 'AMD EPYC 7763', or the architecture if the model is unknown."""
    flags: frozenset[str] = frozenset()
    """CPU flags of /proc/cpuinfo. Empty if they are unknown."""

    def instruction_set(self, environment: Mapping[str, str] | None = None) -> str:
        """Return the widest instruction set for matrix products, from 'baseline' and 'NEON' to 'AMX'.

        Instruction sets that the variables ATEN_CPU_CAPABILITY and ONEDNN_MAX_CPU_ISA disable are not used. By default
        the variables are those of this process.
        """
        is_arm = "asimd" in self.flags
        levels = (
            _ARM_LEVELS
            if is_arm
            else _X86_LEVELS[: _num_allowed_levels(environ if environment is None else environment)]
        )
        widest = "baseline"
        for name, flags in levels:
            if not self.flags.issuperset(flags):
                break
            widest = name
        return widest

    def bfloat16_unavailable_reason(self, environment: Mapping[str, str] | None = None) -> str | None:
        """Return why bfloat16 products are slower than float32 products here, or `None` if they are faster."""
        # The answer changes the results of training, so it must not depend on a measurement under the current load.
        level, best = self.instruction_set(environment), self.instruction_set({})
        if level in _BFLOAT16_LEVELS:
            return None
        if best in _BFLOAT16_LEVELS:
            return (
                f"{self.name} multiplies bfloat16, but ATEN_CPU_CAPABILITY or ONEDNN_MAX_CPU_ISA limits it to {level}"
            )
        return f"{self.name} ({level}) has no instructions that multiply bfloat16 (AVX512_BF16, AMX; BF16 of ARM)"

    def thread_dependence_reason(self, environment: Mapping[str, str] | None = None) -> str | None:
        """Return why bfloat16 products may depend on the number of threads, with a remedy, or `None` if they do not."""
        # Observed with oneDNN 3.10 on an Intel Xeon with AMX, for 2 threads or more and sums of 700 terms or more. Its
        # kernels for AVX-512 BF16 gave the same bits for up to 16 threads in all tested shapes.
        if self.instruction_set(environment) != "AMX":
            return None
        return (
            "products in bfloat16 take AMX, whose sums follow the number of threads; for results that do not, "
            "export ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16, which is slower"
        )


def read_processor(cpuinfo: str | None = None) -> Processor:
    """Parse `cpuinfo`, the text of /proc/cpuinfo. By default the file is read."""
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
    """Return the number of cores that this process may use, or of all cores if the system has no CPU affinity."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def batch_scheduled_threads(names: Sequence[str] = ()) -> Iterator[None]:
    """Context manager that schedules the threads started inside it as SCHED_BATCH, so that they never preempt others.

    Threads whose name is in `names` are included. Does nothing on systems without this policy.
    """
    # A thread that wakes up would otherwise preempt one that computes. If that one holds a lock for which the new
    # thread spins, the new thread spins until its time slice of 4 ms ends.
    before = {int(task.name) for task in _TASK_FOLDER.glob("*")}
    yield
    if not hasattr(os, "SCHED_BATCH"):
        return
    for task in _TASK_FOLDER.glob("*"):
        # The thread may have ended, or the system may forbid the change.
        with suppress(OSError):
            if int(task.name) not in before or (task / "comm").read_text().strip() in names:
                os.sched_setscheduler(int(task.name), os.SCHED_BATCH, os.sched_param(0))


_TASK_FOLDER = Path("/proc/self/task")


def _num_allowed_levels(environment: Mapping[str, str]) -> int:
    aten = environment.get("ATEN_CPU_CAPABILITY", "")
    # oneDNN reads the variable with its current name first.
    onednn = environment.get("ONEDNN_MAX_CPU_ISA") or environment.get("DNNL_MAX_CPU_ISA") or ""
    return min(
        _ATEN_LEVEL_LIMITS.get(aten, len(_X86_LEVELS)),
        _ONEDNN_LEVEL_LIMITS.get(onednn.upper(), len(_X86_LEVELS)),
    )
