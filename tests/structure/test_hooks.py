"""Tests of the protection of test runs: shapes are checked in every call, and uninitialized memory is poisoned."""

import subprocess
import sys

import pytest
import torch

from source_tree import SOURCE


def test_a_wrong_shape_is_refused() -> None:
    jaxtyping = pytest.importorskip("jaxtyping")
    from meseta.sparse import JaggedTensor

    with pytest.raises(jaxtyping.TypeCheckError):
        JaggedTensor(values=torch.zeros(3), lengths=torch.zeros(2, 2, dtype=torch.int64))


def test_shapes_are_not_checked_outside_tests() -> None:
    program = (
        "import torch\nfrom meseta.sparse import JaggedTensor\n"
        "JaggedTensor(values=torch.zeros(3), lengths=torch.zeros(2, 2, dtype=torch.int64))"
    )
    run = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(SOURCE.parent)},
        check=False,
    )
    assert run.returncode == 0, run.stderr


def test_configs_work_under_the_hook() -> None:
    from meseta.config import RunConfig

    assert RunConfig.model_validate({"run_dir": "r", "data": {"dir": "d"}}).train.batch_size > 0


def test_uninitialised_memory_is_poisoned() -> None:
    assert torch.empty(64).isnan().all()
    assert (torch.empty(64, dtype=torch.int64) == torch.iinfo(torch.int64).max).all()
