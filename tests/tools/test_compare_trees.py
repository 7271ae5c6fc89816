"""Tests of tools/compare_trees.py, which accepts changes of names, prose and layout, and reports all others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest
from tree_compare.compare import Options, Result, compare_trees
from tree_compare.renames import Rename, RenameTable, TableError

from source_tree import ROOT

PATH = "src/meseta/a.py"
BEFORE = '''
"""A module."""

from meseta import b
from os import path, sep

LIMIT = 3


class Reader:
    """Of rows."""

    size: int = 4
    """Of a block."""

    def __init__(self, names):
        self.own_names = names

    def take(self, excluded, *, most=2):
        """Return some names."""
        remaining = [name for name in self.own_names if name not in excluded]
        if not remaining:
            raise ValueError(f"nothing of {excluded} is in {self.own_names!r}")
        return remaining[:most], LIMIT - most

    def close(self): ...


class Small(Reader):
    def take(self, excluded, *, most=1):
        pass


def first(reader, words=("a", "b")):
    # Takes one.
    rows = {"key": reader.size}
    for word in words:
        rows[word] = reader.take(word, most=1)
        yield word, f"{word} of {len(rows)}: {reader.size}"
    b.close(reader.own_names, path.join("x", sep))
'''
ROWS = [
    Rename("method", "a.py", "Reader.take", "read"),
    Rename("attribute", "a.py", "Reader.own_names", "columns"),
    Rename("parameter", "a.py", "Reader.take.most", "limit"),
    Rename("constant", "a.py", "LIMIT", "MAX_ROWS"),
    Rename("class", "a.py", "Reader", "RowReader"),
    Rename("function", "b.py", "close", "release"),
    Rename("module", "b.py", "b", "blocks"),
    Rename("stored", "a.py", "two words", "three good words"),
]
TABLE = RenameTable(ROWS)


def compare(
    before: str | dict[str, str], after: str | dict[str, str], table: RenameTable = TABLE, **options: bool
) -> Result:
    trees = [tree if isinstance(tree, dict) else {PATH: tree} for tree in (before, after)]
    first, second = ({path: dedent(text).encode() for path, text in tree.items()} for tree in trees)
    return compare_trees(first, second, Options(table, **options))  # type: ignore[arg-type]


def reasons(result: Result) -> list[str]:
    return sorted(map(str, result.findings.differences))


def changed(*pairs: tuple[str, str]) -> str:
    """Return `BEFORE` with parts replaced."""
    text = BEFORE
    for old, new in pairs:
        assert old in text, old
        text = text.replace(old, new)
    return text


ACCEPTED = {
    "docstrings, field docstrings and comments": changed(
        ('"""Of rows."""', ""), ('"""Of a block."""', '"""Bytes of a block."""'), ("# Takes one.", "# Reads one row.")
    ),
    "layout": changed(
        ("remaining[:most], LIMIT - most", "(\n            remaining[:most],\n            LIMIT - most,\n        )")
    ),
    "empty bodies": changed(("def close(self): ...", 'def close(self):\n        """Does nothing."""'), ("pass", "...")),
    "a local name": changed(("remaining", "unread")),
    "a positional parameter": changed(("excluded", "known")),
    "a loop variable and its uses in f-strings": changed(
        ("word ", "term "), ("word,", "term,"), ("word]", "term]"), ("{word}", "{term}")
    ),
    "literals that are split": changed(
        ('f"{word} of {len(rows)}: {reader.size}"', 'f"{word} of " + f"{len(rows)}" ": " f"{reader.size}"')
    ),
    "a method, its override and its uses": changed(("take", "read")),
    "an attribute": changed(("self.own_names", "self.columns"), ("reader.own_names", "reader.columns")),
    "a keyword parameter": changed(("most", "limit")),
    "a constant": changed(("LIMIT", "MAX_ROWS")),
    "a class and its base": changed(("class Reader", "class RowReader"), ("Small(Reader)", "Small(RowReader)")),
    "the order of imports": changed(
        ("from meseta import b\nfrom os import path, sep", "from os import sep, path\nfrom meseta import b")
    ),
    "imports that are merged": changed(("from os import path, sep", "from os import path\nfrom os import sep")),
}


@pytest.mark.parametrize("kind", ACCEPTED)
def test_accepts(kind: str) -> None:
    assert ACCEPTED[kind] != BEFORE
    result = compare(BEFORE, ACCEPTED[kind])
    assert reasons(result) == []


FORBIDDEN = {
    "swapped operands": changed(("LIMIT - most", "most - LIMIT")),
    "another operator": changed(("LIMIT - most", "LIMIT + most")),
    "a changed constant": changed(("LIMIT = 3", "LIMIT = 4")),
    "another type of constant": changed(("LIMIT = 3", "LIMIT = 3.0")),
    "a dropped call": changed(("{len(rows)}", "{rows}")),
    "a dropped statement": changed(('    b.close(reader.own_names, path.join("x", sep))\n', "")),
    "an added statement": changed(("        return remaining", "        remaining.sort()\n        return remaining")),
    "swapped statements": changed(
        ('    rows = {"key": reader.size}\n    for', "    for"),
        ("    b.close", '    rows = {"key": reader.size}\n    b.close'),
    ),
    "a removed not": changed(("if not remaining", "if remaining")),
    "not in that became in": changed(("not in excluded", "in excluded")),
    "swapped arguments": changed(('reader.own_names, path.join("x", sep)', 'path.join("x", sep), reader.own_names')),
    "swapped names of one function": changed(("yield word, f", "yield rows, f")),
    "a local name that captures another": changed(("remaining", "excluded")),
    "two local names that become one": changed(("rows", "words")),
    "a local name that is renamed in one place only": changed(("return remaining", "return unread")),
    "a local name that hides a builtin": changed(("rows", "len")),
    "a local name that hides a global": changed(("remaining", "LIMIT")),
    "a comprehension that captures": changed(
        ("name for name in self.own_names if name not", "excluded for excluded in self.own_names if excluded not")
    ),
    "a changed default": changed(("most=2", "most=3")),
    "a dropped default": changed(("*, most=2", "*, most")),
    "a keyword parameter that became positional": changed(("excluded, *, most=2", "excluded, most=2")),
    "a dropped keyword": changed(("word, most=1)", "word)")),
    "an attribute that is not in the table": changed(("size", "num_rows")),
    "a method that is not in the table": changed(("close(self)", "stop(self)")),
    "a forgotten use of an attribute": changed(("self.own_names", "self.columns")),
    "a forgotten definition of an attribute": changed(
        ("reader.own_names", "reader.columns"), ("{self.own_names", "{self.columns")
    ),
    "a forgotten override": changed(
        ("take(self, excluded, *, most=2", "read(self, excluded, *, most=2"), ("reader.take", "reader.read")
    ),
    "a forgotten keyword": changed(
        ("most=2", "limit=2"), ("[:most], LIMIT - most", "[:limit], LIMIT - limit"), ("most=1):", "limit=1):")
    ),
    "a keyword parameter that is not in the table": changed(("words", "terms")) + "\nfirst(1, words=2)\n",
    "a global name with a forgotten use": changed(("LIMIT = 3", "MAX_ROWS = 3")),
    "a string that is a key": changed(('"key"', '"value"')),
    "a text of a string that is no message": changed((" of {len", " in {len")),
    "another expression in an f-string": changed(("{reader.size}", "{reader.own_names}")),
    "another conversion in an f-string": changed(("{self.own_names!r}", "{self.own_names}")),
    "a message without leave": changed(("nothing of", "no row of")),
    "another exception": changed(("ValueError", "TypeError")),
    "an import that is gone": changed(("import path, sep", "import path")),
    "an import from elsewhere": changed(("from os import path", "from posix import path")),
    "another base class": changed(("Small(Reader)", "Small(object)")),
    "a decorator": changed(("    def close", "    @property\n    def close")),
    "an annotation that is gone": changed(("size: int = 4", "size = 4")),
    "a generator that became a list": changed(
        (
            "[name for name in self.own_names if name not in excluded]",
            "list(name for name in self.own_names if name not in excluded)",
        )
    ),
    "a changed slice": changed(("remaining[:most]", "remaining[most:]")),
    "a changed tuple": changed(('("a", "b")', '("b", "a")')),
    "a yield that became an assignment": changed(("yield word, f", "rows = word, f")),
}


@pytest.mark.parametrize("kind", FORBIDDEN)
def test_finds(kind: str) -> None:
    before = BEFORE + "\nfirst(1, words=2)\n" if "first(1" in FORBIDDEN[kind] else BEFORE
    result = compare(before, FORBIDDEN[kind], messages=kind != "a message without leave")
    assert reasons(result) != []


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('raise ValueError(f"no {x} of {y[1]}")', 'raise ValueError(f"{y[1]} has no {x}")'),
        ('raise ValueError("no " + x)', 'raise ValueError("there is no " + x)'),
        ('raise ValueError("one" if x else "other")', 'raise ValueError("1" if x else "2")'),
        (
            'why = f"no {x}" if x else "none"\n    raise ValueError(why)',
            'why = f"{x}!" if x else "0"\n    raise ValueError(why)',
        ),
        ('print("a", f"{x:.2f} s")', 'print("b", f"took {x:.2f} seconds")'),
        ('option(x, help="a")', 'option(x, help="b")'),
        ('log.warning("a b")', 'log.warning("b c")'),
        ('return [LateError(", ".join(f"{z} a" for z in y))]', 'return [LateError("; ".join(f"b {z}" for z in y))]'),
        ('refuse(x, "a")', 'refuse(x, "b")'),
        ('raise ValueError(reason("a"))', 'raise ValueError(reason("b"))'),
    ],
)
def test_texts_of_messages_may_change(before: str, after: str) -> None:
    function = """
class LateError(ValueError): ...
def refuse(place, what):
    raise LateError(f"{place}: {what}")
def reason(why):
    return f"because of {why}"
def f(x, y):
    """
    outside = function.replace("because", "since") if "reason(" in before else function
    assert reasons(compare(function + before, outside + after, messages=True)) == []
    assert reasons(compare(function + before, function + after)) != []


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('raise ValueError(f"no {x} of {y[1]}")', 'raise ValueError(f"no {x} of {y[2]}")'),
        ('raise ValueError(f"no {x} of {y}")', 'raise ValueError(f"no {x}")'),
        ('raise ValueError(f"no {x} of {y}")', 'raise ValueError(f"no {x} of {x}")'),
        ('raise ValueError(f"{x:.2f}")', 'raise ValueError(f"{x:.3f}")'),
        ('raise ValueError(y["key"] + " is bad")', 'raise ValueError(y["other"] + " is bad")'),
        ('raise ValueError("one" if x == "a" else "other")', 'raise ValueError("one" if x == "b" else "other")'),
        ('raise ValueError(x.get("a"))', 'raise ValueError(x.get("b"))'),
        ('why = "a"\n    raise ValueError(y[why])', 'why = "b"\n    raise ValueError(y[why])'),
        ('open(x, "r")', 'open(x, "w")'),
        ("print(x, sep=y)", "print(y, sep=x)"),
        ('print("a", end="")', 'print("a", end="b")'),
        ('note("key", "a text")', 'note("other", "a text")'),
    ],
)
def test_other_parts_of_messages_may_not_change(before: str, after: str) -> None:
    function = "def f(x, y):\n    "
    assert reasons(compare(function + before, function + before, messages=True)) == []
    assert reasons(compare(function + before, function + after, messages=True)) != []


def test_expectations_of_tests_may_change_on_request() -> None:
    before = """
        with pytest.raises(ValueError, match="a b"):
            f("c")
        assert "a" in g("c")
    """
    trees = [{"tests/test_a.py": text} for text in (before, before.replace('"a', '"x'))]
    assert len(reasons(compare(*trees, messages=True))) == 2
    result = compare(*trees, messages=True, expectations=True)
    assert (reasons(result), len(result.findings.notices)) == ([], 2)
    assert reasons(compare(trees[0], {"tests/test_a.py": before.replace('f("c")', 'f("d")')}, expectations=True)) != []


def test_texts_of_reports_may_change_on_request() -> None:
    before, after = (f"FAMILIES = [make('rows', 'Rows {word}', {{'a b': x['a b']}})]" for word in ("read", "decoded"))
    trees = {PATH: dedent(before).encode()}, {PATH: dedent(after).encode()}
    assert compare_trees(*trees, Options()).findings.differences
    result = compare_trees(*trees, Options(texts=("src/meseta/a.py",)))
    assert (result.findings.differences, len(result.findings.notices)) == (set(), 1)
    keys = {PATH: after.replace("x['a b']", "x['b a']").encode()}
    assert compare_trees(trees[0], keys, Options(texts=("src",))).findings.differences


MODULES = {
    PATH: BEFORE,
    "src/meseta/b.py": "def close(names, folder): ...\n\ndef _hidden(): ...\n",
    "src/meseta/__init__.py": "",
    "tests/test_b.py": "from meseta.b import close\nimport meseta.b as m\n\nclose(m._hidden(), 1)\n",
}


def test_modules_move_with_their_imports() -> None:
    after = {path.replace("b.py", "blocks.py"): text for path, text in MODULES.items() if path != "tests/test_b.py"}
    after[PATH] = changed(("import b", "import blocks"), ("b.close", "blocks.close"))
    after["tests/test_b.py"] = MODULES["tests/test_b.py"].replace("meseta.b", "meseta.blocks")
    table = RenameTable([*ROWS[:-2], Rename("module", "b.py", "b", "blocks")])
    assert "src/meseta/blocks.py" in after
    assert reasons(compare(MODULES, after, table)) == []
    forgotten = after | {"tests/test_b.py": MODULES["tests/test_b.py"]}
    assert any("no module meseta.b" in reason for reason in reasons(compare(MODULES, forgotten, table)))


def test_folders_move_with_their_imports() -> None:
    before = {
        "src/meseta/train/outside/__init__.py": "",
        "src/meseta/train/outside/files.py": "x = 1\n",
        "src/meseta/a.py": "from meseta.train.outside.files import x\nfrom meseta.train import outside\noutside\n",
        "tests/train/outside/files.py": "",
    }
    after = {path.replace("meseta/train/outside/", "meseta/train/interop/"): text for path, text in before.items()}
    after["src/meseta/a.py"] = before["src/meseta/a.py"].replace("outside", "interop")
    table = RenameTable([Rename("module", "train/outside/__init__.py", "outside", "interop")])
    result = compare(before, after, table)
    assert (reasons(result), result.findings.num_moved) == ([], 2)
    assert reasons(compare(before, after)) != []


@pytest.mark.parametrize(
    ("path", "old", "new"),
    [
        ("tests/test_b.py", "import close", "import close"),
        ("tests/test_b.py", "", "# no more\n"),
        (PATH, "b.close", "b.close"),
    ],
)
def test_a_forgotten_use_in_another_file_is_found(path: str, old: str, new: str) -> None:
    after = {name: text.replace("close(names", "release(names") for name, text in MODULES.items()}
    right = after | {
        PATH: changed(("b.close", "b.release")),
        "tests/test_b.py": MODULES["tests/test_b.py"].replace("close", "release"),
    }
    table = RenameTable([row for row in ROWS if row.kind != "module"])
    assert reasons(compare(MODULES, right, table)) == []
    wrong = right | {path: MODULES[path].replace(old, new, 1) if old else new + MODULES[path]}
    assert reasons(compare(MODULES, wrong, table)) != []


def test_added_and_removed_files_need_leave() -> None:
    one, other = {"src/a.py": "x = 1"}, {"tools/b.py": "x = 1"}
    assert len(reasons(compare(one, other))) == 2
    trees = [{path: text.encode() for path, text in tree.items()} for tree in (one, other)]
    assert not compare_trees(*trees, Options(allowed=("src", "tools/b.py"))).findings.differences
    assert len(compare_trees(*trees, Options(allowed=("tools",))).findings.differences) == 1


def test_lists_of_names_are_sorted_again_only_if_the_table_explains_it() -> None:
    before = "__all__ = ['Alpha', 'Beta']\nKINDS = {'a': 1, 'b': 2}\nNAMES = 'Alpha Beta'\n"
    after = "__all__ = ['Beta', 'Gamma']\nKINDS = {'b': 2, 'c': 1}\nNAMES = 'Beta Gamma'\n"
    table = RenameTable([Rename("class", "", "Alpha", "Gamma"), Rename("stored", "", "a", "c")])
    result = compare(before, after, table)
    assert reasons(result) == []
    assert len(result.findings.notices) == 3
    assert reasons(compare(before, after)) != []
    assert reasons(compare("x = {'a': 1, 'b': 2}", "x = {'b': 2, 'a': 1}", table)) != []
    assert reasons(compare(before, after.replace("1", "2"), table)) != []
    assert reasons(compare("x = ['a', 'b']", "x = ['b', 'a']", table)) != []


def test_strings_follow_the_table_and_are_listed() -> None:
    before = "x = {'near_rows': '--near-rows', 'two words': 1}\ny = 'near_rows'\n"
    after = "x = {'cache_rows': '--cache-rows', 'three good words': 1}\ny = 'near_rows'\n"
    table = RenameTable([Rename("stored", "", "near_rows", "cache_rows"), *ROWS])
    result = compare(f"{before}near_rows = 1", f"{after}cache_rows = 1", table)
    assert reasons(result) == []
    listed = sorted(str(notice) for notice in result.findings.notices)
    assert len(listed) == 4
    assert any("src/meseta/a.py:2: string with the old name near_rows" in line for line in listed)
    assert reasons(compare(before, after.replace("cache_rows'", "other_rows'"), table)) != []


CPP = r"""
#include <string>
#define ROWS(x) \
  ((x) + 1)  // of a macro
namespace meseta {
// Of rows.
struct Selection { int remaining; };
inline int count(const Selection& excluded, int own) {
  const char* raw = R"x(a "quoted" // no comment)x";
  if (own < 0) throw std::invalid_argument("row " + std::to_string(own) + " is bad");
  return excluded.remaining + own * 1'000 + ROWS(own); /* why */
}
}
void bind(nb::module_& m) { m.def("count", &meseta::count); }
"""


@pytest.mark.parametrize(
    ("pairs", "messages"),
    [
        ([("// Of rows.", "// Counts of rows."), (" /* why */", ""), ("  // of a macro", "")], False),
        ([("own", "row")], False),
        ([("Selection", "Counts"), ("remaining", "received")], False),
        ([('"row " + std', '"r" "ow " + std')], False),
        ([('"row " + std', '"number " + std'), ('" is bad"', '" is not valid"')], True),
        ([('"row " + std', "std")], True),
        ([("count", "num_rows")], False),
        ([("  if", "\n\n    if")], False),
    ],
)
def test_accepts_in_cpp(pairs: list[tuple[str, str]], messages: bool) -> None:
    after = CPP
    for old, new in pairs:
        assert old in after
        after = after.replace(old, new)
    table = RenameTable(
        [Rename("class", "", "Selection.remaining", "Counts.received"), Rename("function", "", "count", "num_rows")]
    )
    result = compare({"a.cpp": CPP}, {"a.cpp": after}, table, messages=messages)
    assert reasons(result) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("1'000", "1'001"),
        ("((x) + 1)", "((x) + 2)"),
        ("own < 0", "own <= 0"),
        ("// no comment)x", ")x"),
        ("x(a", "x(b"),
        ('m.def("count"', 'm.def("counts"'),
        ("excluded.remaining + own", "excluded.remaining - own"),
        ("own", "excluded"),
        ("excluded.remaining + own", "excluded.remaining + row"),
        ("Selection", "Counts"),
        ("remaining", "received"),
        ("const Selection&", "Selection&"),
        ("int remaining", "long remaining"),
        ("to_string(own)", "to_string(0)"),
        ('"row "', '"number "'),
        ("  ((x) + 1)", "\n  ((x) + 1)"),
        ("<string>", "<vector>"),
    ],
)
def test_finds_in_cpp(old: str, new: str) -> None:
    assert old in CPP
    assert reasons(compare({"a.cpp": CPP}, {"a.cpp": CPP.replace(old, new)})) != []


def test_code_of_pages_is_compared_and_their_prose_is_not() -> None:
    page = "# Rows\n\nOf rows.\n\n```python\nfrom meseta.b import close\nclose(1, 2)\n```\n\n```text\n3\n```\n"
    before = {"docs/a.md": page}
    assert reasons(compare(before, before | {"docs/a.md": page.replace("Of", "All").replace("3", "4")})) == []
    result = compare(before, before | {"docs/a.md": page.replace("2", "3")})
    assert reasons(result) == ["docs/a.md:7 -> 7: constant changed: 2 | 3"]


def test_other_files_change_with_the_table_only() -> None:
    table = RenameTable([Rename("config key", "", "near_rows", "cache_rows")])
    before = {"a.yaml": "near_rows: 3\n"}
    assert reasons(compare(before, {"a.yaml": "cache_rows: 3\n"}, table)) == []
    assert reasons(compare(before, {"a.yaml": "cache_rows: 4\n"}, table)) != []


def test_parameters_that_others_read_need_a_row() -> None:
    functions = [
        "def test_a(rows): return rows",
        "@app.command()\ndef a(rows): return rows",
        "def f(rows): return rows\npartial(f, rows=1)",
        "class A:\n    def __init__(self, rows): self.x = rows\nclass B(A): ...\nB(rows=1)",
        "class A:\n    def forward(self, rows): return rows\nmodel(rows=1)",
        "def f(rows): return rows\nf(**{'rows': 1})",
    ]
    for text in functions:
        after = text.replace("(rows", "(ids").replace(", rows)", ", ids)").replace("return rows", "return ids")
        after = after.replace("(ids=1", "(rows=1").replace("= rows", "= ids")
        assert reasons(compare(text, after)) != [], text
    assert reasons(compare("def f(rows): return rows\nf(1)", "def f(ids): return ids\nf(1)")) == []


@pytest.mark.parametrize("table", ["kind,old,new\n", "kind,file,line,old,new,note\nclass,a.py,1,A / B,C,\n"])
def test_a_bad_table_is_refused(table: str, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(table)
    with pytest.raises(TableError):
        RenameTable.load([tmp_path / "t.csv"])


def test_the_command(tmp_path: Path) -> None:
    for name, text in (("a", "x = 1\n"), ("b", "x = 1  # one\n"), ("c", "x = 2\n"), ("d", "y = 1\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "m.py").write_text(text)
    (tmp_path / "t.csv").write_text("kind,file,line,old,new,note\nconstant,m.py,1,x,y,\n")

    def run(*arguments: str) -> tuple[int, list[str]]:
        command = [sys.executable, str(ROOT / "tools" / "compare_trees.py"), *arguments]
        run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        return run.returncode, (run.stdout + run.stderr).splitlines()

    nothing = "0 names and 0 local names changed; to look at: nothing"
    assert run("a", "b") == (0, [f"compared 1 files, of which 1 changed and 0 moved: 0 differences; {nothing}"])
    code, lines = run("a", "c")
    assert (code, lines[0]) == (1, "m.py:1 -> 1: constant changed: 1 | 2")
    assert run("a", "d", "--renames", "t.csv")[0] == 0
    assert run("a", "no such commit")[0] == 2


def test_a_name_that_becomes_its_alias_needs_none() -> None:
    table = RenameTable([Rename("function", "b.py", "f", "g")])
    before = {"src/meseta/a.py": "from meseta.b import f as g\ng()\n", "src/meseta/b.py": "def f(): pass\n"}
    after = {"src/meseta/a.py": "from meseta.b import g\ng()\n", "src/meseta/b.py": "def g(): pass\n"}
    assert reasons(compare(before, after, table)) == []
    assert reasons(compare(before, after)) != []


def test_the_order_of_slots_may_change() -> None:
    before = {"m.py": "class A:\n    __slots__ = ('_place', '_record')\n"}
    after = {"m.py": "class A:\n    __slots__ = ('_record', '_sequence')\n"}
    assert reasons(compare(before, after, RenameTable([Rename("attribute", "m.py", "A._place", "_sequence")]))) == []
    assert reasons(compare(before, after)) != []
