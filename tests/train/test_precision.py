"""New runs use bfloat16 only on processors that multiply it, and existing runs continue anywhere. Processors are
faked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from meseta.comm import World
from meseta.config import RunConfig
from meseta.spec import MesetaError
from meseta.system.processors import Processor
from meseta.train.setup import specs
from meseta.train.trained_model import open_trained
from small_run import settings, train

PLAIN = Processor("Old 1", frozenset({"avx2", "fma"}))
FAST = Processor("Fast 9", PLAIN.flags | {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16"})


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that sets the processor of this process."""
    for name in ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"):
        monkeypatch.delenv(name, raising=False)
    return lambda processor: monkeypatch.setattr(specs, "read_processor", lambda: processor)


def document(data: Path, run_dir: Path, **changes: Any) -> dict[str, Any]:
    return settings(data, run_dir, train__max_steps=1, **changes)


def chosen(run_dir: Path) -> str:
    """Return the dtype in the run's config.yaml."""
    text: str = yaml.safe_load((run_dir / "config.yaml").read_text())["dense"]["dtype"]
    return text


def test_a_new_run_is_refused_in_one_line(tiny: Path, tmp_path: Path, on: Any) -> None:
    on(PLAIN)
    with pytest.raises(MesetaError) as caught:
        train(document(tiny, tmp_path / "run", dense__dtype="bfloat16"))
    text = str(caught.value)
    assert "\n" not in text and "Old 1 (AVX2) has no instructions" in text and text.count(" ms") == 2
    assert "dense.check_speed=false" in text and not (tmp_path / "run").exists()


def test_unless_the_config_says_so(tiny: Path, tmp_path: Path, on: Any, capsys: pytest.CaptureFixture[str]) -> None:
    on(PLAIN)
    changes = {"dense__dtype": "bfloat16", "dense__check_speed": False}
    train(document(tiny, tmp_path / "run", **changes))
    train({**document(tiny, tmp_path / "run", **changes), "train": {"batch_size": 90, "max_steps": 2}})
    assert chosen(tmp_path / "run") == "bfloat16" and "slowly" not in "".join(capsys.readouterr())


def test_an_existing_run_continues_with_a_note(
    tiny: Path, tmp_path: Path, on: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    on(FAST)
    first = document(tiny, tmp_path / "run", dense__dtype="bfloat16")
    train(first)
    assert "slowly" not in "".join(capsys.readouterr())
    on(PLAIN)
    train({**first, "train": {**first["train"], "max_steps": 2}})
    assert (
        "note: the dense part computes in bfloat16, as in training, which is slow here: Old 1"
        in capsys.readouterr().err
    )
    with open_trained(tmp_path / "run", "test"):
        assert "slow here: Old 1" in capsys.readouterr().err


@pytest.mark.parametrize(("begun_on", "dtype"), [(FAST, "bfloat16"), (PLAIN, "float32")])
def test_auto_chooses_once(tiny: Path, tmp_path: Path, on: Any, begun_on: Processor, dtype: str) -> None:
    on(begun_on)
    first = document(tiny, tmp_path / "run", dense__dtype="auto")
    train(first)
    assert chosen(tmp_path / "run") == dtype
    on(PLAIN if begun_on is FAST else FAST)
    train({**first, "train": {**first["train"], "max_steps": 2}})
    assert chosen(tmp_path / "run") == dtype


def test_auto_is_kept_by_a_mirror(tiny: Path, tmp_path: Path, on: Any) -> None:
    on(FAST)
    mirror = f"file://{tmp_path / 'mirror'}"
    train(document(tiny, tmp_path / "run", dense__dtype="auto", checkpoint__mirror=mirror))
    on(PLAIN)
    again = document(tiny, tmp_path / "other", dense__dtype="auto", checkpoint__mirror=mirror)
    train({**again, "train": {**again["train"], "max_steps": 2}})
    assert chosen(tmp_path / "other") == "bfloat16"


@pytest.mark.parametrize("changes", [{"embedding__dtype": "float64"}, {"model__name": "own_models:Plain"}])
def test_auto_selects_float32_for_float64_tables_and_user_models(
    tmp_path: Path, on: Any, changes: dict[str, str]
) -> None:
    on(FAST)
    config = RunConfig.model_validate(settings(tmp_path, tmp_path / "run", dense__dtype="auto", **changes))
    assert specs.resolve_dense_dtype(config, World.single()).dense.dtype == "float32"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_new_run_says_that_its_bits_follow_the_threads(
    tiny: Path, tmp_path: Path, on: Any, capsys: pytest.CaptureFixture[str], dtype: str
) -> None:
    on(replace(FAST, flags=FAST.flags | {"amx_tile", "amx_bf16"}))
    train(document(tiny, tmp_path / "run", dense__dtype=dtype))
    is_noted = "note: products in bfloat16 take AMX, whose sums follow the number of threads" in capsys.readouterr().err
    assert is_noted == (dtype == "bfloat16")
