"""Start and end of a process that trains or evaluates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from meseta.comm import World
from meseta.comm.peer_watchdog import start_peer_watchdog
from meseta.comm.recording import start_record
from meseta.config import RunConfig
from meseta.measure.threads import adaptive_wait_policy
from meseta.system.processors import num_cores
from meseta.system.ranks import num_local_ranks
from meseta.system.time_limits import ProcessTimeouts
from meseta.train.setup.build import choose_device


@contextmanager
def session(config: RunConfig) -> Iterator[World]:
    """Context manager that sets up threads, device and timeouts, and yields the ranks of the run. Without an error, it
    destroys the process group."""
    num_threads = config.num_threads or max(1, num_cores() // num_local_ranks())
    torch.set_num_threads(num_threads)
    ProcessTimeouts.limits = config.comm.time_limits
    start_record(config.run_dir)
    world = World.current(choose_device(config))
    watch = start_peer_watchdog(world)
    # bfloat16 products on 16 or more threads depend on the number of threads, see docs/design.md.
    min_threads = num_threads if num_threads >= 16 and config.dense.dtype in {"bfloat16", "auto"} else 1
    with adaptive_wait_policy(num_threads, min_threads=min_threads):
        yield world
    # After an error this is not reached, because other ranks may never arrive at the barrier.
    world.barrier()
    if watch is not None:
        watch.stop()
    World.destroy_process_group()
