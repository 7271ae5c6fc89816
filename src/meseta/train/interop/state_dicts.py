"""Files with the tensors of a model that another program trained, and the names that it gives to them."""

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
from meseta.machine.files import open_regular
from meseta.spec import MesetaError

Layout = Literal["torch", "torchrec", "dlrm"]
LAYOUTS: tuple[Layout, ...] = ("torch", "torchrec", "dlrm")
_SUFFIXES = (".pt", ".pth", ".bin", ".tar", ".safetensors")
_STATE_DICT_KEYS = ("state_dict", "model_state_dict", "model")
_WRAPPER_PREFIX_PATTERN = re.compile(r"^(?:(?:module|model|_orig_mod|_dmp_wrapped_module)\.)+")


def table_target(table: str) -> str:
    """What a table's rows are called beside the dense parameters of a model."""
    return f"embeddings.{table}.weight"


def read_state_dict(path: Path) -> dict[str, Tensor]:
    """Tensors by name, on the CPU, of a state_dict that torch.save wrote, of a safetensors file, or of all such files
    in a folder. Large ones stay in the file until they are used.

    No pickle is ever loaded: torch reads tensors and plain containers alone (weights_only). Raises MesetaError for what
    needs more than that, with the way out, and for a file that is missing, damaged or no such file.
    """
    if path.is_dir():
        if (path / ".metadata").exists():
            raise MesetaError(
                f"import: {str(path)!r} is of torch.distributed.checkpoint, whose .metadata is a pickle, and no "
                "pickle is ever loaded; where you trust it: python -m torch.distributed.checkpoint.format_utils "
                f"dcp_to_torch {path} tensors.pt, then import tensors.pt"
            )
        files = sorted(file for file in path.iterdir() if file.suffix in _SUFFIXES)
        if not files:
            raise MesetaError(
                f"import: {str(path)!r} has no file {', '.join('*' + s for s in _SUFFIXES)}; give another"
            )
    else:
        files = [path]
    found: dict[str, Tensor] = {}
    for file in files:
        for name, tensor in _read_file(file).items():
            if name in found:
                raise MesetaError(f"import: {name!r} is in {str(file)!r} and in another file of its folder; move one")
            found[name] = tensor
    return found


def _read_file(file: Path) -> dict[str, Tensor]:
    try:
        with open(open_regular(file), "rb") as opened:
            head = opened.read(4)
        if file.suffix == ".safetensors":
            return dict(load_file(file))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of pickle protocols, before it refuses them
            document = torch.load(file, map_location="cpu", weights_only=True, mmap=head[:2] == b"PK")
    except pickle.UnpicklingError:
        raise MesetaError(
            f"import: {str(file)!r} holds Python objects beside its tensors, or is no file of torch.save; no pickle is "
            "ever loaded. Where it was made, save the tensors alone: "
            "torch.save({name: tensor for name, tensor in model.state_dict().items()}, 'tensors.pt')"
        ) from None
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, SafetensorError) as error:
        what = getattr(error, "strerror", None) or error_summary(error)
        raise MesetaError(f"import: {str(file)!r} cannot be read ({what}); give a whole file of torch.save") from None
    return _extract_state_dict(file, document)


def _extract_state_dict(file: Path, document: Any) -> dict[str, Tensor]:
    """The names and tensors in a document, which may have them under a key of its own."""
    for key in _STATE_DICT_KEYS:
        if isinstance(document, Mapping) and isinstance(document.get(key), Mapping):
            document = document[key]
    tensors = {}
    if isinstance(document, Mapping):
        tensors = {name: t for name, t in document.items() if isinstance(name, str) and isinstance(t, Tensor)}
    if not tensors:
        raise MesetaError(f"import: {str(file)!r} holds no named tensors; save model.state_dict() of the model")
    return tensors


def translate_names(layout: Layout, names: Sequence[str], tables: Sequence[str]) -> dict[str, str]:
    """What each tensor of `names` is called here; names that the layout does not know stay as they are.

    `tables` are those of the data, in their order, which is that of facebookresearch/dlrm's `emb_l`. TorchRec's tables
    go by their names; where none of them is known here and there are as many, by their order.
    """
    rules = {"torch": _from_torch, "torchrec": _from_torchrec, "dlrm": _from_dlrm}
    return rules[layout](names, tables)


def _from_torch(names: Sequence[str], tables: Sequence[str]) -> dict[str, str]:
    found = {}
    for name in names:
        bare = _WRAPPER_PREFIX_PATTERN.sub("", name)
        last = bare.removesuffix(".weight").rpartition(".")[2]
        found[name] = table_target(last) if last in tables else bare
    return found


def _from_dlrm(names: Sequence[str], tables: Sequence[str]) -> dict[str, str]:
    found = {}
    for name in names:
        bare = _WRAPPER_PREFIX_PATTERN.sub("", name)
        if (match := re.fullmatch(r"emb_l\.(\d+)\.weight", bare)) and int(match[1]) < len(tables):
            bare = table_target(tables[int(match[1])])
        found[name] = re.sub(r"^top_l\.", "top_mlp.", re.sub(r"^bot_l\.", "bottom_mlp.", bare))
    return found


def _from_torchrec(names: Sequence[str], tables: Sequence[str]) -> dict[str, str]:
    bags = {n: m[1] for n in names if (m := re.search(r"(?:^|\.)embedding_bags\.(.+)\.weight$", n))}
    known = dict(zip(tables, tables, strict=True))
    if len(bags) == len(tables) and not set(bags.values()) & set(tables):
        known = dict(zip(bags.values(), tables, strict=True))
    hidden = [m[1] for n in names if (m := re.search(r"over_arch\.model\.0\._mlp\.(\d+)\._linear\.weight$", n))]
    rules = (
        (r"dense_arch\.model\._mlp\.(\d+)\._linear\.(\w+)", lambda m: f"bottom_mlp.{2 * int(m[1])}.{m[2]}"),
        (r"over_arch\.model\.0\._mlp\.(\d+)\._linear\.(\w+)", lambda m: f"top_mlp.{2 * int(m[1])}.{m[2]}"),
        (r"over_arch\.model\.1\.(\w+)", lambda m: f"top_mlp.{2 * len(hidden)}.{m[1]}"),
        (r"inter_arch\.crossnet\.V_kernels\.(\d+)", lambda m: f"cross.down.{m[1]}.weight"),
        (r"inter_arch\.crossnet\.W_kernels\.(\d+)", lambda m: f"cross.up.{m[1]}.weight"),
        (r"inter_arch\.crossnet\.bias\.(\d+)", lambda m: f"cross.up.{m[1]}.bias"),
    )
    found = {}
    for name in names:
        bare = _WRAPPER_PREFIX_PATTERN.sub("", name)
        if name in bags:
            found[name] = table_target(known.get(bags[name], bags[name]))
            continue
        for pattern, make in rules:
            if match := re.search(pattern + "$", bare):
                bare = make(match)
                break
        found[name] = bare
    return found


def reorder_interactions(weight: Tensor, width: int, num_vectors: int) -> Tensor:
    """The columns of a layer that reads TorchRec's dot products, in the order that ours come in.

    `weight` is [outputs, width + pairs]: `width` columns of x, then one per pair of `num_vectors` vectors, there as the
    upper triangle row by row, here as the lower one.
    """
    rows, columns = torch.triu_indices(num_vectors, num_vectors, offset=1)
    place = torch.full((num_vectors, num_vectors), -1)
    place[columns, rows] = torch.arange(len(rows))
    lower_rows, lower_columns = torch.tril_indices(num_vectors, num_vectors, offset=-1)
    return torch.cat([weight[:, :width], weight[:, width:][:, place[lower_rows, lower_columns]]], dim=1)
