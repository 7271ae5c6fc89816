"""Twelve messy click logs over two weeks, with a known best AUC.

Each has a column of times, columns without any effect, and some of: strong numbers, a daily cycle, drift, rare
positives, few rows, missing values and long-tailed ids. Half of the logs write times as text such as
`2017-11-07 9:30`, half as seconds since 1970. The columns as written determine the logits. The test rows are the day
after the training rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import expit

from common.planted_logs import WrittenLog, draw_ids, draw_vectors, write_rows

NUM_DAYS, DAY_S, MINUTE_S = 14, 86_400, 60
"""Number of training days. The test rows are the following day."""
FIRST_SECOND = 1_509_494_400
"""2017-11-01 UTC."""
HOUR = "hour"
"""Name of the hour in pairs of columns."""
TIME_PARTS = ("hour", "weekday", "age")
_TIME_FORMAT = "%Y-%m-%d %H:%M"
_NUM_HOURS = 24
_VECTOR_WIDTH = 3

Values = Mapping[str, NDArray[Any]]
"""Values of n rows by column: ids (int64, -1 if missing), numbers (float64, NaN if missing), seconds (int64)."""
Numbers64 = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Ids:
    """Column of categories, whose frequencies are a power of their rank."""

    name: str
    num_values: int
    power: float = 0.7
    prefix: str = ""
    """Text before the number of a value. Without it, values are written as whole numbers."""
    effect: float = 0.0
    """Standard deviation of the logits of values."""
    drift: float = 0.0
    """Standard deviation of the change of these logits in `NUM_DAYS`."""
    renewal: float = 0.0
    """Share of values that a new value replaces at some time."""
    missing: float = 0.0

    @property
    def num_ids(self) -> int:
        return 2 * self.num_values if self.renewal else self.num_values

    def draw(self, generator: np.random.Generator, days: Numbers64) -> NDArray[np.int64]:
        ids = draw_ids(generator, self.num_values, self.power, len(days))
        if self.renewal:
            replaced_on = generator.uniform(0, (NUM_DAYS + 1) / self.renewal, self.num_values)
            ids = ids + self.num_values * (days > replaced_on[ids])
        return np.where(generator.random(len(days)) < self.missing, -1, ids)

    def logits(self, generator: np.random.Generator, ids: NDArray[np.int64], days: Numbers64) -> Numbers64:
        """Return the logits [n] of ids. Missing ids have the value of another category."""
        base, change = generator.normal(0, 1, (2, self.num_ids + 1))
        return self.effect * base[ids] + self.drift * change[ids] * days / NUM_DAYS

    def write(self, ids: NDArray[np.int64]) -> pa.Array:
        values = np.char.add(self.prefix, ids.astype(np.str_)) if self.prefix else ids
        return pa.array(values, mask=ids < 0)

    def read(self, column: pa.ChunkedArray) -> NDArray[np.int64]:
        if self.prefix:
            column = pc.cast(pc.replace_substring(column, self.prefix, ""), pa.int64())
        return pc.fill_null(column, -1).to_numpy()


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """Column of numbers."""

    name: str
    shape: Callable[[Numbers64], Numbers64] | None = None
    """Logits of the written numbers. `None` means no effect."""
    log_normal: bool = False
    """Whether the numbers are prices, around 20. Otherwise they are standard normal."""
    decimals: int = 3
    missing: float = 0.0
    missing_logit: float = 0.0
    """Logit of a missing number."""

    def draw(self, generator: np.random.Generator, days: Numbers64) -> Numbers64:
        numbers = generator.normal(0, 1, len(days))
        if self.log_normal:
            numbers = np.exp(3 + numbers)
        return np.where(generator.random(len(days)) < self.missing, np.nan, np.round(numbers, self.decimals))

    def logits(self, generator: np.random.Generator, numbers: Numbers64, days: Numbers64) -> Numbers64:
        if self.shape is None:
            return np.zeros(len(numbers))
        return np.where(np.isnan(numbers), self.missing_logit, self.shape(np.nan_to_num(numbers, nan=1.0)))

    def write(self, numbers: Numbers64) -> pa.Array:
        return pa.array(numbers, mask=np.isnan(numbers))

    def read(self, column: pa.ChunkedArray) -> Numbers64:
        return pc.cast(column, pa.float64()).to_numpy()


@dataclass(frozen=True, kw_only=True)
class Texts:
    """Column of texts without an effect."""

    name: str
    make: Callable[[np.random.Generator, int], NDArray[Any]]


@dataclass(frozen=True, kw_only=True)
class Times:
    """Column of times."""

    name: str = "timestamp"
    is_text: bool
    daily: float = 0.0
    """Amplitude of the daily cycle in the logits, in whole hours."""

    def draw(self, generator: np.random.Generator, num_train: int, num_test: int) -> NDArray[np.int64]:
        """Return times in their order, with fewer rows at night. Texts have whole minutes."""
        shares = 1 - 0.7 * np.cos(2 * np.pi * (np.arange(_NUM_HOURS) - 3) / _NUM_HOURS)
        num_rows = num_train + num_test
        days = np.where(np.arange(num_rows) < num_train, generator.integers(0, NUM_DAYS, num_rows), NUM_DAYS)
        hours = generator.choice(_NUM_HOURS, num_rows, p=shares / shares.sum())
        seconds = FIRST_SECOND + days * DAY_S + hours * 3600 + generator.integers(0, 3600, num_rows)
        return np.sort(seconds // MINUTE_S * MINUTE_S if self.is_text else seconds)

    def write(self, seconds: NDArray[np.int64]) -> pa.Array:
        if not self.is_text:
            return pa.array(seconds)
        dates = np.datetime_as_string(seconds.astype("datetime64[s]"), unit="D")
        hours, minutes = seconds % DAY_S // 3600, seconds % 3600 // MINUTE_S
        clock = [np.char.add(f"{hour}:", np.char.zfill(np.arange(60).astype(np.str_), 2)) for hour in range(_NUM_HOURS)]
        return pa.array(np.char.add(np.char.add(dates, " "), np.stack(clock)[hours, minutes]))

    def read(self, column: pa.ChunkedArray) -> NDArray[np.int64]:
        if self.is_text:
            column = pc.cast(pc.strptime(column, format=_TIME_FORMAT, unit="s"), pa.int64())
        return column.to_numpy()


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Effect of two columns of categories together, one of which may be the hour."""

    first: str
    second: str
    effect: float


def hours_of(seconds: NDArray[np.int64]) -> NDArray[np.int64]:
    return seconds % DAY_S // 3600


@dataclass(frozen=True, kw_only=True)
class MessyLog:
    name: str
    num_rows: int
    """Number of training rows."""
    times: Times
    columns: tuple[Ids | Numbers | Texts, ...]
    pairs: tuple[Pair, ...] = ()
    positives: float = 0.25
    """Share of positive labels."""
    num_test_rows: int = 200_000

    @property
    def ids(self) -> tuple[Ids, ...]:
        return tuple(column for column in self.columns if isinstance(column, Ids))

    @property
    def sparse(self) -> tuple[str, ...]:
        return tuple(column.name for column in self.ids)

    @property
    def numbers(self) -> tuple[Numbers, ...]:
        return tuple(column for column in self.columns if isinstance(column, Numbers))

    @property
    def texts(self) -> tuple[str, ...]:
        """Columns that a person who looks at the log would leave out."""
        return tuple(column.name for column in self.columns if isinstance(column, Texts))

    @property
    def useful(self) -> tuple[str, ...]:
        """Columns, and parts of the time, with an effect."""
        paired = {name for pair in self.pairs for name in (pair.first, pair.second)}
        names = [column.name for column in self.ids if column.effect or column.drift or column.name in paired]
        names += [column.name for column in self.numbers if column.shape is not None]
        return (*names, *[f"{self.times.name}.{HOUR}"][: bool(self.times.daily or HOUR in paired)])

    @property
    def noise(self) -> tuple[str, ...]:
        """Columns, and parts of the time, without an effect. The age is left out if effects or values drift."""
        drifts = any(column.drift or column.renewal for column in self.ids)
        parts = [f"{self.times.name}.{part}" for part in TIME_PARTS if not (drifts and part == "age")]
        return tuple(name for name in (*(c.name for c in self.columns), *parts) if name not in self.useful)

    def draw(self, generator: np.random.Generator, num_train: int, num_test: int) -> dict[str, NDArray[Any]]:
        seconds = self.times.draw(generator, num_train, num_test)
        days = (seconds - FIRST_SECOND) / DAY_S
        values: dict[str, NDArray[Any]] = {self.times.name: seconds}
        for column in self.columns:
            is_text = isinstance(column, Texts)
            values[column.name] = column.make(generator, len(days)) if is_text else column.draw(generator, days)
        return values

    def logits(self, seed: int, values: Values) -> Numbers64:
        """Return the logits [n] of the law of `seed`, except for a constant."""
        generator = self._generator(seed, 1)
        seconds = values[self.times.name]
        days = (seconds - FIRST_SECOND) / DAY_S
        logits = self.times.daily * np.sin(2 * np.pi * (hours_of(seconds) - generator.integers(0, 24)) / _NUM_HOURS)
        for column in (*self.ids, *self.numbers):
            logits = logits + column.logits(generator, values[column.name], days)
        sizes = {HOUR: _NUM_HOURS, **{column.name: column.num_ids + 1 for column in self.ids}}
        categories = {**values, HOUR: hours_of(seconds)}
        for pair in self.pairs:
            first, second = (
                draw_vectors(generator, sizes[name], _VECTOR_WIDTH)[categories[name]]
                for name in (pair.first, pair.second)
            )
            logits = logits + pair.effect * (first * second).sum(1)
        return logits

    def _generator(self, seed: int, part: int) -> np.random.Generator:
        return np.random.default_rng([seed, part, *self.name.encode()])

    def write(self, folder: Path, seed: int, num_rows: int | None = None) -> WrittenLog:
        """Write train.csv and test.csv. With `num_rows`, each has that number of rows."""
        generator = self._generator(seed, 0)
        num_train, num_test = num_rows or self.num_rows, num_rows or self.num_test_rows
        values = self.draw(generator, num_train, num_test)
        logits = self.logits(seed, values)
        logits += brentq(lambda base: float(expit(logits + base).mean()) - self.positives, -30, 30)
        writers = {column.name: column for column in (self.times, *self.ids, *self.numbers)}
        columns = {name: writers[name].write(part) if name in writers else part for name, part in values.items()}
        return write_rows(columns, logits, num_train, generator, folder)

    def read(self, path: Path) -> dict[str, NDArray[Any]]:
        """Read the label, and the values of a file except its texts."""
        readers = {column.name: column for column in (self.times, *self.ids, *self.numbers)}
        texts = [self.times.name] if self.times.is_text else []
        texts += [column.name for column in self.ids if column.prefix]
        options = pyarrow.csv.ConvertOptions(
            column_types=dict.fromkeys(texts, pa.string()),
            strings_can_be_null=True,
            include_columns=["label", *readers],
        )
        table = pyarrow.csv.read_csv(path, convert_options=options)
        return {"label": table["label"].to_numpy(), **{name: one.read(table[name]) for name, one in readers.items()}}


def _json(generator: np.random.Generator, num_rows: int) -> NDArray[Any]:
    versions, widths = generator.integers(1, 9, num_rows), generator.integers(300, 2000, num_rows)
    return np.array([f'{{"v": {v}, "screen": {{"w": {w}}}}}' for v, w in zip(versions, widths, strict=True)])


def _list(generator: np.random.Generator, num_rows: int) -> NDArray[Any]:
    tags, counts = generator.integers(0, 300, (num_rows, 4)), generator.integers(1, 5, num_rows)
    return np.array(["|".join(f"t{tag}" for tag in row[:n]) for row, n in zip(tags, counts, strict=True)])


def _noise(num_ids: int, num_numbers: int, *, texts: bool = False, missing: float = 0.0) -> tuple[Any, ...]:
    """Return columns without an effect: ids of 12 to 20,000 values, numbers, and with `texts` a JSON and a list."""
    sizes = (150, 2000, 12, 20_000)
    ids = [
        Ids(name=f"code_{place}", num_values=sizes[place % 4], prefix="k" if place % 2 else "", missing=missing)
        for place in range(num_ids)
    ]
    numbers = [
        Numbers(name=f"value_{place}", log_normal=bool(place % 2), missing=missing) for place in range(num_numbers)
    ]
    return (*ids, *numbers, *([Texts(name="payload", make=_json), Texts(name="tags", make=_list)] if texts else []))


def _ids(sizes: Mapping[str, int], effect: float, **options: Any) -> tuple[Ids, ...]:
    """Return columns of ids. Those with less than 1,000 values are whole numbers, others are texts."""
    return tuple(
        Ids(name=name, num_values=size, effect=effect, prefix=name[0] if size >= 1000 else "", **options)
        for name, size in sizes.items()
    )


def _line(slope: float) -> Callable[[Numbers64], Numbers64]:
    return lambda x: slope * x


def _bump(height: float) -> Callable[[Numbers64], Numbers64]:
    return lambda x: height * (np.exp(-((x - 0.4) ** 2) / 0.3) - 0.4)


def _wave(height: float) -> Callable[[Numbers64], Numbers64]:
    return lambda x: height * np.sin(2.5 * x)


def _step(height: float) -> Callable[[Numbers64], Numbers64]:
    return lambda x: height * np.tanh(1.5 * x)


def _log_price(slope: float) -> Callable[[Numbers64], Numbers64]:
    return lambda price: slope * (np.log(np.maximum(price, 0.001)) - 3)


def _price(slope: float, missing: float = 0.0) -> Numbers:
    return Numbers(name="price", shape=_log_price(slope), log_normal=True, decimals=2, missing=missing)


def _numbers(slopes: tuple[float, ...], missing: float = 0.0) -> tuple[Numbers, ...]:
    return tuple(
        Numbers(name=f"x{place}", shape=_line(slope), missing=missing, missing_logit=0.3 if missing else 0.0)
        for place, slope in enumerate(slopes)
    )


_SMALL = {"device": 6, "region": 50, "site": 200, "category": 30}
_TEXT, _SECONDS = Times(is_text=True), Times(is_text=False)

LOGS = (
    MessyLog(
        name="noise", num_rows=100_000, times=_TEXT,
        columns=(*_ids({"user": 5000, "item": 1000, **_SMALL}, 0.45), _price(-0.4), *_numbers((0.3, -0.3)),
                 *_noise(10, 5, texts=True)),
        pairs=(Pair(first="item", second="region", effect=0.5),),
    ),
    MessyLog(
        name="strong_numbers", num_rows=150_000, times=_SECONDS,
        columns=(Numbers(name="score", shape=_step(1.2)), Numbers(name="load", shape=_bump(1.8)),
                 Numbers(name="signal", shape=_wave(0.9)), *_numbers((0.25, -0.25)),
                 *_ids({**_SMALL, "shop": 300}, 0.25), *_noise(3, 3)),
    ),
    MessyLog(
        name="daily_cycle", num_rows=150_000, times=Times(is_text=True, daily=0.8),
        columns=(*_ids({"user": 3000, "item": 1000, **_SMALL}, 0.35), _price(-0.3), *_numbers((0.3,)), *_noise(4, 2)),
        pairs=(Pair(first=HOUR, second="category", effect=0.6),),
    ),
    MessyLog(
        name="drift", num_rows=200_000, times=_SECONDS,
        columns=(*_ids({"item": 3000, "campaign": 300}, 0.5, drift=0.6, renewal=0.5),
                 *_ids({"user": 6000, **_SMALL}, 0.35), _price(-0.3), *_numbers((0.3,)), *_noise(5, 3)),
    ),
    MessyLog(
        name="rare_positives", num_rows=300_000, times=_TEXT, positives=0.005, num_test_rows=400_000,
        columns=(*_ids({"item": 1000, **_SMALL}, 0.6), _price(-0.5), *_numbers((0.5, -0.5)), *_noise(5, 3)),
    ),
    MessyLog(
        name="few_rows", num_rows=20_000, times=_SECONDS,
        columns=(*_ids({**_SMALL, "shop": 80, "brand": 120}, 0.5), *_numbers((0.5, -0.4, 0.3)), *_noise(4, 3)),
        pairs=(Pair(first="device", second="category", effect=0.6),),
    ),
    MessyLog(
        name="missing", num_rows=100_000, times=_TEXT,
        columns=(*_ids({"user": 3000, "item": 1000, **_SMALL}, 0.55, missing=0.35),
                 Numbers(name="age", shape=_bump(1.8), decimals=1, missing=0.5, missing_logit=0.4),
                 _price(-0.5, missing=0.6), *_numbers((0.6, -0.5), missing=0.3), *_noise(4, 3, missing=0.4)),
    ),
    MessyLog(
        name="long_tails", num_rows=300_000, times=_SECONDS,
        columns=(*_ids({"user": 200_000, "query": 100_000, "item": 30_000}, 0.8, power=0.9),
                 *_ids(_SMALL, 0.3), _price(-0.3), *_numbers((0.3,)), *_noise(4, 2)),
        pairs=(Pair(first="item", second="device", effect=0.5),),
    ),
    MessyLog(
        name="noise_and_numbers", num_rows=60_000, times=Times(is_text=True, daily=0.5),
        columns=(Numbers(name="score", shape=_wave(1.2)), Numbers(name="load", shape=_bump(1.5)),
                 *_ids({"item": 1000, **_SMALL}, 0.35), _price(-0.4), *_noise(8, 6, texts=True)),
    ),
    MessyLog(
        name="drift_and_tails", num_rows=250_000, times=Times(is_text=False, daily=0.5),
        columns=(*_ids({"item": 20_000, "campaign": 400}, 0.6, drift=0.6, renewal=0.4, power=0.9),
                 *_ids({"user": 100_000}, 0.7, power=0.9), *_ids(_SMALL, 0.3, missing=0.3),
                 _price(-0.4, missing=0.4), *_numbers((0.4,), missing=0.3), *_noise(4, 3)),
    ),
    MessyLog(
        name="few_noisy_rows", num_rows=30_000, times=_TEXT,
        columns=(*_ids({**_SMALL, "shop": 100}, 0.5, missing=0.3), Numbers(name="score", shape=_step(0.9)),
                 _price(-0.5, missing=0.5), *_numbers((0.5,)), *_noise(8, 5, texts=True, missing=0.3)),
    ),
    MessyLog(
        name="everything", num_rows=300_000, times=Times(is_text=False, daily=0.5), positives=0.03,
        columns=(*_ids({"user": 50_000, "item": 10_000}, 0.6, power=0.9),
                 *_ids({"campaign": 200}, 0.4, drift=0.5, renewal=0.3), *_ids(_SMALL, 0.35, missing=0.1),
                 Numbers(name="age", shape=_bump(1.2), decimals=1, missing=0.3, missing_logit=0.3), _price(-0.4),
                 *_numbers((0.4,), missing=0.4), *_noise(6, 4, texts=True)),
        pairs=(Pair(first=HOUR, second="category", effect=0.4),),
    ),
)  # fmt: skip
