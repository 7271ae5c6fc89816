"""Tests of control groups with too little memory: one line names the limit, whichever process is killed."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cli.processes import PATIENCE_S, Command
from meseta.system.kernel import KernelFiles, num_oom_kills, raise_oom_score, tightest_cgroup
from meseta.telemetry.watching import MIN_RANK_BYTES, MIN_START_BYTES, MemoryWatch, check_start_memory
from sampling import sample
from small_run import settings, write_config
from stalled_disk import MemoryGroup, memory_group

MB = 1_000_000
SOON_S = 30.0


def start(folder: Path, tiny: Path, group: MemoryGroup, *words: object, **changes: Any) -> Command:
    """Start a training in a control group. It is executed, because pages of a fork's parent would be charged to the
    parent's group."""
    folder.mkdir()
    config = write_config(folder / "c.yaml", settings(tiny, folder / "run", **changes))
    joins = f"import os; open({str(group.folder / 'cgroup.procs')!r}, 'w').write(str(os.getpid())); "
    runs = "import sys; sys.argv[0] = 'meseta'; from meseta.cli.main import main; main()"
    return Command(
        folder, "-P", "-c", joins + runs, "train", config, "--verbose", *words, launcher=("exec",), program="python"
    )


def lines_of(command: Command) -> list[str]:
    return [
        line for line in command.err.read_text().splitlines() if line.startswith(("error: ", "warning: ", "note: "))
    ]


LIMITS = [(mb, ranks) for ranks in (1, 2) for mb in range(150, 351, 25)]


@pytest.mark.parametrize("case", sample(LIMITS, k=1, seed=2))
def test_a_start_with_too_little(case: tuple[int, int], tmp_path: Path, tiny: Path) -> None:
    """The start is refused before torch is imported, refused by the prediction, or it fits. No process is killed."""
    megabytes, ranks = case
    with memory_group(megabytes * MB) as group:
        command = start(tmp_path / "a", tiny, group, "--nproc", ranks)
        code = command.wait()
        errors = [line for line in lines_of(command) if line.startswith("error: ")]
        if code == 0:
            assert errors == [] and (tmp_path / "a/run/summary.json").exists() and megabytes * MB >= MIN_START_BYTES
            return
        assert code == 1 and len(errors) == 1 and "Traceback" not in command.err.read_text()
        # `meseta` checks the need of one rank first, then the launcher that of all.
        refused = rf"error: the control group allows {megabytes} MB of memory, but a start on (1|{ranks}) ranks? needs"
        assert re.match(rf"{refused} \d+ MB before any table: raise|error: (rank 0: )?this run needs", errors[0])
        # Less than torch takes: such a start is refused in the first second.
        assert (group.peak_bytes() < 60 * MB) == ("before any table" in errors[0])


@pytest.mark.soak
@pytest.mark.parametrize("options", [("--nproc", 2), ("--nproc", 2, "--max-restarts", 1), ("--max-restarts", 1)])
def test_a_limit_that_shrinks(options: tuple[object, ...], tmp_path: Path, tiny: Path) -> None:
    """The kernel kills a rank, and the launcher reports which one and why."""
    with memory_group(2000 * MB) as group:
        command = start(tmp_path / "a", tiny, group, *options, train__epochs=100_000, checkpoint__every_steps=50)
        command.until(lambda: "step 100/" in command.err.read_text(), "the first steps")
        since_s = time.monotonic()
        while not any("was killed" in line for line in lines_of(command)):
            group.shrink()
            assert time.monotonic() - since_s < SOON_S
            time.sleep(0.2)
        line = next(line for line in lines_of(command) if "was killed" in line)
        assert re.search(
            r"(error|note): rank \d was killed by SIGKILL of the kernel: the memory of its control group \(\d+ MB\) is "
            r"used up; raise the limit, or use smaller tables; (all ranks were stopped|restart 1 of 1)",
            line,
        )
        group.limit(2000 * MB)


@pytest.mark.soak
def test_a_group_that_is_nearly_full(tmp_path: Path, tiny: Path) -> None:
    """A single process has no launcher to report its end, so it warns before memory is exhausted."""
    with memory_group(2000 * MB) as group:
        command = start(tmp_path / "a", tiny, group, train__epochs=100_000)
        command.until(lambda: "step 100/" in command.err.read_text(), "the first steps")
        group.shrink(left_ratio=0.02)
        since_s = time.monotonic()
        command.until(lambda: lines_of(command), "a warning")
        assert time.monotonic() - since_s < SOON_S
        assert re.match(
            r"warning: [\d.]+ MB are left of the \d+ MB of memory that control group '.*' allows; the kernel kills",
            lines_of(command)[0],
        )


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_need_of_a_start(ranks: int, tmp_path: Path, tiny: Path) -> None:
    """MIN_START_BYTES and MIN_RANK_BYTES, measured again: a run that `check_memory` refuses has used that much by
    then."""
    need = MIN_START_BYTES + (ranks * MIN_RANK_BYTES if ranks > 1 else 0)
    with memory_group(int(1.12 * need)) as group:
        command = start(tmp_path / "a", tiny, group, "--nproc", ranks)
        assert command.wait(PATIENCE_S) == 1 and "this run needs" in command.err.read_text()
        assert 0.9 * need < group.peak_bytes() < 1.1 * need, (group.peak_bytes(), need)


def system_of(folder: Path, files: dict[str, str]) -> KernelFiles:
    for path, text in {
        "proc/self/cgroup": "0::/outer/inner\n",
        "proc/meminfo": "MemTotal: 8000000 kB\n",
        **files,
    }.items():
        place = folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    return KernelFiles(folder)


def v2(limit: str, used: int, cache: int = 0, kills: int = 0) -> Callable[[str], dict[str, str]]:
    """Files of a control group of version 2."""
    return lambda folder: {
        f"{folder}/memory.max": limit,
        f"{folder}/memory.current": str(used),
        f"{folder}/memory.stat": f"inactive_file {cache // 2}\nactive_file {cache // 2}\n",
        f"{folder}/memory.events": f"low 0\noom 0\noom_kill {kills}\n",
    }


def test_the_tightest_group_counts(tmp_path: Path) -> None:
    outer, inner = "sys/fs/cgroup/outer", "sys/fs/cgroup/outer/inner"
    system = system_of(tmp_path, v2("200000000", 190 * MB, 20 * MB)(outer) | v2("max", 100 * MB, kills=3)(inner))
    tightest = tightest_cgroup(system)
    assert tightest is not None and tightest.folder == outer and tightest.unclaimed_bytes == 30 * MB
    assert tightest.free_bytes == 20 * MB, "inactive cache alone is free"
    assert num_oom_kills(system) == 3
    with pytest.raises(Exception, match="allows 200 MB of memory, but a start on 2 ranks needs 349 MB"):
        check_start_memory(2, system)
    watch = MemoryWatch(system)
    assert watch.poll() == []
    (tmp_path / outer / "memory.current").write_text(str(215 * MB))
    (line,) = watch.poll()
    assert line.startswith(
        "warning: 5.00 MB are left of the 200 MB of memory that control group '/sys/fs/cgroup/outer'"
    )
    assert watch.poll() == [], "once"
    (tmp_path / outer / "memory.max").write_text("max")
    assert watch.poll() == [] and tightest_cgroup(system) is None
    check_start_memory(64, system)


def test_forks_are_killed_first(tmp_path: Path) -> None:
    path = tmp_path / "oom_score_adj"
    for before, after in (("0\n", "500"), ("-900\n", "-400"), ("700\n", "1000")):
        path.write_text(before)
        raise_oom_score(path)
        assert path.read_text() == after
    raise_oom_score(tmp_path / "absent")
    assert os.path.exists(path)
