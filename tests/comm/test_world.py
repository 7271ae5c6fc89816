"""Collectives of one rank return their input and use no network."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from meseta.comm import DenseGradients, World
from meseta.comm.world import _bind_to_cpu_share
from meseta.measure.threads import use_num_threads
from meseta.spec import MesetaError

PASSES = SimpleNamespace(local_share=1.0, is_part=False, accumulated_dense=[])


def test_collectives_of_one_rank_return_their_input() -> None:
    world = World.single()
    x = torch.arange(6.0).view(3, 2)
    pending = world.all_to_all(x, [3], [3])
    assert torch.equal(pending.wait(), x)
    assert world.all_reduce(x) is x and world.broadcast(x) is x
    assert torch.equal(world.all_gather(x), x[None])
    assert world.all_gather_object({"a": 1}) == [{"a": 1}]
    world.barrier()
    assert not torch.distributed.is_initialized()


def test_without_torchrun_the_world_is_single(monkeypatch: pytest.MonkeyPatch) -> None:
    for variables in ({}, {"WORLD_SIZE": "1", "RANK": "0"}):
        monkeypatch.delenv("WORLD_SIZE", raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        assert World.current() == World.single()
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("num_threads", "variables", "expected"),
    [
        (2, {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "0"}, {0, 1}),
        (1, {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "1"}, {4, 7}),
        (3, {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "1"}, {0, 1, 4, 7, 9}),  # more threads than the share has
        (1, {"LOCAL_WORLD_SIZE": "6", "LOCAL_RANK": "1"}, {0, 1, 4, 7, 9}),
        (1, {}, {0, 1, 4, 7, 9}),
    ],
)
def test_ranks_of_a_machine_share_its_processors(
    monkeypatch: pytest.MonkeyPatch, num_threads: int, variables: dict[str, str], expected: set[int]
) -> None:
    allowed = {0, 1, 4, 7, 9}

    def keep(_: int, processors: list[int] | set[int]) -> None:
        nonlocal allowed
        allowed = set(processors)

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: allowed, raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", keep, raising=False)
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with use_num_threads(num_threads):
        _bind_to_cpu_share()
    assert allowed == expected
    World.destroy_process_group()
    assert allowed == {0, 1, 4, 7, 9}


def test_raise_together_alone_raises_the_error_itself() -> None:
    error = OSError("disk full")
    World.single().raise_on_all_ranks(None)
    with pytest.raises(OSError, match="disk full") as raised:
        World.single().raise_on_all_ranks(error)
    assert raised.value is error


def test_on_first_alone_runs_the_action() -> None:
    done: list[int] = []
    World.single().run_on_rank_0(lambda: done.append(1))
    assert done == [1]
    World(rank=1, size=1, device=torch.device("cpu")).run_on_rank_0(lambda: done.append(2))
    assert done == [1]

    def fail() -> None:
        raise MesetaError("run_dir is taken")

    with pytest.raises(MesetaError, match=r"^run_dir is taken$"):
        World.single().run_on_rank_0(fail)


def test_one_rank_leaves_dense_gradients_alone() -> None:
    layer = torch.nn.Linear(2, 1)
    DenseGradients(list(layer.parameters()), World.single(), PASSES)
    layer(torch.ones(4, 2)).mean().backward()
    assert layer.weight.grad is not None and layer.weight.grad.tolist() == [[1.0, 1.0]]


def test_dense_parameters_of_two_dtypes_are_refused() -> None:
    parameters = [torch.nn.Parameter(torch.ones(1, dtype=dtype)) for dtype in (torch.float32, torch.float64)]
    with pytest.raises(MesetaError, match=r"one dtype, got .'torch.float32', 'torch.float64'."):
        DenseGradients(parameters, World.single(), PASSES)


LEAVES = """
import contextlib
import os
import torch
from meseta.comm import World
os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
torch.distributed.init_process_group("gloo")
import torch.distributed.nn, torch._dynamo  # modules that torch imports later
torch.distributed.all_reduce(torch.ones(2))
World.destroy_process_group()
for task in os.listdir("/proc/self/task"):
    with contextlib.suppress(OSError):  # the thread has ended meanwhile
        print(open(f"/proc/self/task/{task}/comm").read().strip())
"""


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="the system does not list threads")
def test_no_thread_of_a_group_outlives_it() -> None:
    """Such a thread may need the interpreter after its end, and then aborts the process."""
    done = subprocess.run([sys.executable, "-c", LEAVES], capture_output=True, text=True, check=True, timeout=120)
    assert "gloo" not in done.stdout and "python" in done.stdout
