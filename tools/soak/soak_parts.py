"""`make soak`: the whole matrices, every kill and the long fuzz, in parts of less than 45 minutes on two cores.

    python tools/soak/soak_parts.py             all parts, one after the other
    python tools/soak/soak_parts.py kill files  these
    python tools/soak/soak_parts.py --list      what they are

A part that is cut off, or in which a test failed, goes on where it was with the same command: what has passed is kept
in build/soak/PART.jsonl until src/, tests/ or tools/ change. A part that has passed gets its row in docs/soak.md.
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

from meseta.system.environment import git_version, hardware_summary
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
        "sharded training against one process: schemes x poolings x row optimizers x 2, 4 and 8 ranks, "
        "whose table is [exactness.md](exactness.md)",
        ("tests/distributed/test_sharded.py",),
    ),
    "tiers": Part(
        "rows near and far against the same run in memory, 50 steps each: every pair of optimizer, type of rows, tier "
        "and engine, look-ahead, ranks, scheme, overlap, codec, threads and more, twice",
        ("tests/distributed/test_tier_bits.py",),
    ),
    "distributed": Part("everything else on several ranks", ("tests/distributed",)),
    "kill": Part(
        "`kill -9` at random moments of preparing, starting, training, saving and evaluating, then to the end",
        (
            "tests/cli/test_kill.py",
            "tests/checkpoint/test_object_store.py",
            "tests/cli/test_kill_tiers.py",
            "tests/cli/test_restarts.py",
            "tests/data/test_resume_prepare.py",
        ),
    ),
    "kill_models": Part(
        "`kill -9` at random moments of training, saving and evaluating every model that has dropout and norms, on 1 "
        "rank and, its dense part cut, on 2: the bits of runs that nobody killed",
        ("tests/cli/test_kill_models.py",),
    ),
    "faults": Part(
        "1,000 seeded faults of a run that saves deltas: files cut, flipped, exchanged or missing, full disks, "
        "refused changes of the file system, two writers; and a death before each change, under every policy, while it "
        "prunes and makes whole ones",
        ("tests/checkpoint/test_faults.py", "tests/checkpoint/test_deaths.py"),
    ),
    "reads": Part(
        "each open, read, stat and listing of a run that saves deltas, prunes, mirrors, compacts, resumes and goes "
        "back fails once with EIO, EMFILE and ESTALE, in a directory and at a URL, and each below the folder of a run "
        "that a command resumes; 200 seeded runs in which 30 % of all reads of manifests fail",
        ("tests/checkpoint/test_failed_reads.py", "tests/bad_input/test_unread_runs.py"),
        checks_types=False,  # the part would take five times as long
    ),
    "mirrors": Part(
        "a mirror in 13 states, such as that of another run, half deleted or with a changed byte, under every policy, "
        "at a directory and at an S3 server; two runs that save to one URL, interleaved at any request",
        ("tests/checkpoint/test_mirror_cases.py", "tests/checkpoint/test_two_runs.py"),
    ),
    "everything": Part(
        "examples/configs/everything.yaml on two hosts of two ranks: `kill -9` of all ranks and of one, and SIGTERM, "
        "at random moments, with `pipeline.staleness` 0 and 1, and with nothing rounded: the bits of itself "
        "undisturbed, and of a plain run",
        ("tests/distributed/test_everything.py",),
    ),
    "hang": Part(
        "ranks killed, stopped and astray, and links cut, at random moments on 2, 4 and 8 ranks: the right one named "
        "within 30 s, no process left",
        ("tests/cli/test_hang.py", "tests/cli/test_hang_links.py"),
    ),
    "stalls": Part(
        "disks frozen, throttled and file servers stopped while one and two ranks train, save, load and evaluate; "
        "control groups of 150 to 350 MB, and shrunk while training: one line within 30 s that names the cause",
        ("tests/telemetry/test_stalls.py", "tests/cli/test_stalls.py", "tests/cli/test_memory_limits.py"),
    ),
    "reader_faults": Part(
        "200 schedules of readers and dispatchers killed, stopped, told to leave, begun again and joined, links cut "
        "and slow, and ranks killed, with keys and without: every row once, in order",
        ("tests/data/service/test_faults.py",),
    ),
    "readers": Part(
        "100,000 malformed tickets and questions; 1,000 mutated beats, tickets, filters and addresses each of another "
        "user, without the token and with it; batches of readers, and of recipes, against those of a local one",
        ("tests/data/service",),
    ),
    "configs": Part(
        "5,000 spoiled configs and overrides; every key of configs, plans, topologies, constraints and cost models "
        "with values of any type",
        ("tests/bad_input/test_fuzz_config.py", "tests/bad_input/test_setting_values.py"),
    ),
    "files": Part("spoiled and hostile data, plans, checkpoints and runs, through every command", ("tests/bad_input",)),
    "operators": Part("hostile calls of every operator, and 200 random examples per property", ("tests/ops",)),
    "planner": Part("plans of 12 tables on 4 ranks against an integer program", ("tests/planner",)),
    "rest": Part("all other tests, 200 random examples per property", ("tests",)),
    "sanitize": Part(
        "the core under AddressSanitizer and UndefinedBehaviorSanitizer, each instruction set of the processor",
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
        print(f"soak: not passed: {', '.join(failed)}; the same command goes on with what is left", file=sys.stderr)
    return bool(failed)


def run(name: str) -> bool:
    """Run what is left of a part; whether all of it has now passed."""
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
    _write_row(name, f"{num_tests:,} tests passed", known["seconds"])
    return True


def _source() -> str:
    """What the tests that have passed were run on: the trees of the last commit, and what was changed since."""

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


def _write_row(name: str, result: str, seconds: float) -> None:
    """Put the row of a part into the table of the page."""
    today = datetime.now(UTC).date().isoformat()
    cells = [f"`{name}`", PARTS[name].about, result, format_duration(seconds), hardware_summary(), git_version(), today]
    row = "| " + " | ".join(cells) + " |"
    page, count = re.subn(rf"^\| `{name}` \|.*$", lambda _: row, PAGE.read_text(), flags=re.MULTILINE)
    if count != 1:
        raise SystemExit(f"soak: {PAGE} has {count} rows of part {name!r}, and must have one; add `| `{name}` | |`")
    PAGE.write_text(page)
    print(row)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
