"""Tests of the number of threads, with simulated control groups, variables and CPU affinity."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa
import pytest

from meseta.system import processors
from meseta.system.kernel import KernelFiles
from meseta.system.processors import (
    bind_to_processors,
    choose_num_threads,
    limit_arrow_threads,
    num_cores,
    undo_binding,
)

VARIABLES = (
    "LOCAL_WORLD_SIZE", "MESETA_RENDEZVOUS", "OMP_NUM_THREADS", "SLURM_CPUS_PER_TASK", "SLURM_PROCID",
    "TORCHELASTIC_RUN_ID",
)  # fmt: skip
V1_GROUP = {
    "proc/self/cgroup": "2:cpu,cpuacct:/\n",
    "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
}
TORCHRUN = {"LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none", "OMP_NUM_THREADS": "1"}
SRUN = {"SLURM_PROCID": "1", "LOCAL_WORLD_SIZE": "4", "SLURM_CPUS_PER_TASK": "2"}


def v1_quota(cores: float) -> dict[str, str]:
    return V1_GROUP | {"sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": f"{int(cores * 100_000)}\n"}


def v2_quota(cores: float) -> dict[str, str]:
    return {"proc/self/cgroup": "0::/job\n", "sys/fs/cgroup/job/cpu.max": f"{int(cores * 100_000)} 100000\n"}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Simulate a machine of 16 cores without variables, and return its CPU affinity, which tests change."""
    affinity = set(range(16))

    def bind(_: int, allowed: list[int] | set[int]) -> None:
        allowed = set(allowed)
        affinity.clear()
        affinity.update(allowed)

    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(affinity), raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", bind, raising=False)
    monkeypatch.setattr(processors, "_affinity_before_binding", [])
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return affinity


def write_files(folder: Path, files: dict[str, str]) -> KernelFiles:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return KernelFiles(folder)


@pytest.mark.parametrize(
    ("num_affine", "files", "variables", "text"),
    [
        (16, {}, {}, "16 threads: cores"),
        (6, {}, {}, "6 threads: CPU affinity"),
        (16, v2_quota(2.9), {}, "2 threads: control group"),
        (16, v1_quota(3.0), {}, "3 threads: control group"),
        (16, v2_quota(0.5), {}, "1 thread: control group"),
        (2, v2_quota(8), {}, "2 threads: CPU affinity"),
        (16, v2_quota(8), {"SLURM_CPUS_PER_TASK": "4"}, "4 threads: SLURM_CPUS_PER_TASK"),
        (16, v2_quota(3), {"SLURM_CPUS_PER_TASK": "4"}, "3 threads: control group"),
        (16, {}, {"OMP_NUM_THREADS": "5"}, "5 threads: OMP_NUM_THREADS"),
        (16, {}, {"OMP_NUM_THREADS": "5,2"}, "5 threads: OMP_NUM_THREADS"),
        (16, {}, {"OMP_NUM_THREADS": "1"}, "1 thread: OMP_NUM_THREADS"),
        (4, {}, {"OMP_NUM_THREADS": "5"}, "4 threads: CPU affinity"),
        *((16, {}, {"OMP_NUM_THREADS": bad, "SLURM_CPUS_PER_TASK": bad}, "16 threads: cores")
          for bad in ("", "0", "-1", "many", "1.5", "\u00b2", "9" * 30)),
        (16, {}, {"LOCAL_WORLD_SIZE": "3"}, "5 threads: cores, shared by 3 ranks"),
        (16, v2_quota(2), {"LOCAL_WORLD_SIZE": "3"}, "1 thread: control group, shared by 3 ranks"),
        (4, {}, {"LOCAL_WORLD_SIZE": "0"}, "4 threads: CPU affinity"),
        # torchrun sets OMP_NUM_THREADS to 1 if it starts several ranks.
        (4, {}, TORCHRUN, "2 threads: CPU affinity, shared by 2 ranks"),
        (4, {}, TORCHRUN | {"LOCAL_WORLD_SIZE": "1"}, "1 thread: OMP_NUM_THREADS"),
        (16, {}, TORCHRUN | {"OMP_NUM_THREADS": "3"}, "3 threads: OMP_NUM_THREADS"),
        (16, {}, TORCHRUN | {"SLURM_CPUS_PER_TASK": "6"}, "3 threads: SLURM_CPUS_PER_TASK, shared by 2 ranks"),
        (16, {}, TORCHRUN | SRUN, "1 thread: SLURM_CPUS_PER_TASK, shared by 4 ranks"),
        # srun starts a task per rank, with and without bound cores.
        (2, {}, SRUN, "2 threads: CPU affinity"),
        (16, {}, SRUN, "2 threads: SLURM_CPUS_PER_TASK"),
        (16, v2_quota(4), SRUN, "1 thread: control group, shared by 4 ranks"),
    ],
)  # fmt: skip
def test_the_least_limit_counts(
    machine: set[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    num_affine: int, files: dict[str, str], variables: dict[str, str], text: str,
) -> None:  # fmt: skip
    machine.intersection_update(range(num_affine))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    system = write_files(tmp_path, files)
    assert str(choose_num_threads(system=system)) == text
    assert str(choose_num_threads(7, system=system)) == "7 threads: num_threads"


def test_one_process_does_not_share(machine: set[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("OMP_NUM_THREADS", "11")
    system = write_files(tmp_path, v2_quota(8))
    assert choose_num_threads(num_sharing=1, system=system).number == num_cores(system) == 8
    machine.intersection_update(range(12))
    assert choose_num_threads(num_sharing=1, system=KernelFiles(tmp_path / "none")).number == 11
    assert num_cores(KernelFiles(tmp_path / "none")) == 12  # threads per process do not limit the cores


def test_arrow_uses_at_most_the_usable_cores(machine: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    before = pa.cpu_count()
    try:
        for num_threads, variable, expected in ((5, "3", 3), (2, "3", 2)):
            pa.set_cpu_count(num_threads)
            monkeypatch.setenv("SLURM_CPUS_PER_TASK", variable)
            limit_arrow_threads()
            assert pa.cpu_count() == expected
    finally:
        pa.set_cpu_count(before)


def test_a_bound_rank_keeps_its_share(machine: set[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    system = KernelFiles(tmp_path)
    bind_to_processors(range(8, 16))
    assert machine == set(range(8, 16))
    assert choose_num_threads(system=system).number == 8
    undo_binding()
    assert machine == set(range(16)) and choose_num_threads(system=system).number == 8
