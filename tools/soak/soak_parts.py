"""`make soak`: the whole matrices, every kill and the long fuzz, in parts of less than 45 minutes on two cores.

    python tools/soak/soak_parts.py             all parts, one after the other
    python tools/soak/soak_parts.py kill files  these
    python tools/soak/soak_parts.py --list      their descriptions

The same command resumes a part that was interrupted or in which a test failed. Passed tests are recorded in
build/soak/PART.jsonl until src/, tests/ or tools/ change. A part that has passed writes its row in docs/soak.md.
"""

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from meseta.system.environment import git_version
from meseta.system.files import write_atomic
from meseta.telemetry.formatting import format_duration

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "soak.md"
RECORDS = ROOT / "build" / "soak"


@dataclass(frozen=True)
class Part:
    """Tests below some paths; those below a longer path of another part are that part's."""

    about: str
    paths: tuple[str, ...] = ()
    command: tuple[str, ...] = (sys.executable, "-m", "pytest")
    checks_types: bool = True
    """Whether every call of the package is checked against its annotations."""


PARTS = {
    "exactness": Part(
        "sharded training compared with one process: sharding types, poolings, row optimizers, 2 to 8 ranks "
        "([table](exactness.md))",
        ("tests/distributed/test_sharded.py",),
    ),
    "tiers": Part(
        "offloaded rows compared with rows in memory, 50 steps each: every pair of optimizer, dtype, tier, "
        "lookahead, ranks, sharding type, overlap, codec and other settings",
        ("tests/distributed/test_tier_bits.py",),
    ),
    "distributed": Part("all other tests on several ranks", ("tests/distributed",)),
    "kill": Part(
        "`kill -9` at random moments of preparing, training, saving and evaluating, then resume",
        (
            "tests/cli/test_kill.py",
            "tests/checkpoint/test_object_store.py",
            "tests/cli/test_kill_tiers.py",
            "tests/cli/test_restarts.py",
            "tests/data/test_resume_prepare.py",
        ),
    ),
    "kill_models": Part(
        "`kill -9` at random moments for every model with dropout and norms, on 1 and 2 ranks: the same bits as "
        "without",
        ("tests/cli/test_kill_models.py",),
    ),
    "faults": Part(
        "1,000 seeded faults of runs with delta checkpoints: damaged, exchanged and missing files, full disks, "
        "refused system calls, two writers; a kill before each change of the file system",
        ("tests/checkpoint/test_faults.py", "tests/checkpoint/test_deaths.py"),
    ),
    "reads": Part(
        "each open, read, stat and listing of runs with delta checkpoints, and of resuming, fails once with EIO, "
        "EMFILE and ESTALE, in a folder and at a URL; 200 runs in which 30 % of all reads of manifests fail",
        ("tests/checkpoint/test_failed_reads.py", "tests/bad_input/test_unread_runs.py"),
        checks_types=False,  # the part would take five times as long
    ),
    "mirrors": Part(
        "a mirror in 13 states, such as damaged or of another run, in a folder and at an S3 server; two runs that"
        " save to one URL",
        ("tests/checkpoint/test_mirror_cases.py", "tests/checkpoint/test_two_runs.py"),
    ),
    "everything": Part(
        "`examples/configs/everything.yaml` on two hosts of two ranks, killed and stopped at random moments: the "
        "same bits as without",
        ("tests/distributed/test_everything.py",),
    ),
    "hang": Part(
        "ranks killed, stopped and diverged, and links cut, on 2 to 8 ranks: the right rank is named within 30 s,"
        " and no process remains",
        ("tests/cli/test_hang.py", "tests/cli/test_hang_links.py"),
    ),
    "clusters": Part(
        "the recipes of [clusters](clusters.md) on two hosts, undisturbed and after SIGTERM and SIGKILL: the same bits "
        "as on one host",
        ("tests/hosts/test_clusters.py",),
    ),
    "stalls": Part(
        "frozen and throttled disks, stopped file servers and full control groups: a line within 30 s names the cause",
        ("tests/telemetry/test_stalls.py", "tests/cli/test_stalls.py", "tests/cli/test_memory_limits.py"),
    ),
    "reader_faults": Part(
        "200 schedules of readers, dispatchers and ranks that are killed, stopped, drained and restarted, and of "
        "cut and slow links: every row arrives once, in order",
        ("tests/data/service/test_faults.py",),
    ),
    "readers": Part(
        "100,000 malformed requests; 1,000 mutated heartbeats, tickets, filters and addresses each, with and "
        "without the token; served batches compared with local ones",
        ("tests/data/service",),
    ),
    "configs": Part(
        "5,000 mutated configs and overrides; every key of configs, plans, topologies, constraints and cost "
        "models with values of any type",
        ("tests/bad_input/test_fuzz_config.py", "tests/bad_input/test_setting_values.py"),
    ),
    "files": Part("invalid and malicious data, plans, checkpoints and runs, with every command", ("tests/bad_input",)),
    "operators": Part("invalid calls of every operator; 200 random examples per property", ("tests/ops",)),
    "benchmarks": Part(
        "comparisons of operators and training with other systems, and their correctness checks",
        ("tests/benchmarks",),
    ),
    "planner": Part("plans of 12 tables on 4 ranks compared with an integer program", ("tests/planner",)),
    "quality": Part(
        "suites of `tools/quality` from file to page, interrupted, with failing runs, and on a dataset",
        ("tests/quality",),
    ),
    "rest": Part("all other tests; 200 random examples per property", ("tests",)),
    "sanitize": Part(
        "the core with AddressSanitizer and UndefinedBehaviorSanitizer, for each instruction set of the processor",
        command=("tools/sanitize.sh",),
    ),
}


def main(names: list[str]) -> int:
    if names == ["--list"]:
        print("\n".join(f"{name:12} {part.about}" for name, part in PARTS.items()))
        return 0
    if unknown := [name for name in names if name not in PARTS]:
        print(f"soak: no part {unknown[0]!r}; the parts are {', '.join(PARTS)}", file=sys.stderr)
        return 2
    failed = [name for name in names or PARTS if not run(name)]
    if failed:
        print(f"soak: not passed: {', '.join(failed)}; the same command resumes them", file=sys.stderr)
    return bool(failed)


def run(name: str) -> bool:
    """Run the remaining tests of a part. Return whether all of its tests have passed."""
    record = RECORDS / f"{name}.jsonl"
    sessions = RECORDS / f"{name}.sessions.json"
    source = _source()
    known = json.loads(sessions.read_text()) if sessions.exists() else {}
    if known.get("source") != source:
        known = {"source": source, "seconds": 0.0}
        record.unlink(missing_ok=True)
    RECORDS.mkdir(parents=True, exist_ok=True)
    write_atomic(sessions, json.dumps(known))  # a run that is cut off leaves the one before
    began = time.monotonic()
    try:
        code = subprocess.call(_command(name), cwd=ROOT, env=_environment(PARTS[name], record))
    finally:
        known["seconds"] += time.monotonic() - began
        write_atomic(sessions, json.dumps(known))
    # 5: every test had passed before.
    if code not in (0, 5):
        return False
    if name == "exactness":
        script = [sys.executable, "tests/distributed/exactness.py", str(record), "docs/exactness.md"]
        subprocess.run(script, cwd=ROOT, check=True)
    num_tests = len(record.read_text().splitlines())
    _write_row(name, num_tests, known["seconds"])
    return True


def _source() -> str:
    """Return the trees of the last commit and the uncommitted changes, on which the recorded tests ran."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout

    folders = ("src", "tests", "tools")
    return git("rev-parse", *(f"HEAD:{folder}" for folder in folders)) + git("diff", "HEAD", "--stat", "--", *folders)


def paths_of(name: str) -> tuple[list[str], list[str]]:
    """(paths of a part, paths below them that are another part's)."""
    paths = PARTS[name].paths
    others = [path for other, its in PARTS.items() if other != name for path in its.paths]
    return list(paths), [path for path in others if any(path.startswith(f"{outer}/") for outer in paths)]


def _command(name: str) -> list[str]:
    paths, ignored = paths_of(name)
    selection = ["-m", "soak or not soak", "--timeout", "3600", "-p", "soak_record"]
    processes = ["-n", "auto", "--maxprocesses", "4", "--dist", "worksteal"]
    return [*PARTS[name].command, *paths, *(f"--ignore={path}" for path in ignored), *selection, *processes]


def _environment(part: Part, record: Path) -> dict[str, str]:
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    settings = {
        "MESETA_SOAK": "1",
        "MESETA_SOAK_TYPES": str(int(part.checks_types)),
        "MESETA_SOAK_RECORD": str(record),
        "PYTHONPATH": os.pathsep.join(paths),
    }
    return {**os.environ, "PYTHON": sys.executable, **settings}


def _write_row(name: str, num_tests: int, seconds: float) -> None:
    """Put the row of a part into the table of the page."""
    today = datetime.now(UTC).date().isoformat()
    cells = [f"`{name}`", PARTS[name].about, f"{num_tests:,}", format_duration(seconds), git_version(), today]
    row = "| " + " | ".join(cells) + " |"
    page, count = re.subn(rf"^\| `{name}` \|.*$", lambda _: row, PAGE.read_text(), flags=re.MULTILINE)
    if count != 1:
        raise SystemExit(f"soak: {PAGE} has {count} rows of part {name!r}, and must have one; add `| `{name}` | |`")
    PAGE.write_text(page)
    print(row)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
