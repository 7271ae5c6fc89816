"""Choice of the device of a rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from meseta.config import RunConfig
from meseta.spec import MesetaError
from meseta.train.setup.build import choose_device


def config(device: str) -> RunConfig:
    return RunConfig.model_validate({"run_dir": "run", "data": {"dir": Path("data")}, "device": device})


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Simulate a host with two GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    return monkeypatch


def test_a_gpu_for_each_rank(two_gpus: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert choose_device(config("auto")) == torch.device("cuda", 0)
    two_gpus.setenv("LOCAL_WORLD_SIZE", "2")
    two_gpus.setenv("LOCAL_RANK", "1")
    for device in ("auto", "cuda"):
        assert choose_device(config(device)) == torch.device("cuda", 1)
    assert choose_device(config("cpu")) == torch.device("cpu")
    assert capsys.readouterr().err == ""


def test_more_ranks_than_gpus(two_gpus: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    two_gpus.setenv("LOCAL_WORLD_SIZE", "3")
    note = "note: this host has 3 ranks and only 2 GPU(s), so all ranks use the CPU; --nproc 2 uses the GPUs\n"
    for rank, err in (("0", note), ("2", "")):
        two_gpus.setenv("RANK", rank)
        two_gpus.setenv("LOCAL_RANK", rank)
        assert choose_device(config("auto")) == torch.device("cpu")
        assert capsys.readouterr().err == err
        with pytest.raises(MesetaError, match=r"sees 2 GPU\(s\) for the 3 ranks of this host; set --nproc 2"):
            choose_device(config("cuda"))
