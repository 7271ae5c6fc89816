"""Checks of the machine on simulated /proc and /sys trees."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from meseta.measure.doctor import checks
from meseta.measure.doctor.packages import Finding, note, problem
from meseta.system.environment_variables import WAIT_POLICY
from meseta.system.kernel import CgroupLimits, KernelFiles, read_cgroup_limits
from meseta.system.processors import ThreadCount
from meseta.telemetry.formatting import format_bytes

Make = Callable[[dict[str, str]], KernelFiles]
NO_LIMITS = CgroupLimits(None, None, None)
MEMINFO = "MemTotal:       16000000 kB\nMemFree:  1 kB\nMemAvailable:   8000000 kB\n"
THP = checks.HUGEPAGE_PATH
FAST = "avx2 fma avx512f avx512bw avx512dq avx512vl avx512_bf16"


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def make_system(files: dict[str, str]) -> KernelFiles:
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        return KernelFiles(tmp_path)

    return make_system


def test_a_problem_has_a_way_out_and_findings_are_frozen() -> None:
    with pytest.raises(ValueError, match="way_out"):
        problem("disk", "full", "")
    with pytest.raises(dataclasses.FrozenInstanceError):
        note("disk", "full").state = "ok"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (512_000_000, "512 MB"), (24_680_000_000, "24.7 GB"), (3_200_000_000_000, "3.20 TB")],
)
def test_sizes(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


def test_no_groups_no_limits(make: Make) -> None:
    assert read_cgroup_limits(make({})) == NO_LIMITS
    nothing = {"proc/self/cgroup": "0::/\nrubbish\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}
    assert read_cgroup_limits(make(nothing | {"sys/fs/cgroup/memory.max": "max\n"})) == NO_LIMITS


def test_version_2_takes_the_tightest_of_all_groups_around(make: Make) -> None:
    files = {
        "proc/self/cgroup": "0::/a/b\n",
        "proc/meminfo": MEMINFO,
        "sys/fs/cgroup/a/b/cpu.max": "400000 100000\n",
        "sys/fs/cgroup/a/cpu.max": "150000 100000\n",
        "sys/fs/cgroup/a/b/memory.max": "4000000000\n",
        "sys/fs/cgroup/a/b/memory.current": "3000000000\n",
        "sys/fs/cgroup/a/b/memory.stat": "anon 5\ninactive_file 1000000000\n",
    }
    assert read_cgroup_limits(make(files)) == CgroupLimits(1.5, 4_000_000_000, 2_000_000_000)


def test_version_1_in_a_container_that_sees_its_group_as_the_root(make: Make) -> None:
    files = {
        "proc/self/cgroup": "9:name=systemd:/docker/x\n4:memory:/docker/x\n2:cpu,cpuacct:/docker/x\n",
        "proc/meminfo": MEMINFO,
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "50000\n",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "1000000000\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "900000000\n",
        "sys/fs/cgroup/memory/memory.stat": "total_inactive_file 100000000\n",
    }
    assert read_cgroup_limits(make(files)) == CgroupLimits(0.5, 1_000_000_000, 200_000_000)


def test_version_1_without_limits(make: Make) -> None:
    files = {
        "proc/self/cgroup": "4:memory:/\n1:cpu:/\n",
        "proc/meminfo": MEMINFO,
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
    }
    assert read_cgroup_limits(make(files)) == NO_LIMITS


@pytest.mark.parametrize(
    ("chosen", "best", "state", "words"),
    [
        ("avx512", "avx512", "ok", "Fast 9, with avx512"),
        ("baseline", "baseline", "note", "neither AVX2 nor AVX-512"),
        ("avx2", "avx512", "note", "MESETA_ISA is set, but the processor supports avx512"),
        (None, None, "note", "could not be determined"),
    ],
)
def test_processor(make: Make, chosen: str | None, best: str | None, state: str, words: str) -> None:
    system = make({"proc/cpuinfo": "processor : 0\nmodel\t: 17\nmodel name\t: Fast 9\n\nmodel name\t: Fast 9\n"})
    finding = checks.check_processor(system, {"instruction_set": chosen, "best": best} if chosen else {"error": "x"})
    assert finding.state == state and words in finding.text and finding.figures["name"] == "Fast 9"


def test_a_processor_without_a_name(make: Make) -> None:
    assert checks.check_processor(make({}), {"instruction_set": "avx2", "best": "avx2"}).state == "ok"


@pytest.mark.parametrize(
    ("flags", "variables", "state", "words"),
    [
        (FAST, {}, "ok", "AVX-512 BF16: dense.dtype=bfloat16 pays"),
        ("avx2 fma", {}, "ok", "auto selects float32, and a new run in bfloat16 is refused"),
        (FAST, {"ONEDNN_MAX_CPU_ISA": "AVX2"}, "note", "limits it to AVX2"),
    ],
)  # fmt: skip
def test_bfloat16(make: Make, flags: str, variables: dict[str, str], state: str, words: str) -> None:
    finding = checks.check_bfloat16(make({"proc/cpuinfo": f"model name : Fast 9\nflags : {flags}\n"}), variables)
    assert finding.state == state and words in finding.text and bool(finding.way_out) == (state == "note")
    assert finding.figures["pays"] == ("pays" in words)


def test_waiting() -> None:
    ours = checks.check_wait_policy({"PATH": "/bin", **WAIT_POLICY})
    assert ours.state == "ok" and "export OMP_WAIT_POLICY=passive" in ours.text
    assert checks.check_wait_policy({"OMP_WAIT_POLICY": "passive"}).text.endswith(
        "as your variables specify: OMP_WAIT_POLICY=passive"
    )
    spinning = checks.check_wait_policy({"OMP_WAIT_POLICY": "active"})
    assert (spinning.state, spinning.way_out) == ("note", "unset OMP_WAIT_POLICY")


def test_cores() -> None:
    torch, quota = {"num_threads": 1, "omp_num_threads": "1"}, CgroupLimits(2.5, None, None)
    assert checks.check_cores(ThreadCount(1, "OMP_NUM_THREADS"), 2, 2, NO_LIMITS, torch).text == (
        "2, all usable; torch alone uses 1 thread (OMP_NUM_THREADS=1); "
        "`meseta train` and `meseta prepare` use 1 thread: OMP_NUM_THREADS"
    )
    some = checks.check_cores(ThreadCount(4, "CPU affinity"), 4, 64, NO_LIMITS, {"error": "no torch"})
    assert some.text == "4 of 64 usable; `meseta train` and `meseta prepare` use 4 threads: CPU affinity"
    tight = checks.check_cores(ThreadCount(2, "control group"), 64, 64, quota, {"num_threads": 64})
    assert (tight.state, tight.figures["cgroup_cores"], tight.figures["num_threads"]) == ("note", 2.5, 2)
    assert "use 2 threads: control group, which allows the CPU time of 2.5 cores" in tight.text
    assert tight.way_out.endswith("export OMP_NUM_THREADS=2")
    loose = checks.check_cores(ThreadCount(2, "CPU affinity"), 2, 64, CgroupLimits(8.0, None, None), {"num_threads": 2})
    assert loose.state == "ok"


@pytest.mark.parametrize(
    ("limits", "state", "text"),
    [
        (NO_LIMITS, "ok", "8.19 GB free of 16.4 GB, no control group limits it"),
        (
            CgroupLimits(None, 4_000_000_000, 3_000_000_000),
            "ok",
            "3.00 GB free of the 4.00 GB that a control group allows",
        ),
        (CgroupLimits(None, 4_000_000_000, 1_000_000_000), "note", "small tables only"),
        (CgroupLimits(None, 400_000_000, 100_000_000), "problem", "100 MB free of the 400 MB"),
    ],
)
def test_memory(make: Make, limits: CgroupLimits, state: str, text: str) -> None:
    finding = checks.check_memory(make({"proc/meminfo": MEMINFO}), limits)
    assert finding.state == state and text in finding.text


def test_memory_that_is_not_reported(make: Make) -> None:
    assert checks.check_memory(make({"proc/meminfo": "MemTotal: none\n"}), NO_LIMITS).state == "note"


@pytest.mark.parametrize(
    ("files", "share", "state", "words"),
    [
        ({THP: "always [madvise] never\n"}, 1.0, "ok", "madvise); 100% of a large tensor got them"),
        ({THP: "[always] madvise never\n"}, None, "ok", "(transparent_hugepage: always)"),
        ({THP: "always madvise [never]\n"}, 0.0, "note", "turned off (transparent_hugepage: never)"),
        ({THP: "[always] madvise never\n", "proc/self/status": "THP_enabled:\t0\n"}, 0.0, "note", "for this process"),
        ({THP: "[always] madvise never\n"}, 0.25, "note", "fragmented: 25% of a large tensor"),
        ({}, None, "note", "no transparent 2 MB pages"),
    ],
)
def test_pages(make: Make, files: dict[str, str], share: float | None, state: str, words: str) -> None:
    finding = checks.check_huge_pages(make(files), share)
    assert finding.state == state and words in finding.text
    assert ("lookups in large tables are slow" in finding.text) == ("off" in finding.text or not files)


def test_the_way_out_of_never(make: Make) -> None:
    finding = checks.check_huge_pages(make({THP: "always madvise [never]\n"}), None)
    assert finding.way_out.startswith("echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.parametrize(("num_bytes", "state"), [(None, "note"), (64 << 20, "note"), (8 << 30, "ok")])
def test_shared_memory(num_bytes: int | None, state: str) -> None:
    finding = checks.check_shared_memory(num_bytes)
    assert finding.state == state and ("--shm-size" in finding.way_out) == (state == "note")


@pytest.mark.parametrize(
    ("soft", "hard", "way"),
    [
        (-1, -1, ""),
        (1024, 4096, ""),
        (256, -1, "ulimit -n 4096"),
        (256, 9000, "ulimit -n 4096"),
        (256, 2048, "ulimit -n 2048"),
        (256, 256, "raise nofile in /etc/security/limits.conf, or docker run --ulimit nofile=65536"),
    ],
)
def test_open_files(soft: int, hard: int, way: str) -> None:
    finding: Finding = checks.check_open_files(soft, hard)
    assert (finding.way_out, finding.state) == (way, "note" if way else "ok")
