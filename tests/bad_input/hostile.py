"""Crafted checkpoints whose checksums are right, with one fault each."""

from __future__ import annotations

import copy
import json
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa

from meseta.checkpoint.files import digest

Change = Callable[[Path], object]
"""Damages the checkpoint in a folder."""
USER, TAGS = "tables/user/block-00000.arrow", "tables/tags/block-00000.arrow"
DENSE, MANIFEST = "dense.safetensors", "manifest.json"

NAMES = [
    *("", ".", "..", "/", "../x", "../../x", "tables/../../x", "tables/../dense.safetensors", "tables/user/../../../x"),
    *("/etc/passwd", "//etc/passwd", "/dev/zero", "/proc/self/mem", "~/.bashrc", "file:///etc/passwd", "memory://x"),
    *("./dense.safetensors", "tables//user/block-00000.arrow", "tables/./user/block-00000.arrow", "tables/user"),
    *(f"{USER}/", f"{USER}.", f"{USER} ", f"/{USER}", USER.upper(), USER.title(), DENSE.upper(), "a\tb"),
    *("tables/user/block-0.arrow", "tables/user/block-00001.arrow", "tables/user/block-00000.arrow\0.txt"),
    *("tables/user/block-٠٠٠٠٠.arrow", "tables/us\u0308er/block-00000.arrow", "tables/\uff0e\uff0e/x", "\u2024/x"),
    *("tables\\user\\block-00000.arrow", "..\\..\\x", "C:\\x", "\\\\host\\x", "CON", "a\nb", "\x1b[2Jx", "\u202ecod"),
    *("manifest.json", "MANIFEST.json", "manifest.json/x", "dense.safetensors/x", ".tmp-step-000000004", "\ud800"),
    *("x" * 256, "a/" * 3000 + "a", "x" * 100_000, "%2e%2e/x", "tables/%2E%2E/x", "{0}", "$HOME/x", "*", "-rf"),
]  # fmt: skip
NUMBERS: list[Any] = [
    None,
    True,
    -1,
    0,
    1.5,
    7.0,
    "7",
    [],
    {},
    float("nan"),
    1e999,
    2**31,
    2**53,
    2**60,
    2**64,
    10**400,
]
OTHERS: list[Any] = [
    None,
    True,
    7,
    -1.5,
    "",
    "x",
    "\ud800",
    "float31",
    "a\0b",
    "../x",
    [],
    [[]],
    ["x"],
    {},
    {"x": 1},
    10**9,
]
FIELDS: dict[str, list[Any]] = {
    **dict.fromkeys(("format", "tables", "tables.user", "tables.user.dtype", "tables.user.optimizer"), OTHERS),
    **dict.fromkeys(("tables.user.optimizer.name", "tables.user.columns", "tables.user.columns.0"), OTHERS),
    **dict.fromkeys((f"tables.user.columns.1.{name}" for name in ("name", "kind", "dtype")), OTHERS),
    **dict.fromkeys(("tables.user.blocks", "tables.user.blocks.0", "tables.user.blocks.0.checksum", "dense"), OTHERS),
    **dict.fromkeys(("tables.user.checksum", "dense.checksum", "checksum", "manifest_checksum", "plan"), OTHERS),
    "state": [value for value in OTHERS if not isinstance(value, dict)],
    **dict.fromkeys(("step", "plan.num_ranks", "dense.num_bytes", "tables.user.num_embeddings"), NUMBERS),
    **dict.fromkeys(("tables.user.embedding_dim", "tables.user.block_rows"), NUMBERS),
    **dict.fromkeys((f"tables.user.blocks.0.{name}" for name in ("num_rows", "num_bytes")), NUMBERS),
    "tables.user.blocks.0.first_row": [value for value in NUMBERS if value != 0 or isinstance(value, bool | float)],
}
"""Place of a value, and a value of another type or out of its range."""
HARMLESS = {
    ("step", 0),
    ("step", 2**31),
    ("tables.user.optimizer.name", "x"),
    ("tables.user.optimizer.name", ""),
    ("plan.num_ranks", 2**31),
}
HARMLESS |= {("tables.user.optimizer.name", name) for name in ("../x", "a\0b", "float31")}
HARMLESS |= {("tables.user.columns.1.name", name) for name in ("../x", "x", "float31")}
"""Values that a checkpoint may have as far as its files go."""


def rewrite(change: Callable[[dict[str, Any]], object]) -> Change:
    """Change a manifest, and correct its checksums if it still has them."""

    def spoil(root: Path) -> None:
        manifest = json.loads((root / MANIFEST).read_text())
        before = copy.deepcopy(manifest)
        change(manifest)
        sign(manifest, before)
        (root / MANIFEST).write_text(json.dumps(manifest))

    return spoil


def sign(manifest: dict[str, Any], before: dict[str, Any]) -> None:
    """Correct every checksum except those that were changed on purpose."""
    wrong = KeyError, TypeError, AttributeError, ValueError
    with suppress(*wrong):
        for name, entry in manifest["tables"].items():
            if entry.get("checksum") == before["tables"].get(name, entry).get("checksum"):
                entry["checksum"] = digest.hash_table(entry)
    with suppress(*wrong):
        if manifest["checksum"] == before["checksum"]:
            manifest["checksum"] = digest.hash_model(manifest)
    with suppress(*wrong):
        if manifest["manifest_checksum"] == before["manifest_checksum"]:
            manifest["manifest_checksum"] = digest.hash_manifest(manifest)


def at(document: Any, path: str) -> tuple[Any, Any]:
    """Return the container and the key of a value inside a document."""
    *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    for part in parents:
        document = document[part]
    return document, last


def put(path: str, value: Any) -> Change:
    def change(manifest: dict[str, Any]) -> None:
        container, key = at(manifest, path)
        container[key] = value

    return rewrite(change)


def drop(path: str) -> Change:
    def change(manifest: dict[str, Any]) -> None:
        container, key = at(manifest, path)
        del container[key]

    return rewrite(change)


def tables(change: Callable[[dict[str, Any]], object]) -> Change:
    return rewrite(lambda manifest: change(manifest["tables"]))


def columns(change: Callable[[list[dict[str, Any]]], object]) -> Change:
    return tables(lambda entries: change(entries["user"]["columns"]))


def blocks(change: Callable[[list[dict[str, Any]]], object]) -> Change:
    return tables(lambda entries: change(entries["user"]["blocks"]))


def text(change: Callable[[str], str | bytes]) -> Change:
    """Change the text of a manifest. Its checksums are those of the text as a lenient reader parses it."""

    def spoil(root: Path) -> None:
        changed = change((root / MANIFEST).read_text())
        (root / MANIFEST).write_bytes(
            changed if isinstance(changed, bytes) else changed.encode("utf-8", "surrogatepass")
        )

    return spoil


def nested(levels: int) -> Any:
    value: Any = 0
    for _ in range(levels):
        value = [value]
    return value


def manifests() -> Iterator[tuple[str, Change]]:
    """Return manifests that no run writes, by their fault."""
    for place in ("tables.user.blocks.0.path", "tables.tags.blocks.0.path", "dense.path"):
        for number, name in enumerate(NAMES):
            yield f"{place} {number}", put(place, name)
    for place, values in FIELDS.items():
        for number, value in enumerate(values):
            harmless = any(place == p and type(value) is type(v) and value == v for p, v in HARMLESS)
            if not harmless:
                yield f"{place} {number}", put(place, value)
        yield f"{place} missing", drop(place)
    for place in ("", "tables.user.", "tables.user.columns.0.", "tables.user.blocks.0.", "dense."):
        yield f"{place}unknown", put(f"{place}unknown", 1)
    names = (
        "User",
        "us\u0065\u0301r",
        "..",
        "*" * 300,
        "a\0b",
        "a\nb",
        "\x1b[2J",
        "",
        "\ud800",
        "a" * 256,
        "user ",
        "Tags",
    )
    for number, name in enumerate(names):
        yield f"table named {number}", tables(lambda t, name=name: t.update({name: t.pop("user")}))
        yield f"another table {number}", tables(lambda t, name=name: t.update({name: copy.deepcopy(t["user"])}))
    yield "no blocks", blocks(list.clear)
    yield "a block twice", blocks(lambda b: b.append(dict(b[0])))
    yield "a block of another number", blocks(lambda b: b.append({**b[0], "path": USER.replace("00000", "00001")}))
    yield "a block in two", blocks(lambda b: (b[0].update(num_rows=100), b.append({**b[0], "first_row": 100})))
    yield "too many blocks", blocks(lambda b: b.extend([b[0]] * 20_000))
    yield "columns twice", columns(lambda c: c.append(dict(c[-1])))
    yield "columns turned round", columns(list.reverse)
    yield "no columns", columns(list.clear)
    yield "10,000 columns", columns(lambda c: c.extend({**c[0], "name": f"s{i:05d}"} for i in range(10_000)))
    for name in ("id", "row", "", "../x", "a\0b", "\x1b[2J", "x" * 300):
        yield f"a column {name[:9]!r}", columns(lambda c, name=name: c.append({**c[0], "name": name}))
    for kind in ("bool", "complex64", "object", "O", "U100000000", "datetime64[s]", "float8_e4m3fn", "V1000000000"):
        yield f"values of {kind}", columns(lambda c, kind=kind: c[1].update(dtype=kind))
    for rows in (2**40, 2**52, 2**60):
        yield (
            f"{rows} rows",
            tables(lambda t, n=rows: (t["user"].update(num_embeddings=n), t["user"]["blocks"][0].update(num_rows=n))),
        )
        yield f"{rows} wide", tables(lambda t, n=rows: t["user"].update(embedding_dim=n, block_rows=1))
        yield f"a block of {rows} bytes", blocks(lambda b, n=rows: b[0].update(num_bytes=n))
        yield f"{rows} dense bytes", put("dense.num_bytes", rows)
    yield "nested deeply", put("state.random", nested(100))
    yield (
        "nested very deeply",
        text(lambda t: t.replace('"state": {', '"state": {"deep": ' + "[" * 10**6 + "]" * 10**6 + ",", 1)),
    )
    yield "a key twice", text(lambda t: t.replace('"step":', '"step": 4, "step":', 1))
    yield "a table twice", text(lambda t: t.replace('"user": {', '"user": 7, "user": {', 1))
    for number, value in enumerate(
        ("NaN", "Infinity", "1e999", "9" * 5000, "0x10", "'x'", '"\\ud800"', "01", "[" * 70)
    ):
        yield f"text {number}", text(lambda t, value=value: t.replace('"state": {', f'"state": {{"x": {value},', 1))
    for code in ("utf-8-sig", "utf-16", "utf-32", "utf-7"):
        yield (
            f"as {code}",
            text(lambda t, code=code: t.encode(code) + b" " * (code == "utf-7") + b"\0" * (code == "utf-7")),
        )
    for number, content in enumerate(
        (b"", b"null", b"[]", b"7", b'"x"', b"{}", b"\0" * 4096, b"\xff" * 64, b"[" * 4096)
    ):
        yield f"content {number}", text(lambda _, content=content: content)
    yield "text after it", text(lambda t: t + "{}")
    yield "half of it", text(lambda t: t[: len(t) // 2])
    yield "33 MiB of spaces", text(lambda t: t + " " * (33 << 20))
    yield "31 MiB of a string", put("state.random", "x" * (31 << 20))
    yield "a million lists", text(lambda t: t.replace('"state": {', '"state": {"x": [' + "[]," * 10**6 + "0],", 1))


def replaced(name: str, make: Callable[[Path], object]) -> Change:
    """Replace a file or folder by something else."""

    def spoil(root: Path) -> None:
        path = root / name
        path.rename(root.parent / "former")
        make(path)

    return spoil


def linked(name: str, target: str) -> Change:
    return replaced(name, lambda path: path.symlink_to(target.format(root=path.parents[len(Path(name).parts) - 1])))


def listen(path: Path) -> None:
    """Bind a socket, which outlives its process. A relative name keeps the address short."""
    folder = os.open(path.parent, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(f"/proc/self/fd/{folder}/{path.name}")
    os.close(folder)


def grown(path: Path) -> None:
    """Make a sparse file of 2^40 bytes."""
    with path.open("ab") as file:
        file.truncate(1 << 40)


def kinds_of_files() -> Iterator[tuple[str, Change]]:
    """Return checkpoints with a valid manifest, one of whose files is no regular file."""
    for name in (MANIFEST, DENSE, USER):
        yield f"{name} a FIFO", replaced(name, os.mkfifo)
        yield f"{name} a socket", replaced(name, listen)
        yield f"{name} a folder", replaced(name, Path.mkdir)
        yield f"{name} sparse", lambda root, name=name: grown(root / name)
        yield f"{name} cut", lambda root, name=name: os.truncate(root / name, 40)
        yield f"{name} missing", lambda root, name=name: (root / name).unlink()
        for target in (
            "/dev/zero",
            "/etc/hostname",
            "nowhere",
            "{root}/../former",
            "{root}/../../secret",
            "/proc/self/mem",
        ):
            yield f"{name} at {target}", linked(name, target)
    for name in ("tables", "tables/user"):
        for target in ("/", "/etc", "{root}/../former", "{root}/../..", "nowhere", "."):
            yield f"{name} at {target}", linked(name, target)
        yield f"{name} a FIFO", replaced(name, os.mkfifo)
        yield f"{name} a file", replaced(name, Path.touch)


def arrow(change: Callable[[pa.RecordBatch], pa.RecordBatch], **options: Any) -> Change:
    """Replace a block by another Arrow file, and correct its size in the manifest."""

    def spoil(root: Path) -> None:
        with pa.OSFile(str(root / USER)) as file:
            batch = change(pa.ipc.open_file(file).get_batch(0))
        chosen = pa.ipc.IpcWriteOptions(**options)
        with pa.OSFile(str(root / USER), "wb") as sink, pa.ipc.new_file(sink, batch.schema, options=chosen) as writer:
            writer.write_batch(batch)
        blocks(lambda b: b[0].update(num_bytes=(root / USER).stat().st_size))(root)

    return spoil


def with_metadata(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Add metadata and keep the size of the file, if a codec makes the data smaller."""
    return batch.replace_schema_metadata({"x": os.urandom(1 << 11).hex()})


def flipped(name: str, place: int) -> Change:
    def spoil(root: Path) -> None:
        content = bytearray((root / name).read_bytes())
        content[place] ^= 0xFF
        (root / name).write_bytes(content)

    return spoil


def header(change: Callable[[dict[str, Any]], object], length: int | None = None) -> Change:
    """Replace the header of the file of dense tensors, and correct its size in the manifest."""

    def spoil(root: Path) -> None:
        content = (root / DENSE).read_bytes()
        size = int.from_bytes(content[:8], "little")
        document = json.loads(content[8 : 8 + size])
        change(document)
        made = json.dumps(document).encode()
        made += b" " * (-len(made) % 8)
        size_bytes = (len(made) if length is None else length).to_bytes(8, "little")
        (root / DENSE).write_bytes(size_bytes + made + content[8 + size :])
        put("dense.num_bytes", (root / DENSE).stat().st_size)(root)

    return spoil


def first_tensor(**changes: Any) -> Change:
    return header(lambda h: next(v for k, v in h.items() if k != "__metadata__").update(changes))


def contents() -> Iterator[tuple[str, Change]]:
    """Return checkpoints with a valid manifest, one of whose files has false metadata."""
    for codec in ("zstd", "lz4"):
        yield f"compressed by {codec}", arrow(with_metadata, compression=codec)
    yield "stranger's metadata", arrow(with_metadata)
    yield "of another order", arrow(lambda b: b.select([0, 2, 1]))
    for place in (0, 8, 9, 12, 20, 100, 300, 600, 700, 800, 900, 1000, -1, -7, -9, -20, -100, -200, -300):
        yield f"block's byte {place}", flipped(USER, place)
    for place in (0, 4, 7, 8, 9, 20, -1):
        yield f"dense byte {place}", flipped(DENSE, place)
    for length in (0, 1, 2**31, 2**60, 2**64 - 1, 99_999_999):
        yield f"a header of {length}", header(lambda h: None, length)
    for shape in ([2**60], [2**32, 2**32], [-1], ["7"], [[1]], 7, [1.5], [0]):
        yield f"a tensor of {shape}", first_tensor(shape=shape)
    for kind in ("F128", "BOOL", "F8_E4M3", "U64", "", None, 7):
        yield f"a tensor's {kind}", first_tensor(dtype=kind)
    for offsets in ([0, 2**60], [8, 0], [-8, 0], [0], [], "x", [2**63, 2**64]):
        yield f"a tensor at {offsets}", first_tensor(data_offsets=offsets)
    for name in ("../../x", "/etc/x", "a\0b", "\x1b[2J", "", "file", "x" * 70_000):
        yield f"a tensor {name[:9]!r}", header(lambda h, name=name: h.update({name: h.pop(next(iter(h)))}))


MANIFESTS, FILES, CONTENTS = dict(manifests()), dict(kinds_of_files()), dict(contents())


def states() -> Iterator[tuple[str, Change]]:
    """Return valid checkpoints whose state no run can resume from."""
    wrong: list[Any] = [None, True, -1, "x", [], {"x": "y"}, 1e300]
    for name in ("num_samples", "embedding_step", "ids_outside", "train_s", "dense_optimizer", "random", "best"):
        for number, value in enumerate(wrong):
            if (name, value) not in (("train_s", 1e300), ("dense_optimizer", "x"), ("best", None), ("best", [])):
                yield f"state.{name} {number}", put(f"state.{name}", value)
    for number, value in enumerate(wrong):
        yield f"reader {number}", put("reader", value)
        for name in ("epoch", "row", "seed", "split"):
            if (name, number) != ("row", 1):
                yield f"reader.{name} {number}", put(f"reader.{name}", value)
    yield "no state", put("state", {})


def descriptions() -> Iterator[tuple[str, Change]]:
    """Return prepared datasets whose dataset.json refers to other files, or is no regular file."""

    def change(path: str, value: Any) -> Change:
        def spoil(root: Path) -> None:
            document = json.loads((root / "dataset.json").read_text())
            container, key = at(document, path)
            container[key] = value
            (root / "dataset.json").write_text(json.dumps(document))

        return spoil

    for number, name in enumerate(NAMES):
        yield f"a file {number}", change("splits.train.files.0.path", name)
        if name.startswith(("/", "..", "./")) or "/../" in name:  # hashed ids need no other file
            yield f"a vocabulary {number}", change("sparse.0.vocabulary", name)
            yield f"touched rows {number}", change("touched", name)
    for place in ("splits.train.num_rows", "splits.train.files.0.num_rows", "sparse.0.num_embeddings"):
        for number, value in enumerate(NUMBERS):
            if (place, value) != ("sparse.0.num_embeddings", 2**31):
                yield f"{place} {number}", change(place, value)
    places = ("dense", "sparse", "splits", "splits.train.files", "sparse.0.name", "sparse.0.encoding", "labels")
    form = (f"source_form.{key}" for key in ("kind", "labels", "delimiter", "header", "separators", "weights"))
    for place in (*places, "splits.valid", "valid_fraction", "source_form", "has_labels", *form):
        for number, value in enumerate(OTHERS):
            kept = (("dense", []), ("sparse", []), ("sparse.0.name", "../x"), ("valid_fraction", None))
            kept += (("source_form", None), ("has_labels", True))
            kept += tuple(("source_form.delimiter", text) for text in ("x", "float31", "a\0b", "../x"))
            kept += tuple((f"source_form.{key}", empty) for key in ("separators", "weights") for empty in ({},))
            kept += tuple(("source_form.header", names) for names in ([], ["x"]))
            if (place, value) not in kept:
                yield f"{place} {number}", change(place, value)
    for name in ("dataset.json", "train/part-00000.parquet"):
        yield f"{name} a FIFO", replaced(name, os.mkfifo)
        yield f"{name} a folder", replaced(name, Path.mkdir)
        for target in ("/dev/zero", "/etc/hostname", "nowhere", "/proc/self/mem", "{root}/../former"):
            yield f"{name} at {target}", linked(name, target)
    yield "train at {root}/../former", linked("train", "{root}/../former")
    yield "a dataset.json without end", lambda root: grown(root / "dataset.json")


STATES, DESCRIPTIONS = dict(states()), dict(descriptions())
