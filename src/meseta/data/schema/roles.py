"""Roles of columns from options, and the schema that follows from the roles of all columns."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields

from meseta.data.schema.infer import ColumnRole, Role, has_negative, keep_one_per_role, parse_number
from meseta.data.schema.layout import MAX_BUCKETS
from meseta.data.schema.schema import Schema, is_condition
from meseta.data.schema.separators import invalid_separator_reason
from meseta.errors import UnknownColumnError
from meseta.spec import MesetaError

DEFAULT_NUM_BUCKETS = 20
MAX_DEFAULT_BUCKETIZED = 100
"""Maximum number of dense columns that all have buckets by default."""


@dataclass(frozen=True, kw_only=True)
class NamedColumns:
    """Roles that options assign to columns, by names or shell patterns such as 'C*'."""

    label: Sequence[str] = ()
    dense: Sequence[str] = ()
    sparse: Sequence[str] = ()
    """Categorical columns. A column that is in `dense` as well becomes two features."""
    multi_valued: Sequence[str] = ()
    """Categorical columns of text with several values, as NAME or NAME=SEPARATOR."""
    ignore: Sequence[str] = ()
    time: Sequence[str] = ()
    time_features: Sequence[str] | None = None
    """Columns of times that give features. `None` selects the column of the time. Empty means no features."""
    buckets: Sequence[str] | None = None
    """Dense columns whose buckets are features too, as NAME or NAME=NUMBER."""
    default_buckets: bool = False
    """Whether `None` for `buckets` selects all dense columns with more than two values, if there are at most
    MAX_DEFAULT_BUCKETIZED dense columns."""

    def __bool__(self) -> bool:
        """Whether an option names columns."""
        return any(getattr(self, name) for name in COLUMN_OPTIONS)

    def labels(self, where: str, names: Sequence[str]) -> tuple[str, ...]:
        """Return the labels: columns in `names`, or conditions for `resolve_labels`. Raises MesetaError with the prefix
        `where` for other columns."""
        known = {*names}
        chosen = [
            name
            for entry in self.label
            for name in (
                [entry] if entry not in known and is_condition(entry) else _matches(where, entry, names, known, "label")
            )
        ]
        return tuple(dict.fromkeys(chosen))

    def roles(self, where: str, names: Sequence[str]) -> dict[str, ColumnRole]:
        """Return the role of each column in `names` that an option selects.

        A name takes precedence over a pattern, and patterns of features over those of `ignore`. Raises MesetaError if a
        name or pattern matches no column, or if a column has conflicting roles. The message starts with `where`.
        """
        known = {*names}
        by_name: dict[str, set[str]] = {}
        by_pattern: dict[str, set[str]] = {}
        for role in ("dense", "sparse", "multi_valued", "ignore", "time"):
            for entry in getattr(self, role):
                column = _split_separator(where, entry, known)[0] if role == "multi_valued" else entry
                table = by_name if column in known else by_pattern
                for name in _matches(where, column, names, known, role):
                    table.setdefault(name, set()).add(role)
        for name, roles in by_name.items():
            for alone in ("ignore", "time"):
                if alone in roles and len(roles) > 1:
                    raise MesetaError(f"{where}: column {name!r} is named by --{alone} and as a feature; name it once")
        times = [name for name in names if "time" in by_name.get(name, by_pattern.get(name, ()))]
        if len(times) > 1:
            raise MesetaError(f"{where}: --time selects {times[0]!r} and {times[1]!r}, but rows have only one time")
        chosen = {
            name: by_name.get(name) or by_pattern[name] for name in names if name in by_name or name in by_pattern
        }
        for name, roles in chosen.items():
            if {"dense", "multi_valued"} <= roles:
                raise MesetaError(
                    f"{where}: column {name!r} is selected by --dense and --multi-valued, but a dense column has one "
                    "number per row; name it once"
                )
        return {name: _merge_roles(roles) for name, roles in chosen.items()}

    def time_feature_columns(self, where: str, names: Sequence[str], guesses: Mapping[str, ColumnRole]) -> list[str]:
        """Return the columns in `names` whose hour, weekday and age are features. `guesses` are the roles of `names`.

        Raises MesetaError, with the prefix `where`, if a name or pattern matches no column, or if a column has another
        role.
        """
        roles = keep_one_per_role(guesses)
        if self.time_features is None:
            return [name for name in names if roles[name].role == "time"]
        known = {*names}
        chosen = [
            name for entry in self.time_features for name in _matches(where, entry, names, known, "time_features")
        ]
        for name in chosen:
            if roles[name].role not in ("time", "ignore"):
                raise MesetaError(
                    f"{where}: column {name!r} for --time-features is read as {roles[name].role}; add it to --ignore, "
                    "so that only its hour, weekday and age are features"
                )
        return list(dict.fromkeys(chosen))

    def bucket_counts(
        self, where: str, guesses: Mapping[str, ColumnRole], samples: Mapping[str, Sequence[str]]
    ) -> dict[str, int]:
        """Return the number of buckets of each column whose buckets are features. `guesses` and `samples` are the roles
        and sampled texts of all columns that are not labels.

        Raises MesetaError, with the prefix `where`, if a name or pattern matches no column, a named column is not
        dense, or a number is invalid.
        """
        roles = keep_one_per_role(guesses)
        dense = [name for name, guess in roles.items() if guess.role == "dense"]
        if self.buckets is None:
            if not self.default_buckets or len(dense) > MAX_DEFAULT_BUCKETIZED:
                return {}
            return {name: DEFAULT_NUM_BUCKETS for name in dense if len({*samples.get(name, ())}) > 2}
        counts: dict[str, int] = {}
        for entry in self.buckets:
            column, number = _split_number(where, entry, roles)
            for name in _matches(where, column, list(roles), roles, "buckets"):
                if roles[name].role == "dense":
                    counts[name] = number
                elif name == column:
                    raise MesetaError(
                        f"{where}: column {name!r} for --buckets is read as {roles[name].role}, but only numbers have "
                        "buckets; add it to --dense"
                    )
        return counts

    def separators(self, where: str, names: Sequence[str]) -> dict[str, str | None]:
        """Return the separator of each column in `names` that is multi-valued. `None` means to infer it.

        Columns to which another option gives a role that is not categorical are left out. Raises MesetaError as `roles`
        does, and if a separator is invalid or a column has two.
        """
        known = {*names}
        by_name: dict[str, str | None] = {}
        by_pattern: dict[str, str | None] = {}
        for entry in self.multi_valued:
            column, separator = _split_separator(where, entry, known)
            table = by_name if column in known else by_pattern
            for name in _matches(where, column, names, known, "multi_valued"):
                if table.setdefault(name, separator) != separator:
                    raise MesetaError(
                        f"{where}: --multi-valued selects column {name!r} twice, with different separators; name it "
                        "once"
                    )
        chosen = self.roles(where, names)
        return {name: sign for name, sign in (by_pattern | by_name).items() if chosen[name].role == "categorical"}


COLUMN_OPTIONS = tuple(field.name for field in fields(NamedColumns) if field.name != "default_buckets")
"""Names of the options that assign roles to columns."""


def _split_separator(where: str, entry: str, known: Collection[str]) -> tuple[str, str | None]:
    """Return (name or pattern, separator) of an entry of `multi_valued`. The separator may be `=`."""
    if entry in known or "=" not in entry:
        return entry, None
    column, _, separator = (entry[:-2], "=", entry[-1]) if entry[-2:-1] == "=" else entry.rpartition("=")
    if problem := invalid_separator_reason(separator):
        raise MesetaError(
            f"{where}: --multi-valued {entry!r}: the separator {separator!r} {problem}; write "
            f"--multi-valued '{column}=|'"
        )
    return column, separator


def _split_number(where: str, entry: str, known: Collection[str]) -> tuple[str, int]:
    """Return (name or pattern, number) of an entry of `buckets`."""
    if entry in known or "=" not in entry:
        return entry, DEFAULT_NUM_BUCKETS
    column, _, text = entry.rpartition("=")
    number = parse_number(text)
    if number is None or not number.is_integer() or not 2 <= number <= MAX_BUCKETS:
        raise MesetaError(
            f"{where}: --buckets {entry!r}: {text!r} must be a whole number in 2..{MAX_BUCKETS}; write --buckets "
            f"'{column}={DEFAULT_NUM_BUCKETS}'"
        )
    return column, int(number)


def _matches(where: str, entry: str, names: Sequence[str], known: Collection[str], option: str) -> list[str]:
    matching = [entry] if entry in known else fnmatch.filter(names, entry)
    if not matching:
        raise UnknownColumnError(where, entry, names, option=f"--{option.replace('_', '-')}")
    return matching


# Role for each option. If several options select a column, the first one in this order wins.
_ROLES: dict[str, Role] = {
    "dense": "dense",
    "sparse": "categorical",
    "multi_valued": "categorical",
    "time": "time",
    "ignore": "ignore",
}


def _merge_roles(roles: set[str]) -> ColumnRole:
    if {"dense", "sparse"} <= roles:
        return ColumnRole("both", "a category and a measurement, as --sparse and --dense say", is_named=True)
    option = next(option for option in _ROLES if option in roles)
    return ColumnRole(_ROLES[option], f"as --{option} says", is_named=True)


def schema_from_roles(
    labels: Sequence[str], guesses: Mapping[str, ColumnRole], columns: Mapping[str, Sequence[str]]
) -> Schema:
    """Return a schema with the inferred roles. `columns` contains sampled values as texts."""
    guesses = keep_one_per_role(guesses)
    dense = [name for name, guess in guesses.items() if guess.role in ("dense", "both")]
    single = {guess.role: name for name, guess in guesses.items() if guess.role in ("weight", "group", "time")}
    # Not validated: roles are disjoint, and duplicate names are reported later together with the file.
    return Schema.model_construct(
        label=labels[0] if len(labels) == 1 else None,
        labels=list(labels) if len(labels) > 1 else [],
        dense=dense,
        signed=[name for name in dense if has_negative(columns.get(name, ()))],
        categorical=[name for name, guess in guesses.items() if guess.role in ("categorical", "both")],
        weight=single.get("weight"),
        group=single.get("group"),
        time=single.get("time"),
    )


def other_times_of(guesses: Mapping[str, ColumnRole]) -> tuple[str, ...]:
    """Return the ignored columns that contain times."""
    guesses = keep_one_per_role(guesses)
    return tuple(name for name, guess in guesses.items() if guess.role == "ignore" and guess.is_time)


def role_reasons(guesses: Mapping[str, ColumnRole]) -> dict[str, str]:
    """Return the reason for the role of each column."""
    return {name: guess.reason for name, guess in keep_one_per_role(guesses).items()}
