"""Export of the dense part of a trained model to ONNX or torch.export."""

from __future__ import annotations

import io
import json
import logging
import warnings
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from meseta.checkpoint.averages import select_averages
from meseta.checkpoint.files.block import read_tensors
from meseta.checkpoint.manifest import read_manifest
from meseta.config import RunConfig
from meseta.data.dataset.dataset import Dataset
from meseta.embedding import EmbeddingBagCollection
from meseta.errors import error_summary
from meseta.models import make_model
from meseta.models.layers import check_reads_pooled
from meseta.spec import MesetaError
from meseta.system.files import atomic_folder
from meseta.system.remote import Location
from meseta.train.evaluate import logit_shift
from meseta.train.run_dir import RunDir
from meseta.train.setup.specs import make_specs
from meseta.train.state import set_dense_parameters

DenseFormat = Literal["onnx", "torch-export"]
DENSE_FORMATS: tuple[DenseFormat, ...] = ("onnx", "torch-export")
INPUTS_PATH = "inputs.json"


class DensePart(nn.Module):
    """Dense part of a model as a module, from dense inputs and pooled embeddings to the logits of `meseta predict`."""

    def __init__(self, model: Any, shift: float) -> None:
        """Wrap a model of `make_model`. `shift` is added to its logits, see `logit_shift`."""
        super().__init__()
        self.model = model
        self.shift = shift

    def forward(self, dense: Tensor, pooled: Tensor) -> Tensor:
        """Return logits [B], or [B, T] for T labels, from dense [B, num_dense] and pooled [B, sum of D]."""
        logits: Tensor = self.model.score(dense, pooled)
        return logits + self.shift if self.shift else logits


def load_dense_part(path: Location, run_dir: Path | None = None) -> tuple[DensePart, dict[str, Any]]:
    """Load the dense part of a run's checkpoint. Return (dense part, description of its inputs).

    The description lists the dense columns, and the features in the order in which `pooled` concatenates them. No table
    is read, and MLPs compute in float32. `run_dir` defaults to the run that contains the checkpoint.
    Raises MesetaError if the checkpoint is damaged or not in a run.
    """
    if run_dir is None:
        if not isinstance(path, Path):
            raise MesetaError(f"export: checkpoint {str(path)!r} is not in a run; pass the run_dir of its training")
        run_dir = path.absolute().parent.parent
    run = RunDir(run_dir)
    config = run.load_config()
    dataset = Dataset.load(run.path).select(config.data.labels, config.data.without, allow_missing=True)
    tables, features = make_specs(config, dataset)
    collection = EmbeddingBagCollection(tables, features, seed=config.seed)
    model = make_model(config.model, collection, len(dataset.dense), config.seed, labels=dataset.labels)
    model.to(dtype=collection.dtype)
    set_dense_parameters(model, select_averages(read_tensors(path, read_manifest(path)["dense"])))
    check_reads_pooled("export", model)
    part = DensePart(model, logit_shift(config)).eval()
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
    """Write the dense part of a run's checkpoint to a new folder, atomically. Return the files.

    The model is dense.onnx or dense.pt2, with inputs `dense` and `pooled`, output `logits`, and any batch size from 1.
    inputs.json describes the columns of the inputs.
    Raises MesetaError if the folder exists, the checkpoint is not in a run, ONNX is not installed, or a custom model
    cannot be traced.
    """
    if out.exists():
        raise MesetaError(f"export: folder {str(out)!r} exists; choose a new one")
    part, inputs = load_dense_part(path, run_dir)
    program = _trace(part, len(inputs["inputs"]["dense"]), sum(e["width"] for e in inputs["inputs"]["pooled"]))
    with atomic_folder(out) as folder:
        (folder / INPUTS_PATH).write_text(json.dumps(inputs, indent=1) + "\n")
        if form == "onnx":
            (folder / "dense.onnx").write_bytes(_export_onnx(program))
        else:
            packed = io.BytesIO()  # torch's own file writer does not report why writing failed.
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
    except Exception as error:  # Code of a custom model may raise anything.
        raise MesetaError(
            f"export: torch.export cannot trace the dense part of {type(part.model).__name__} "
            f"({error_summary(error)}); "
            "export its tensors with --format safetensors"
        ) from error
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            node.meta.pop("stack_trace", None)  # Has file paths and source lines of this machine.
    return program


def _export_onnx(program: Any) -> bytes:
    log = logging.getLogger("torch.onnx")
    level = log.level
    try:
        with warnings.catch_warnings():
            # Warnings and log lines report optional packages that the exporter would use.
            warnings.simplefilter("ignore")
            log.setLevel(logging.ERROR)
            exported = torch.onnx.export(
                program, dynamo=True, input_names=["dense", "pooled"], output_names=["logits"], verbose=False
            )
    except ImportError as error:
        raise MesetaError(
            f"export: ONNX needs a package that is not installed ({error}); pip install 'meseta[onnx]'"
        ) from None
    finally:
        log.setLevel(level)
    assert exported is not None  # It is None only if a file name is passed.
    model = exported.model_proto
    _clear_metadata(model)
    content: bytes = model.SerializeToString()
    return content


def _clear_metadata(message: Any) -> None:
    # The exporter records source files and lines of this machine. No runtime reads them.
    for field, value in message.ListFields():
        if field.name in ("metadata_props", "doc_string"):
            message.ClearField(field.name)
        elif field.message_type is not None:
            for inner in (value,) if hasattr(value, "ListFields") else value:
                _clear_metadata(inner)
