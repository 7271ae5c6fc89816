"""Synthetic click log in the format of Criteo's: TSV with a label, 13 integers and 26 hexadecimal categories.

Row i depends only on the fields of `ClickLog`, i and its day. Rows are drawn in fixed chunks, each from its own
counter-based random stream.
"""

from __future__ import annotations

import gzip
import itertools
import json
import math
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
from meseta.data.synth.effects import feature_keys, replace_ids
from meseta.data.synth.teacher import CLICK_RATE, PROBABILITIES, Tally, Teacher
from meseta.data.synth.worlds import SynthWorld, find_world
from meseta.spec import MesetaError
from meseta.system.files import move, sync

# Chunk index for the calibration of the teacher. No log is long enough to contain it.
_CALIBRATION_CHUNK = 2**64 - 1
# `category_codes` has this many codes per feature.
_MAX_IDS = 2**32


@dataclass(frozen=True)
class LogRows:
    """Consecutive rows of a log."""

    label: NDArray[np.int8]
    """Labels [n], 0 or 1."""
    dense: NDArray[np.int32]
    """Counts [13, n], or `MISSING_COUNT` for missing values."""
    ids: NDArray[np.int64]
    """Ids [26, n]: popularity ranks, from 0 for the most frequent value. -1 means missing. Each id that replaces
    another at a rank adds the cardinality of its feature."""
    bins: NDArray[np.int32]
    """Bins of the true logits [n]."""

    @property
    def probability(self) -> NDArray[np.float64]:
        """True click probabilities [n]."""
        return PROBABILITIES[self.bins]

    def __len__(self) -> int:
        return len(self.label)

    def __getitem__(self, part: slice) -> LogRows:
        return LogRows(self.label[part], self.dense[:, part], self.ids[:, part], self.bins[part])


@dataclass(frozen=True)
class ClickLog:
    """Unlimited log whose rows depend only on these fields. Raises MesetaError if a field is out of range."""

    seed: int = 0
    scale: float = 0.01
    """Factor for `CARDINALITIES`, above 0 and at most 1."""
    world: str = "pairs"
    """Name of the world in `WORLDS`, which determines how clicks depend on features."""
    strength: float = 1.0
    """Factor for the planted part of the logit, in 0..1. With 0, worlds differ only in the distribution of columns."""
    churn: float = 0.0
    """Share of the ids of each feature that new ids replace each day, in 0..1."""
    drift: float = 0.0
    """Angle in radians by which the effects of ids rotate each day."""

    def __post_init__(self) -> None:
        find_world(self.world)
        if not 0 <= self.seed < 2**63:
            raise MesetaError(f"data synth: seed must be in 0..2**63-1, got {self.seed}")
        if not 0 < self.scale <= 1:
            raise MesetaError(f"data synth: scale must be above 0 and at most 1, got {self.scale}; try 0.01")
        if not 0 <= self.strength <= 1:
            raise MesetaError(f"data synth: strength must be in 0..1, got {self.strength}; 1 keeps all planted effects")
        if not 0 <= self.churn <= 1:
            raise MesetaError(f"data synth: churn must be in 0..1, got {self.churn}; 0.05 replaces 5 % of ids each day")
        if not math.isfinite(self.drift):
            raise MesetaError(f"data synth: drift must be a finite angle in radians, got {self.drift}; try 0.1")

    @cached_property
    def synth_world(self) -> SynthWorld:
        return find_world(self.world)

    @cached_property
    def cardinalities(self) -> tuple[int, ...]:
        """Number of ids per sparse feature and day: scaled, but at least 3, or fewer if the feature has fewer."""
        return tuple(max(min(3, n), round(n * self.scale)) for n in CARDINALITIES)

    @cached_property
    def teacher(self) -> Teacher:
        """Teacher, calibrated on rows that are never part of a log."""
        dense, ids, _ = self._inputs(_CALIBRATION_CHUNK)
        return Teacher(self.seed, self.synth_world, self.strength, self.cardinalities, dense, ids, self.drift != 0)

    def chunk(self, index: int, days: NDArray[np.int64] | int = 0) -> LogRows:
        """Return rows index * CHUNK_ROWS to (index + 1) * CHUNK_ROWS - 1, which belong to `days` [CHUNK_ROWS]."""
        dense, ranks, uniform = self._inputs(index)
        num_days: NDArray[np.float64] = np.asarray(days, np.float64)
        ids = replace_ids(ranks, self.churn * num_days, feature_keys(self.seed, NUM_SPARSE), self.cardinalities)
        bins = self.teacher.bins(dense, ids, self.drift * num_days)
        return LogRows((uniform < PROBABILITIES[bins]).astype(np.int8), dense, ids, bins)

    def rows(self, begin: int, end: int) -> Iterator[LogRows]:
        """Yield rows begin to end - 1 of day 0 in parts that do not cross chunk boundaries."""
        for index in range(begin // CHUNK_ROWS, -(-end // CHUNK_ROWS)):
            first = index * CHUNK_ROWS
            yield self.chunk(index)[max(begin - first, 0) : min(end - first, CHUNK_ROWS)]

    def _inputs(self, chunk: int) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.float64]]:
        """Return (dense [13, n], popularity ranks [26, n], uniform random numbers [n])."""
        # The random stream belongs to this chunk only, so that chunks can be computed in any order.
        stream = np.random.Philox(key=np.array([self.seed, chunk], np.uint64))
        dense = draw_counts(stream)
        categories, missing = draw_categories(stream)
        uniform, _ = split_draw(stream.random_raw(CHUNK_ROWS), 0.0)
        ids = to_ids(self.synth_world.correlate(categories, stream), missing, self.cardinalities)
        return dense, ids, uniform


def category_codes(feature: int, ids: NDArray[np.int64]) -> NDArray[np.uint32]:
    """Return the 32-bit code of each id, distinct within a feature."""
    # The finalizer of MurmurHash3, a bijection.
    x = ids.astype(np.uint32) ^ np.uint32(0x9E3779B9 * (feature + 1) & 0xFFFFFFFF)
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))


@lru_cache(maxsize=1)
def _text_tables() -> tuple[NDArray[np.uint64], NDArray[np.uint32]]:
    # The text of a tab and each count -1..MAX_COUNT in 8 bytes, and the 4 hexadecimal digits of each 16-bit number.
    counts = np.array([b"\t%d" % n for n in range(-1, MAX_COUNT + 1)], "S8").view(np.uint64)
    return counts, np.array([b"%04x" % n for n in range(65_536)], "S4").view(np.uint32)


def encode_tsv(rows: LogRows) -> bytes:
    """Return the rows as lines of text."""
    # Each field is written to a slot of fixed width padded with NUL. All NULs are removed at the end.
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
    """Options of `write_click_log`. Raises MesetaError if a value is out of range."""

    out: Path
    """Directory for day_0.tsv, day_1.tsv, ... and teacher.json."""
    num_rows: int
    num_files: int = 1
    """Number of files, one per day. Their numbers of rows differ by at most one."""
    log: ClickLog = ClickLog()
    gzip: bool = False
    """Whether to compress the files to day_0.tsv.gz and so on."""
    probabilities: bool = False
    """Whether to write day_0.probability.parquet and so on, with the label (int8) and true probability (float64) of
    each row."""
    force: bool = False
    """Whether to replace an earlier log in `out`. Other files there are kept."""

    def __post_init__(self) -> None:
        if self.num_files < 1 or self.num_rows < self.num_files:
            raise MesetaError(
                f"data synth: each file must have at least one row, but rows is {self.num_rows} and files is "
                f"{self.num_files}; "
                "specify at least one file, and at least as many rows as files"
            )
        num_ids = max(self.log.cardinalities) * (1 + math.ceil(self.log.churn * (self.num_files - 1)))
        if num_ids > _MAX_IDS:
            raise MesetaError(
                f"data synth: each feature must have at most {_MAX_IDS:,} ids over all days, but one has {num_ids:,} "
                f"in {self.num_files:,} days; choose fewer days, or a smaller churn or scale"
            )


def write_click_log(options: SynthOptions, on_rows: Callable[[int], None] | None = None) -> dict[str, Any]:
    """Write the log and then teacher.json, which marks it as complete. Return the content of teacher.json.

    Each file appears under its name when it is complete. An interrupted run leaves no partial files. `on_rows` receives
    the number of rows of each part written.

    Raises MesetaError if the directory is not empty and `force` is not set, or if writing fails. Then no file of the
    log remains.
    """
    out = options.out
    try:
        with _remove_log_on_error(out, force=options.force):
            total = Tally.empty()
            files = {}
            for k, pieces in itertools.groupby(_split_into_files(options), key=lambda piece: piece[0]):
                name = f"day_{k}.tsv" + (".gz" if options.gzip else "")
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
                "churn": log.churn,
                "drift": log.drift,
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
    # teacher.json is removed first, because it marks a log as complete.
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
    bounds = [k * options.num_rows // options.num_files for k in range(options.num_files + 1)]
    file = 0
    for index in range(-(-options.num_rows // CHUNK_ROWS)):
        first = index * CHUNK_ROWS
        days = np.searchsorted(bounds, np.arange(first, first + CHUNK_ROWS), side="right") - 1
        chunk = options.log.chunk(index, days)
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
            # Without a file name and time in the header, the same log has the same bytes.
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
    # The temporary file is deleted on any error.
    tmp = path.with_name(f".{path.name}.tmp")
    try:
        with tmp.open("wb") as file:
            yield file
        sync(tmp)
        move(tmp, path)
    finally:
        tmp.unlink(missing_ok=True)
