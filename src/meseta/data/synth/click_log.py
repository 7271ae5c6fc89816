"""A Criteo-shaped click log with a known teacher, as raw TSV: label, 13 integers, 26 hexadecimal categories.

Row i is a function of (seed, scale, world, strength, i) alone: rows are drawn in fixed chunks, each from its own
counter-based stream.
"""

from __future__ import annotations

import gzip
import itertools
import json
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from meseta.data.synth.columns import (
    CARDINALITIES,
    CHUNK_ROWS,
    MAX_COUNT,
    MISSING_COUNT,
    NUM_DENSE,
    NUM_SPARSE,
    draw_categories,
    draw_counts,
    split_draw,
    to_ids,
)
from meseta.data.synth.teacher import CLICK_RATE, PROBABILITIES, Tally, Teacher
from meseta.data.synth.worlds import SynthWorld, find_world
from meseta.machine.files import move, sync
from meseta.spec import MesetaError

_CALIBRATION_CHUNK = 2**64 - 1


@dataclass(frozen=True)
class LogRows:
    """Consecutive rows of a log."""

    label: NDArray[np.int8]
    """[n] 0 or 1."""
    dense: NDArray[np.int32]
    """[13, n] counts; MISSING_COUNT where missing."""
    ids: NDArray[np.int64]
    """[26, n] popularity ranks, 0 the most frequent; -1 where missing."""
    bins: NDArray[np.int32]
    """[n] bins of the true logits."""

    @property
    def probability(self) -> NDArray[np.float64]:
        """[n] true click probabilities."""
        return PROBABILITIES[self.bins]

    def __len__(self) -> int:
        return len(self.label)

    def __getitem__(self, part: slice) -> LogRows:
        return LogRows(self.label[part], self.dense[:, part], self.ids[:, part], self.bins[part])


@dataclass(frozen=True)
class ClickLog:
    """An endless log: its rows are a function of these fields. Raises MesetaError where one of them cannot be met."""

    seed: int = 0
    scale: float = 0.01
    """Factor on CARDINALITIES, above 0 and at most 1."""
    world: str = "pairs"
    """Name of the law that clicks follow, of WORLDS."""
    strength: float = 1.0
    """Factor on the planted part of the logit, from 0 to 1; at 0 worlds differ in their columns alone."""

    def __post_init__(self) -> None:
        find_world(self.world)
        if not 0 <= self.seed < 2**63:
            raise MesetaError(f"data synth: seed must lie in 0..2**63-1, got {self.seed}")
        if not 0 < self.scale <= 1:
            raise MesetaError(f"data synth: scale must be above 0 and at most 1, got {self.scale}; try 0.01")
        if not 0 <= self.strength <= 1:
            raise MesetaError(f"data synth: strength must lie in 0..1, got {self.strength}; 1 is all that is planted")

    @cached_property
    def synth_world(self) -> SynthWorld:
        """The world, by its name."""
        return find_world(self.world)

    @cached_property
    def cardinalities(self) -> tuple[int, ...]:
        """Ids per sparse feature: scaled, but at least 3 (or the true number where that is smaller)."""
        return tuple(max(min(3, n), round(n * self.scale)) for n in CARDINALITIES)

    @cached_property
    def teacher(self) -> Teacher:
        """Calibrated on rows that are never written."""
        dense, ids, _ = self._inputs(_CALIBRATION_CHUNK)
        return Teacher(self.seed, self.synth_world, self.strength, self.cardinalities, dense, ids)

    def chunk(self, index: int) -> LogRows:
        """Rows index * CHUNK_ROWS to (index + 1) * CHUNK_ROWS - 1."""
        dense, ids, uniform = self._inputs(index)
        bins = self.teacher.bins(dense, ids)
        return LogRows((uniform < PROBABILITIES[bins]).astype(np.int8), dense, ids, bins)

    def rows(self, begin: int, end: int) -> Iterator[LogRows]:
        """Rows begin to end - 1, in pieces that lie inside one chunk."""
        for index in range(begin // CHUNK_ROWS, -(-end // CHUNK_ROWS)):
            first = index * CHUNK_ROWS
            yield self.chunk(index)[max(begin - first, 0) : min(end - first, CHUNK_ROWS)]

    def _inputs(self, chunk: int) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.float64]]:
        """dense [13, n], ids [26, n] and one uniform per row [n], from a stream of this chunk alone."""
        stream = np.random.Philox(key=np.array([self.seed, chunk], np.uint64))
        dense = draw_counts(stream)
        categories, missing = draw_categories(stream)
        uniform, _ = split_draw(stream.random_raw(CHUNK_ROWS), 0.0)
        ids = to_ids(self.synth_world.correlate(categories, stream), missing, self.cardinalities)
        return dense, ids, uniform


def category_codes(feature: int, ids: NDArray[np.int64]) -> NDArray[np.uint32]:
    """The 32-bit number that stands for each rank, distinct within a feature (MurmurHash3's finaliser, a bijection)."""
    x = ids.astype(np.uint32) ^ np.uint32(0x9E3779B9 * (feature + 1) & 0xFFFFFFFF)
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))


@lru_cache(maxsize=1)
def _text_tables() -> tuple[NDArray[np.uint64], NDArray[np.uint32]]:
    """Text of a tab and each count -1..MAX_COUNT as 8 bytes, and of each 16-bit number as 4 hexadecimal digits."""
    counts = np.array([b"\t%d" % n for n in range(-1, MAX_COUNT + 1)], "S8").view(np.uint64)
    return counts, np.array([b"%04x" % n for n in range(65_536)], "S4").view(np.uint32)


def encode_tsv(rows: LogRows) -> bytes:
    """The rows as lines of text: each field in a slot of fixed width padded with NUL, then all NULs removed."""
    counts, hexadecimal = _text_tables()
    words = np.zeros((len(rows), 2 + 2 * NUM_DENSE + 3 * NUM_SPARSE), np.uint32)
    text = words.view(np.uint8)
    text[:, 0] = rows.label + ord("0")
    text[:, -4] = ord("\n")
    for j, column in enumerate(rows.dense):
        slots = counts[np.maximum(column, -1) + 1]
        slots[column == MISSING_COUNT] = ord("\t")
        words[:, 1 + 2 * j : 3 + 2 * j] = slots.view(np.uint32).reshape(-1, 2)
    for f, column in enumerate(rows.ids):
        codes = category_codes(f, column)
        present = column >= 0
        slot = 1 + 2 * NUM_DENSE + 3 * f
        text[:, 4 * slot] = ord("\t")
        words[:, slot + 1] = np.where(present, hexadecimal[codes >> np.uint32(16)], 0)
        words[:, slot + 2] = np.where(present, hexadecimal[codes & np.uint32(0xFFFF)], 0)
    return words.tobytes().translate(None, b"\0")


@dataclass(frozen=True, kw_only=True)
class SynthOptions:
    """What to write; raises MesetaError where a value cannot be met."""

    out: Path
    """Directory for day_0.tsv, day_1.tsv, ... and teacher.json."""
    num_rows: int
    num_files: int = 1
    """Files of equal length, to within a row."""
    log: ClickLog = ClickLog()
    gzip: bool = False
    """Write day_0.tsv.gz and so on."""
    probabilities: bool = False
    """Write day_0.probability.parquet and so on: label (int8) and true probability (float64) of each row."""
    force: bool = False
    """Replace an earlier log in `out`; other files there stay."""

    def __post_init__(self) -> None:
        if self.num_files < 1 or self.num_rows < self.num_files:
            raise MesetaError(
                f"data synth: every file needs a row, but rows is {self.num_rows} and files is {self.num_files}; "
                "give at least one file, and at least as many rows as files"
            )

    @property
    def file_names(self) -> list[str]:
        return [f"day_{k}.tsv" + (".gz" if self.gzip else "") for k in range(self.num_files)]


def write_click_log(options: SynthOptions, on_rows: Callable[[int], None] | None = None) -> dict[str, Any]:
    """Write the log, then teacher.json, whose presence says that the log is whole; returns its content.

    Args:
        options: what to write.
        on_rows: called with the number of rows of each piece written.

    Raises MesetaError for a directory in use without `force`, and where writing fails, which leaves nothing of the log.
    Each file appears under its name when it is whole; an interrupted run leaves no piece of one behind.
    """
    out = options.out
    try:
        with _remove_log_on_error(out, force=options.force):
            total = Tally.empty()
            files = {}
            for k, pieces in itertools.groupby(_split_into_files(options), key=lambda piece: piece[0]):
                name = options.file_names[k]
                tally = _write_file(options, name, (rows for _, rows in pieces), on_rows)
                files[name] = tally.summary()
                total.merge(tally)
            log = options.log
            document = {
                "format": "meseta.teacher/1",
                "all": total.summary(),
                "files": files,
                "world": log.world,
                "strength": log.strength,
                "seed": log.seed,
                "scale": log.scale,
                "cardinalities": list(log.cardinalities),
                "planted": [
                    {"features": [f"cat_{feature}" for feature in product.features], "sign": product.sign}
                    for product in log.synth_world.planted
                ],
                "latent_dim": log.synth_world.latent_dim,
                "target_click_rate": CLICK_RATE,
            }
            with _atomic_file(out / _TEACHER_FILE) as file:
                file.write(json.dumps(document, indent=1).encode() + b"\n")
    except OSError as error:
        raise MesetaError(
            f"data synth: cannot write {str(out)!r}: {error.strerror or error}; make room there, or choose another"
        ) from None
    return document


_TEACHER_FILE = "teacher.json"
_LOG_FILE_PATTERN = re.compile(r"\.?(teacher\.json|day_\d+\.(tsv(\.gz)?|probability\.parquet))(\.tmp)?")


@contextmanager
def _remove_log_on_error(out: Path, *, force: bool) -> Iterator[None]:
    """Where the system refuses to write, nothing stays of what was written."""
    is_new = not out.exists()
    _prepare_folder(out, force=force)
    try:
        yield
    except OSError:
        with suppress(OSError):
            _remove_log(out)
            if is_new:
                out.rmdir()
        raise


def _prepare_folder(out: Path, *, force: bool) -> None:
    """Make `out`, or with `force` take the files of an earlier log out of it, teacher.json first."""
    if out.exists() and not out.is_dir():
        raise MesetaError(f"data synth: {str(out)!r} is not a directory; choose another --out")
    if out.is_dir() and any(out.iterdir()):
        if not force:
            raise MesetaError(
                f"data synth: {str(out)!r} is not empty; choose another --out, or --force to replace the log in it"
            )
        _remove_log(out)
    out.mkdir(parents=True, exist_ok=True)


def _remove_log(out: Path) -> None:
    (out / _TEACHER_FILE).unlink(missing_ok=True)
    for path in list(out.iterdir()):
        if _LOG_FILE_PATTERN.fullmatch(path.name):
            path.unlink()


def _split_into_files(options: SynthOptions) -> Iterator[tuple[int, LogRows]]:
    """(file, rows) in order, cut where a file or a chunk ends."""
    bounds = [k * options.num_rows // options.num_files for k in range(options.num_files + 1)]
    file = 0
    for index in range(-(-options.num_rows // CHUNK_ROWS)):
        first = index * CHUNK_ROWS
        chunk = options.log.chunk(index)
        while file < options.num_files and bounds[file] < first + CHUNK_ROWS:
            yield file, chunk[max(bounds[file] - first, 0) : bounds[file + 1] - first]
            if bounds[file + 1] > first + CHUNK_ROWS:
                break
            file += 1


def _write_file(
    options: SynthOptions, name: str, pieces: Iterator[LogRows], on_rows: Callable[[int], None] | None
) -> Tally:
    tally = Tally.empty()
    with ExitStack() as stack:
        file = stack.enter_context(_atomic_file(options.out / name))
        write: Callable[[bytes], object] = file.write
        if options.gzip:
            # No name and no time in the header: the same log gives the same bytes.
            write = stack.enter_context(gzip.GzipFile("", "wb", compresslevel=6, fileobj=file, mtime=0)).write
        sidecar = None
        if options.probabilities:
            path = options.out / f"{name.partition('.')[0]}.probability.parquet"
            schema = pa.schema({"label": pa.int8(), "probability": pa.float64()})
            sidecar = stack.enter_context(pq.ParquetWriter(stack.enter_context(_atomic_file(path)), schema))
        for rows in pieces:
            write(encode_tsv(rows))
            tally.add(rows.bins, rows.label)
            if sidecar is not None:
                sidecar.write_batch(
                    pa.record_batch({"label": rows.label, "probability": rows.probability}, schema=sidecar.schema)
                )
            if on_rows is not None:
                on_rows(len(rows))
    return tally


@contextmanager
def _atomic_file(path: Path) -> Iterator[BinaryIO]:
    """A file that takes its name when it is whole, and leaves nothing behind on any error or interrupt."""
    tmp = path.with_name(f".{path.name}.tmp")
    try:
        with tmp.open("wb") as file:
            yield file
        sync(tmp)
        move(tmp, path)
    finally:
        tmp.unlink(missing_ok=True)
