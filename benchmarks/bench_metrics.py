"""Compare exact AUC and all metrics of 10 million predictions with scikit-learn.

python benchmarks/bench_metrics.py [num_samples]
"""

import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
from record import ROOT, record
from sklearn.metrics import log_loss, roc_auc_score

from meseta.train.metrics import auc, compute_metrics

NUM_ROUNDS = 5


def main() -> None:
    num_samples = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000_000
    subprocess.run([sys.executable, "-m", "pytest", str(ROOT / "tests/train/test_metrics.py")], check=True, cwd=ROOT)
    rng = np.random.default_rng(0)
    labels = (rng.random(num_samples) < 0.25).astype(np.float32)
    logits = (rng.normal(size=num_samples) + labels - 1.5).astype(np.float32)
    predictions = 1.0 / (1.0 + np.exp(-logits.astype(np.float64)))
    case = f"{num_samples} predictions"

    ours, peer = race(lambda: auc(logits, labels), lambda: float(roc_auc_score(labels, logits)))
    report("auc", case, ours, peer, "scikit-learn roc_auc_score")
    ours, peer = race(
        lambda: compute_metrics(logits, labels).logloss,
        lambda: (roc_auc_score(labels, logits), float(log_loss(labels, predictions)))[1],
    )
    report("all figures", case, ours, peer, "scikit-learn roc_auc_score + log_loss")


def race(ours: Callable[[], float], peer: Callable[[], float]) -> tuple[float, float]:
    """Return median seconds of both. Exits if their results differ."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(NUM_ROUNDS):
        values = []
        for run, spent in zip((ours, peer), times, strict=True):
            start = time.perf_counter()
            values.append(run())
            spent.append(time.perf_counter() - start)
        if abs(values[0] - values[1]) > 1e-10:
            sys.exit(f"bench_metrics: the figures differ: {values[0]!r} and {values[1]!r}; nothing is reported")
    return statistics.median(times[0]), statistics.median(times[1])


def report(metric: str, case: str, ours_s: float, peer_s: float, peer: str) -> None:
    record("metrics", case, metric, ours_s, "s", peer=peer, peer_value=peer_s, packages=("numpy", "scikit-learn"))


if __name__ == "__main__":
    main()
