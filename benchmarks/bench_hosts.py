"""Measure an all-to-all of gloo over the links of benchmarks/hosts: its rate, and the kernel's counters.

    python benchmarks/bench_hosts.py [--hosts 2] [--ranks 2] [--across 200mbit] [--mb 4] [--page links.html]

Each rank sends `--mb` megabytes to every other one.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from record import record

from hosts import Hosts, why_impossible, write_page

ALL_TO_ALL = """
import sys, time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
sent = torch.ones(dist.get_world_size(), int(sys.argv[1]) // 4)
received = torch.empty_like(sent)
dist.barrier()
start = time.monotonic()
dist.all_to_all_single(received, sent)
dist.barrier()
print(time.monotonic() - start)
dist.destroy_process_group()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2, help="of each host")
    parser.add_argument("--across", default="200mbit", help="rate of a host's link")
    parser.add_argument("--mb", type=float, default=4.0, help="megabytes for each other rank")
    parser.add_argument("--page", type=Path, help="write how busy the links were over time")
    options = parser.parse_args()
    why = why_impossible()
    if why is not None:
        print(f"nothing is measured, since this machine makes no slow links: {why}")
        return
    num_bytes = int(options.mb * 1e6) // 4 * 4
    with Hosts(options.hosts, ranks=options.ranks, across=options.across) as hosts:
        outcome = hosts.run([sys.executable, "-c", ALL_TO_ALL, str(num_bytes)])
    sent = num_bytes * options.ranks * options.ranks * (options.hosts - 1)
    seconds = max(float(output) for output in outcome.outputs)
    counted = sum(traffic.payload_bytes for traffic in outcome.traffic) / options.hosts
    case = f"{options.hosts} x {options.ranks}, {options.across}"
    record("hosts", case, "payload of a link", counted, "bytes", peer="sent by its ranks", peer_value=sent)
    rate = 8 * sent / seconds
    record("hosts", case, "rate of a link", rate, "bit/s", peer="let through", peer_value=outcome.rate)
    if options.page is not None:
        write_page(options.page, f"An all-to-all over {case}", outcome)
        print(f"how busy the links were: {options.page}")


if __name__ == "__main__":
    main()
