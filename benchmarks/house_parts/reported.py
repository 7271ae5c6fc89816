"""Pages about the same runs, plans and data, made by both checkouts."""

from __future__ import annotations

import difflib
import json
import re
from pathlib import Path
from typing import Any

import yaml
from house_parts.checkouts import Checkout, Ledger
from house_parts.trained import make_data, sampled_config

RUNS = (5, 15, 25)
"""Configs of one, two and four ranks."""
RENAMED = {"agree": "agree", "gradient_exchange": "backward", "row_update": "update"}
"""Stages and parts of a predicted step by their name now, and before."""


def compare_reports(before: Checkout, after: Checkout, folder: Path) -> Ledger:
    """Runs of the checkout before, since newer ones may write what it does not read; times are those of the files."""
    ledger = Ledger("reports")
    data = make_data(before, folder)
    workload = folder / "workload.yaml"
    workload.write_text(yaml.safe_dump({
        "batch_size": 4096, "tables": {"a": {"num_embeddings": 10**6, "embedding_dim": 64},
                                       "b": {"num_embeddings": 1000, "embedding_dim": 16}},
        "dense": {"flops_per_sample": 1000000.0, "parameter_bytes": 4000},
    }))  # fmt: skip
    machines = folder / "machines.yaml"
    machines.write_text("num_hosts: 1\ndevices_per_host: 2\n")
    page = folder / "page.html"
    commands: dict[str, list[Any]] = {
        "data stats": ["data", "stats", data, "--html", page],
        "plan page": ["plan", workload, "--topology", machines, "--html", page],
    }
    folders = []
    for number in RUNS:
        document, ranks = sampled_config(number, data)
        run_dir = folder / f"run-{number}"
        path = run_dir.with_suffix(".yaml")
        path.write_text(yaml.safe_dump({**document, "run_dir": str(run_dir)}))
        before.succeed("train", path, "--nproc", ranks)
        folders.append(run_dir)
        commands |= {
            f"run {number}, {ranks} ranks": ["report", run_dir, "--out", page],
            f"run {number} as JSON": ["report", run_dir, "--json"],
            f"run {number}, checked plan": ["plan", "check", run_dir],
        }
    commands["comparison"] = ["report", *folders, "--out", page]
    for name, command in commands.items():
        old, new = (_made(checkout, command, page) for checkout in (before, after))
        _compare_pages(ledger, name, old, new)
    return ledger


def _made(checkout: Checkout, command: list[Any], page: Path) -> str:
    """What a command prints, and its page, cut into lines at its tags."""
    page.unlink(missing_ok=True)
    done = checkout.meseta(*command)
    text = page.read_text() if page.exists() else ""
    return f"{done.returncode}\n{done.stdout}{done.stderr}{re.sub(r'(?=<)', chr(10), text)}"


def _compare_pages(ledger: Ledger, name: str, old: str, new: str) -> None:
    """A difference for each place where one page has other lines."""
    ledger.num_compared += 1
    lines = old.splitlines(), new.splitlines()
    matcher = difflib.SequenceMatcher(None, *lines, autojunk=False)
    for kind, a, b, c, d in matcher.get_opcodes():
        if kind != "equal":
            was, now = "|".join(lines[0][a:b]), "|".join(lines[1][c:d])
            ledger.differ(name, f"{kind}: {now[:60] or was[:60]}", json.dumps([was[:200], now[:200]]))
