"""Options of `meseta prepare`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal

from meseta.data.dataset.dataset import SPLITS
from meseta.data.dataset.growth import DEFAULT_MAX_CANDIDATES
from meseta.data.schema.roles import COLUMN_OPTIONS, NamedColumns
from meseta.spec import MesetaError
from meseta.system.remote import check_not_url

HELD_OUT_SPLITS = ("test", "valid")
"""Splits other than the training split."""
SPLIT_RULES = ("fraction", "files", "after")
"""Rules that can define a held-out split, as in option names such as --test-fraction."""
DEFAULT_TEST_FRACTION = 0.1
"""Share of the test split if no option defines it."""
_LIKE_OPTIONS = {
    *("sources", "out", "like", "grow", "recount", "retire_after", "max_candidates", "without", "label", "dense"),
    *("sparse", "multi_valued", "schema", "encoding", "bad_rows", "max_bad_rows", "force", "num_threads", "split_by"),
    *("valid_by_time", *(f"{split}_{rule}" for split in HELD_OUT_SPLITS for rule in SPLIT_RULES)),
}
"""Options that may be combined with `like`. The earlier dataset determines the others."""


@dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    """Options of `prepare`."""

    sources: Sequence[str]
    """Files, folders, URLs or patterns of raw files: CSV, JSON lines, Criteo TSV, libsvm or libffm, optionally
    compressed, or Parquet."""
    out: Path
    test_files: Sequence[str] = ()
    """Files or patterns whose rows form the test split. They may be among the sources."""
    test_fraction: float | None = None
    """Share of rows in the test split. `None` means 0.1 unless test_files or test_after is set, or no test split with
    `like`."""
    test_after: str | None = None
    """Time (a number, or ISO 8601) at which the test split starts. It implies split_by 'time'."""
    valid_files: Sequence[str] = ()
    """Files or patterns whose rows form the valid split. They may be among the sources, but not among test_files."""
    valid_fraction: float | None = None
    """Share of rows in the valid split. `None` and 0 mean no valid split, unless valid_files or valid_after is set."""
    valid_after: str | None = None
    """Time (a number, or ISO 8601) at which the valid split starts. It implies split_by 'time', and the test split
    follows."""
    valid_by_time: bool = False
    """Whether the valid share are the last of the rows outside the test split, if there is a column of times and
    `split_by` is `None`. The share is drawn if this gives fewer than 200 rows."""
    split_by: str | None = None
    """Rule for splits that are shares. `None` draws rows by `seed`. 'group' draws whole groups by `seed`. 'time' uses
    the last rows as test split and the rows before them as valid split."""
    seed: int = 0
    """Seed of the random split and of the hashes, in 0..2**63-1."""
    hash_rows: int = 100_000
    hash_rows_by_feature: Mapping[str, int] = field(default_factory=dict)
    """Number of table rows by feature, for exceptions such as {"cat_2": 5_000_000}."""
    vocabulary: bool = False
    """Whether each frequent value has its own row. Otherwise values are hashed."""
    min_count: int = 10
    """Minimum count in the training split for a separate row. Less frequent and unseen values share row 0."""
    max_candidates: int = DEFAULT_MAX_CANDIDATES
    """Maximum number of values below `min_count` whose hashes are kept for later parts, per feature."""
    like: Path | None = None
    """Folder of an earlier dataset, or of a run, whose next part is prepared. The rows are encoded like its rows. All
    of them are training rows, unless options define other splits."""
    grow: bool = False
    """Whether the vocabularies of `like` grow by the values of these rows."""
    recount: bool = False
    """Whether vocabularies are counted from these rows alone, while everything else stays like `like`."""
    retire_after: int | None = None
    """Number of parts without an occurrence after which a value loses its row. It needs `grow`. `None` means never."""
    without: Sequence[str] = ()
    """Columns or features of `like` that are left out."""
    label: str | Sequence[str] | None = None
    """Label columns of CSV and Parquet, as names or patterns such as 'is_*'. `None` finds the label by its name."""
    dense: Sequence[str] = ()
    """Numeric columns of CSV and Parquet, as names or patterns. Roles of unnamed columns are inferred."""
    sparse: Sequence[str] = ()
    """Categorical columns, as names or patterns. A column may be dense and sparse. For libffm and libsvm, only these
    fields are used."""
    multi_valued: Sequence[str] = ()
    """Text columns of several categories per row, as names or patterns. `NAME=CHAR` names their separator, which is
    inferred otherwise."""
    ignore: Sequence[str] = ()
    """Columns of CSV and Parquet that are left out. Names take precedence over patterns, and patterns of features over
    these patterns."""
    time: Sequence[str] = ()
    """Column of CSV and Parquet with the times by which `test_after` and `valid_after` split. Empty finds it by its
    name."""
    time_features: Sequence[str] | None = None
    """Columns of times, as names or patterns, whose hour, weekday and age become features. `None` selects the column
    of the time. Empty means no features."""
    buckets: Sequence[str] | None = None
    """Columns of numbers, as names or patterns, whose buckets of about equal size become features too. `NAME=NUMBER`
    sets the number of buckets, which is 20 otherwise."""
    default_buckets: bool = False
    """Whether all columns of numbers with more than two values have buckets if `buckets` is `None`. Without effect if
    there are more than 100 such columns, or their roles are not inferred."""
    schema: Path | None = None
    """File that describes the columns, in place of the options above that name columns. It cannot be used with TSV."""
    encoding: str | None = None
    """Encoding of the text, as a Python codec name. `None` means that of the schema, of a byte order mark, or UTF-8."""
    bad_rows: str = "error"
    """Treatment of rows that cannot be parsed: 'error' stops at the first one, 'skip' counts and skips them."""
    max_bad_rows: int | float = 0.01
    """Maximum number (int) or share (float) of skipped rows."""
    recipe_only: bool = False
    """Whether to write a recipe without rows, see `meseta.data.recipe`."""
    force: bool = False
    num_threads: int | None = None
    """Number of worker threads, which does not affect the result. `None` means the number of
    `meseta doctor`."""

    def __post_init__(self) -> None:
        check_not_url("prepare: --out", self.out)
        self._check_shares()
        self._check_split_by()
        if self.schema is not None and self.named_columns:
            *others, last = (f"--{name.replace('_', '-')}" for name in COLUMN_OPTIONS)
            options = f"{', '.join(others)} or {last}"
            raise MesetaError(
                f"prepare: --schema cannot be used with {options}; use either the schema or these options"
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
        self._check_like()

    @property
    def named_columns(self) -> NamedColumns:
        """Columns that options name, by role."""
        label = [self.label] if isinstance(self.label, str) else self.label or ()
        columns = {name: getattr(self, name) for name in COLUMN_OPTIONS}
        return NamedColumns(**columns | {"label": label}, default_buckets=self.default_buckets)

    def _check_like(self) -> None:
        if self.max_candidates < 0:
            raise MesetaError(f"prepare: --max-candidates must be at least 0, got {self.max_candidates}")
        if self.like is None:
            for name in ("grow", "recount", "without"):
                if getattr(self, name):
                    raise MesetaError(f"prepare: --{name} needs an earlier dataset; add --like DATASET|RUN")
        if self.retire_after is not None and not self.grow:
            raise MesetaError("prepare: --retire-after frees rows of a growing vocabulary; add --grow")
        if self.retire_after is not None and self.retire_after < 1:
            raise MesetaError(f"prepare: --retire-after must be at least 1, got {self.retire_after}")
        if self.grow and self.recount:
            raise MesetaError("prepare: --grow and --recount exclude each other; use one of them")
        if self.like is None:
            return
        defaults = {option.name: option.default for option in fields(self) if option.name not in _LIKE_OPTIONS}
        excluded = [
            f"--{name.replace('_', '-')}"
            for name, default in defaults.items()
            if (value := getattr(self, name)) and value != default
        ]
        if excluded:
            raise MesetaError(
                f"prepare: {', '.join(excluded)} cannot be combined with --like, which determines the encoding; "
                "omit one"
            )

    def _check_shares(self) -> None:
        for split in HELD_OUT_SPLITS:
            options = [
                f"--{split}-{rule}" for rule in SPLIT_RULES if getattr(self, f"{split}_{rule}") not in (None, (), [])
            ]
            if len(options) > 1:
                raise MesetaError(f"prepare: {' and '.join(options)} exclude each other; use one of them")
            share = getattr(self, f"{split}_fraction")
            if share is not None and not 0 <= share < 1:
                raise MesetaError(f"prepare: --{split}-fraction must be in [0, 1), got {share}")
        test, valid = self.split_fraction("test") or 0.0, self.split_fraction("valid") or 0.0
        if test + valid >= 1:
            raise MesetaError(
                f"prepare: --test-fraction {test:g} and --valid-fraction {valid:g} leave no row for training; "
                "decrease one"
            )

    def _check_split_by(self) -> None:
        if self.split_by not in (None, "time", "group"):
            raise MesetaError(f"prepare: --split-by must be 'time' or 'group', got {self.split_by!r}")
        options = {f"--{split}-{rule}": rule for split in HELD_OUT_SPLITS if (rule := self.split_rule(split))}
        after = [option for option, rule in options.items() if rule == "after"]
        if self.split_by == "group" and after:
            raise MesetaError(f"prepare: --split-by group and {after[0]} exclude each other; use one")
        if self.split_by is not None and set(options.values()) == {"files"}:
            other = " and ".join(options)
            raise MesetaError(f"prepare: --split-by {self.split_by} and {other} exclude each other; use one")

    def split_rule(self, split: str) -> Literal["fraction", "files", "after"] | None:
        """Return the rule that defines the test or valid split. `None` means that there is no such split."""
        if getattr(self, f"{split}_files"):
            return "files"
        if getattr(self, f"{split}_after") is not None:
            return "after"
        share = self.test_fraction if split == "test" else self.valid_fraction
        has_default = split == "test" and self.like is None
        return "fraction" if has_default or share else None

    def split_fraction(self, split: str) -> float | None:
        """Return the share of rows, or of groups, in the test or valid split. `None` if no fraction defines it."""
        if self.split_rule(split) != "fraction":
            return None
        share: float | None = getattr(self, f"{split}_fraction")
        return DEFAULT_TEST_FRACTION if share is None else share

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of the splits to make, in the order of SPLITS."""
        return tuple(split for split in SPLITS if split == "train" or self.split_rule(split))
