"""Pages about the same runs, plans and data, made by both checkouts."""

from __future__ import annotations

import difflib
import json
import re
from pathlib import Path
from typing import Any

import yaml
from house_parts.checkouts import Checkout, Ledger, first_difference
from house_parts.prepared import PROGRESS
from house_parts.trained import make_data, sampled_config

RUNS = (5, 15, 25)
"""Configs of one, two and four ranks."""
PLANNED = "plan page"
UNIT_BYTES = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
SIZE = re.compile(r"([\d.,]+) (KiB|MiB|GiB|TiB|kB|MB|GB|TB|bytes|B)\b")
DIGITS = 0.011
"""Relative: sizes are shown with three digits."""
NOTHING = 0.5
"""Bytes, of an axis that begins at 0."""

Rules = tuple[tuple[str, str], ...]
MASKS: dict[str, Rules] = {
    "agree": (
        (r" *--s-agree: #\w+;", ""),
        (r"\.stage-agree \{[^}]*\}", ""),
        (r'<rect [^>]*class="stage stage-(agree|spare-0)"[^>]*>\s*<title>[^<]*\bagree:[^<]*\s*</title>\s*</rect>', ""),
        (r'<tr>\s*<td>\s*<span class="swatch stage-(agree|spare-0)">\s*</span>agree(?s:.*?)</tr>', ""),
        (r'<span class="swatch stage-(agree|spare-0)">\s*</span>agree', ""),
        (r'<rect x="[\d.]+" y="[\d.]+" class="stage', '<rect class="stage'),
        (r'\n\s*"agree": [^\n]*', ""),
        (r",(\s*\})", r"\1"),
        (r"\n\s*\n", "\n"),
    ),
    "names of predicted parts": (
        (r"stage-(backward|gradient_dist)\b", "stage-of-gradients"),
        (r"stage-(update|table_update)\b", "stage-of-rows"),
        (r"\b(backward|gradient_exchange)\b", "gradients"),
        (r"\b(update|row_update)\b", "rows"),
        (r"[ ─━]+", " "),
    ),
    "units of sizes": (
        (r"\bMebibytes\b", "Megabytes"),
        (r'<text [^>]*class="box-detail"[^>]*>[\d.,]+ \w+\s*</text>', ""),
        (r'<rect (class="stage[^>]*) width="[\d.]+"', r"<rect \1"),
        (r'<(text|line) x1?="[\d.]+"', r"<\1"),
        (r' x2="[\d.]+"', ""),
        (SIZE.pattern, "# bytes"),
        (r"\n\s*\n", "\n"),
    ),
    "predicted times": ((r"\d[\d.,]*k?", "#"), (r"[ ]+", " ")),
}
"""What may differ in a page, one after the other; the last where a plan is shown alone, whose seconds the part plans
compares."""


def masked(text: str, rules: Rules) -> str:
    """A text without what the rules find."""
    for pattern, instead in rules:
        text = re.sub(pattern, instead, text)
    return text


def sizes(text: str) -> list[float]:
    """Bytes of all sizes in a text, but for labels that are left out where they do not fit."""
    text = masked(text, MASKS["units of sizes"][1:2])
    found = [float(number.replace(",", "")) * UNIT_BYTES.get(unit, 1) for number, unit in SIZE.findall(text)]
    return [size for size in found if size > NOTHING]


def places(old: str, new: str) -> list[tuple[str, str]]:
    """The pieces in which two texts differ."""
    lines = old.splitlines(), new.splitlines()
    matcher = difflib.SequenceMatcher(None, *lines, autojunk=False)
    return [("\n".join(lines[0][a:b]), "\n".join(lines[1][c:d])) for kind, a, b, c, d in matcher.get_opcodes()
            if kind != "equal"]  # fmt: skip


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
    machines.write_text("num_hosts: 1\ndevices_per_host: 2\nhbm_bytes: 8000000000\n")
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
        compare_pages(ledger, name, old, new)
    return ledger


def _made(checkout: Checkout, command: list[Any], page: Path) -> str:
    """What a command prints, and its page, cut into lines at its tags."""
    page.unlink(missing_ok=True)
    done = checkout.meseta(*command)
    text = page.read_text() if page.exists() else ""
    return f"{done.returncode}\n{done.stdout}{PROGRESS.sub('', done.stderr)}{re.sub(r'(?=<)', chr(10), text)}"


def compare_pages(ledger: Ledger, name: str, old: str, new: str) -> None:
    """A difference for each mask that makes two pages more alike, and for each place that stays different."""
    ledger.num_compared += 1
    pair = sizes(old), sizes(new)
    is_near = len(pair[0]) == len(pair[1]) and all(abs(a - b) <= DIGITS * a for a, b in zip(*pair, strict=True))
    if not is_near:
        ledger.differ(name, "page: other sizes", first_difference(*pair))
    left = places(old, new)
    for what, rules in MASKS.items():
        if left and (what != "predicted times" or name == PLANNED):
            old, new = masked(old, rules), masked(new, rules)
            remaining = places(old, new)
            if len(remaining) < len(left):
                ledger.differ(
                    name, f"page: {what}", f"in {len(left) - len(remaining)} places, as {list(left[0])}"[:300]
                )
            left = remaining
    for was, now in left:
        ledger.differ(name, "page", json.dumps([was[:200], now[:200]]))
