"""Import of models of other programs: their logits equal those of the same model in plain torch."""

from __future__ import annotations

import itertools
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from meseta.comm import World
from meseta.config import RunConfig
from meseta.spec import MesetaError
from meseta.train.interop.importing import import_model
from meseta.train.interop.state_dicts import Layout, read_state_dict
from meseta.train.trained_model import load_trained
from small_run import SHAPES, final_checksum, settings, train

D, BOTTOM, TOP = 4, (8, 4), (8, 1)
CROSS = {"model__name": "dlrm_dcnv2"}


def layers(widths: tuple[int, ...]) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(o, i) / i**0.5, torch.randn(o) / 4) for i, o in itertools.pairwise(widths)]


def run_layers(x: Tensor, stack: list[tuple[Tensor, Tensor]], relu_last: bool) -> Tensor:
    for index, (weight, bias) in enumerate(stack):
        x = functional.linear(x, weight, bias)
        x = x.relu() if relu_last or index < len(stack) - 1 else x
    return x


class PlainModel:
    """DLRM or DCNv2 with the shapes of the tiny data. `pairs` orders its dot products."""

    def __init__(self, pairs: Callable[[int], tuple[Tensor, Tensor]] | None) -> None:
        torch.manual_seed(5)
        self.pairs, vectors = pairs, len(SHAPES) + 1
        self.tables = {name: torch.randn(rows, D) for name, rows in SHAPES.items()}
        self.bottom = layers((2, *BOTTOM))
        width = D + vectors * (vectors - 1) // 2 if pairs else vectors * D
        self.cross = [] if pairs else [(torch.randn(4, width) / 5, torch.randn(width, 4) / 5, torch.randn(width))]
        self.top = layers((width, *TOP))

    def logits(self, dense: Tensor, pooled: Tensor) -> Tensor:
        x = run_layers(dense, self.bottom, relu_last=True)
        vectors = torch.cat([x, pooled], dim=1)
        if self.pairs is None:
            y = vectors
            for down, up, bias in self.cross:
                y = vectors * (y @ down.T @ up.T + bias) + y
        else:
            stacked = vectors.unflatten(1, (-1, D))
            a, b = self.pairs(stacked.shape[1])
            y = torch.cat([x, torch.bmm(stacked, stacked.transpose(1, 2))[:, a, b]], dim=1)
        return run_layers(y, self.top, relu_last=False).squeeze(1)


def lower(n: int) -> tuple[Tensor, Tensor]:
    """Return the pairs of facebookresearch/dlrm: for i in range(n) for j in range(i)."""
    pairs = [(i, j) for i in range(n) for j in range(i)]
    return torch.tensor([i for i, _ in pairs]), torch.tensor([j for _, j in pairs])


def upper(n: int) -> tuple[Tensor, Tensor]:
    """Return the pairs of TorchRec's InteractionArch: triu_indices with offset 1."""
    rows, columns = torch.triu_indices(n, n, offset=1)
    return rows, columns


def stack_names(stack: list[tuple[Tensor, Tensor]], name: Callable[[int], str]) -> dict[str, Tensor]:
    tensors = {}
    for index, (weight, bias) in enumerate(stack):
        tensors |= {f"{name(index)}.weight": weight, f"{name(index)}.bias": bias}
    return tensors


def dlrm_names(model: PlainModel) -> dict[str, Tensor]:
    tables = {f"emb_l.{n}.weight": table for n, table in enumerate(model.tables.values())}
    bottom = stack_names(model.bottom, lambda i: f"bot_l.{2 * i}")
    return tables | bottom | stack_names(model.top, lambda i: f"top_l.{2 * i}")


def torchrec_names(model: PlainModel, prefix: str = "model.", table: str = "{}") -> dict[str, Tensor]:
    bags = prefix + "sparse_arch.embedding_bag_collection.embedding_bags.{}.weight"
    tensors = {bags.format(table.format(name)): rows for name, rows in model.tables.items()}
    tensors |= stack_names(model.bottom, lambda i: f"{prefix}dense_arch.model._mlp.{i}._linear")
    tensors |= stack_names(model.top[:-1], lambda i: f"{prefix}over_arch.model.0._mlp.{i}._linear")
    tensors |= stack_names(model.top[-1:], lambda i: f"{prefix}over_arch.model.1")
    for i, (down, up, bias) in enumerate(model.cross):
        cross = f"{prefix}inter_arch.crossnet"
        tensors |= {f"{cross}.V_kernels.{i}": down, f"{cross}.W_kernels.{i}": up, f"{cross}.bias.{i}": bias}
    return tensors


def torch_names(model: PlainModel, prefix: str = "module.") -> dict[str, Tensor]:
    tables = {f"{prefix}tables.{name}.weight": rows for name, rows in model.tables.items()}
    bottom = stack_names(model.bottom, lambda i: f"{prefix}bottom_mlp.{2 * i}")
    return tables | bottom | stack_names(model.top, lambda i: f"{prefix}top_mlp.{2 * i}")


def config_of(tiny: Path, run_dir: Path, **changes: Any) -> dict[str, Any]:
    return settings(tiny, run_dir, train__max_steps=3, **changes)


def load(path: Path, layout: Layout, document: dict[str, Any], **more: Any) -> Path:
    return import_model(path, layout, RunConfig.model_validate(document), **more)[0]


@pytest.mark.parametrize(
    ("layout", "pairs", "name", "changes"),
    [
        ("dlrm", lower, dlrm_names, {}),
        ("torchrec", upper, torchrec_names, {}),
        ("torchrec", None, torchrec_names, CROSS),
        ("torchrec", upper, lambda m: torchrec_names(m, "module.model.", "t_{}_x"), {}),
        ("torch", lower, torch_names, {}),
    ],
    ids=["dlrm", "torchrec", "torchrec dcn", "torchrec by order", "torch"],
)
def test_the_same_logits(
    tiny: Path,
    tmp_path: Path,
    layout: Layout,
    pairs: Any,
    name: Callable[[PlainModel], dict[str, Tensor]],
    changes: dict,
) -> None:
    model = PlainModel(pairs)
    torch.save({"state_dict": name(model), "epoch": 3}, tmp_path / "model.pt")
    document = config_of(tiny, tmp_path / "run", **changes)
    saved = load(tmp_path / "model.pt", layout, document)
    assert saved == tmp_path / "run/checkpoints/step-000000000"
    trained = load_trained(tmp_path / "run", "test", World.single())
    batch = next(iter(trained.reader.epoch()))
    values = [
        functional.embedding_bag(
            jagged.values, model.tables[feature], jagged.offsets[:-1], mode="sum", per_sample_weights=jagged.weights
        )
        for feature in (f.name for f in trained.model.embeddings.features)
        for jagged in [batch.sparse[feature]]
    ]
    expected = model.logits(batch.dense, torch.cat(values, dim=1))
    with torch.no_grad():
        logits = trained.model.score(batch.dense, trained.model.embeddings(batch.sparse).pooled.values)
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


def test_training_continues_from_it(tiny: Path, tmp_path: Path) -> None:
    """Training from a safetensors file equals training from a folder with the tensors in several files."""
    tensors = dlrm_names(PlainModel(lower))
    save_file({n: t.contiguous() for n, t in tensors.items()}, tmp_path / "model.safetensors")
    (tmp_path / "folder").mkdir()
    for part, names in enumerate((list(tensors)[:3], list(tensors)[3:])):
        torch.save({n: tensors[n] for n in names}, tmp_path / f"folder/{part}.pt")
    sums = []
    for source in ("model.safetensors", "folder"):
        document = config_of(tiny, tmp_path / f"run {source}")
        load(tmp_path / source, "dlrm", document)
        assert train(document)["num_steps"] == 3
        sums.append(final_checksum(tmp_path / f"run {source}"))
    assert sums[0] == sums[1]
    with pytest.raises(MesetaError, match="already has a checkpoint"):
        load(tmp_path / "folder", "dlrm", document)


def test_mismatches_are_listed_with_suggestions(tiny: Path, tmp_path: Path) -> None:
    tensors = torch_names(PlainModel(lower), prefix="")
    tensors["tables.itme.weight"] = tensors.pop("tables.item.weight")
    tensors["top_mlp.0.bias"] = torch.zeros(3)
    tensors["steps"] = torch.zeros(())
    torch.save(tensors, tmp_path / "model.pt")
    document = config_of(tiny, tmp_path / "run")
    with pytest.raises(MesetaError) as refusal:
        load(tmp_path / "model.pt", "torch", document)
    message = str(refusal.value)
    assert "'tables.itme.weight' (did you mean 'embeddings.item.weight'?)" in message and "'steps'" in message
    assert "are missing in the file: 'embeddings.item.weight' [40, 4]" in message
    assert "have a different shape: 'top_mlp.0.bias' [3], and [8] in the model" in message
    assert "--rename SOURCE=TARGET" in message
    assert not (tmp_path / "run").exists()
    torch.save(dlrm_names(PlainModel(lower)), tmp_path / "dlrm.pt")
    with pytest.raises(MesetaError, match=r"; use --from dlrm$"):
        load(tmp_path / "dlrm.pt", "torchrec", document)
    with pytest.raises(MesetaError, match=r"tensor 'x' of --rename is not in the file"):
        load(tmp_path / "model.pt", "torch", document, renames={"x": "y"})
    tensors["top_mlp.0.bias"] = torch.zeros(8)
    torch.save(tensors, tmp_path / "model.pt")
    renames = {"tables.itme.weight": "embeddings.item.weight"}
    load(tmp_path / "model.pt", "torch", document, renames=renames, ignore=["step*"])


class Evil:
    """Object whose pickle makes a folder when it is loaded."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


def test_no_pickle_is_ever_loaded(tmp_path: Path) -> None:
    torch.save({"state_dict": {"w": torch.ones(2)}, "optimizer": Evil(tmp_path / "made")}, tmp_path / "model.pt")
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(Evil(tmp_path / "made")))
    for name in ("model.pt", "plain.pt"):
        with pytest.raises(MesetaError, match="ickles are not loaded"):
            read_state_dict(tmp_path / name)
    assert not (tmp_path / "made").exists()


def test_other_files_are_refused(tmp_path: Path) -> None:
    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "whole.pt")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "whole.pt").read_bytes()[:-200])
    (tmp_path / "cut.safetensors").write_bytes(b"\x08")
    torch.save([1, 2], tmp_path / "list.pt")
    (tmp_path / "empty").mkdir()
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp/.metadata").write_bytes(b"")
    for name, what in (
        ("missing.pt", "cannot be read"), ("cut.pt", "cannot be read"), ("cut.safetensors", "cannot be read"),
        ("list.pt", "no named tensors"), ("empty", "has no file"), ("dcp", "dcp_to_torch"),
    ):  # fmt: skip
        with pytest.raises(MesetaError, match=what):
            read_state_dict(tmp_path / name)
    assert set(read_state_dict(tmp_path / "whole.pt")) == {"weight", "bias"}
