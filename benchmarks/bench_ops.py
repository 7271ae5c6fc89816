"""Benchmark embedding lookups and training steps.

Prints lookups/s, the share of the speed limit given by memory gathers, and the ratio to other systems.
"""

from __future__ import annotations

from peers import ops
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
from peers.tables import ops_table
from peers.workloads import OPS_WORKLOADS, OPTIMIZERS, shrink


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--threads", default="1,2", help="numbers of threads, separated by commas (default: 1,2)")
    default = "rowwise_adagrad,sgd,adagrad,adam"
    parser.add_argument(
        "--optimizers", default=default, help=f"row optimizers, separated by commas, or all (default: {default})"
    )
    parser.add_argument(
        "--dtypes", default="", help="data types of rows (default: all for rowwise_adagrad, else float32)"
    )
    arguments = parser.parse_args()
    workloads = select_named("configuration", arguments.configs, {w.name: w for w in OPS_WORKLOADS})
    names = [] if arguments.optimizers == "all" else arguments.optimizers.split(",")
    optimizers = select_named("optimizer", names, {name: name for name in OPTIMIZERS})
    dtypes = arguments.dtypes.split(",") if arguments.dtypes else None
    if arguments.quick:
        workloads = [shrink(workload, max_rows=1000, max_batch=64, max_tables=4) for workload in workloads]
    threads = tuple(parse_count(word) for word in arguments.threads.split(","))
    peers, printer, timing = select_peers(arguments), ResultPrinter(arguments), timing_options(arguments, 0.25)
    for workload in workloads:
        contests = list(ops.contests(workload, optimizers, dtypes, threads, peers))
        variants = {target.variant for _, targets in contests for target in targets if target.name == "ours"}
        # Do not measure operators whose results are wrong.
        ops.check_operators([workload], sorted((optimizer, dtype) for optimizer, dtype in variants))
        for optimizer, targets in contests:
            result = ops.measure_operators(workload, optimizer, targets, timing, log)
            printer.print_result(ops_table(result), ops.comparisons(result), result.timing_result.failures)
    printer.raise_failures()


if __name__ == "__main__":
    run_command(main)
