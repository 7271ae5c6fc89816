"""Compare the index from keys to slots with sorted search, a dict and the limit of memory, in keys per second.

    python benchmarks/bench_directory.py [--keys 4000000] [--batch 100000] [--threads 2] [--no-record]

Keys are random 64-bit numbers. The limit is a loop that reads 16 bytes at random positions of as much memory.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from record import parse_arguments, record
from turns import best_s

from meseta.measure.gather_limit import best_prefetches, gather
from meseta.ops.slot_map import SlotMap

NUM_TURNS = 7


def limit_rate(num_bytes: int, num_keys: int, num_threads: int) -> float:
    """Return random reads of 16 bytes per second."""
    table = torch.zeros(num_bytes // 16, 4)
    ids = np.random.default_rng(2).integers(0, len(table), num_keys)
    ways = best_prefetches([table], ids, [0, num_keys], num_threads)
    return num_keys / min(gather([table], ids, [0, num_keys], way, num_threads).seconds for way in ways * 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("keys", 4_000_000), ("batch", 100_000), ("threads", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parse_arguments(parser)
    torch.set_num_threads(options.threads)
    random = np.random.default_rng(1)
    keys = np.unique(random.integers(-(2**62), 2**62, options.keys + options.batch))
    random.shuffle(keys)
    there, others = keys[: -options.batch], torch.from_numpy(keys[-options.batch :].copy())
    directory = SlotMap(len(there) + options.batch)
    directory.insert(torch.from_numpy(there), torch.arange(len(there)))
    asked = torch.from_numpy(random.choice(there, options.batch, replace=False))
    slots, ordered = torch.arange(len(there), len(there) + options.batch), np.sort(there)
    table, listed = dict(zip(there.tolist(), range(len(there)), strict=True)), asked.tolist()

    def renew() -> None:
        directory.insert(others, slots)
        directory.remove(others)

    seconds = best_s(
        {
            "find": lambda: directory.find(asked),
            "find absent": lambda: directory.find(others),
            "insert and remove": renew,
            "numpy searchsorted": lambda: ordered.searchsorted(asked.numpy()),
            "dict": lambda: [table[key] for key in listed],
        },
        NUM_TURNS,
    )
    rates = {name: options.batch / best for name, best in seconds.items()}
    rates["limit of memory"] = limit_rate(directory.num_bytes(), options.batch, options.threads)
    print(f"{len(there)} keys, {directory.num_bytes() / len(there):.1f} bytes each; {options.threads} threads")
    for name, rate in rates.items():
        print(f"{name:20} {rate / 1e6:8.1f} M keys/s")
    case = f"{options.keys / 1e6:g} M keys, {options.batch} a batch, {options.threads} threads"
    for metric in ("find", "find absent", "insert and remove"):
        for peer in ("numpy searchsorted", "dict", "limit of memory"):
            record("directory", case, metric, rates[metric], "keys/s", peer=peer, peer_value=rates[peer])


if __name__ == "__main__":
    main()
