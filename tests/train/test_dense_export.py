"""Export of the dense part to ONNX and torch.export: other programs compute the logits of `meseta predict`."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from meseta import checkpoint
from meseta.comm import World
from meseta.config.models import MODEL_NAMES
from meseta.spec import MesetaError
from meseta.train.interop import dense_export
from meseta.train.interop.dense_export import DenseFormat, export_dense
from meseta.train.trained_model import TrainedModel, load_trained
from small_run import settings, train
from source_tree import ROOT

FIRST = ("dlrm",)
"""Models that `make test` traces. Tracing takes seconds, so the others are traced by `make soak`."""


def trained_run(tiny: Path, run_dir: Path, **changes: object) -> tuple[Path, TrainedModel]:
    """Return (checkpoint, model) of a run of three steps."""
    train(settings(tiny, run_dir, train__max_steps=3, **changes))
    path = checkpoint.latest_complete(run_dir / "checkpoints")
    assert path is not None
    return path, load_trained(run_dir, "test", World.single())


def traces(path: Path) -> set[bytes]:
    """Return the strings in a file, or in the members of a zip file, that reveal the machine or the sources."""
    contents = [path.read_bytes()]
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            contents += map(archive.read, archive.namelist())
    folders = (str(folder).encode() for folder in (ROOT, Path(torch.__file__).parent, Path.home()))
    needles = {*folders, b".py", b"stack_trace", b"File ", b"self.", b"return "}
    return {needle for needle in needles for content in contents if needle in content}


def run_exported(out: Path, form: DenseFormat, dense: torch.Tensor, pooled: torch.Tensor) -> np.ndarray:
    """Return the logits that onnxruntime or torch computes from the exported files."""
    if form == "onnx":
        onnxruntime = pytest.importorskip("onnxruntime")
        session = onnxruntime.InferenceSession(out / "dense.onnx", providers=["CPUExecutionProvider"])
        [logits] = session.run(["logits"], {"dense": dense.numpy(), "pooled": pooled.numpy()})
        return np.asarray(logits)
    program = torch.export.load(out / "dense.pt2")
    assert not [node for node in program.graph.nodes if "meseta" in str(node.target)]
    return program.module()(dense, pooled).detach().numpy()


@pytest.mark.parametrize(
    "model", [name if name in FIRST else pytest.param(name, marks=pytest.mark.soak) for name in MODEL_NAMES]
)
def test_every_model_gives_the_same_logits(tiny: Path, tmp_path: Path, model: str) -> None:
    path, trained = trained_run(tiny, tmp_path / "run", model__name=model, data__negative_keep=0.5)
    forms: tuple[DenseFormat, ...] = ("onnx", "torch-export")
    for form in forms:
        files = export_dense(path, tmp_path / form, form)
        assert [file.name for file in files] == ["dense.onnx" if form == "onnx" else "dense.pt2", "inputs.json"]
        assert [traces(file) for file in files] == [set(), set()]
        inputs = json.loads((tmp_path / form / "inputs.json").read_text())["inputs"]
        assert inputs["dense"] == ["price", "age"]
        assert [entry["feature"] for entry in inputs["pooled"]] == [f.name for f in trained.model.embeddings.features]
        batch = next(iter(trained.reader.epoch()))
        for size in (1, batch.batch_size):
            pooled = trained.model.embeddings(batch.sparse).pooled.values.detach()[:size]
            assert pooled.shape[1] == sum(entry["width"] for entry in inputs["pooled"])
            with torch.no_grad():
                expected = trained.model.score(batch.dense[:size], pooled) + trained.logit_shift
            logits = run_exported(tmp_path / form, form, batch.dense[:size], pooled)
            np.testing.assert_allclose(logits, expected.numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", ["torch-export", pytest.param("onnx", marks=pytest.mark.soak)])
def test_batch_norm_uses_running_statistics(tiny: Path, tmp_path: Path, form: DenseFormat) -> None:
    changes = {"model__name": "wide_deep", "model__deep_mlp": [8, 8], "model__batch_norm": True, "model__dropout": 0.5}
    path, trained = trained_run(tiny, tmp_path / "run", **changes)
    export_dense(path, tmp_path / "out", form)
    batch = next(iter(trained.reader.epoch()))
    pooled = trained.model.embeddings(batch.sparse).pooled.values.detach()
    expected = trained.model.score(batch.dense, pooled).detach().numpy()
    logits = run_exported(tmp_path / "out", form, batch.dense, pooled)
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-5)


def test_errors_leave_no_files(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = trained_run(tiny, tmp_path / "run")
    (tmp_path / "there").mkdir()
    with pytest.raises(MesetaError, match="exists; choose a new one"):
        export_dense(path, tmp_path / "there", "onnx")

    def missing(*_: object, **__: object) -> None:
        raise ModuleNotFoundError("No module named 'onnxscript'")

    monkeypatch.setattr(torch.onnx, "export", missing)
    with pytest.raises(MesetaError, match=r"onnxscript.*pip install 'meseta\[onnx\]'"):
        export_dense(path, tmp_path / "out", "onnx")

    def untraceable(self: object, dense: torch.Tensor, pooled: torch.Tensor) -> torch.Tensor:
        return dense.sum() if float(dense.sum()) > 0 else pooled.sum()

    monkeypatch.setattr(dense_export.DensePart, "forward", untraceable)
    with pytest.raises(MesetaError, match="cannot trace the dense part of DLRM"):
        export_dense(path, tmp_path / "out", "torch-export")
    path.parent.rename(tmp_path / "elsewhere")
    with pytest.raises(MesetaError, match="is not a run"):
        export_dense(tmp_path / "elsewhere" / path.name, tmp_path / "out", "onnx")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["elsewhere", "run", "there"]
