"""Prove that two source trees differ only in names, docstrings, comments and, on request, messages.

    python tools/compare_trees.py BEFORE AFTER --renames renames.csv --messages

BEFORE and AFTER are folders, or commits of this repository. Exits with 0 if they agree, and prints what a person should
look at. Exits with 1 after one line per difference: file, line before -> line after, reason, code before | code after.

Accepted: docstrings, comments and layout; local names that map one to one; other names that a table of renames lists
(columns kind, file, line, old, new, note), also in strings; modules that the table renames; another order of imports
within their block; another order of names in `__all__`, a set or a dictionary, if the table explains it.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

from tree_compare.compare import Options, Result, compare_trees
from tree_compare.renames import RenameTable, TableError
from tree_compare.trees import TreeError, read_tree


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="compare_trees.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", help="folder or commit")
    parser.add_argument("after", help="folder or commit")
    parser.add_argument("--renames", type=Path, action="append", default=[], help="table of renames; may be repeated")
    parser.add_argument("--messages", action="store_true", help="accept other texts in errors, warnings, logs and help")
    parser.add_argument(
        "--expectations", action="store_true", help="accept other strings in assertions and `match=` of tests"
    )
    parser.add_argument(
        "--allow", action="append", default=[], metavar="PATH",
        help="file or folder that may be added or removed, or change if it is no code; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--texts", action="append", default=[], metavar="PATH",
        help="file or folder whose strings with a space may all change, such as reports; may be repeated",
    )  # fmt: skip
    parser.add_argument("--quiet", action="store_true", help="print nothing to look at")
    parser.add_argument("--verbose", action="store_true", help="also print texts in which an old name may be a word")
    options = parser.parse_args(arguments)
    try:
        table = RenameTable.load(options.renames)
        before, after = read_tree(options.before), read_tree(options.after)
    except (TableError, TreeError, OSError) as error:
        print(f"compare_trees: {error}", file=sys.stderr)
        return 2
    allowed, texts = (tuple(path.rstrip("/") for path in paths) for paths in (options.allow, options.texts))
    result = compare_trees(before, after, Options(table, options.messages, options.expectations, allowed, texts))
    show(result, quiet=options.quiet, verbose=options.verbose)
    return bool(result.findings.differences)


def show(result: Result, *, quiet: bool, verbose: bool) -> None:
    """Print all differences, the places to look at, and a summary."""
    findings = result.findings
    for difference in sorted(findings.differences):
        print(difference)
    for notice in () if quiet else sorted(findings.notices, key=lambda notice: (notice.reason, notice)):
        if verbose or not notice.reason.startswith("word "):
            print(f"look at {notice}")
    reasons = Counter(notice.reason.partition(" the old name")[0] for notice in findings.notices)
    look_at = ", ".join(f"{count} x {reason}" for reason, count in sorted(reasons.items())) or "nothing"
    print(
        f"compared {result.num_files} files, of which {result.num_changed} changed and {findings.num_moved} moved: "
        f"{len(findings.differences)} differences; {len(findings.renamed)} names and {findings.num_local} local names "
        f"changed; to look at: {look_at}"
    )


if __name__ == "__main__":
    sys.exit(main())
