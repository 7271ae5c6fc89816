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
from meseta.system.processors import choose_num_threads, limit_arrow_threads
from meseta.system.time_limits import ProcessTimeouts
from meseta.train.setup.build import choose_device


@contextmanager
def session(config: RunConfig) -> Iterator[World]:
    """Context manager that sets up threads, device and timeouts of the config, and yields the ranks of the run.

    It destroys the process group, unless an error is raised.
    """
    num_threads = choose_num_threads(config.num_threads).number
    torch.set_num_threads(num_threads)
    limit_arrow_threads()
    ProcessTimeouts.limits = config.comm.time_limits
    start_record(config.run_dir)
    world = World.current(choose_device(config))
    watch = start_peer_watchdog(world)
    with adaptive_wait_policy(
        num_threads, min_threads=1 if _is_thread_count_invariant(config, num_threads) else num_threads
    ):
        yield world
    # After an error this is not reached, because other ranks may never arrive at the barrier.
    world.barrier()
    if watch is not None:
        watch.stop()
    World.destroy_process_group()


def _is_thread_count_invariant(config: RunConfig, num_threads: int) -> bool:
    """Whether results do not depend on the number of threads, see docs/design.md.

    bfloat16 products on 16 or more threads do.
    """
    return num_threads < 16 or config.dense.dtype not in {"bfloat16", "auto"}
