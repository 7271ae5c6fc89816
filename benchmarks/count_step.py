"""Count the kernels, copies and waits of one training step on a GPU, on any machine.

    python benchmarks/count_step.py [MODEL ...] [--batch-size 64] [--replay] [--list] [--compare]

Steps run as in `meseta train` on one rank, with 26 tables of 16 columns, on an emulated GPU: operators on host memory,
and Triton's kernels in its interpreter. A sort counts as one kernel. Python calls are those of the training thread,
without those inside Triton's launcher. With --replay the step is a CUDA graph, whose operators are listed but
not counted.

Large batches need more kernels: above 256 samples one per MLP, for the gradients of its biases, and above 1024 samples
one per fused layer, which adds the chunks of a weight gradient. Layers that are left to cuBLAS need several.
"""

from __future__ import annotations

import argparse
import os
import warnings
from dataclasses import replace

os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported.

import torch
from common.command import make_parser
from common.tables import table
from gpu_path.patches import emulated_gpu
from gpu_path.records import StepRecording, compare_steps, num_different
from gpu_path.training import Training, TrainingCase, record_steps

from meseta.config.models import MODEL_NAMES
from meseta.spec import MesetaError

NUM_GROUPS = 12


def record(case: TrainingCase, num_steps: int = 1, *, uses_graphs: bool = False) -> list[StepRecording]:
    """Record successive steps on a new emulated GPU. Raises MesetaError if `uses_graphs` but a step is not replayed."""
    with emulated_gpu() as gpu:
        training = Training(case, "cuda", uses_graphs=uses_graphs)
        recordings = record_steps(gpu, training, num_steps)
    if uses_graphs and not all(recording.select("graph replay") for recording in recordings):
        reasons = training.pipeline.graphs.eager_reasons
        raise MesetaError(f"{case.model}: a step is not replayed ({', '.join(reasons)}); omit --replay")
    return recordings


def print_records(recording: StepRecording) -> None:
    """Print all records, and the operators of a replayed graph."""
    for one in recording.records:
        print(one)
        for operator in one.operators:
            print(f"  {operator}")


def print_groups(name: str, recording: StepRecording) -> None:
    """Print the lines of the package that start most kernels, and all of other kinds."""
    rows = []
    for (stage, source), names in recording.groups()[:NUM_GROUPS]:
        rows.append((names.total(), stage, source, ", ".join(f"{n} {one}" for one, n in names.most_common(4))))
    table(f"{name}: kernels", ("kernels", "stage", "line", "most frequent"), rows)
    others = [
        (kind, names.total(), stage, source, ", ".join(names))
        for kind in ("copy to device", "copy to host", "synchronization", "event wait", "pinned allocation")
        for (stage, source), names in recording.groups(kind)
    ]
    table(f"{name}: copies and waits", ("kind", "number", "stage", "line", "name"), others)


def print_differences(case: TrainingCase) -> None:
    """Print what differs between two steps with ragged ids, weights and other learning rates."""
    first, second = record(case, 2)
    differences = compare_steps(first, second)
    print(
        f"\n{case.model}: {num_different(differences, 'operator', 'scalar', 'shape')} operators differ in scalars or "
        f"shapes, {num_different(differences, 'address')} in addresses\n"
    )
    for difference in differences:
        print(difference)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="(default: dlrm dcnv2)")
    parser.add_argument("--batch-size", type=int, default=64, help="(default: 64)")
    parser.add_argument("--row-optimizer", default="rowwise_adagrad", help="(default: rowwise_adagrad)")
    parser.add_argument("--dense-optimizer", default="adam", help="(default: adam)")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="(default: float32)")
    parser.add_argument("--replay", action="store_true", help="count a step that is replayed as a CUDA graph")
    parser.add_argument("--list", action="store_true", help="print each operator")
    parser.add_argument("--compare", action="store_true", help="compare two steps with ragged ids")
    chosen = parser.parse_args()
    if unknown := sorted({*chosen.models} - {*MODEL_NAMES}):
        parser.error(f"unknown models {', '.join(unknown)}; choose from {', '.join(MODEL_NAMES)}")
    warnings.filterwarnings("ignore", category=RuntimeWarning, module="triton")  # NaN and infinity in masked lanes.
    torch.set_num_threads(1)
    run(chosen)


def run(chosen: argparse.Namespace) -> None:
    """Record a step of each model. Print the requested lists, and one table of counts."""
    counts = []
    for name in chosen.models or ["dlrm", "dcnv2"]:
        case = TrainingCase(
            model=name,
            row_optimizer=chosen.row_optimizer,
            dense_optimizer=chosen.dense_optimizer,
            dtype=chosen.dtype,
            batch_size=chosen.batch_size,
        )
        [recording] = record(case, uses_graphs=chosen.replay)
        if chosen.list:
            print_records(recording)
        print_groups(name, recording)
        if chosen.compare:
            print_differences(replace(case, is_ragged=True))
        counts.append((name, recording.counts()))
    table("One training step", ("model", *counts[0][1]), [(name, *numbers.values()) for name, numbers in counts])


if __name__ == "__main__":
    main()
