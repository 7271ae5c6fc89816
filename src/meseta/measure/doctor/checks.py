"""List of all checks in the order of the report."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from meseta.measure.doctor import devices, disk, machine, packages, probe, ranks
from meseta.measure.doctor.finding import Finding, note
from meseta.system.environment_variables import environ
from meseta.system.kernel import KernelFiles, read_cgroup_limits
from meseta.system.processors import num_cores


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
        "core": lambda: devices.check_core(core),
        "processor": lambda: machine.check_processor(system, facts["processor"]),
        "bfloat16": lambda: machine.check_bfloat16(system, environ),
        "cores": lambda: machine.check_cores(num_cores(), os.cpu_count() or 1, limits, torch),
        "waiting": lambda: machine.check_wait_policy(environ),
        "memory": lambda: machine.check_memory(system, limits),
        "pages": lambda: machine.check_huge_pages(system, facts["pages"].get("huge_share")),
        "shared memory": lambda: machine.check_shared_memory(_shared_bytes()),
        "open files": lambda: machine.check_open_files(*resource.getrlimit(resource.RLIMIT_NOFILE)),
        "GPU": lambda: devices.check_gpu(gpu, torch, system),
        "triton": lambda: devices.check_triton(facts["triton"], bool(gpus), installed),
        "nccl": lambda: devices.check_nccl(facts["nccl"], len(gpus)),
        "gloo": lambda: ranks.check_gloo(torch),
        "disk": lambda: disk.check_disk(folder, system),
        "row files": lambda: disk.check_row_files(folder, facts["io_uring"]),
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
