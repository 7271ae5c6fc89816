"""Checks of the processor, of memory, and of system limits."""

from __future__ import annotations

import os
import re
import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from meseta.measure.doctor import packages, probe
from meseta.measure.doctor.child_processes import run_children
from meseta.measure.doctor.packages import Finding, VersionLookup, note, ok, problem
from meseta.ops.core import InstructionSetError
from meseta.system.environment_variables import WAIT_POLICY_VARIABLES, environ, has_default_policy, threads_spin
from meseta.system.files import direct_io_block_bytes
from meseta.system.kernel import CgroupLimits, KernelFiles, free_memory_bytes, read_cgroup_limits
from meseta.system.processors import ThreadCount, choose_num_threads, num_affine_cores, read_processor
from meseta.system.ranks import Rendezvous
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


def check_cores(
    chosen: ThreadCount, num_usable: int, num_all: int, limits: CgroupLimits, torch: Mapping[str, Any]
) -> Finding:
    """Report the threads of training, and compare the CPU quota with those of torch. `torch` is its probe's result."""
    alone, quota = torch.get("num_threads"), limits.num_cores
    values: dict[str, Any] = {
        "num_usable": num_usable,
        "num_all": num_all,
        "cgroup_cores": quota,
        "torch_threads": alone,
        "num_threads": chosen.number,
        "num_threads_source": chosen.source,
    }
    text = f"{num_usable} of {num_all} usable" if num_usable < num_all else f"{num_all}, all usable"
    if alone is not None:
        why = f" (OMP_NUM_THREADS={torch['omp_num_threads']})" if torch.get("omp_num_threads") else ""
        text += f"; torch alone uses {alone} thread{'s' * (alone != 1)}{why}"
    text += f"; `meseta train` and `meseta prepare` use {chosen}"
    if alone is not None and quota is not None and max(1, int(quota)) < alone:
        text = f"{text}, which allows the CPU time of {quota:g} cores" if chosen.source == "control group" else text
        return note("cores", text, f"for other programs: export OMP_NUM_THREADS={max(1, int(quota))}", **values)
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
    """Check for huge pages of 2 MB. `huge_share` is the share of a large tensor on them, or `None` if not measured."""
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
    """Check this process's limit of open files: `soft` is the current one, `hard` its maximum, -1 means no limit."""
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


ProbeResult = Mapping[str, Any]


def check_core(fact: ProbeResult) -> Finding:
    """Check that the compiled core loads. `fact` is the result of the probe 'core'."""
    error = fact.get("error")
    if error is None:
        return ok("core", f"the compiled core for {fact['instruction_set']} loads", **fact)
    if "skipped" in fact:
        return note("core", error)
    if fact.get("error_class") == InstructionSetError.__name__:
        return problem("core", error, "unset MESETA_ISA")
    way = "build it: `pip install .` in a clone of the project (after `apt install g++ make python3-dev`)"
    return problem("core", f"the compiled core does not load: {error}", way)


def driver_version(system: KernelFiles) -> str | None:
    """Return the version of the NVIDIA driver, or `None` if it is not loaded."""
    version = system.read("sys/module/nvidia/version")
    if version:
        return version
    words = (system.read_field("proc/driver/nvidia/version", "NVRM version") or "").split()
    return next((word for word in words if word[:1].isdigit() and "." in word), None)


def check_gpu(fact: ProbeResult, torch: ProbeResult, system: KernelFiles) -> Finding:
    """Check the GPUs that torch sees. `fact` and `torch` are the results of the probes 'gpu' and 'torch'."""
    driver = driver_version(system)
    values = {"devices": fact.get("devices", []), "driver": driver}
    if "error" in fact:
        text = f"{fact['error']}{f' (driver {driver})' if driver else ''}"
        if "skipped" in fact:
            return note("GPU", text, **values)
        way = "set device=cpu to train on the CPU; or update the driver, or install a torch build for "
        return problem("GPU", f"a GPU does not work: {text}", way + "the CUDA version that nvidia-smi shows", **values)
    if devices := fact["devices"]:
        each = (
            f"{d['name']}, {format_bytes(d['free_bytes'])} free of {format_bytes(d['total_bytes'])}" for d in devices
        )
        text = "; ".join(f"{index}: {device}" for index, device in enumerate(each))
        return ok("GPU", text + (f"; driver {driver}" if driver else ""), **values)
    if driver is None:
        return ok("GPU", "none; everything runs on the CPU", **values)
    if torch.get("cuda") is None:
        text = f"NVIDIA driver {driver} is loaded, but torch was built without CUDA"
        return note("GPU", text, "install a CUDA build of torch to use the GPU", **values)
    text = f"NVIDIA driver {driver} is loaded, but torch, built for CUDA {torch['cuda']}, sees no GPU"
    way = "check CUDA_VISIBLE_DEVICES; update the driver, or install a torch for the CUDA version that nvidia-smi shows"
    return note("GPU", text, way, **values)


def check_triton(fact: ProbeResult, has_gpu: bool, installed: VersionLookup) -> Finding:
    """Check that Triton compiles a kernel. Only GPUs need it. `fact` is the result of the probe 'triton'."""
    version, error = installed("triton") or fact.get("version"), fact.get("error")
    if error is None:
        where = "and runs a kernel on this GPU" if fact["target"] else "kernels for GPUs; not needed without a GPU"
        return ok("triton", f"{fact['version']} compiles {where}", **fact)
    if "skipped" in fact:
        return note("triton", error, version=version)
    if version is None:
        if not has_gpu:
            return ok("triton", "not installed; not needed without a GPU", version=None)
        return problem("triton", "not installed; training on a GPU needs it", "pip install triton", version=None)
    text = f"{version} does not compile: {error}"
    if not has_gpu:
        return note("triton", f"{text}; not needed without a GPU", version=version)
    way = "apt install gcc python3-dev, make ~/.triton writable (or set TRITON_CACHE_DIR), or set device=cpu"
    return problem("triton", text, way, version=version)


def check_nccl(fact: ProbeResult, num_gpus: int) -> Finding:
    """Check that torch includes NCCL, which several GPUs need. `fact` is the result of the probe 'nccl'."""
    if "error" in fact:
        return note("nccl", fact["error"])
    if fact["version"] is not None:
        return ok("nccl", fact["version"], **fact)
    if num_gpus > 1:
        return problem("nccl", "not in this torch build; training on several GPUs needs it", "install a CUDA build "
                       "of torch for Linux", **fact)  # fmt: skip
    return ok("nccl", "not in this torch build; only several GPUs need it, CPUs use gloo", **fact)


BLOCK_BYTES = 4 << 20
WARMUP_BYTES = 2 * BLOCK_BYTES
MAX_BYTES = 256 << 20
MEASUREMENT_WINDOW_S = 2.0
"""Approximate seconds spent on writing, and again on reading."""
MIN_FREE_BYTES = 200_000_000
RECOMMENDED_FREE_BYTES = 10_000_000_000
MIN_BYTES_PER_S = 50e6


@dataclass(frozen=True)
class DiskSpeed:
    """Sequential speed of a disk."""

    num_bytes: int
    """Total number of bytes written for the measurement."""
    write_bytes_per_s: float
    """Write speed, including the final fsync."""
    read_bytes_per_s: float


def measure_disk_speed(folder: Path, max_bytes: int = MAX_BYTES, window_s: float = MEASUREMENT_WINDOW_S) -> DiskSpeed:
    """Measure the sequential speed of the disk of `folder`.

    Writes a temporary file twice and reads it once. The faster write counts. If the system supports it, the file has no
    name, so that nothing remains even if this process is killed.

    Raises OSError if the folder is not writable.
    """
    block = os.urandom(BLOCK_BYTES)  # Random data, so that a compressing file system saves nothing.
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        first_s = _time_write(file, block, WARMUP_BYTES)
        more = min(max_bytes - WARMUP_BYTES, int(WARMUP_BYTES / first_s * window_s)) // 2
        num_bytes = max(more // BLOCK_BYTES, 1) * BLOCK_BYTES
        # In the first pass, a virtual machine may have to request memory for the page cache from its host. That takes
        # longer than the write itself.
        write_s = min(_time_write(file, block, num_bytes) for _ in range(2))
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return DiskSpeed(WARMUP_BYTES + 2 * num_bytes, num_bytes / write_s, _read_bytes_per_s(file, window_s))


def _time_write(file: IO[bytes], block: bytes, num_bytes: int) -> float:
    """Return the seconds to write and sync `num_bytes` from the start of a file."""
    file.seek(0)
    start_s = time.perf_counter()
    for _ in range(num_bytes // len(block)):
        rest = memoryview(block)
        while rest:
            rest = rest[file.write(rest) :]
    os.fsync(file.fileno())
    return max(time.perf_counter() - start_s, 1e-9)


def _read_bytes_per_s(file: IO[bytes], limit_s: float) -> float:
    """Return the speed of reading a file from its start, for at most about `limit_s`."""
    buffer, done = bytearray(BLOCK_BYTES), 0
    file.seek(0)
    start_s = time.perf_counter()
    while time.perf_counter() - start_s < limit_s and (count := file.readinto(buffer)):  # type: ignore[attr-defined]
        done += count
    return done / max(time.perf_counter() - start_s, 1e-9)


def check_disk(folder: Path, system: KernelFiles) -> Finding:
    """Check that data and runs can be written to `folder`, and measure the speed of its disk."""
    path, elsewhere = str(folder), "name a folder on another disk with --dir"
    values: dict[str, Any] = {"dir": str(folder.absolute())}
    if not folder.is_dir():
        if folder.exists():
            return problem("disk", f"{path!r} is not a folder", "name a folder with --dir", **values)
        return problem("disk", f"{path!r} does not exist", "create it, or name another folder with --dir", **values)
    try:
        tempfile.TemporaryFile(dir=folder).close()  # A folder that is not writable may also report no free space.
        free = shutil.disk_usage(folder).free
        kind = _file_system(folder, system)
        values |= {"free_bytes": free, "file_system": kind}
        text = f"{path}{f' ({kind})' if kind else ''}: {format_bytes(free)} free"
        if free < MIN_FREE_BYTES:
            return problem("disk", text, f"delete unneeded files, or {elsewhere}", **values)
        speed = measure_disk_speed(folder, min(MAX_BYTES, free // 4))
    except OSError as error:
        reason = error.strerror or str(error)
        way = f"make it writable (chmod, chown or remount), or {elsewhere}"
        return problem("disk", f"{path!r} cannot be written: {reason}", way, **values)
    rates = speed.write_bytes_per_s, speed.read_bytes_per_s
    values |= {"write_bytes_per_s": rates[0], "read_bytes_per_s": rates[1], "measured_bytes": speed.num_bytes}
    text += f"; {rates[0] / 1e6:,.0f} MB/s written and synced, {rates[1] / 1e6:,.0f} MB/s read back"
    if kind in ("tmpfs", "ramfs"):
        return note("disk", f"{text}; its files are in memory and are lost when the machine stops", elsewhere, **values)
    if min(rates) < MIN_BYTES_PER_S:
        return note("disk", f"{text}: checkpoints will be slow", elsewhere, **values)
    if free < RECOMMENDED_FREE_BYTES:
        return note("disk", f"{text}: little space for data and checkpoints", elsewhere, **values)
    return ok("disk", text, **values)


def check_row_files(folder: Path, fact: Mapping[str, Any]) -> Finding:
    """Check that row files in `folder` use io_uring and direct I/O, given the result `fact` of the probe 'io_uring'."""
    values: dict[str, Any] = {"io_uring": "error" not in fact and fact.get("why_not") is None}
    how = "io_uring" if values["io_uring"] else f"threads ({fact.get('error') or fact.get('why_not')})"
    try:
        block_bytes, why_buffered = direct_io_block_bytes(folder)
    except OSError as error:
        return note("row files", f"{how}; {str(folder)!r} cannot be written: {error.strerror or error}", **values)
    values |= {"direct": why_buffered is None, "block_bytes": block_bytes}
    if why_buffered is not None:
        text = f"tables on this disk are read by {how}, through the page cache: {why_buffered}"
        return note("row files", text, "name a folder on another disk with --dir", **values)
    text = f"tables on this disk are read by {how}, directly, in blocks of {block_bytes:,} bytes"
    return ok("row files", text, **values)


def _file_system(folder: Path, system: KernelFiles) -> str | None:
    """Return the type of the file system of `folder`, such as 'ext4', or `None` if it is unknown."""
    # If several file systems are mounted at one path, the last one is visible.
    place, best = folder.resolve(), ("", "")
    for line in (system.read("proc/self/mounts") or "").splitlines():
        _, mount, kind = [*line.split(" "), "", "", ""][:3]
        mount = mount.replace("\\040", " ")
        if place.is_relative_to(mount or "?") and len(mount) >= len(best[0]):
            best = mount, kind
    return best[1] or None


NUM_RANKS = 2
EXPECTED_SUM = 3.0
"""Sum of 1 and 2, the numbers that the two ranks contribute."""
GLOO_TIMEOUT_S = 60


def check_gloo(torch: Mapping[str, Any], timeout_s: int = GLOO_TIMEOUT_S) -> Finding:
    """Start two ranks that all-reduce one number each over gloo. `torch` is the result of the probe 'torch'."""
    if "error" in torch:
        return note("gloo", "not tried, since torch does not load")
    start_s = time.perf_counter()
    with Rendezvous(NUM_RANKS) as meeting:
        # With a size of 0, ranks are not pinned to separate processors. This check does not need that.
        alone = {"LOCAL_WORLD_SIZE": "0", "OMP_NUM_THREADS": "1"}
        environments = [meeting.environment(rank) | alone for rank in range(NUM_RANKS)]
        arguments, inherited = [str(timeout_s + 1)], [meeting.descriptor]
        ended = run_children("meseta.measure.doctor.rank", environments, float(timeout_s), arguments, inherited)
    elapsed_s = time.perf_counter() - start_s
    failed = [(rank, child) for rank, child in enumerate(ended) if child.exit_code != 0]
    way = "enable loopback: ip link set lo up, with the address 127.0.0.1, and no firewall rule that blocks it"
    if failed:
        # A rank that ended by itself reports the cause. A killed one only waited for it.
        rank, child = min(failed, key=lambda entry: entry[1].exit_code is None or entry[1].exit_code < 0)
        reason = re.sub(r"\[enforce fail at \S+\] ", "", child.reason)  # Source lines of gloo.
        text = f"two processes cannot communicate: rank {rank}: {reason[:400]}"
        return problem("gloo", text, way, seconds=elapsed_s)
    sums = [next((message["sum"] for message in child.messages("sum")), None) for child in ended]
    if any(total != EXPECTED_SUM for total in sums):
        texts = [child.stdout.strip() or "nothing" if total is None else f"sum {total:g}"
                 for child, total in zip(ended, sums, strict=True)]  # fmt: skip
        return problem("gloo", f"an all-reduce of 1 and 2 returned {' and '.join(texts)}", way, seconds=elapsed_s)
    return ok("gloo", f"two processes communicate over loopback, tested in {elapsed_s:.1f} s", seconds=elapsed_s)


def run_checks(folder: Path, system: KernelFiles | None = None) -> Iterator[Finding]:
    """Check this machine, and `folder` as the location of data and runs. Yields one finding per check.

    Takes about ten seconds. It loads torch, starts two ranks, and writes at most 256 MiB to a temporary file. A check
    that raises an exception yields a note.
    """
    system = system or KernelFiles()
    yield from _run_check("meseta", packages.check_meseta)
    facts = probe.run_probes()
    torch, core, gpu = facts["torch"], facts["core"], facts["gpu"]
    limits = read_cgroup_limits(system)
    gpus = gpu.get("devices", [])
    installed = packages.installed_version
    checks: dict[str, Callable[[], Finding]] = {
        "torch": lambda: packages.check_torch(torch, installed),
        "packages": lambda: packages.check_packages(facts, installed),
        "core": lambda: check_core(core),
        "processor": lambda: check_processor(system, facts["processor"]),
        "bfloat16": lambda: check_bfloat16(system, environ),
        "cores": lambda: check_cores(
            choose_num_threads(system=system), num_affine_cores(), os.cpu_count() or 1, limits, torch
        ),
        "waiting": lambda: check_wait_policy(environ),
        "memory": lambda: check_memory(system, limits),
        "pages": lambda: check_huge_pages(system, facts["pages"].get("huge_share")),
        "shared memory": lambda: check_shared_memory(_shared_bytes()),
        "open files": lambda: check_open_files(*resource.getrlimit(resource.RLIMIT_NOFILE)),
        "GPU": lambda: check_gpu(gpu, torch, system),
        "triton": lambda: check_triton(facts["triton"], bool(gpus), installed),
        "nccl": lambda: check_nccl(facts["nccl"], len(gpus)),
        "gloo": lambda: check_gloo(torch),
        "disk": lambda: check_disk(folder, system),
        "row files": lambda: check_row_files(folder, facts["io_uring"]),
        "extras": lambda: packages.check_optional(installed),
    }
    for topic, check in checks.items():
        yield from _run_check(topic, check)


def _run_check(topic: str, check: Callable[[], Finding]) -> Iterator[Finding]:
    try:
        yield check()
    except Exception as error:  # An unusual machine may raise any exception. The other checks must still run.
        yield note(topic, f"the check failed: {type(error).__name__}: {error}")


def _shared_bytes() -> int | None:
    try:
        return shutil.disk_usage("/dev/shm").total
    except OSError:
        return None
