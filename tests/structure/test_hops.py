"""A call of `forward` has at most 8 frames of this package down to the kernel, and uses at most 14 files."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from meseta.comm import World
from meseta.embedding import EmbeddingBagCollection, ShardedEmbeddingBagCollection
from meseta.sparse import KeyedJaggedTensor
from meseta.spec import FeatureSpec, Plan, TableSpec
from road_trace import calls
from source_tree import SOURCE

MAX_HOPS = 8
MAX_FILES = 14
TABLES = [TableSpec(name=name, num_embeddings=6, embedding_dim=32) for name in ("cut", "replicated")]
FEATURES = [
    FeatureSpec(name="a", table="cut"),
    FeatureSpec(name="b", table="cut", pooling="mean", weighted=True),
    FeatureSpec(name="c", table="replicated"),
]
BATCH = KeyedJaggedTensor(
    keys=("a", "b", "c"),
    values=torch.tensor([0, 5, 2, 1, 3]),
    lengths=torch.tensor([2, 0, 1, 1, 0, 1]),
    weights=torch.ones(5),
)


def own_frames(frame: FrameType | None) -> list[str]:
    """Return the functions of this package on the stack, outermost first. Generated wrappers of shape checks have other
    files."""
    hops = []
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(SOURCE) and frame.f_code.co_name not in ("<listcomp>", "<genexpr>"):
            hops.append(f"{path.relative_to(SOURCE)}:{frame.f_code.co_name}")
        frame = frame.f_back
    return hops[::-1]


@contextmanager
def watched(operator: str, stacks: list[list[str]]) -> Iterator[None]:
    """Record the stack at each call of a function of the compiled core."""
    module = importlib.import_module(f"meseta.ops.{operator}")
    compiled = module.core()

    class Spied:
        """Wrapper of the compiled core, whose attributes cannot be replaced."""

        def __getattr__(self, name: str) -> Any:
            if name.startswith(operator):
                stacks.append(own_frames(sys._getframe(1)))
            return getattr(compiled, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "core", Spied)
        yield


def sharded() -> ShardedEmbeddingBagCollection:
    plan = Plan.from_dict({"tables": {"cut": "row_wise", "replicated": "data_parallel"}}, TABLES, 1)
    return ShardedEmbeddingBagCollection(EmbeddingBagCollection(TABLES, FEATURES), plan, World.single())


MAKERS = [sharded, lambda: EmbeddingBagCollection(TABLES, FEATURES)]


@pytest.mark.parametrize("make", MAKERS, ids=["sharded", "one process"])
def test_forward_reaches_the_kernel_within_the_budget(make: Callable[[], Any]) -> None:
    pytest.importorskip("meseta._C")
    embeddings, stacks = make(), list[list[str]]()
    with watched("pooled_lookup", stacks):
        embeddings(BATCH)
    assert stacks
    for hops in stacks:
        assert hops[0].endswith(":forward") and hops[-1].startswith("ops/pooled_lookup/")
        assert len(hops) <= MAX_HOPS, hops
        assert len({hop.partition(":")[0] for hop in hops}) < 10


@pytest.mark.parametrize("make", MAKERS, ids=["sharded", "one process"])
def test_backward_reaches_the_kernel_within_the_budget(make: Callable[[], Any]) -> None:
    pytest.importorskip("meseta._C")
    embeddings, stacks = make(), list[list[str]]()
    values = embeddings(BATCH).pooled.values
    with watched("row_update", stacks):
        values.sum().backward()
    assert stacks
    for hops in stacks:
        assert hops[0].endswith(":backward") and hops[-1].startswith("ops/row_update/")
        assert len(hops) <= MAX_HOPS, hops


def test_one_batch_from_the_command_to_the_kernel_in_under_ten_files(tmp_path_factory: pytest.TempPathFactory) -> None:
    pytest.importorskip("typer")
    from meseta.cli.train import train
    from small_run import settings, tiny_data, write_config

    folder = tmp_path_factory.mktemp("run")
    document = settings(tiny_data(tmp_path_factory.getbasetemp() / "data"), folder / "run", train__max_steps=1)
    stacks: list[list[str]] = []
    with watched("pooled_lookup", stacks):
        train([str(write_config(folder / "run.yaml", document))])
    assert stacks
    for hops in stacks:
        assert hops[0] == "cli/train.py:train" and hops[-1].startswith("ops/pooled_lookup/")
        files = {hop.partition(":")[0] for hop in hops}
        assert len(files) < 10, files


def test_forward_runs_through_few_files() -> None:
    embeddings = EmbeddingBagCollection(TABLES, FEATURES)
    embeddings(BATCH)
    with calls() as made:
        embeddings(BATCH)
    files = {file for file, _ in made}
    assert "ops/pooled_lookup/__init__.py" in files
    assert len(files) <= MAX_FILES, sorted(files)


def test_the_count_sees_this_package_alone() -> None:
    assert own_frames(sys._getframe()) == []


def test_the_rule_of_frames_bites() -> None:
    """Frames count by the file name of their code."""
    known: dict[str, Any] = {"own_frames": own_frames, "sys": sys}
    code = "def deeper(n):\n    return deeper(n - 1) if n else own_frames(sys._getframe())\n"
    exec(compile(code, str(SOURCE / "embedding" / "made.py"), "exec"), known)
    assert known["deeper"](MAX_HOPS - 1) == ["embedding/made.py:deeper"] * MAX_HOPS
    assert len(known["deeper"](MAX_HOPS)) > MAX_HOPS
