"""Tests of the output and the errors of `meseta calibrate` and `meseta topology detect`."""

from collections.abc import Callable
from pathlib import Path

import pytest

from meseta.measure.calibrate import calibration
from meseta.spec import CostModel, Topology

Run = Callable[..., tuple[int, str, str]]


@pytest.mark.soak
def test_calibrate_writes_a_model_and_its_errors(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "MAX_MEMORY_BYTES", 20_000_000)
    code, out, err = run("calibrate", "--out", tmp_path / "cost.yaml", "--seconds", "1", "--neural")
    assert code == 0, err
    model = CostModel.load(tmp_path / "cost.yaml")
    assert model.neural is not None and set(model.neural.collectives) == {2, 4}
    assert "constants | with networks" in out and "collectives, 4 devices" in out
    assert model.is_measured and not model.tiers.measured
    assert model.exchange.inside_all_to_all.bytes_per_s > 1e6
    for name in ("lookup", "update", "all_to_all", "all_reduce"):
        assert f"  {name}" in out
    code, out, _ = run("topology", "detect", "--device", "cpu", "--cost-model", tmp_path / "cost.yaml")
    assert code == 0 and "inside:\n  bytes_per_s:" in out


def test_detect_writes_a_topology(run: Run, tmp_path: Path) -> None:
    code, out, _ = run("topology", "detect", "--device", "cpu", "--devices-per-host", "3", "--out", tmp_path / "t.yaml")
    assert code == 0 and out.splitlines()[-1] == f"wrote {tmp_path / 't.yaml'}"
    assert Topology.load(tmp_path / "t.yaml").devices_per_host == 3


@pytest.mark.parametrize("command", [("calibrate",), ("topology", "detect", "--device", "cpu")])
def test_a_place_that_cannot_be_written_is_refused_first(run: Run, tmp_path: Path, command: tuple[str, ...]) -> None:
    for place, reason in ((tmp_path, "is a folder"), (tmp_path / "none/cost.yaml", "does not exist")):
        code, out, err = run(*command, "--out", place)
        assert code == 1 and out == "" and reason in err


def test_an_unknown_device_is_refused(run: Run) -> None:
    code, _, err = run("topology", "detect", "--device", "a10")
    assert code == 1 and "'a10' is unknown; did you mean 'a100'?" in err
