"""Compare exact AUC of 10 million predictions with scikit-learn.

python benchmarks/bench_metrics.py [num_samples]
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
from common.command import make_parser, parse_arguments
from common.processes import check_tests
from common.timing import alternate_seconds, medians
from record import record
from sklearn.metrics import roc_auc_score

from meseta.train.metrics import auc

NUM_ROUNDS = 5


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("num_samples", type=int, nargs="?", default=10_000_000)
    num_samples = parse_arguments(parser).num_samples
    check_tests("tests/train/test_metrics.py")
    rng = np.random.default_rng(0)
    labels = (rng.random(num_samples) < 0.25).astype(np.float32)
    logits = (rng.normal(size=num_samples) + labels - 1.5).astype(np.float32)
    case = f"{num_samples} predictions"
    compare("auc", case, lambda: auc(logits, labels), "scikit-learn roc_auc_score",
            lambda: float(roc_auc_score(labels, logits)))  # fmt: skip


def compare(metric: str, case: str, ours: Callable[[], float], name: str, peer: Callable[[], float]) -> None:
    """Record median seconds of both. Exits if their results differ."""
    values = ours(), peer()
    if abs(values[0] - values[1]) > 1e-10:
        sys.exit(f"bench_metrics: the figures differ: {values[0]!r} and {values[1]!r}; nothing is reported")
    seconds = medians(alternate_seconds({"ours": ours, "peer": peer}, NUM_ROUNDS))
    record("metrics", case, metric, seconds["ours"], "s", peer=name, peer_value=seconds["peer"],
           packages=("numpy", "scikit-learn"))  # fmt: skip


if __name__ == "__main__":
    main()
