"""Fixture of tests of kernels, in which Triton's interpreter leaves out work whose results it does not use."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.util import find_spec

import pytest


@pytest.fixture(autouse=True, scope="module")
def in_fast_interpreter() -> Iterator[None]:
    """Run the module in `fast_interpreter` if it has imported Triton's interpreter. A wheel has no benchmarks/."""
    if "triton.runtime.interpreter" not in sys.modules or find_spec("gpu_path") is None:
        yield
        return
    from gpu_path.interpreter import fast_interpreter

    with fast_interpreter():
        yield
