"""Every refusal of docs/errors.md, and some of plans and documents: the same words and exit code."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from house_parts.checkouts import Checkout, Ledger
from record import ROOT

if str(ROOT / "tests") not in sys.path:
    sys.path.insert(0, str(ROOT / "tests"))

from bad_input.cases import PREPARING, TRAINING, Place
from meseta.system.locks import FolderLock
from small_run import settings, tiny_data, write_config

TWO_RANKS = ("--nproc", "2")
SPEED = re.compile(r"[\d,]+ samples/s|\d+ s left")


def compare_refused(before: Checkout, after: Checkout, folder: Path) -> Ledger:
    """On one rank, and on two where the ranks meet it."""
    ledger = Ledger("refusals")
    tiny = tiny_data(folder / "tiny")
    finished = folder / "finished" / "run"
    document = settings(tiny, finished, checkpoint__every_steps=4, checkpoint__keep_last=2)
    before.succeed("train", write_config(folder / "finished" / "c.yaml", document))
    for case in (*PREPARING, *TRAINING, run_in_use):
        for ranks in ((), TWO_RANKS) if case not in PREPARING else ((),):
            where = case.__name__.replace("_", " ") + (", two ranks" if ranks else "")
            told = [_refusal(checkout, case, Place(folder / "place", tiny, finished), ranks)
                    for checkout in (before, after)]  # fmt: skip
            for what, old, new in zip(("exit code", "errors", "standard error", "output"), *told, strict=True):
                ledger.compare(where, what, old, new)
            if told[0][0] != 1:
                ledger.differ(where, "not refused", str(told[0]))
    return ledger


def run_in_use(place: Place) -> list[Any]:
    """A run that another process trains in."""
    config = write_config(place.folder / "c.yaml", settings(place.tiny, place.run(), train__epochs=2))
    return ["train", config]


def _refusal(
    checkout: Checkout, case: Callable[[Place], list[Any]], place: Place, ranks: tuple[str, ...]
) -> tuple[int, list[str], str, str]:
    """Exit code, errors, all of standard error, and output."""
    shutil.rmtree(place.folder, ignore_errors=True)
    place.folder.mkdir(parents=True)
    command = [*case(place), *ranks]
    lock = FolderLock(place.folder / "run") if case is run_in_use else None
    if lock is not None:
        lock.acquire()
    done = checkout.meseta(*command)
    if lock is not None:
        lock.release()
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    return done.returncode, errors, SPEED.sub("", done.stderr), done.stdout


DOCUMENTS: dict[str, Any] = {
    "unknown key of a table": {"tables": {"a": {"num_embeddings": 10, "embedding_dim": 16, "optimiser": "sgd"}}},
    "no batch size": {"batch_size": None},
    "text for a number": {"batch_size": "many"},
    "unknown optimizer": {"tables": {"a": {"num_embeddings": 10, "embedding_dim": 16, "optimizer": "sdg"}}},
    "negative rows": {"tables": {"a": {"num_embeddings": -1, "embedding_dim": 16}}},
    "unknown table": {"features": {"f": {"table": "b"}}},
    "unknown pooling": {"features": {"f": {"table": "a", "pooling": "maximum"}}},
    "two formats": {"format": "meseta.workload/2"},
    "number as people write it": {"dense": {"flops_per_sample": "3e6"}},
    "too large": {"tables": {"a": {"num_embeddings": 10**8, "embedding_dim": 64}}},
}


def compare_documents(before: Checkout, after: Checkout, folder: Path) -> Ledger:
    """Workloads, topologies, plans and constraints that are refused."""
    ledger = Ledger("documents")
    folder.mkdir(parents=True, exist_ok=True)
    machines = folder / "machines.yaml"
    machines.write_text("num_hosts: 1\ndevices_per_host: 2\nhbm_bytes: 1000000000\n")
    good = {"batch_size": 512, "tables": {"a": {"num_embeddings": 1000, "embedding_dim": 16}}}
    texts = {name: yaml.safe_dump({k: v for k, v in {**good, **change}.items() if v is not None})
             for name, change in DOCUMENTS.items()}  # fmt: skip
    texts["key given twice"] = yaml.safe_dump(good) + "batch_size: 9\n"
    texts["no yaml"] = "tables: ["
    texts["a list"] = "- 1\n"
    cases: dict[str, list[Any]] = {}
    for name, text in texts.items():
        path = folder / f"{name}.yaml"
        path.write_text(text)
        cases[f"workload, {name}"] = ["plan", path, "--topology", machines]
    workload = folder / "good.yaml"
    workload.write_text(yaml.safe_dump(good))
    for option, name, text in (
        ("--topology", "unknown key", "num_host: 2\n"), ("--topology", "ill typed", "num_hosts: two\n"),
        ("--topology", "key twice", "num_hosts: 2\nnum_hosts: 2\n"), ("--topology", "no hosts", "num_hosts: 0\n"),
        ("--constraints", "unknown table", "tables: {b: {ranks: [0]}}\n"), ("--constraints", "list", "[1]\n"),
        ("--constraints", "unknown scheme", "tables: {a: {sharding: [row_wize]}}\n"),
        ("--constraints", "no such rank", "tables: {a: {ranks: [7]}}\n"), ("--cost", "no format", "lookup: 1\n"),
    ):  # fmt: skip
        path = folder / f"{option.strip('-')} {name}.yaml"
        path.write_text(text)
        machine = [] if option == "--topology" else ["--topology", machines]
        cases[f"{option.strip('-')}, {name}"] = ["plan", workload, option, path, *machine]
    for name, command in cases.items():
        old, new = (checkout.meseta(*command) for checkout in (before, after))
        ledger.compare(name, f"words: {name}", (old.returncode, old.stderr), (new.returncode, new.stderr))
    return ledger
