"""Rules of prose that a program can check: tell-tale words, and how a docstring begins."""

from __future__ import annotations

import ast
import re

from writing.source import Docstring, FunctionNode

TELL_TALE = re.compile(
    r"\b(told|tells?(?!-tale)|lies|lie|lay|lying|stands?|stood|beside|alike|anew"
    r"|so (?:many|much|long|often)(?! that| as)"
    r"|(?:go|goes|going|went|gone) on|held against|at once|of (?:its|their|one's|your) own|hand(?:s|ed)? on|taken? up"
    r"|nobody|somebody|strangers?|but (?:for|where)|put together|comes? to"
    r"|what (?:it|they|is|was|are|were|has|comes|came))\b",
    re.IGNORECASE,
)
QUESTION = re.compile(r"(What|Where|Which|How|When|Whose)\b")
FRAGMENT = re.compile(r"(Of|Those|So many|So much|By|As|In|Likewise|None|The same|Also|And|But|Or|Else|To)\b")
VERBS = frozenset(
    re.findall(
        r"\w+",
        """
        abort accept access accumulate acquire add adjust adopt advance aggregate align allocate allow annotate
        announce append apply approximate arrange assemble assert assign attach average await back balance begin bind
        block borrow break broadcast bucketize build bypass cache calculate calibrate call cancel cap cast catch
        change check choose clamp classify clean clear clip clone close coalesce collapse collect combine commit
        compact compare compile complete compose compress compute concatenate configure confirm connect construct
        consume continue convert copy count create cut decode decompress decrease deduplicate define delegate delete
        dequantize derive describe deserialize destroy detach detect determine disable discard dispatch display
        distribute divide do download drain draw drop dump emit enable encode encrypt enforce ensure enter enumerate
        erase escape estimate evaluate evict exchange exclude execute exit expand explain export expose extend extract
        fail fetch fill filter finalize find finish fit fix flag flatten flush fold follow force forget fork format
        forward free freeze gather generate get give grant group grow guard handle hash hold identify ignore implement
        import include increase increment indicate infer inform initialize inject insert inspect install instantiate
        interleave interpolate interpret interrupt invalidate invert invoke iterate join keep kill launch learn leave
        let limit link list listen load locate lock log look lower make map mark mask match materialize measure merge
        minimize mirror modify monitor move multiply name narrow normalize note notify observe obtain offer open order
        overwrite pack pad parse partition pass patch pause perform permute pick pin place plan plot poll pop populate
        predict prefetch prepare preserve prevent price print probe process produce propagate prune publish push put
        quantize quarantine queue raise rank read rebuild receive recompute reconcile reconstruct record recover
        redistribute reduce refresh refuse register reject release reload remove rename reorder repeat replace replay
        reply report request require reserve reset reshape resolve restart restore resume retain retrieve retry return
        reuse revert rewrite rotate round route run sample save scale scan scatter schedule score search seed seek
        select send separate serialize serve set shard share show shrink shuffle shut signal simulate skip sleep slice
        snapshot solve sort spawn split stack start state step stop store stream strip submit subtract sum summarize
        suppress swap switch sync synchronize take terminate test time touch trace track train transfer transform
        translate transpose traverse treat trim truncate try tune turn undo unload unlock unpack unpin unregister
        update upload use validate verify view visit wait wake walk warn watch weigh widen wrap write yield zero
        """,
    )
)
"""Verbs that the docstring of a function may begin with. Add one that is missing."""
ADVERB = re.compile(r"(?:[A-Z][a-z]+ly|Re-?|Also|Only|First|Never|Always|Do not)[ -]+")


def begins_with_question(text: str) -> bool:
    """Whether a docstring begins with a question word."""
    return QUESTION.match(text) is not None


def begins_with_fragment(text: str) -> bool:
    """Whether a docstring begins with a word that needs a sentence before it."""
    return FRAGMENT.match(text) is not None


def lacks_verb(docstring: Docstring) -> bool:
    """Whether the docstring of a function begins with no imperative verb. A property may begin with a noun, a function
    that returns a boolean with "Whether", and a context manager with "Context manager"."""
    function = docstring.owner
    if not isinstance(function, FunctionNode):
        return False
    marks = {ast.unparse(mark).rpartition(".")[2].partition("(")[0] for mark in function.decorator_list}
    if marks & {"property", "cached_property", "setter", "overload"}:
        return False
    text = str(docstring.node.value).strip()
    returns = ast.unparse(function.returns) if function.returns else ""
    if text.startswith("Whether ") and ("bool" in returns or "TypeGuard" in returns or not returns):
        return False
    if text.startswith("Context manager ") and marks & {"contextmanager", "asynccontextmanager"}:
        return False
    first = re.match(r"([A-Za-z]+)\b(?! of\b)", ADVERB.sub("", text, count=1))
    return first is None or first[1].lower() not in VERBS
