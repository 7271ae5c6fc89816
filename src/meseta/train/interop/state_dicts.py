"""Files with tensors of models that were trained elsewhere, and the translation of their names."""

from __future__ import annotations

import pickle
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from meseta.errors import error_summary
from meseta.spec import MesetaError
from meseta.system.files import open_regular

Layout = Literal["torch", "torchrec", "dlrm"]
LAYOUTS: tuple[Layout, ...] = ("torch", "torchrec", "dlrm")
_SUFFIXES = (".pt", ".pth", ".bin", ".tar", ".safetensors")
_STATE_DICT_KEYS = ("state_dict", "model_state_dict", "model")
_WRAPPER_PREFIX_PATTERN = re.compile(r"^(?:(?:module|model|_orig_mod|_dmp_wrapped_module)\.)+")


def table_target(table: str) -> str:
    """Return the name of a table's rows, in addition to the names of dense parameters."""
    return f"embeddings.{table}.weight"


def read_state_dict(path: Path) -> dict[str, Tensor]:
    """Read tensors by name from a file of torch.save, a safetensors file, or all such files in a folder.

    Tensors are on the CPU. Large tensors are memory-mapped.
    Raises MesetaError with a remedy if a file is missing, damaged, of an unknown format, or contains a pickle.
    """
    # Unpickling would execute code, so torch loads tensors and plain containers only (weights_only).
    if path.is_dir():
        if (path / ".metadata").exists():
            raise MesetaError(
                f"import: {str(path)!r} is a torch.distributed.checkpoint, whose .metadata is a pickle, and pickles "
                "are not loaded; if you trust it, run python -m torch.distributed.checkpoint.format_utils "
                f"dcp_to_torch {path} tensors.pt, then import tensors.pt"
            )
        files = sorted(file for file in path.iterdir() if file.suffix in _SUFFIXES)
        if not files:
            raise MesetaError(
                f"import: folder {str(path)!r} has no file {', '.join('*' + s for s in _SUFFIXES)}; choose another"
            )
    else:
        files = [path]
    tensors: dict[str, Tensor] = {}
    for file in files:
        for name, tensor in _read_file(file).items():
            if name in tensors:
                raise MesetaError(
                    f"import: tensor {name!r} is in {str(file)!r} and another file of its folder; move one"
                )
            tensors[name] = tensor
    return tensors


def _read_file(file: Path) -> dict[str, Tensor]:
    try:
        with open(open_regular(file), "rb") as opened:
            head = opened.read(4)
        if file.suffix == ".safetensors":
            return dict(load_file(file))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about pickle protocols before it refuses them.
            document = torch.load(file, map_location="cpu", weights_only=True, mmap=head[:2] == b"PK")
    except pickle.UnpicklingError:
        raise MesetaError(
            f"import: {str(file)!r} has Python objects in addition to tensors, or is no file of torch.save. Pickles "
            "are not loaded; on the machine that wrote it, save only the tensors: "
            "torch.save({name: tensor for name, tensor in model.state_dict().items()}, 'tensors.pt')"
        ) from None
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, SafetensorError) as error:
        what = getattr(error, "strerror", None) or error_summary(error)
        raise MesetaError(
            f"import: {str(file)!r} cannot be read ({what}); choose a complete file of torch.save"
        ) from None
    return _extract_state_dict(file, document)


def _extract_state_dict(file: Path, document: Any) -> dict[str, Tensor]:
    """Return the tensors of a document by name. They may be nested under a common key such as "state_dict"."""
    for key in _STATE_DICT_KEYS:
        if isinstance(document, Mapping) and isinstance(document.get(key), Mapping):
            document = document[key]
    tensors = {}
    if isinstance(document, Mapping):
        tensors = {name: t for name, t in document.items() if isinstance(name, str) and isinstance(t, Tensor)}
    if not tensors:
        raise MesetaError(f"import: {str(file)!r} has no named tensors; save model.state_dict()")
    return tensors


def translate_names(layout: Layout, names: Sequence[str], tables: Sequence[str]) -> dict[str, str]:
    """Return the name in the model of each tensor in `names`. Names unknown to the layout are unchanged.

    `tables` are in the order of the data, which is that of `emb_l` in facebookresearch/dlrm. Tables of TorchRec are
    matched by name. If no name matches and the numbers are equal, they are matched by order.
    """
    rules = {"torch": _from_torch, "torchrec": _from_torchrec, "dlrm": _from_dlrm}
    return rules[layout](names, tables)


def _from_torch(names: Sequence[str], tables: Sequence[str]) -> dict[str, str]:
    targets = {}
    for name in names:
        bare = _WRAPPER_PREFIX_PATTERN.sub("", name)
        last = bare.removesuffix(".weight").rpartition(".")[2]
        targets[name] = table_target(last) if last in tables else bare
    return targets


def _from_dlrm(names: Sequence[str], tables: Sequence[str]) -> dict[str, str]:
    targets = {}
    for name in names:
        bare = _WRAPPER_PREFIX_PATTERN.sub("", name)
        if (match := re.fullmatch(r"emb_l\.(\d+)\.weight", bare)) and int(match[1]) < len(tables):
            bare = table_target(tables[int(match[1])])
        targets[name] = re.sub(r"^top_l\.", "top_mlp.", re.sub(r"^bot_l\.", "bottom_mlp.", bare))
    return targets


def _from_torchrec(names: Sequence[str], tables: Sequence[str]) -> dict[str, str]:
    bags = {n: m[1] for n in names if (m := re.search(r"(?:^|\.)embedding_bags\.(.+)\.weight$", n))}
    table_names = dict(zip(tables, tables, strict=True))
    if len(bags) == len(tables) and not set(bags.values()) & set(tables):
        table_names = dict(zip(bags.values(), tables, strict=True))
    hidden = [m[1] for n in names if (m := re.search(r"over_arch\.model\.0\._mlp\.(\d+)\._linear\.weight$", n))]
    rules = (
        (r"dense_arch\.model\._mlp\.(\d+)\._linear\.(\w+)", lambda m: f"bottom_mlp.{2 * int(m[1])}.{m[2]}"),
        (r"over_arch\.model\.0\._mlp\.(\d+)\._linear\.(\w+)", lambda m: f"top_mlp.{2 * int(m[1])}.{m[2]}"),
        (r"over_arch\.model\.1\.(\w+)", lambda m: f"top_mlp.{2 * len(hidden)}.{m[1]}"),
        (r"inter_arch\.crossnet\.V_kernels\.(\d+)", lambda m: f"cross.down.{m[1]}.weight"),
        (r"inter_arch\.crossnet\.W_kernels\.(\d+)", lambda m: f"cross.up.{m[1]}.weight"),
        (r"inter_arch\.crossnet\.bias\.(\d+)", lambda m: f"cross.up.{m[1]}.bias"),
    )
    targets = {}
    for name in names:
        bare = _WRAPPER_PREFIX_PATTERN.sub("", name)
        if name in bags:
            targets[name] = table_target(table_names.get(bags[name], bags[name]))
            continue
        for pattern, make in rules:
            if match := re.search(pattern + "$", bare):
                bare = make(match)
                break
        targets[name] = bare
    return targets


def reorder_interactions(weight: Tensor, width: int, num_vectors: int) -> Tensor:
    """Reorder the columns of a layer that reads TorchRec's dot products for our order of pairs.

    `weight` is [outputs, width + pairs]. After `width` columns of x, there is one column per pair of `num_vectors`
    vectors.
    """
    # TorchRec lists the upper triangle row by row, this package the lower one.
    rows, columns = torch.triu_indices(num_vectors, num_vectors, offset=1)
    place = torch.full((num_vectors, num_vectors), -1)
    place[columns, rows] = torch.arange(len(rows))
    lower_rows, lower_columns = torch.tril_indices(num_vectors, num_vectors, offset=-1)
    return torch.cat([weight[:, :width], weight[:, width:][:, place[lower_rows, lower_columns]]], dim=1)
