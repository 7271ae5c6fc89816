"""What `meseta prepare` is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from meseta.data.dataset.dataset import SPLITS
from meseta.data.schema.roles import NamedColumns
from meseta.machine.remote import check_not_url
from meseta.spec import MesetaError

HELD_OUT_SPLITS = ("test", "valid")
"""Splits that are parted from the training rows."""
SPLIT_RULES = ("fraction", "files", "after")
"""What may part them, as in the names of the options."""
DEFAULT_TEST_FRACTION = 0.1
"""Share of the test split where nothing says what makes it."""


@dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    """What `prepare` reads and how."""

    sources: Sequence[str]
    """Files, folders, URLs or patterns: CSV, JSON lines, Criteo TSV, libsvm or libffm, compressed or not, or
    Parquet."""
    out: Path
    """Folder to make."""
    test_files: Sequence[str] = ()
    """Files or patterns whose rows make the test split; they may be among the sources."""
    test_fraction: float | None = None
    """Share of rows that make the test split; None: 0.1 where neither test_files nor test_after are given."""
    test_after: str | None = None
    """Rows from this time on make the test split, as a number or in ISO 8601; it implies split_by 'time'."""
    valid_files: Sequence[str] = ()
    """Files or patterns whose rows make the valid split; they may be among the sources, not among test_files."""
    valid_fraction: float | None = None
    """Share of rows that make the valid split; None and 0: there is none, unless by valid_files or valid_after."""
    valid_after: str | None = None
    """Rows from this time on, up to the test split, make the valid split; it implies split_by 'time'."""
    split_by: str | None = None
    """What makes those shares: None: rows drawn by seed; 'group': whole groups, drawn by seed; 'time': the last rows,
    for testing, and those just before them."""
    seed: int = 0
    """Seed of the split and of the hashes, 0..2**63-1."""
    hash_rows: int = 100_000
    """Table rows that each feature is hashed to."""
    hash_rows_by_feature: Mapping[str, int] = field(default_factory=dict)
    """Exceptions, such as {"cat_2": 5_000_000}."""
    vocabulary: bool = False
    """Give each frequent value its own row instead of hashing."""
    min_count: int = 10
    """Occurrences in the training split that earn a row; rarer and unseen values share row 0."""
    label: str | Sequence[str] | None = None
    """CSV and Parquet: column of the label, or several, or patterns such as 'is_*'; None: by its name."""
    dense: Sequence[str] = ()
    """CSV and Parquet: columns that are numbers, by name or pattern; what no option names is inferred."""
    sparse: Sequence[str] = ()
    """Columns that are categories; one that is dense too is both. Of libffm and libsvm: the only fields that count."""
    ignore: Sequence[str] = ()
    """CSV and Parquet: columns that are left out; a name goes before a pattern, a feature's pattern before this one."""
    time: Sequence[str] = ()
    """CSV and Parquet: the column of times, by which `test_after` and `valid_after` split; empty: by its name."""
    schema: Path | None = None
    """A file that says what the columns are, instead of the five options above; not for TSV."""
    encoding: str | None = None
    """Encoding of the text, as Python names it; `None`: as the schema says, else by a byte order mark, else UTF-8."""
    bad_rows: str = "error"
    """A row that cannot be parsed: 'error' stops the work there, 'skip' leaves it out and counts it."""
    max_bad_rows: int | float = 0.01
    """With 'skip', more of them stop the work: an int of rows, or a float, their share of all rows."""
    recipe_only: bool = False
    """Write no rows, but what they are made by as they are read from the sources, see meseta.data.recipe."""
    force: bool = False
    """Replace `out` where it is a prepared dataset."""
    num_threads: int | None = None
    """Worker threads; None: the cores this process may use. The result does not depend on it."""

    def __post_init__(self) -> None:
        check_not_url("prepare: --out", self.out)
        self._check_shares()
        self._check_split_by()
        if self.schema is not None and self.named_columns:
            raise MesetaError(
                "prepare: --schema and --label, --dense, --sparse, --ignore, --time exclude each other; give one or "
                "the others"
            )
        if not 0 <= self.seed < 2**63:
            raise MesetaError(f"prepare: --seed must be in 0..2**63-1, got {self.seed}")
        for name, rows in {"all features": self.hash_rows, **self.hash_rows_by_feature}.items():
            if not 1 <= rows <= 2**40:
                raise MesetaError(f"prepare: --hash-rows of {name} must be in 1..2**40, got {rows}")
        if self.bad_rows not in ("error", "skip"):
            raise MesetaError(f"prepare: --bad-rows must be error or skip, got {self.bad_rows!r}")
        if self.max_bad_rows < 0 or (isinstance(self.max_bad_rows, float) and self.max_bad_rows > 1):
            raise MesetaError(
                "prepare: --max-bad-rows must be a number of rows, or a share of them from 0.0 to 1.0, "
                f"got {self.max_bad_rows}"
            )
        if self.min_count < 1:
            raise MesetaError(f"prepare: --min-count must be at least 1, got {self.min_count}")

    @property
    def named_columns(self) -> NamedColumns:
        """Columns by name."""
        label = [self.label] if isinstance(self.label, str) else self.label or ()
        return NamedColumns(label=label, dense=self.dense, sparse=self.sparse, ignore=self.ignore, time=self.time)

    def _check_shares(self) -> None:
        for split in HELD_OUT_SPLITS:
            options = [
                f"--{split}-{rule}" for rule in SPLIT_RULES if getattr(self, f"{split}_{rule}") not in (None, (), [])
            ]
            if len(options) > 1:
                raise MesetaError(f"prepare: {' and '.join(options)} exclude each other; give one of them")
            share = getattr(self, f"{split}_fraction")
            if share is not None and not 0 <= share < 1:
                raise MesetaError(f"prepare: --{split}-fraction must be in [0, 1), got {share}")
        test, valid = self.split_fraction("test") or 0.0, self.split_fraction("valid") or 0.0
        if test + valid >= 1:
            raise MesetaError(
                f"prepare: --test-fraction {test:g} and --valid-fraction {valid:g} leave no row for training; lower one"
            )

    def _check_split_by(self) -> None:
        if self.split_by not in (None, "time", "group"):
            raise MesetaError(f"prepare: --split-by must be 'time' or 'group', got {self.split_by!r}")
        options = {f"--{split}-{rule}": rule for split in HELD_OUT_SPLITS if (rule := self.split_rule(split))}
        after = [option for option, rule in options.items() if rule == "after"]
        if self.split_by == "group" and after:
            raise MesetaError(f"prepare: --split-by group and {after[0]} exclude each other; give one")
        if self.split_by is not None and set(options.values()) == {"files"}:
            other = " and ".join(options)
            raise MesetaError(f"prepare: --split-by {self.split_by} and {other} exclude each other; give one")

    def split_rule(self, split: str) -> Literal["fraction", "files", "after"] | None:
        """Which option makes the test or the valid split; None: there is no valid split."""
        if getattr(self, f"{split}_files"):
            return "files"
        if getattr(self, f"{split}_after") is not None:
            return "after"
        return "fraction" if split == "test" or self.valid_fraction else None

    def split_fraction(self, split: str) -> float | None:
        """Share of rows, or of groups, for the test or the valid split; None: by files, at a given time, or none."""
        if self.split_rule(split) != "fraction":
            return None
        share: float | None = getattr(self, f"{split}_fraction")
        return DEFAULT_TEST_FRACTION if share is None else share

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of the splits that are made, in the order of SPLITS."""
        return tuple(split for split in SPLITS if split == "train" or self.split_rule(split))
