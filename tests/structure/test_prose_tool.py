"""Tests of tools/prose.py on small sources: it reports each kind of text and name, and applies its rules."""

from __future__ import annotations

import io
import sys
import tokenize
from pathlib import Path

import pytest

from source_tree import ROOT

sys.path.insert(0, str(ROOT / "tools"))
import prose
from writing.measures import package_measures, read_part, remaining_renames
from writing.names import leftovers, repeated_classes
from writing.renames import read_renames
from writing.rules import TELL_TALE, begins_with_fragment, begins_with_question, lacks_verb
from writing.source import parse
from writing.texts import DIRECTIVE, files_below, parse_all, texts_of

PYTHON = '''\
#!/usr/bin/env python3
"""A module."""
import logging
import sys
import warnings

limit = 3  # a comment
"""A field."""
name = "# no comment"  # noqa: F401


class Refused(ValueError):
    """A class."""


class Result:
    size: int
    """
    A field of a class,
    in two lines.
    """


def check(value: int, path: str, parser) -> None:
    """A function."""
    if value < 0:
        raise ValueError(f"{path}: value {value!r} is negative")
    reason = "is too large"
    hint = "choose a smaller one" if value > 5 else "leave it out"
    if value > limit:
        raise Refused(f"{path}: value {reason}; " + hint)
    if value == 1:
        raise refused("holds a single value")
    problem = Refused("is set but never used")
    logging.getLogger(__name__).info("read the file %s", path)
    warnings.warn(advice(path))
    print("read it", file=sys.stderr)
    say(f"wrote {path}")
    parser.add_argument("--rows", help="number of rows")
    table["a key of several words"] = text("words that nothing prints here")
    raise problem


def refused(what: str) -> Refused:
    return Refused(f"a file that {what}")


def advice(path: str) -> str:
    return f"the file {path} is old"


def say(message: str) -> None:
    print(message)
'''
"""A module with texts of each kind."""


def write(folder: Path, **files: str) -> list[Path]:
    """Write files and return their paths. `part__a_py` is part/a.py."""
    for name, source in files.items():
        parts = name.split("__")
        path = folder.joinpath(*parts[:-1], ".".join(parts[-1].rsplit("_", 1)))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return files_below(folder)


def kinds_and_texts(paths: list[Path]) -> list[tuple[str, str]]:
    return sorted((text.kind, text.text) for text in texts_of(paths))


def test_texts_of_python(tmp_path: Path) -> None:
    texts = texts_of(write(tmp_path, a_py=PYTHON))
    lines = PYTHON.splitlines()
    expected = [
        ("module", "A module."),
        ("comment", "# a comment"),
        ("field", "A field."),
        ("class", "A class."),
        ("field", "A field of a class,\nin two lines."),
        ("function", "A function."),
        ("raised", "{path}: value {value} is negative"),
        ("error", "is too large"),
        ("error", "choose a smaller one"),
        ("error", "leave it out"),
        ("error", "{path}: value {reason}; "),
        ("raised", "holds a single value"),
        ("error", "is set but never used"),
        ("log", "read the file %s"),
        ("print", "read it"),
        ("print", "wrote {path}"),
        ("help", "number of rows"),
        ("phrase", "words that nothing prints here"),
        ("error", "a file that {what}"),
        ("log", "the file {path} is old"),
    ]
    assert sorted((text.kind, text.text) for text in texts) == sorted(expected)
    for text in texts:
        assert text.text.splitlines()[0].replace("{value}", "{value!r}") in lines[text.line - 1]
    assert next(text for text in texts if text.kind == "raised").num_words == 4


def test_messages_across_modules(tmp_path: Path) -> None:
    """Names that several modules define are resolved by imports, and `fail` passes its parameter on."""
    one = "from b.messages import note, fail\nnote('seen by nobody else')\nfail('the disk is full')\n"
    messages = "def note(text):\n    print(f'note: {text}')\ndef fail(text):\n    raise OSError(text)\n"
    other = "def note(text):\n    return text\nnote('only a plain string')\n"
    paths = write(tmp_path, one_py=one, b__messages_py=messages, other_py=other)
    assert kinds_and_texts(paths) == [
        ("error", "the disk is full"),
        ("phrase", "only a plain string"),
        ("print", "note: {text}"),
        ("print", "seen by nobody else"),
    ]


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("print(f'{a}: ' + 'in two parts')", "print"),
        ("raise E('a' if x else 'is too long')", "error"),
        ("raise E(', '.join(f'{a} is lost' for a in b))", "error"),
        ("raise E('%s is lost' % a)", "error"),
        ("raise E('{} is lost'.format(a))", "error"),
        ("why = {1: 'is lost'}\nraise E(why[a])", "error"),
        ("class A(B): pass\nclass B(MyError): pass\nA('is lost')", "error"),
        ("for name, text in (('a', 'is lost'), ('b', 'is late')):\n    print(text)", "print"),
        ("typer.echo('is lost')", "print"),
        ("sys.stderr.write('is lost')", "print"),
        ("console.print('is lost')", "print"),
        ("Annotated[int, typer.Option(help='is lost')]", "help"),
        ("logger.warning('is lost')", "log"),
        ("warnings.warn('is lost')", "log"),
        ("math.log('is lost')", None),
        ("open('is lost')", None),
        ("table['is lost by all']", None),
        ("x: Float['rows columns more']", None),
    ],
)
def test_messages(tmp_path: Path, source: str, kind: str | None) -> None:
    assert {text.kind for text in texts_of(write(tmp_path, a_py=source))} == ({kind} if kind else set())


def test_texts_of_reports(tmp_path: Path) -> None:
    paths = write(tmp_path, report__a_py="tag('the time of a step')", b_py="tag('the time of a step')")
    assert kinds_and_texts(paths) == [("phrase", "the time of a step"), ("report", "the time of a step")]


NATIVE = """\
#include "a b c"
// one line
int n = 1'000;  // "after" code
/* a block
   of lines */
const char* url = "http://no.comment/*";
throw std::invalid_argument("offsets must not fall");
auto raw = R"(one raw // string)";
"""


def test_texts_of_other_files(tmp_path: Path) -> None:
    shell = "#!/bin/sh\n# run it\nx=${a#b} # trailing\n"
    paths = write(tmp_path, a_cpp=NATIVE, b_sh=shell, c_md="# Title\n\nA page.\n", d_pyi='def f():\n    """Text."""\n')
    assert [(text.kind, text.line, text.text.strip()) for text in texts_of(paths)] == [
        ("stub", 2, "Text."),
        ("native-comment", 2, "one line"),
        ("native-comment", 3, '"after" code'),
        ("native-comment", 4, "a block\n   of lines"),
        ("native-text", 7, "offsets must not fall"),
        ("native-text", 8, "one raw // string"),
        ("comment", 2, "# run it"),
        ("comment", 3, "# trailing"),
        ("page", 1, "# Title"),
        ("page", 3, "A page."),
    ]


def test_comments_are_those_of_tokenize() -> None:
    modules = parse_all(files_below(ROOT / "tools"))
    assert modules
    for module in modules:
        tokens = tokenize.generate_tokens(io.StringIO(module.text).readline)
        comments = [
            (t.start[0], t.string) for t in tokens if t.type == tokenize.COMMENT and not DIRECTIVE.match(t.string)
        ]
        assert [
            (text.line, text.text) for text in texts_of([module.path], [module]) if text.kind == "comment"
        ] == comments


@pytest.mark.parametrize(
    "text", ["It lies there.", "what it is", "so many rows", "Handed on.", "The run goes on", "ALIKE", "but for one"]
)
def test_tell_tale_words(text: str) -> None:
    assert TELL_TALE.search(text)


@pytest.mark.parametrize("text", ["so many that", "understand", "a tell-tale", "applies", "go one", "What follows"])
def test_words_that_are_not_tell_tale(text: str) -> None:
    assert not TELL_TALE.search(text)


def test_beginnings() -> None:
    assert begins_with_question("What is left.") and begins_with_question("Where\nit is.")
    assert not begins_with_question("Whether it is.") and not begins_with_question("Whatever")
    assert begins_with_fragment("Of a row.") and begins_with_fragment("So many rows.")
    assert not begins_with_fragment("Offsets of rows.") and not begins_with_fragment("Index of rows.")


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        ("def f() -> int: 'Return a row.'", False),
        ("def f() -> int: 'Re-read a row.'", False),
        ("def f() -> int: 'Lazily read a row.'", False),
        ("def f() -> int: 'The row.'", True),
        ("def f() -> int: 'Name of the row.'", True),
        ("def f() -> int: 'Name the row.'", False),
        ("def f() -> int: 'Returns a row.'", True),
        ("def f() -> int: '(row, column)'", True),
        ("def f() -> bool: 'Whether it is open.'", False),
        ("def f() -> int: 'Whether it is open.'", True),
        ("@property\ndef f() -> int: 'The row.'", False),
        ("@functools.cached_property\ndef f() -> int: 'The row.'", False),
        ("@contextmanager\ndef f(): 'Context manager that locks a row.'", False),
        ("def f(): 'Context manager that locks a row.'", True),
    ],
)
def test_verbs(tmp_path: Path, function: str, expected: bool) -> None:
    [path] = write(tmp_path, a_py=function)
    [docstring] = parse(path).docstrings
    assert lacks_verb(docstring) is expected


def test_leftover_names_and_repeated_classes(tmp_path: Path) -> None:
    first = "own = 1\ndef f(found, other):\n    self.met_ = found\nclass A: pass\nclass C: pass\n"
    second = "for told in x: pass\ntry: pass\nexcept E as _mine: pass\nclass A: pass\nknown = founding = 1\n"
    modules = parse_all(write(tmp_path, a_py=first, b_py=second))
    assert [name.text for name in leftovers(modules)] == ["own", "found", "met_", "told", "_mine"]
    assert [str(name) for name in repeated_classes(modules)] == [f"{tmp_path}/a.py:4: A", f"{tmp_path}/b.py:4: A"]


OLD = """\
class Told:
    came: int
    def tell(self, most): pass
def shown(): pass
FEWEST_ROWS = 1
"""


def renamed(folder: Path, table: str) -> list[str]:
    """Return the names of a table that the files of `folder` still define, with their lines."""
    path = folder / "table.csv"
    path.write_text(table)
    _, lines = remaining_renames(read_part(folder), [path])
    return [line.removeprefix(f"{folder}/").partition(" (")[0] for line in lines]


def test_renames_by_kind(tmp_path: Path) -> None:
    table = """\
kind,file,line,old,new,note
class,part/old.py,1,Told,Counts,
attribute,part/old.py,2,Told.came,received,
method,part/old.py,3,Told.tell,update,
parameter,part/old.py,3,Told.tell.most,limit,
function,part/old.py,4,shown,format_value,
constant,part/old.py,5,FEWEST_ROWS,MIN_ROWS,
module,part/old.py,1,old,counts,
function,native.cpp,1,take,acquire,
stored,part/old.py,1,FEWEST_ROWS,min_rows,
"""
    before, during, after = tmp_path / "before", tmp_path / "during", tmp_path / "after"
    write(before, part__old_py=OLD, native_cpp="void take(int n);  // take it\n")
    assert renamed(before, table) == [
        "part/old.py:1: Told -> Counts",
        "part/old.py:2: Told.came -> received",
        "part/old.py:3: Told.tell -> update",
        "part/old.py:3: Told.tell.most -> limit",
        "part/old.py:4: shown -> format_value",
        "part/old.py:5: FEWEST_ROWS -> MIN_ROWS",
        "part/old.py:1: part/old -> counts",
        "native.cpp:1: take -> acquire",
    ]
    # The class and the module have their new names; a method, and in other places a parameter and a local name, do not.
    source = "class Counts:\n    def tell(self, limit): pass\n    came_late: int\ndef g(shown): FEWEST_ROWS = 1\n"
    write(during, part__counts_py=source, native_cpp="x.take();  // take it\n")
    assert renamed(during, table) == ["part/counts.py:2: Told.tell -> update"]
    write(after, part__counts_py="class Counts: pass\n")
    assert renamed(after, table) == []


def test_renames_by_pattern(tmp_path: Path) -> None:
    table = """\
pattern,old,new,where (below src/meseta)
a,"Told.tell / .came, module old (everywhere)","Told.update / .received, counts","part/old.py:3,2, other.py"
b,config keys shown,format_value,several
"""
    write(tmp_path, part__old_py=OLD, part__other_py="x = 1\n", other_py="x = 1\n")
    assert renamed(tmp_path, table) == [
        "part/old.py:3: Told.tell -> Told.update",
        "part/old.py:2: Told.came -> Told.received",
        "part/old.py:1: old -> counts",
        "part/old.py:4: shown -> format_value",
    ]
    assert [rename.files for rename in read_renames(tmp_path / "table.csv")] == [("part/old.py", "other.py"), ()]


def test_measures(tmp_path: Path) -> None:
    write(tmp_path, a_py='"""What it is."""\n# It lies there.\nraise E("the rows are alike")\n' + "x = 1\n" * 7)
    measures = {measure.name: measure for measure in package_measures(read_part(tmp_path))}
    prose_rate = measures["tell-tale words per 10,000: docstrings and comments"]
    assert prose_rate.value == pytest.approx(1e4 * 2 / 7) and prose_rate.detail == "2 in 7 words"
    assert measures["tell-tale words per 10,000: all errors"].value == 2500
    assert measures["% of module docstrings that begin with a question word"].value == 100
    assert measures["words of docstrings per 100 lines of Python"].value == 30
    assert measures["comment lines per 100 lines of Python"].value == 10
    assert not prose_rate.is_met


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[str]:
    prose.main(list(map(str, arguments)))
    return capsys.readouterr().out.splitlines()


def test_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, package__a_py=PYTHON, package__a_test_py='"""Of a test."""\n', tests__b_py='"""So many."""\n')
    chosen = [tmp_path, "--package", "package"]
    table = run(capsys, *chosen)
    assert any(line.startswith("class names used twice") and line.endswith("0  <= 0") for line in table)
    assert "Of a test." in run(capsys, *chosen, "--list", "fragment", tmp_path / "package")[0]
    assert run(capsys, *chosen, "--list", "help", tmp_path) == [f"{tmp_path}/package/a.py:39: help: number of rows"]
    assert run(capsys, *chosen, "--list", "tell-tale", tmp_path / "tests") == [
        f"{tmp_path}/tests/b.py:1: module: So many: So many."
    ]
    assert len(run(capsys, *chosen, "--sample", 3, 1)) == 3
    assert run(capsys, *chosen, "--sample", 3, 1) == run(capsys, *chosen, "--sample", 3, 1)
    assert "Of a test." not in run(capsys, *chosen, "--sample", 100, 1)
    errors = ["is set but never used", "{path}: value '{value}' is negative"]
    assert sorted(run(capsys, *chosen, "--sample-errors", 9, 1)) == sorted(
        [*errors, "{path}: value is too large; choose a smaller one"]
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--package", "absent"], "absent does not exist"),
        (["--list", "kind", "."], "no kind 'kind'; choose one of tell"),
    ],
)
def test_bad_arguments(arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "src").mkdir()
    with pytest.raises(SystemExit):
        prose.main([str(tmp_path), *arguments])
    assert message in capsys.readouterr().err
