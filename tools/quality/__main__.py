"""`python tools/quality SUITE --out DIR`: compares configs over worlds, datasets and seeds, see docs/quality.md."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = str(Path(__file__).resolve().parents[2])


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python tools/quality",
        description="Tune each config with the same number of trials, train it on new seeds, and compare the results. "
        "The result says which differences are significant. The same command resumes a suite and keeps finished runs.",
    )
    parser.add_argument("suite", type=Path, metavar="SUITE", help="YAML file of the suite, see docs/quality.md")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for the results")
    parser.add_argument(
        "--workers",
        type=_positive_int,
        metavar="N",
        default=len(os.sched_getaffinity(0)),
        help="number of simultaneous training runs, each with one thread (default: one per processor)",
    )
    options = parser.parse_args(arguments)

    # These import torch, which takes seconds.
    from meseta.spec import MesetaError
    from tools.quality.runner import run_suite

    try:
        return run_suite(options.suite, options.out, options.workers)
    except MesetaError as error:
        print(f"error: {error}", file=sys.stderr)
    except OSError as error:
        where = f"{error.filename!r}: " if error.filename else ""
        print(f"error: {where}{error.strerror or error}; fix this and run the command again", file=sys.stderr)
    return 1


def _positive_int(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"it must be a whole number of at least 1, got {text!r}")
    return int(text)


if __name__ == "__main__":
    # Python adds the folder of this file, but the package is imported as tools.quality. Child processes inherit the
    # variable, and import custom models by it.
    sys.path[0] = ROOT
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [ROOT, os.environ.get("PYTHONPATH")]))
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
