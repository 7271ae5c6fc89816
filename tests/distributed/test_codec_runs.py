"""Whole runs in fewer bits: one run on every way between hosts, after a resume, and in one process that rounds."""

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
    ("int8", {"train__accumulate_steps": 2}),
    ("fp16", {"dense__sharding": "fsdp"}),
])  # fmt: skip
def test_runs_on_every_way_are_one_run(
    ranks: Ranks, tiny: Path, tmp_path: Path, codec: str, more: dict[str, Any]
) -> None:
    """Their checkpoints, and what evaluations say, which are exact."""
    changes = {**WIDE, **more, "plan": TABLES, "comm__precision": codec, "train__max_steps": 2}
    summaries = []
    for way in ("flat", "hierarchical"):
        document = settings(tiny, tmp_path / way, **changes, comm__exchange=way)
        summaries.append(ranks(4).run(train, document)[0])
    assert final_checksum(tmp_path / "flat") == final_checksum(tmp_path / "hierarchical")
    assert table_checksums(tmp_path / "flat") == table_checksums(tmp_path / "hierarchical")
    for key in ("auc", "ne", "logloss"):
        assert summaries[0]["test"][key] == summaries[1]["test"][key]
    assert [summary.get("num_clamped") for summary in summaries] == [0 if codec in ("paper", "fp16") else None] * 2


@pytest.mark.parametrize("codec", ["int8", "fp16"])
def test_a_run_that_goes_on_has_the_bits_of_one_that_was_not_cut_off(
    ranks: Ranks, tiny: Path, tmp_path: Path, codec: str
) -> None:
    changes = {**WIDE, "plan": COLUMNS, "comm__precision": codec, "checkpoint__resume": "auto"}
    whole = settings(tiny, tmp_path / "whole", **changes, train__max_steps=4)
    ranks(2).run(train, whole)
    for steps in (2, 4):
        ranks(2).run(train, settings(tiny, tmp_path / "parts", **changes, train__max_steps=steps))
    assert final_checksum(tmp_path / "parts") == final_checksum(tmp_path / "whole")


def test_rounding_shows_in_training_and_in_no_evaluation(ranks: Ranks, tiny: Path, tmp_path: Path) -> None:
    """A run in 8 bits is another run than one in 32, and one process scores its checkpoint as its ranks did."""
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
        ({"plan": MIXED, "comm__forward": "fp8", "embedding__pooling": "mean"}, 4),
        ({"plan": HOSTS, "comm__precision": "bf16", "comm__exchange": "hierarchical"}, 4),
    ],
)
def test_verify_rounds_where_ranks_do(
    ranks: Ranks, tiny: Path, tmp_path: Path, changes: dict[str, Any], size: int
) -> None:
    found = verify(ranks, settings(tiny, tmp_path / "run", **{**WIDE, **changes}), tmp_path / "records", 2, size=size)
    assert found.first_mismatch is None
    item = found.tables["embedding"]["item"]
    assert item.rule == ToleranceRule("bits") and item.max_row_difference == item.max_state_difference == 0.0


def test_verify_sees_another_rounding(
    ranks: Ranks, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process that does not round is told from ranks that do."""
    from meseta.embedding import EmbeddingBagCollection

    monkeypatch.setattr(EmbeddingBagCollection, "emulate_rounding", lambda self, *_: None)
    document = settings(tiny, tmp_path / "run", **WIDE, plan=COLUMNS, comm__precision="int8")
    first = verify(ranks, document, tmp_path / "records", 2).first_mismatch
    assert first is not None and first.phase == "embedding" and first.rule == ToleranceRule("bits")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"comm__precision": "bf17"}, "comm.precision"),
        ({"comm__backward": "int4"}, "comm.backward"),
        ({"comm__exchange": "ring"}, "comm.exchange"),
        ({"comm__precision": "int8", "comm__dense_exchange": "chain"}, "'chain' cannot be used with a codec"),
    ],
)
def test_what_cannot_be_is_refused(tiny: Path, tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    from meseta.config import validate_document
    from meseta.spec import MesetaError
    from small_run import write_config

    document = settings(tiny, tmp_path / "run", **changes)
    with pytest.raises(MesetaError, match=said):
        validate_document(document, write_config(tmp_path / "run.yaml", document))
