"""Whether a change of the house changed what it makes: this checkout beside another one, which is built.

    python benchmarks/bench_house.py --before CHECKOUT [--parts main,runs,...] [--configs 40] [--turns 9]

Each checkout runs by its own .venv, in the same folders, one after the other. Parts:
- tests: those of the checkout before, made to call what they called where it stands now: by a table of moves that is
  read from both trees, and one of calls, house_parts/former_tests.txt.
- main: the main job with a tenth of its rows: raw files, prepared files, checksum, metrics, predictions.
- runs: sampled configs (models, row optimizers, types, schemes, micro-batches, dropout, batch norm, clipping, fsdp;
  1, 2 and 4 ranks): checksum of the last checkpoint, lines of metrics without times, summary, plan, predictions, and
  what a refused one is told. Every fourth is also killed at its first checkpoint and resumed; killed by
  this checkout, and by the one before. Predicted seconds differ by what the list of transfers says, to 1e-9.
- prepare: files of raw logs of every kind, schemas and splits; what the commands print.
- plans: of 20 drawn workloads and of the published models: shards, ranks and tiers, seconds, bytes.
- refusals: every row of docs/errors.md, on one rank and on two.
- documents: workloads, machines and rules that `meseta plan` refuses.
- reports: pages of runs that the checkout before has made, of a plan and of data.
- help: what `--help` of every command prints.
- speed: `meseta bench e2e`, ingest, planner, a run that goes on, `meseta --help`, in turns; the ratio of each turn, and
  the 95 % interval of their mean, which passes where it ends above 0.98. A case that fails is repeated with 25 turns.

Prints one table, with all that differs; exits with 1 where something does that ALLOWED does not explain. Appends speeds
to benchmarks/results.csv.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from house_parts.checkouts import Allowed, Checkout, Ledger, table
from house_parts.former_tests import compare_tests
from house_parts.plans import compare_plans
from house_parts.prepared import compare_prepared
from house_parts.refused import compare_documents, compare_refused
from house_parts.reported import compare_reports
from house_parts.speed import MEASURES, compare_speed
from house_parts.trained import compare_main, compare_runs
from record import ROOT

LISTED = (
    "ranks agree on the loss, batch norm and norms, micro-batches: no list of transfers knew their latencies (c5d2480)"
)
READER = "one reader of documents names keys by their path (b5befa9); docs/errors.md has none of these"
ALLOWED: tuple[Allowed, ...] = (
    Allowed("runs", "unlisted", "part 9: summary.json has 'unlisted'"),
    Allowed("main", "unlisted", "part 9: summary.json has 'unlisted'"),
    Allowed("runs", "predicted step, by the list", LISTED),
    Allowed("plans", "predicted step, by agree", LISTED),
    Allowed("*", "last digits of a cost", "prices are added up in the order of the list of transfers (c5d2480)"),
    Allowed("plans", "shards, where memory binds", "where memory binds, places may differ"),
    Allowed("plans", "bytes of checkpoint", "part 9: bytes of the checkpoint phase (5cf9b3a)"),
    Allowed(
        "plans", "shards, as dear", "pieces that cost the same to 1e-9: prices are added up in another order (c5d2480)"
    ),
    Allowed("reports", "page: agree", "part 9: agree is shown, and has a colour"),
    Allowed("reports", "page: names of predicted parts", "part 9: gradient_exchange and row_update (7c9e6d6)"),
    Allowed("reports", "page: other sizes", "part 9: sizes in one unit, GB and its kin: three digits of another unit"),
    Allowed("reports", "page: units of sizes", "part 9: sizes in one unit, GB and its kin (be51790)"),
    Allowed("reports", "page: predicted times", LISTED),
    Allowed("documents", "words: workload, unknown*", READER),
    Allowed("documents", "words: topology, ill typed", READER),
    Allowed("documents", "words: constraints, unknown scheme", READER),
    Allowed("documents", "words: workload, too large", "part 9: sizes in one unit; seconds with the agreement"),
)
COMMANDS = ("", "prepare", "train", "sweep", "config", "plan", "verify", "eval", "predict", "report", "calibrate",
            "doctor", "data", "data synth", "data check", "data stats", "bench", "bench ops", "bench e2e", "checkpoint",
            "checkpoint list", "checkpoint inspect", "checkpoint verify", "checkpoint diff", "checkpoint export",
            "checkpoint import", "topology", "topology detect")  # fmt: skip


def compare_help(before: Checkout, after: Checkout, folder: Path) -> Ledger:
    """What `--help` of each command prints."""
    ledger = Ledger("help")
    for command in COMMANDS:
        old, new = (checkout.meseta(*command.split(), "--help") for checkout in (before, after))
        ledger.compare(f"meseta {command} --help", "text", old.stdout + old.stderr, new.stdout + new.stderr)
    return ledger


PARTS: dict[str, Callable[[Checkout, Checkout, Path], Ledger]] = {
    "tests": compare_tests,
    "main": compare_main,
    "prepare": compare_prepared,
    "plans": compare_plans,
    "refusals": compare_refused,
    "documents": compare_documents,
    "reports": compare_reports,
    "help": compare_help,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="a checkout with a .venv")
    parser.add_argument("--after", type=Path, default=ROOT, help="another one than this")
    parser.add_argument("--parts", default=",".join((*PARTS, "runs", "speed")))
    parser.add_argument("--configs", type=int, default=40)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--speeds", default=",".join(MEASURES), help="which of the part speed")
    options = parser.parse_args()
    before, after = Checkout("before", options.before.resolve()), Checkout("after", options.after.resolve())
    ledgers = []
    with tempfile.TemporaryDirectory(prefix="meseta-house-") as name:
        for part in options.parts.split(","):
            folder = Path(name) / part
            folder.mkdir()
            if part == "runs":
                ledgers.append(compare_runs(before, after, folder, range(options.configs)))
            elif part == "speed":
                ledgers.append(compare_speed(before, after, folder, options.speeds.split(","), options.turns))
            else:
                ledgers.append(PARTS[part](before, after, folder))
    for checkout in (before, after):
        checkout.close()
    print("\n".join(table(ledgers, ALLOWED)))
    sys.exit(any(ledger.split(ALLOWED)[0] for ledger in ledgers))


if __name__ == "__main__":
    main()
