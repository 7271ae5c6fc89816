"""Checks of processor, memory and the limits that the system sets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meseta.machine.kernel import CgroupLimits, KernelFiles, free_memory_bytes
from meseta.machine.processors import read_processor
from meseta.machine.wait_policy import WAIT_POLICY_VARIABLES, has_default_policy, threads_spin
from meseta.measure.doctor.finding import Finding, note, ok, problem
from meseta.telemetry.formatting import format_bytes

RECOMMENDED_FREE_MEMORY_BYTES = 2_000_000_000
MIN_FREE_MEMORY_BYTES = 300_000_000
"""Loading torch and the rest takes about this much."""
MIN_SHARED_MEMORY_BYTES = 500_000_000
MIN_OPEN_FILES = 1024
HUGEPAGE_PATH = "sys/kernel/mm/transparent_hugepage/enabled"


def check_processor(system: KernelFiles, fact: Mapping[str, Any]) -> Finding:
    """The processor's name, and the instruction set that the core chose for it; `fact` is the probe's."""
    name = read_processor(system.read("proc/cpuinfo") or "").name
    chosen, best = fact.get("instruction_set"), fact.get("best")
    figures: dict[str, Any] = {"name": name, "instruction_set": chosen, "best_instruction_set": best}
    if chosen is None:
        return note("processor", f"{name}; the core could not say which instruction set it takes", **figures)
    if chosen != best:
        text = f"{name}; the core runs {chosen}, since MESETA_ISA says so, and the processor has {best}"
        return note("processor", text, "unset MESETA_ISA", **figures)
    if chosen == "baseline":
        return note("processor", f"{name}; it has neither AVX2 nor AVX-512, so the core is slow", **figures)
    return ok("processor", f"{name}, with {chosen}", **figures)


def check_bfloat16(system: KernelFiles, environment: Mapping[str, str]) -> Finding:
    """Whether dense.dtype=bfloat16 pays on the processor, and what lowers it."""
    processor = read_processor(system.read("proc/cpuinfo") or "")
    level, why = processor.instruction_set(environment), processor.bfloat16_unavailable_reason(environment)
    figures: dict[str, Any] = {"instructions": level, "pays": why is None}
    if why is None:
        text = f"multiplied by {level}: dense.dtype=bfloat16 pays, and auto takes it"
        follows = processor.thread_dependence_reason(environment)
        return ok("bfloat16", text if follows is None else f"{text}; {follows}", **figures)
    text = f"{why}: dense.dtype=auto takes float32, and a new run in bfloat16 is refused"
    if processor.bfloat16_unavailable_reason({}) is None:
        return note("bfloat16", text, "unset ATEN_CPU_CAPABILITY, ONEDNN_MAX_CPU_ISA and DNNL_MAX_CPU_ISA", **figures)
    return ok("bfloat16", text, **figures)


def check_cores(num_usable: int, num_all: int, limits: CgroupLimits, torch: Mapping[str, Any]) -> Finding:
    """Cores that this process may use, and threads that torch starts; `torch` is the probe's fact."""
    threads = torch.get("num_threads")
    figures: dict[str, Any] = {
        "num_usable": num_usable,
        "num_all": num_all,
        "cgroup_cores": limits.num_cores,
        "torch_threads": threads,
    }
    text = f"{num_usable} of {num_all} usable" if num_usable < num_all else f"{num_all}, all usable"
    if threads is not None:
        why = f" (OMP_NUM_THREADS={torch['omp_num_threads']})" if torch.get("omp_num_threads") else ""
        text += f"; torch alone takes {threads} thread{'s' * (threads != 1)}{why}, `meseta train` {num_usable}"
    if limits.num_cores is not None and limits.num_cores < num_usable:
        fits = max(1, int(limits.num_cores))
        text += f"; a control group grants the time of {limits.num_cores:g} of them, so more threads only wait"
        way = f"set num_threads={fits} in the config (divided by the number of ranks)"
        return note("cores", text, way, **figures)
    return ok("cores", text, **figures)


def check_wait_policy(environment: Mapping[str, str]) -> Finding:
    """How OpenMP's threads wait for each other, by the variables that are in force."""
    chosen = {name: environment[name] for name in WAIT_POLICY_VARIABLES if environment.get(name)}
    listed = ", ".join(f"{name}={value}" for name, value in chosen.items())
    figures = {"variables": chosen}
    if threads_spin(environment):
        text = (
            f"threads that wait for each other spin ({listed or 'no variable says otherwise'}); where other programs "
        )
        text += "use the processors too, a run may fall to a twentieth of its speed"
        return note("waiting", text, f"unset {' '.join(chosen)}" if chosen else "", **figures)
    if not has_default_policy(environment):
        return ok("waiting", f"threads wait for each other as you chose: {listed}", **figures)
    text = "threads that wait for each other spin; while other programs want the processors they sleep, and steps take "
    text += "fewer of them where that is faster; before a script of your own imports torch on a machine that others "
    text += "use too: export OMP_WAIT_POLICY=passive"
    return ok("waiting", text, **figures)


def check_memory(system: KernelFiles, limits: CgroupLimits) -> Finding:
    """Memory that is free, and what limits it."""
    total, free = system.read_bytes_field("proc/meminfo", "MemTotal"), free_memory_bytes(system, limits)
    if total is None or free is None:
        return note("memory", "the kernel does not tell how much there is")
    text = f"{format_bytes(free)} free of {format_bytes(total)}"
    if limits.memory_bytes is not None and limits.memory_free_bytes is not None:
        granted = format_bytes(limits.memory_bytes)
        text = f"{format_bytes(free)} free of the {granted} that a control group grants, of {format_bytes(total)}"
    else:
        text += ", no control group limits it"
    figures: dict[str, Any] = {"total_bytes": total, "free_bytes": free, "cgroup_bytes": limits.memory_bytes}
    way = "end other programs, raise the container's limit, or take a larger machine"
    if free < MIN_FREE_MEMORY_BYTES:
        return problem("memory", f"{text}: too little to start", way, **figures)
    if free < RECOMMENDED_FREE_MEMORY_BYTES:
        return note("memory", f"{text}: enough for small tables only", way, **figures)
    return ok("memory", text, **figures)


def check_huge_pages(system: KernelFiles, huge_share: float | None) -> Finding:
    """2 MB pages; `huge_share` is the part of a large tensor that got them, None where that was not tried."""
    setting = system.read(HUGEPAGE_PATH) or ""
    chosen = setting.partition("[")[2].partition("]")[0]
    figures: dict[str, Any] = {"transparent_hugepage": chosen or None, "huge_share": huge_share}
    slow = "lookups in large tables are slow: most of them miss the TLB"
    if not chosen:
        return note("pages", f"this kernel has no transparent 2 MB pages, and {slow}", **figures)
    if chosen == "never":
        way = f"echo madvise | sudo tee /{HUGEPAGE_PATH} (on the host, if this is a container)"
        return note("pages", f"2 MB pages are turned off (transparent_hugepage: never), and {slow}", way, **figures)
    if system.read_field("proc/self/status", "THP_enabled") == "0":
        way = "start from a shell or service that leaves them on (it has called PR_SET_THP_DISABLE)"
        return note("pages", f"2 MB pages are turned off for this process, and {slow}", way, **figures)
    if huge_share is not None and huge_share < 0.5:
        text = f"2 MB pages are on ({chosen}), but memory is in pieces: {huge_share:.0%} of a large tensor got them"
        return note("pages", text, "echo 1 | sudo tee /proc/sys/vm/compact_memory", **figures)
    tried = "" if huge_share is None else f"; {huge_share:.0%} of a large tensor got them"
    return ok("pages", f"2 MB pages for tables (transparent_hugepage: {chosen}){tried}", **figures)


def check_shared_memory(num_bytes: int | None) -> Finding:
    """The size of /dev/shm, in bytes; None: there is none."""
    users = "nccl between GPUs and the workers of a torch DataLoader need more"
    way = "docker run --shm-size=8g, or sudo mount -o remount,size=8G /dev/shm"
    if num_bytes is None:
        return note("shared memory", f"no /dev/shm; {users}", way, bytes=None)
    if num_bytes < MIN_SHARED_MEMORY_BYTES:
        return note("shared memory", f"{format_bytes(num_bytes)}; {users}", way, bytes=num_bytes)
    return ok("shared memory", format_bytes(num_bytes), bytes=num_bytes)


def check_open_files(soft: int, hard: int) -> Finding:
    """How many files this process may have open (-1: any number): the present limit, and what it may be raised to."""
    figures: dict[str, Any] = {"soft": soft, "hard": hard}
    if soft == -1:
        return ok("open files", "no limit", **figures)
    if soft >= MIN_OPEN_FILES:
        return ok("open files", f"up to {soft:,}", **figures)
    reach = hard == -1 or hard >= MIN_OPEN_FILES
    way = "ulimit -n 4096" if reach and (hard == -1 or hard >= 4096) else f"ulimit -n {hard}"
    if not reach:
        way = "raise nofile in /etc/security/limits.conf, or docker run --ulimit nofile=65536"
    return note("open files", f"up to {soft:,} only; files and connections of many ranks may need more", way, **figures)
