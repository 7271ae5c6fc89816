"""Whole runs with codecs: under both exchanges, after a resume, and against one process that rounds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meseta.comm import World
from meseta.train.trained_model import load_trained
from meseta.train.verify.compare import ToleranceRule
from small_run import final_checksum, settings, table_checksums, train

from .pool import RankPool
from .test_verify import COLUMNS, HOSTS, MIXED, WIDE, verify

Ranks = Callable[[int], RankPool]
TABLES = {"devices_per_host": 2, "tables": {"*": "table_wise", "item": "column_wise"}}


@pytest.mark.parametrize(("codec", "more"), [
    pytest.param("paper", {}, marks=pytest.mark.soak),
    pytest.param("int8", {"train__accumulate_steps": 2}, marks=pytest.mark.soak),
    ("fp16", {"dense__sharding": "fsdp"}),
])  # fmt: skip
def test_both_exchanges_train_the_same_run(
    ranks: Ranks, tiny: Path, tmp_path: Path, codec: str, more: dict[str, Any]
) -> None:
    """Checkpoints are equal, and so are evaluations, which never use a codec."""
    changes = {**WIDE, **more, "plan": TABLES, "comm__precision": codec, "train__max_steps": 2}
    summaries = []
    for exchange in ("flat", "hierarchical"):
        document = settings(tiny, tmp_path / exchange, **changes, comm__exchange=exchange)
        summaries.append(ranks(4).run(train, document)[0])
    assert final_checksum(tmp_path / "flat") == final_checksum(tmp_path / "hierarchical")
    assert table_checksums(tmp_path / "flat") == table_checksums(tmp_path / "hierarchical")
    for key in ("auc", "ne", "logloss"):
        assert summaries[0]["test"][key] == summaries[1]["test"][key]
    assert [summary.get("num_clamped") for summary in summaries] == [0 if codec in ("paper", "fp16") else None] * 2


@pytest.mark.parametrize("codec", ["int8", pytest.param("fp16", marks=pytest.mark.soak)])
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(
    ranks: Ranks, tiny: Path, tmp_path: Path, codec: str
) -> None:
    changes = {**WIDE, "plan": COLUMNS, "comm__precision": codec, "checkpoint__resume": "auto"}
    whole = settings(tiny, tmp_path / "whole", **changes, train__max_steps=4)
    ranks(2).run(train, whole)
    for steps in (2, 4):
        ranks(2).run(train, settings(tiny, tmp_path / "parts", **changes, train__max_steps=steps))
    assert final_checksum(tmp_path / "parts") == final_checksum(tmp_path / "whole")


def test_rounding_shows_in_training_and_in_no_evaluation(ranks: Ranks, tiny: Path, tmp_path: Path) -> None:
    """A run with int8 differs from one with fp32, and one process evaluates its checkpoint without a codec."""
    changes = {**WIDE, "plan": COLUMNS, "train__max_steps": 2}
    for codec in ("fp32", "int8"):
        ranks(2).run(train, settings(tiny, tmp_path / codec, **changes, comm__precision=codec))
    assert final_checksum(tmp_path / "fp32") != final_checksum(tmp_path / "int8")
    trained = load_trained(tmp_path / "int8", "test", World.single())
    assert trained.model.embeddings.num_clamped is None


@pytest.mark.parametrize(
    ("changes", "size"),
    [
        ({"plan": COLUMNS, "comm__precision": "int8"}, 2),
        pytest.param(
            {"plan": {**TABLES}, "comm__precision": "paper", "comm__exchange": "hierarchical"},
            4,
            marks=pytest.mark.soak,
        ),
        pytest.param({"plan": MIXED, "comm__forward": "fp8", "embedding__pooling": "mean"}, 4, marks=pytest.mark.soak),
        ({"plan": HOSTS, "comm__precision": "bf16", "comm__exchange": "hierarchical"}, 4),
    ],
)
def test_verify_rounds_where_ranks_do(
    ranks: Ranks, tiny: Path, tmp_path: Path, changes: dict[str, Any], size: int
) -> None:
    verification = verify(
        ranks, settings(tiny, tmp_path / "run", **{**WIDE, **changes}), tmp_path / "records", 2, size=size
    )
    assert verification.first_mismatch is None
    item = verification.tables["embedding"]["item"]
    assert item.rule == ToleranceRule("bits") and item.max_row_difference == item.max_state_difference == 0.0


def test_verify_sees_another_rounding(
    ranks: Ranks, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process without rounding differs from ranks with rounding."""
    from meseta.embedding import EmbeddingBagCollection

    monkeypatch.setattr(EmbeddingBagCollection, "emulate_rounding", lambda self, *_: None)
    document = settings(tiny, tmp_path / "run", **WIDE, plan=COLUMNS, comm__precision="int8")
    first = verify(ranks, document, tmp_path / "records", 2).first_mismatch
    assert first is not None and first.phase == "embedding" and first.rule == ToleranceRule("bits")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"comm__precision": "bf17"}, "comm.precision"),
        ({"comm__backward": "int4"}, "comm.backward"),
        ({"comm__exchange": "ring"}, "comm.exchange"),
        ({"comm__precision": "int8", "comm__dense_exchange": "chain"}, "'chain' cannot be used with a codec"),
    ],
)
def test_invalid_codecs_are_rejected(tiny: Path, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    from meseta.config import validate_document
    from meseta.spec import MesetaError
    from small_run import write_config

    document = settings(tiny, tmp_path / "run", **changes)
    with pytest.raises(MesetaError, match=message):
        validate_document(document, write_config(tmp_path / "run.yaml", document))
