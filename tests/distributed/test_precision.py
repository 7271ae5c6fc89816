"""A rank whose processor cannot multiply bfloat16 decides for all."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from meseta.comm import World
from meseta.config import RunConfig
from meseta.spec import MesetaError
from meseta.system.processors import Processor
from meseta.train.setup import specs
from small_run import settings

PLAIN = Processor("Old 1", frozenset({"avx2", "fma"}))
FAST = Processor("Fast 9", PLAIN.flags | {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16"})


def settled(document: dict[str, Any], processors: list[Processor]) -> str:
    """Return the resolved dense.dtype of this rank, whose processor is in `processors`, or the error."""
    world = World.current()
    module: Any = sys.modules[specs.__name__]
    before, module.read_processor = module.read_processor, lambda: processors[world.rank]
    try:
        return specs.resolve_dense_dtype(RunConfig.model_validate(document), world).dense.dtype
    except MesetaError as error:
        return str(error)
    finally:
        module.read_processor = before


@pytest.mark.parametrize("slow", [0, 1])
def test_a_new_run_is_refused_on_all_ranks(ranks: Any, tmp_path: Path, slow: int) -> None:
    processors = [PLAIN if rank == slow else FAST for rank in range(2)]
    results = ranks(2).run(settled, settings(tmp_path, tmp_path / "run", dense__dtype="bfloat16"), processors)
    assert results[0] == results[1] and results[0].startswith(
        f"rank {slow}: dense.dtype 'bfloat16' is slow: Old 1 (AVX2)"
    )


@pytest.mark.parametrize(
    ("processors", "dtype"), [([FAST, FAST], "bfloat16"), ([FAST, PLAIN], "float32"), ([PLAIN, FAST], "float32")]
)
def test_auto_is_bfloat16_where_all_ranks_multiply_it(
    ranks: Any, tmp_path: Path, processors: list[Processor], dtype: str
) -> None:
    document = settings(tmp_path, tmp_path / "run", dense__dtype="auto")
    assert ranks(2).run(settled, document, processors) == [dtype] * 2
