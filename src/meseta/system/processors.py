"""Processors that this process may use: number, name and instruction sets, and the number of threads on them."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from meseta.system.environment_variables import environ
from meseta.system.kernel import KernelFiles, read_cgroup_limits
from meseta.system.ranks import RENDEZVOUS_VARIABLE, num_local_ranks

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


_affinity_before_binding: list[set[int]] = []


def bind_to_processors(processors: Sequence[int]) -> None:
    """Restrict this process to `processors` until `undo_binding`. `num_cores` does not change."""
    _affinity_before_binding.append(os.sched_getaffinity(0))
    os.sched_setaffinity(0, processors)


def undo_binding() -> None:
    """Undo `bind_to_processors`."""
    while _affinity_before_binding:
        os.sched_setaffinity(0, _affinity_before_binding.pop())


@dataclass(frozen=True)
class ThreadCount:
    """Number of threads and its source."""

    number: int
    source: str
    """Name of the setting, environment variable or limit, such as 'control group'."""

    def __str__(self) -> str:
        return f"{self.number} thread{'s' * (self.number != 1)}: {self.source}"


def num_affine_cores() -> int:
    """Return the number of cores in the CPU affinity of this process, or of all cores if the system has none."""
    if _affinity_before_binding:
        return len(_affinity_before_binding[0])
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def num_cores(system: KernelFiles | None = None) -> int:
    """Return the number of cores that this process may use, within the CPU quota and SLURM_CPUS_PER_TASK."""
    return min(limit.number for limit, _ in _core_limits(system or KernelFiles(), 1))


def limit_arrow_threads() -> None:
    """Limit pyarrow's pool of threads to `num_cores`, because pyarrow knows only the CPU affinity."""
    import pyarrow as pa

    pa.set_cpu_count(min(pa.cpu_count(), num_cores()))


def choose_num_threads(
    configured: int | None = None, *, num_sharing: int | None = None, system: KernelFiles | None = None
) -> ThreadCount:
    """Return `configured`, or the number of threads that suits this process, at least 1.

    It is the least of CPU affinity, CPU quota of control groups and SLURM_CPUS_PER_TASK, divided by `num_sharing`
    processes (by default the ranks of this host), and of OMP_NUM_THREADS.

    Raises MesetaError if LOCAL_WORLD_SIZE is not an integer.
    """
    if configured is not None:
        return ThreadCount(configured, "num_threads")
    ranks = max(1, num_local_ranks() if num_sharing is None else num_sharing)
    limits = [_divide(limit, sharing) for limit, sharing in _core_limits(system or KernelFiles(), ranks)]
    omp = _read_count("OMP_NUM_THREADS")
    # torchrun sets the variable to 1 if it is not set and there are several ranks.
    is_by_torchrun = omp == 1 and "TORCHELASTIC_RUN_ID" in environ and num_local_ranks() > 1
    if omp is not None and not is_by_torchrun:
        limits.append(ThreadCount(omp, "OMP_NUM_THREADS"))
    return min(limits, key=lambda limit: limit.number)  # the first of equal limits


def _core_limits(system: KernelFiles, ranks: int) -> list[tuple[ThreadCount, int]]:
    # Returns each limit, and how many of `ranks` share it.
    affine, quota = num_affine_cores(), read_cgroup_limits(system).num_cores
    slurm = _read_count("SLURM_CPUS_PER_TASK")
    # srun starts a task for each rank. Tasks do not share cores.
    is_task = "SLURM_PROCID" in environ and not {"TORCHELASTIC_RUN_ID", RENDEZVOUS_VARIABLE} & environ.keys()
    has_own_cores = is_task and slurm is not None and affine <= slurm
    name = "CPU affinity" if affine < (os.cpu_count() or 1) else "cores"
    limits = [(ThreadCount(affine, name), 1 if has_own_cores else ranks)]
    if quota is not None:
        limits.append((ThreadCount(max(1, int(quota)), "control group"), ranks))
    if slurm is not None:
        limits.append((ThreadCount(slurm, "SLURM_CPUS_PER_TASK"), 1 if is_task else ranks))
    return limits


def _divide(limit: ThreadCount, ranks: int) -> ThreadCount:
    if ranks == 1:
        return limit
    return ThreadCount(max(1, limit.number // ranks), f"{limit.source}, shared by {ranks} ranks")


def _read_count(variable: str) -> int | None:
    # For OMP_NUM_THREADS, OpenMP allows a list with a number per level of nesting, and ignores invalid values.
    text = environ.get(variable, "").partition(",")[0].strip()
    return int(text) if text.isascii() and text.isdigit() and 0 < len(text) < 10 and int(text) else None


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
