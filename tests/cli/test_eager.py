"""Commands leave torch._dynamo out, and whoever compiles has it nevertheless."""

import subprocess
import sys
from pathlib import Path

import pytest

from small_run import environment, settings, write_config

TRAINS = """
import sys
from contextlib import suppress
from meseta.cli.main import main
from meseta.cli.lazy_dynamo import NAME

with suppress(SystemExit):
    main()
brought = [name for name in sys.modules if name.startswith((NAME + ".", "torch._inductor"))]
assert not brought, brought
"""

MEETS = """
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


def run(program: str, *arguments: str) -> None:
    command = [sys.executable, "-c", program, *arguments]
    found = subprocess.run(command, capture_output=True, text=True, env=environment(), check=False)
    assert found.returncode == 0, found.stderr


def test_training_does_without(tiny: Path, tmp_path: Path) -> None:
    run(TRAINS, "train", str(write_config(tmp_path / "c.yaml", settings(tiny, tmp_path / "run"))))
    assert (tmp_path / "run/report.html").exists()


@pytest.mark.soak
def test_ranks_that_meet_do_without() -> None:
    run(MEETS)


def test_who_compiles_has_it() -> None:
    run(COMPILES)
