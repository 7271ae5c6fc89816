"""Pages about the same runs, plans and data, made by both checkouts."""

from __future__ import annotations

import difflib
import json
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import yaml
from house_parts.checkouts import Checkout, Ledger
from house_parts.prepared import PROGRESS
from house_parts.trained import make_data, sampled_config

RUNS = (5, 15, 25)
"""Configs of one, two and four ranks."""
PLANNED = "plan page"
UNIT_BYTES = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
SIZE = re.compile(r"([\d.,]+) (KiB|MiB|GiB|TiB|kB|MB|GB|TB|bytes|B)\b")
DIGITS = 0.011
"""Relative: sizes are shown with three digits."""
GEOMETRY = re.compile(r' (x|width|x1|x2)="[\d.]+"')
AGREE = re.compile(r" *--s-agree: #\w+;|\.stage-agree \{[^}]*\}|<span class=\"swatch stage-agree\">\n?</span>agree ?")
NUMBER = re.compile(r"\d[\d.,]*k?")
RENAMED = (
    (re.compile(r"stage-(backward|gradient_dist)"), "stage-of-gradients"),
    (re.compile(r"stage-(update|table_update)"), "stage-of-rows"),
    (re.compile(r"\b(backward|gradient_exchange)\b"), "gradients"),
    (re.compile(r"\b(update|row_update)\b"), "rows"),
    (re.compile(r"\s+"), " "),
)


def _without_agree(text: str) -> str:
    return " ".join(AGREE.sub("", text).split())


def _renamed(text: str) -> str:
    for pattern, name in RENAMED:
        text = pattern.sub(name, text)
    return text


def _without_units(text: str) -> str:
    text = GEOMETRY.sub(r' \1="#"', text.replace("Mebibytes", "Megabytes"))
    return re.sub(r"\b0 MiB", "0 MB", SIZE.sub("# bytes", text))


def _without_numbers(text: str) -> str:
    return " ".join(NUMBER.sub("#", text).split())


MASKS = {
    "agree": _without_agree,
    "names of predicted parts": _renamed,
    "units of sizes": _without_units,
    "predicted times": _without_numbers,
}
"""What may differ in a page; the last of them where a plan is shown alone, whose seconds the part plans compares."""


def sizes(text: str) -> list[float]:
    """Bytes of all sizes in a text."""
    return [float(number.replace(",", "")) * UNIT_BYTES.get(unit, 1) for number, unit in SIZE.findall(text)]


def why_differs(old: str, new: str, is_plan: bool) -> str:
    """Which masks make two pieces of pages equal, as few as do; '' where none."""
    pair = sizes(old), sizes(new)
    is_near = len(pair[0]) == len(pair[1]) and all(abs(a - b) <= DIGITS * a for a, b in zip(*pair, strict=True))
    names = [name for name in MASKS if (name != "predicted times" or is_plan) and (name != "units of sizes" or is_near)]
    for count in range(1, len(names) + 1):
        for chosen in combinations(names, count):
            texts = [old, new]
            for name in chosen:
                texts = [MASKS[name](text) for text in texts]
            if texts[0] == texts[1]:
                return ", ".join(chosen)
    return ""


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
        PLANNED: ["plan", workload, "--topology", machines, "--html", page],
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
    return f"{done.returncode}\n{done.stdout}{PROGRESS.sub('', done.stderr)}{re.sub(r'(?=<)', chr(10), text)}"


def _compare_pages(ledger: Ledger, name: str, old: str, new: str) -> None:
    """A difference for each place where one page has other lines."""
    ledger.num_compared += 1
    lines = old.splitlines(), new.splitlines()
    matcher = difflib.SequenceMatcher(None, *lines, autojunk=False)
    for kind, a, b, c, d in matcher.get_opcodes():
        if kind != "equal":
            was, now = "\n".join(lines[0][a:b]), "\n".join(lines[1][c:d])
            why = why_differs(was, now, name == PLANNED)
            ledger.differ(name, f"page: {why}" if why else "page", json.dumps([was[:200], now[:200]]))
