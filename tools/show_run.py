"""Print the result of a run directory: `python tools/show_run.py runs/main`."""

import json
import sys
from pathlib import Path


def main(run: Path) -> None:
    summary = json.loads((run / "summary.json").read_text())
    test, teacher = summary["test"], summary["teacher"]
    print(f"{'':10}{'test AUC':>10}{'test NE':>10}")
    print(f"{'this run':10}{test['auc']:10.4f}{test['ne']:10.4f}")
    if teacher:
        print(
            f"{'teacher':10}{teacher['auc']:10.4f}{teacher['ne']:10.4f}   (the best that can be reached on these rows)"
        )
    print(
        f"{summary['num_samples']:,} samples in {summary['train_s']:.0f} s: {summary['samples_per_s']:,.0f} samples/s"
    )
    print(f"report: {run / 'report.html'}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
