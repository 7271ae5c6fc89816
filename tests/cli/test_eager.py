"""Ranks do not import torch._dynamo, but processes that compile can; tests/structure/test_openmp.py covers training."""

import subprocess
import sys

import pytest

from small_run import environment

GROUP = """
import sys
from meseta.cli.lazy_dynamo import defer_dynamo_import

defer_dynamo_import()
import torch.distributed as dist

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.destroy_process_group()
assert "torch._dynamo.trace_rules" not in sys.modules
import torch._dynamo

assert torch._dynamo.trace_rules.lookup and sys.modules["torch._dynamo.trace_rules"]
"""

COMPILES = """
import inspect
from meseta.cli.lazy_dynamo import defer_dynamo_import

defer_dynamo_import()
import torch

traced = []

@torch._disable_dynamo
def refused():
    traced.append(torch.compiler.is_compiling())

refused()
inspect.getmodule(inspect.currentframe())  # which asks every module for its file
import sys
assert "torch._dynamo.convert_frame" not in sys.modules

graphs = []

def keep(graph, inputs):
    graphs.append(graph)
    return graph.forward

@torch.compile(backend=keep)
def sine(x):
    y = torch.sin(x)
    refused()
    return y + 1

x = torch.ones(3)
assert torch.equal(sine(x), torch.sin(x) + 1)
assert traced == [False, False], traced
assert len(graphs) == 2, "the call of what must not be traced parts the graph"
assert torch._dynamo.config.suppress_errors is False
"""


def run(program: str) -> None:
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.soak
def test_a_process_group_does_not_import_dynamo() -> None:
    run(GROUP)


def test_processes_that_compile_import_dynamo() -> None:
    run(COMPILES)
