"""Benchmark DLRM training. Prints samples/s and the ratio to plain PyTorch and TorchRec."""

from __future__ import annotations

from dataclasses import replace

from peers import e2e
from peers.command import (
    ResultPrinter,
    log,
    make_parser,
    parse_count,
    run_command,
    select_named,
    select_peers,
    timing_options,
)
from peers.tables import e2e_table
from peers.workloads import E2E_WORKLOADS, shrink

from meseta.system import read_processor


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--layouts",
        default="1x2,2x1",
        help="pairs of processes x threads per process, separated by commas (default: 1x2,2x1)",
    )
    arguments = parser.parse_args()
    workloads = select_named("configuration", arguments.configs, {w.name: w for w in E2E_WORKLOADS})
    if arguments.quick:
        workloads = [replace(w, lookups=shrink(w.lookups, max_rows=1000, max_batch=64)) for w in workloads]
    pairs = (word.partition("x") for word in arguments.layouts.split(","))
    layouts = [(parse_count(processes), parse_count(threads)) for processes, _, threads in pairs]
    peers, printer, timing = select_peers(arguments), ResultPrinter(arguments), timing_options(arguments, 0.6)
    if reason := read_processor().bfloat16_unavailable_reason():
        log(f"skipping bfloat16: {reason}")
    # Do not measure models whose losses are wrong.
    e2e.check_training(workloads)
    for workload in workloads:
        targets = [target for layout in layouts for target in e2e.training_targets(workload, layout, peers)]
        result = e2e.measure_training(workload, targets, timing, log)
        printer.print_result(e2e_table(result), e2e.comparisons(result), result.timing_result.failures)
    printer.raise_failures()


if __name__ == "__main__":
    run_command(main)
