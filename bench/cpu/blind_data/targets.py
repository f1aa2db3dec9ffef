"""The functions that blind wrong bodies stand in for, on 17 real tasks of 6 packages: where a body goes, what arguments the
function has, an almost right version (`_rough`) and, for bodies that are right for most inputs only, a right one (`_right`).
"""

# ruff: noqa: E501

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    task: str  # below the tasks' folder
    path: str
    anchor: str  # replaced by the body; empty where the function is gone and comes at the end of the file
    parameters: str
    rough: str
    right: str = ""
    head: str = ""  # of a function that is gone
    edits: tuple[tuple[str, str, str], ...] = ()  # what else has to change: path, old, new

    def names(self) -> str:
        """The parameters as expressions: `a, b=1` -> `a, b`."""
        return ", ".join(part.partition("=")[0].strip() for part in self.parameters.split(","))


def stub(task: str, path: str, name: str, parameters: str, rough: str, right: str = "", **more: object) -> Target:
    return Target(task, path, f'raise NotImplementedError("{name}")', parameters, rough, right, **more)  # type: ignore[arg-type]


TARGETS = {
    "naturalsize": stub(
        "train/humanize-filesize-naturalsize-3ced05",
        "src/humanize/filesize.py",
        "naturalsize",
        "value, binary=False, gnu=False, format='%.1f'",
        """
base = 1024 if binary or gnu else 1000
units = suffixes["gnu"] if gnu else suffixes["binary"] if binary else suffixes["decimal"]
size = float(value)
if abs(size) < base:
    return "%dB" % size if gnu else "%d Bytes" % size
power = 0
while abs(size) >= base and power < len(units):
    size /= base
    power += 1
return format % size + ("" if gnu else " ") + units[power - 1]
""",
    ),
    "activate": stub(
        "train/humanize-i18n-activate-fe86e3",
        "src/humanize/i18n.py",
        "activate",
        "locale, path=None",
        """
_CURRENT.locale = locale
return _TRANSLATIONS[None]
""",
    ),
    "scientific": stub(
        "train/humanize-number-scientific-751e86",
        "src/humanize/number.py",
        "scientific",
        "value, precision=2",
        """
number = float(value)
left, right = f"{number:.{precision}e}".split("e")
return f"{left} x 10{str(int(right)).translate(_SUPERSCRIPT_TRANS)}"
""",
        """
import math
try:
    number = float(value)
except (TypeError, ValueError):
    return str(value)
if not math.isfinite(number):
    return _format_not_finite(number)
left, right = f"{number:.{precision}e}".split("e")
return f"{left} x 10{str(int(right)).translate(_SUPERSCRIPT_TRANS)}"
""",
    ),
    "parameterize": Target(
        "train/inflection-inflection-parameterize-e6e55d",
        "inflection/__init__.py",
        "",
        "string, separator='-'",
        """
import re
return re.sub(r"[^a-z0-9_-]+", separator, string.lower()).strip(separator)
""",
        """
string = re.sub(r"(?i)[^a-z0-9\\-_]+", separator, transliterate(string))
if separator:
    mark = re.escape(separator)
    string = re.sub(r"%s{2,}" % mark, separator, string)
    string = re.sub(r"(?i)^{0}|{0}$".format(mark), "", string)
return string.lower()
""",
        'def transliterate(string):\n    return unicodedata.normalize("NFKD", string).encode("ascii", "ignore").decode("ascii")\n\n\n'
        "def parameterize(string, separator='-'):\n",
    ),
    "singularize": Target(
        "train/inflection-inflection-singularize-700da0",
        "inflection/__init__.py",
        "",
        "word",
        """
if word.endswith("ies"):
    return word[:-3] + "y"
return word[:-1] if word.endswith("s") and not word.endswith("ss") else word
""",
        """
for name in UNCOUNTABLES:
    if re.search(r"(?i)\\b(%s)\\Z" % name, word):
        return word
for rule, replacement in SINGULARS:
    if re.search(rule, word):
        return re.sub(rule, replacement, word)
return word
""",
        "def singularize(word):\n",
    ),
    "underscore": stub(
        "train/inflection-inflection-underscore-9d1b48",
        "inflection/__init__.py",
        "underscore",
        "word",
        """
return re.sub(r"([a-z])([A-Z])", r"\\1_\\2", word).lower()
""",
        """
word = re.sub(r"([A-Z]+)([A-Z][a-z])", r"\\1_\\2", word)
word = re.sub(r"([a-z\\d])([A-Z])", r"\\1_\\2", word)
return word.replace("-", "_").lower()
""",
    ),
    "adjacent": stub(
        "train/more-itertools-more-adjacent-485cfd",
        "more_itertools/more.py",
        "adjacent",
        "predicate, iterable, distance=1",
        """
items = list(iterable)
return ((any(predicate(x) for x in items[i : i + distance + 1]), item) for i, item in enumerate(items))
""",
        """
if distance < 0:
    raise ValueError("distance must be at least 0")
items = list(iterable)
hits = [bool(predicate(x)) for x in items]
return ((any(hits[max(0, i - distance) : i + distance + 1]), item) for i, item in enumerate(items))
""",
    ),
    "gray_product": stub(
        "train/more-itertools-more-gray-product-921494",
        "more_itertools/more.py",
        "gray_product",
        "*iterables, repeat=1",
        """
from itertools import product
yield from product(*iterables, repeat=repeat)
""",
        """
pools = [tuple(it) for it in iterables] * repeat
if any(len(pool) < 2 for pool in pools):
    raise ValueError("each iterable must have two or more items")

def walk(rest):
    if not rest:
        yield ()
        return
    for n, tail in enumerate(walk(rest[1:])):
        for item in rest[0] if n % 2 == 0 else reversed(rest[0]):
            yield (item, *tail)

yield from walk(pools)
""",
    ),
    "replace": Target(
        "train/more-itertools-more-replace-f78f6d",
        "more_itertools/more.py",
        "",
        "iterable, pred, substitutes, count=None, window_size=1",
        """
substitutes = tuple(substitutes)
for item in iterable:
    if pred(item) and count != 0:
        count = None if count is None else count - 1
        yield from substitutes
    else:
        yield item
""",
        """
if window_size < 1:
    raise ValueError("window_size must be at least 1")
substitutes, items, i, n = tuple(substitutes), list(iterable), 0, 0
while i < len(items):
    if (count is None or n < count) and pred(*items[i : i + window_size]):
        yield from substitutes
        n += 1
        i += window_size
    else:
        yield items[i]
        i += 1
""",
        "def replace(iterable, pred, substitutes, count=None, window_size=1):\n",
        (("more_itertools/more.py", "    'repeat_last',\n", "    'repeat_last',\n    'replace',\n"),),
    ),
    "date_convert": stub(
        "train/parse-parse-date-convert-ac3049",
        "parse/__init__.py",
        "date_convert",
        "string, match, ymd=None, mdy=None, dmy=None, d_m_y=None, hms=None, am=None, tz=None, mm=None, dd=None",
        """
groups = match.groups()
if ymd is not None:
    y, m, d = re.split(r"[-/\\s]", groups[ymd])
    return datetime(int(y), int(m), int(d))
return datetime(2011, 2, 1, 12, 15)
""",
    ),
    "strf": stub(
        "train/parse-parse-strf-date-convert-0ed100",
        "parse/__init__.py",
        "strf_date_convert",
        "x, _, type",
        """
return datetime.strptime(x, type)
""",
    ),
    "with_pattern": stub(
        "train/parse-parse-with-pattern-8d88a7",
        "parse/__init__.py",
        "with_pattern",
        "pattern, regex_group_count=None",
        """
def decorator(func):
    func.pattern = pattern
    return func

return decorator
""",
    ),
    "valfilter": Target(
        "train/toolz-dicttoolz-valfilter-14b88b",
        "toolz/dicttoolz.py",
        "",
        "predicate, d, factory=dict",
        """
return {k: v for k, v in d.items() if predicate(v)}
""",
        """
kept = factory()
for k, v in d.items():
    if predicate(v):
        kept[k] = v
return kept
""",
        "def valfilter(predicate, d, factory=dict):\n",
        (
            ("toolz/dicttoolz.py", "'valmap', 'keymap'", "'valmap', 'valfilter', 'keymap'"),
            (
                "toolz/curried/__init__.py",
                "valmap = toolz.curry(toolz.valmap)",
                "valfilter = toolz.curry(toolz.valfilter)\nvalmap = toolz.curry(toolz.valmap)",
            ),
        ),
    ),
    "isiterable": Target(
        "train/toolz-itertoolz-isiterable-1ad47e",
        "toolz/itertoolz.py",
        "",
        "x",
        """
return isinstance(x, (list, tuple, str))
""",
        """
try:
    iter(x)
except TypeError:
    return False
return True
""",
        "def isiterable(x):\n",
        (
            ("toolz/itertoolz.py", "'unique', 'isdistinct',", "'unique', 'isiterable', 'isdistinct',"),
            ("toolz/curried/__init__.py", "    isdistinct,\n", "    isdistinct,\n    isiterable,\n"),
        ),
    ),
    "reduceby": stub(
        "train/toolz-itertoolz-reduceby-2fe7f6",
        "toolz/itertoolz.py",
        "reduceby",
        "key, binop, seq, init=no_default",
        """
found = {}
for item in seq:
    k = key(item)
    found[k] = binop(found[k], item) if k in found else item
return found
""",
        """
key = key if callable(key) else getter(key)
found = {}
for item in seq:
    k = key(item)
    if k not in found and init == no_default:
        found[k] = item
        continue
    start = found[k] if k in found else init() if callable(init) else init
    found[k] = binop(start, item)
return found
""",
    ),
    "php": stub(
        "heldout/sqlparse-output-outputphpfilter-process-0a306b",
        "sqlparse/filters/output.py",
        "OutputPHPFilter._process",
        "self, stream, varname, has_nl",
        """
text = "".join(str(token) for token in stream)
yield sql.Token(T.Text, varname + ' = "' + text + '";')
""",
    ),
    "get_name": stub(
        "heldout/sqlparse-sql-tokenlist-get-first-name-a6bbdd",
        "sqlparse/sql.py",
        "TokenList.get_name",
        "self",
        """
return self.get_alias() or self.value
""",
        """
return self.get_alias() or self.get_real_name()
""",
        edits=(
            (
                "sqlparse/sql.py",
                'raise NotImplementedError("TokenList._get_first_name")',
                """tokens = self.tokens[idx:] if idx else self.tokens
        kinds = [T.Name, T.Wildcard, T.String.Symbol] + ([T.Keyword] if keywords else [])
        for token in reversed(tokens) if reverse else tokens:
            if token.ttype in kinds:
                return remove_quotes(token.value)
            if isinstance(token, (Identifier, Function)):
                return token.get_real_name() if real_name else token.get_name()
        return None""",
            ),
        ),
    ),
}
