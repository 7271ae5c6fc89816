"""Checks of the processor, of memory, and of system limits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meseta.measure.doctor.finding import Finding, note, ok, problem
from meseta.system.kernel import CgroupLimits, KernelFiles, free_memory_bytes
from meseta.system.processors import read_processor
from meseta.system.wait_policy import WAIT_POLICY_VARIABLES, has_default_policy, threads_spin
from meseta.telemetry.formatting import format_bytes

RECOMMENDED_FREE_MEMORY_BYTES = 2_000_000_000
MIN_FREE_MEMORY_BYTES = 300_000_000
"""Approximate memory needed to load torch and the other packages."""
MIN_SHARED_MEMORY_BYTES = 500_000_000
MIN_OPEN_FILES = 1024
HUGEPAGE_PATH = "sys/kernel/mm/transparent_hugepage/enabled"


def check_processor(system: KernelFiles, fact: Mapping[str, Any]) -> Finding:
    """Report the processor and the instruction set of the core. `fact` is the result of the probe 'processor'."""
    name = read_processor(system.read("proc/cpuinfo") or "").name
    chosen, best = fact.get("instruction_set"), fact.get("best")
    values: dict[str, Any] = {"name": name, "instruction_set": chosen, "best_instruction_set": best}
    if chosen is None:
        return note("processor", f"{name}; the instruction set of the core could not be determined", **values)
    if chosen != best:
        text = f"{name}; the core uses {chosen} because MESETA_ISA is set, but the processor supports {best}"
        return note("processor", text, "unset MESETA_ISA", **values)
    if chosen == "baseline":
        return note("processor", f"{name}; the processor has neither AVX2 nor AVX-512, so the core is slow", **values)
    return ok("processor", f"{name}, with {chosen}", **values)


def check_bfloat16(system: KernelFiles, environment: Mapping[str, str]) -> Finding:
    """Check that bfloat16 is faster than float32 for the dense part, and that no variable disables it."""
    processor = read_processor(system.read("proc/cpuinfo") or "")
    level, why = processor.instruction_set(environment), processor.bfloat16_unavailable_reason(environment)
    values: dict[str, Any] = {"instructions": level, "pays": why is None}
    if why is None:
        text = f"multiplied by {level}: dense.dtype=bfloat16 pays off, and auto selects it"
        follows = processor.thread_dependence_reason(environment)
        return ok("bfloat16", text if follows is None else f"{text}; {follows}", **values)
    text = f"{why}: dense.dtype=auto selects float32, and a new run in bfloat16 is refused"
    if processor.bfloat16_unavailable_reason({}) is None:
        return note("bfloat16", text, "unset ATEN_CPU_CAPABILITY, ONEDNN_MAX_CPU_ISA and DNNL_MAX_CPU_ISA", **values)
    return ok("bfloat16", text, **values)


def check_cores(num_usable: int, num_all: int, limits: CgroupLimits, torch: Mapping[str, Any]) -> Finding:
    """Compare the usable cores with the CPU time limit of control groups.

    Args:
        num_usable: Number of cores that this process may use.
        num_all: Number of cores of the machine.
        limits: Limits of control groups.
        torch: Result of the probe 'torch', with the number of threads that torch uses by default.
    """
    threads = torch.get("num_threads")
    values: dict[str, Any] = {
        "num_usable": num_usable,
        "num_all": num_all,
        "cgroup_cores": limits.num_cores,
        "torch_threads": threads,
    }
    text = f"{num_usable} of {num_all} usable" if num_usable < num_all else f"{num_all}, all usable"
    if threads is not None:
        why = f" (OMP_NUM_THREADS={torch['omp_num_threads']})" if torch.get("omp_num_threads") else ""
        text += f"; torch alone uses {threads} thread{'s' * (threads != 1)}{why}, `meseta train` {num_usable}"
    if limits.num_cores is not None and limits.num_cores < num_usable:
        fits = max(1, int(limits.num_cores))
        text += f"; a control group allows the CPU time of {limits.num_cores:g} of them, so more threads only wait"
        way = f"set num_threads={fits} in the config (divided by the number of ranks)"
        return note("cores", text, way, **values)
    return ok("cores", text, **values)


def check_wait_policy(environment: Mapping[str, str]) -> Finding:
    """Check how OpenMP threads wait for each other, given the environment variables."""
    chosen = {name: environment[name] for name in WAIT_POLICY_VARIABLES if environment.get(name)}
    listed = ", ".join(f"{name}={value}" for name, value in chosen.items())
    values = {"variables": chosen}
    if threads_spin(environment):
        text = f"waiting threads always spin ({listed or 'no variable prevents it'}); if other programs also use the "
        text += "processors, a run may slow down to a twentieth of its speed"
        return note("waiting", text, f"unset {' '.join(chosen)}" if chosen else "", **values)
    if not has_default_policy(environment):
        return ok("waiting", f"threads wait as your variables specify: {listed}", **values)
    text = "waiting threads spin; while other programs need the processors, they sleep, and steps use fewer threads if "
    text += "that is faster; before a script that imports torch without Meseta runs on a shared machine: "
    text += "export OMP_WAIT_POLICY=passive"
    return ok("waiting", text, **values)


def check_memory(system: KernelFiles, limits: CgroupLimits) -> Finding:
    """Check that enough memory is free, within the limits of control groups."""
    total, free = system.read_bytes_field("proc/meminfo", "MemTotal"), free_memory_bytes(system, limits)
    if total is None or free is None:
        return note("memory", "the kernel does not report the memory size")
    text = f"{format_bytes(free)} free of {format_bytes(total)}"
    if limits.memory_bytes is not None and limits.memory_free_bytes is not None:
        granted = format_bytes(limits.memory_bytes)
        text = f"{format_bytes(free)} free of the {granted} that a control group allows, of {format_bytes(total)}"
    else:
        text += ", no control group limits it"
    values: dict[str, Any] = {"total_bytes": total, "free_bytes": free, "cgroup_bytes": limits.memory_bytes}
    way = "end other programs, raise the container's limit, or use a larger machine"
    if free < MIN_FREE_MEMORY_BYTES:
        return problem("memory", f"{text}: too little to start", way, **values)
    if free < RECOMMENDED_FREE_MEMORY_BYTES:
        return note("memory", f"{text}: enough for small tables only", way, **values)
    return ok("memory", text, **values)


def check_huge_pages(system: KernelFiles, huge_share: float | None) -> Finding:
    """Check that large tensors get transparent huge pages of 2 MB.

    `huge_share` is the share of a large tensor on such pages, or `None` if it was not measured.
    """
    setting = system.read(HUGEPAGE_PATH) or ""
    chosen = setting.partition("[")[2].partition("]")[0]
    values: dict[str, Any] = {"transparent_hugepage": chosen or None, "huge_share": huge_share}
    slow = "lookups in large tables are slow: most of them miss the TLB"
    if not chosen:
        return note("pages", f"this kernel has no transparent 2 MB pages, and {slow}", **values)
    if chosen == "never":
        way = f"echo madvise | sudo tee /{HUGEPAGE_PATH} (on the host, if this is a container)"
        return note("pages", f"2 MB pages are turned off (transparent_hugepage: never), and {slow}", way, **values)
    if system.read_field("proc/self/status", "THP_enabled") == "0":
        way = "start from a shell or service that does not disable them (PR_SET_THP_DISABLE of prctl)"
        return note("pages", f"2 MB pages are turned off for this process, and {slow}", way, **values)
    if huge_share is not None and huge_share < 0.5:
        text = f"2 MB pages are on ({chosen}), but memory is fragmented: {huge_share:.0%} of a large tensor got them"
        return note("pages", text, "echo 1 | sudo tee /proc/sys/vm/compact_memory", **values)
    tried = "" if huge_share is None else f"; {huge_share:.0%} of a large tensor got them"
    return ok("pages", f"2 MB pages for tables (transparent_hugepage: {chosen}){tried}", **values)


def check_shared_memory(num_bytes: int | None) -> Finding:
    """Check the size of /dev/shm. `None` means that it does not exist."""
    users = "NCCL between GPUs and the workers of a torch DataLoader need more"
    way = "docker run --shm-size=8g, or sudo mount -o remount,size=8G /dev/shm"
    if num_bytes is None:
        return note("shared memory", f"no /dev/shm; {users}", way, bytes=None)
    if num_bytes < MIN_SHARED_MEMORY_BYTES:
        return note("shared memory", f"{format_bytes(num_bytes)}; {users}", way, bytes=num_bytes)
    return ok("shared memory", format_bytes(num_bytes), bytes=num_bytes)


def check_open_files(soft: int, hard: int) -> Finding:
    """Check the limit of open files of this process.

    `soft` is the current limit and `hard` its maximum. -1 means no limit.
    """
    values: dict[str, Any] = {"soft": soft, "hard": hard}
    if soft == -1:
        return ok("open files", "no limit", **values)
    if soft >= MIN_OPEN_FILES:
        return ok("open files", f"up to {soft:,}", **values)
    reach = hard == -1 or hard >= MIN_OPEN_FILES
    way = "ulimit -n 4096" if reach and (hard == -1 or hard >= 4096) else f"ulimit -n {hard}"
    if not reach:
        way = "raise nofile in /etc/security/limits.conf, or docker run --ulimit nofile=65536"
    return note("open files", f"up to {soft:,} only; files and connections of many ranks may need more", way, **values)
