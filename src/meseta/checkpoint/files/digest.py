"""Checksums over logical content, so that they name the model and not the way it was spread or written.

SHA-256 throughout: processors of the last years compute it in hardware, and everybody has a tool that checks it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

_CHUNK_CHARS = 1 << 20
"""Characters that are encoded at a time."""


def hash_arrays(arrays: Iterable[np.ndarray]) -> str:
    """Digest of the little-endian bytes of C-ordered arrays, one after the other."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def hash_json(document: object) -> str:
    """Digest of a document as JSON in UTF-8 with sorted keys and without spaces."""
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    digest = hashlib.sha256()
    for start in range(0, len(text), _CHUNK_CHARS):  # a copy of all of a long manifest costs as much memory as it has
        digest.update(text[start : start + _CHUNK_CHARS].encode())
    return digest.hexdigest()


def hash_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Digest of named tensors by rising name: for each, the digest of [name, dtype, shape] as JSON, then its bytes."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        head = [name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
        digest.update(hash_json(head).encode())
        if tensor.numel():  # an empty tensor may have no stride to view bytes by
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


TABLE_SHAPE_KEYS = ("num_embeddings", "embedding_dim", "dtype", "columns", "block_rows")
"""Fields of a table's entry in a manifest that say what its blocks hold."""


def hash_table(entry: Mapping[str, Any]) -> str:
    """Digest of a table's entry in a manifest: its shape, columns and the digests of its blocks.

    The constants of its optimizer are left out: they say how the rows will learn, not what they are.
    """
    head = {name: entry[name] for name in TABLE_SHAPE_KEYS}
    return hash_json({**head, "blocks": [block["checksum"] for block in entry["blocks"]]})


def hash_chain(entry: Mapping[str, Any]) -> str:
    """Digest of a table's entry whose blocks are put together from several files: its shape, columns and, of each file,
    the first row of its block, the number of its rows and its digest."""
    head = {name: entry[name] for name in TABLE_SHAPE_KEYS}
    files = [[file["first_row"], file["num_rows"], file["checksum"]] for file in entry["blocks"]]
    return hash_json({**head, "files": files})


def content_digest(entry: Mapping[str, Any]) -> str:
    """What names the content of a manifest, or of a table in one: the checksum of what it holds where that is known,
    else the digest of its chain of files. Equal ones mean equal content; of unequal ones the content may be equal."""
    return str(entry["checksum"] if entry.get("checksum") is not None else entry["chain"])


def hash_model(manifest: Mapping[str, Any]) -> str:
    """Digest of the whole model, tables and dense tensors, whatever the step, the plan and the trainer's state. A table
    without a checksum of its content stands there with the digest of its chain."""
    tables = {name: content_digest(entry) for name, entry in manifest["tables"].items()}
    return hash_json({"tables": tables, "dense": manifest["dense"]["checksum"]})


def hash_manifest(manifest: Mapping[str, Any]) -> str:
    """Digest of the manifest itself, without the key that holds this digest."""
    return hash_json({key: value for key, value in manifest.items() if key != "manifest_checksum"})
