"""The dense part of a trained model for other programs: ONNX, or a program of torch.export."""

from __future__ import annotations

import io
import json
import logging
import warnings
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from meseta.checkpoint.files.tensors import read_tensors
from meseta.checkpoint.manifest import read_manifest
from meseta.config import RunConfig
from meseta.data.dataset.dataset import Dataset
from meseta.data.read.selection import calibration_shift
from meseta.embedding import EmbeddingBagCollection
from meseta.errors import error_summary
from meseta.machine.files import atomic_folder
from meseta.machine.remote import Location
from meseta.models import make_model
from meseta.models.base import check_reads_pooled
from meseta.spec import MesetaError
from meseta.train.run_dir import RunDir
from meseta.train.setup.specs import make_specs
from meseta.train.state import set_dense_parameters

DenseFormat = Literal["onnx", "torch-export"]
DENSE_FORMATS: tuple[DenseFormat, ...] = ("onnx", "torch-export")
INPUTS_PATH = "inputs.json"


class DensePart(nn.Module):
    """From dense inputs and pooled embeddings to logits, those of `meseta predict`."""

    def __init__(self, model: Any, shift: float) -> None:
        """`model` as make_model gives it; `shift` is added to its logits, see `calibration_shift`."""
        super().__init__()
        self.model = model
        self.shift = shift

    def forward(self, dense: Tensor, pooled: Tensor) -> Tensor:
        """dense [B, num_dense] and pooled [B, sum of D] give logits [B], or [B, T] with several labels."""
        logits: Tensor = self.model.score(dense, pooled)
        return logits + self.shift if self.shift else logits


def load_dense_part(path: Location, run_dir: Path | None = None) -> tuple[DensePart, dict[str, Any]]:
    """The dense part of a run's checkpoint, and what its inputs are: names of dense columns in order, and for each
    feature its table, width and pooling, in the order in which `pooled` has them side by side. `run_dir` None: the run
    in whose folder the checkpoint lies.

    No table is read. MLPs compute in float32 where the run had bfloat16. Raises MesetaError for a checkpoint that is in
    no run, or damaged.
    """
    if run_dir is None:
        if not isinstance(path, Path):
            raise MesetaError(f"export: checkpoint {str(path)!r} lies in no run; give the run_dir of its training")
        run_dir = path.absolute().parent.parent
    run = RunDir(run_dir)
    config = run.load_config()
    dataset = Dataset.load(run.path).with_labels(config.data.labels)
    tables, features = make_specs(config, dataset)
    collection = EmbeddingBagCollection(tables, features, seed=config.seed)
    model = make_model(config.model, collection, len(dataset.dense), config.seed, labels=dataset.labels)
    model.to(dtype=collection.dtype)
    set_dense_parameters(model, read_tensors(path, read_manifest(path)["dense"]))
    check_reads_pooled("export", model)
    part = DensePart(model, calibration_shift(config.data.negative_keep)).eval()
    return part, _describe_inputs(config, dataset, collection)


def _describe_inputs(config: RunConfig, dataset: Dataset, collection: EmbeddingBagCollection) -> dict[str, Any]:
    width = {table.name: table.embedding_dim for table in collection.tables}
    pooled = [{"feature": f.name, "table": f.table, "width": width[f.table], "pooling": f.pooling}
              for f in collection.features]  # fmt: skip
    dtype = str(collection.dtype).removeprefix("torch.")
    return {
        "model": config.model.name,
        "inputs": {"dense": [column.name for column in dataset.dense], "pooled": pooled, "dtype": dtype},
        "outputs": {"logits": list(dataset.labels)},
    }


def export_dense(path: Location, out: Path, form: DenseFormat, run_dir: Path | None = None) -> list[Path]:
    """Write the dense part of a run's checkpoint to a new folder: dense.onnx or dense.pt2, with inputs `dense` and
    `pooled`, output `logits` and a batch of any size from 1 on, and inputs.json, which says what the columns are.

    The folder appears by one rename; returns its files. Raises MesetaError for a folder that exists, a checkpoint that
    is in no run, an ONNX that is not installed, and a model of the user's own that cannot be traced.
    """
    if out.exists():
        raise MesetaError(f"export: {str(out)!r} exists; give a folder that does not")
    part, inputs = load_dense_part(path, run_dir)
    program = _trace(part, len(inputs["inputs"]["dense"]), sum(e["width"] for e in inputs["inputs"]["pooled"]))
    with atomic_folder(out) as folder:
        (folder / INPUTS_PATH).write_text(json.dumps(inputs, indent=1) + "\n")
        if form == "onnx":
            (folder / "dense.onnx").write_bytes(_export_onnx(program))
        else:
            packed = io.BytesIO()  # into memory, since torch's writer of files does not tell why one fails
            torch.export.save(program, packed)
            (folder / "dense.pt2").write_bytes(packed.getvalue())
    return sorted(out.iterdir())


def _trace(part: DensePart, num_dense: int, width: int) -> Any:
    dtype = part.model.embeddings.dtype
    example = torch.zeros(3, num_dense, dtype=dtype), torch.zeros(3, width, dtype=dtype)
    batch = torch.export.Dim("batch", min=1)
    try:
        with torch.no_grad():
            program = torch.export.export(part, example, dynamic_shapes=({0: batch}, {0: batch}), strict=False)
    except Exception as error:  # whatever a model of the user's own may raise there
        raise MesetaError(
            f"export: torch.export cannot trace the dense part of {type(part.model).__name__} "
            f"({error_summary(error)}); "
            "export its tensors with --format safetensors"
        ) from error
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            node.meta.pop("stack_trace", None)  # file paths and source lines of this machine
    return program


def _export_onnx(program: Any) -> bytes:
    log = logging.getLogger("torch.onnx")
    level = log.level
    try:
        with warnings.catch_warnings():
            # Both tell of packages that the exporter would use if they were there.
            warnings.simplefilter("ignore")
            log.setLevel(logging.ERROR)
            exported = torch.onnx.export(
                program, dynamo=True, input_names=["dense", "pooled"], output_names=["logits"], verbose=False
            )
    except ImportError as error:
        raise MesetaError(
            f"export: ONNX needs a package that is not here ({error}); pip install 'meseta[onnx]'"
        ) from None
    finally:
        log.setLevel(level)
    assert exported is not None  # since no file is named
    model = exported.model_proto
    _clear_metadata(model)
    content: bytes = model.SerializeToString()
    return content


def _clear_metadata(message: Any) -> None:
    """Clear the metadata and comments of a protobuf message and of all messages within: the exporter's notes name
    source files and lines of this machine. No runtime reads them."""
    for field, value in message.ListFields():
        if field.name in ("metadata_props", "doc_string"):
            message.ClearField(field.name)
        elif field.message_type is not None:
            for inner in (value,) if hasattr(value, "ListFields") else value:
                _clear_metadata(inner)
