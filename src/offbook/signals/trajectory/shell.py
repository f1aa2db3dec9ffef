"""Command lines: the simple commands in them, the files they bring along, the Python inside, and what they do.

Read by hand: a parser of the whole grammar gives a tree to walk, and the walk would be as long. Agents' lines are also
often cut off or wrong, and then the words that are there still count. In doubt a command may write anything.
"""

from __future__ import annotations

import ast
import re
import shlex
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path

from offbook.core.pycode import nodes, try_parse

HEREDOC = re.compile(r"<<-?\s*(['\"]?)(\w+)\1([^\n]*)\n(.*?)\n?^\s*\2\s*$", re.DOTALL | re.MULTILINE)
PYTHON = re.compile(r"(?:^|[\s;&|(/])(?:python[\d.]*|ipython|pypy3?)(?=\s|$)")
WRITES_TO = re.compile(r"(?:>>?|\btee\s+(?:-a\s+)?)\s*(['\"]?)([^\s'\"&|;<>()]+)\1")
APPENDS = re.compile(r">>|tee\s+-a")
PIECE = re.compile(
    r"(?P<separator>&&|\|\||[;\n|]|(?<![>&\d])&(?![&>\d])|\$\(|`|<\()"
    r"|'[^']*'|\"(?:\\.|[^\"\\])*\"|\\.|.",
    re.DOTALL,
)
ROOTS = re.compile(r"^(/app/|/testbed/|/workspace/|/repo/|(\./)+)")
DATA = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
WORDS: dict[str, frozenset[str]] = {name: frozenset(text.split()) for name, text in DATA.items()}
NARROWING = re.compile(r"^(-k|-m|--lf|--last-failed|--ff|--failed-first|--sw|--stepwise|--deselect|--nf|-k.+|-k=.*)")
WHOLE = frozenset({"", ".", "tests", "test", "discover"})
STARTS = re.compile(
    r"^(subprocess\.\w+|os\.(system|popen)|(\w+\.)*(check_output|check_call|Popen)|run|(\w+\.)*pip(\.\w+)*\.main)$"
)
Words = list[str]  # of one simple command


def relative(path: str) -> str:
    """A path as an agent wrote it, from the root of the repository where it is inside."""
    return ROOTS.sub("", path.strip())


def name_of(words: Sequence[str]) -> str:
    return words[0].rpartition("/")[2]


@dataclass(frozen=True, slots=True)
class Heredoc:
    """line[start:end] is it; `rest` is what follows its mark on the line that it belongs to."""

    start: int
    end: int
    rest: str
    text: str
    path: str  # of the file that it is written to, if it is
    appends: bool
    is_python: bool


@dataclass(frozen=True)
class Command:
    """One command line, with what the agent had written before it: path -> text."""

    line: str
    files: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def heredocs(self) -> tuple[Heredoc, ...]:
        found = []
        for match in HEREDOC.finditer(self.line) if "<<" in self.line else ():
            before = self.line[self.line.rfind("\n", 0, match.start()) + 1 : match.start()]
            target = WRITES_TO.search(f"{before} {match.group(3)}")
            path, appends = (relative(target.group(2)), bool(APPENDS.match(target.group(0)))) if target else ("", False)
            is_python = not target and bool(PYTHON.search(before))
            text = match.group(4) + "\n" * bool(target)
            found.append(Heredoc(*match.span(), match.group(3), text, path, appends, is_python))
        return tuple(found)

    @property
    def files_inside(self) -> dict[str, str]:
        return {one.path: one.text for one in self.heredocs if one.path}

    def _without(self, heredocs: Sequence[Heredoc]) -> str:
        text = self.line
        for one in reversed(heredocs):
            text = f"{text[: one.start]} {one.rest}\n{text[one.end :]}"
        return text

    # What it runs: with the scripts that the agent wrote, and what Python starts.

    @cached_property
    def _run(self) -> tuple[str, tuple[str, ...]]:
        python = [one.text for one in self.heredocs if one.is_python]
        shell = self._without([one for one in self.heredocs if one.path or one.is_python])
        files = {**self.files, **self.files_inside}
        for words in simple_commands(shell):
            starts_python = bool(PYTHON.search(words[0]))
            code = _inline_code(words) if starts_python else None
            python += [code] if code is not None else []
            for path in map(relative, words[1:] if starts_python else words):
                if path in files and path.endswith(".py") and PYTHON.search(" ".join(words)):
                    python.append(files[path])
                elif path in files and path.endswith((".sh", ".bash")):
                    shell += "\n" + files[path]
        shell += "".join(f"\n{line}" for code in python for line in commands_in(code))
        return shell, tuple(python)

    @property
    def text(self) -> str:
        """The line and the lines that it runs, without the files that it brings along."""
        return self._run[0]

    @property
    def python(self) -> tuple[str, ...]:
        """The code that it runs."""
        return self._run[1]

    @cached_property
    def simple(self) -> list[Words]:
        """The commands of `text`."""
        return simple_commands(self.text)

    @cached_property
    def targets(self) -> list[str]:
        """What it writes to, as far as its words say so."""
        found = [match[2] for match in WRITES_TO.finditer(self.text)]
        return found + [words[-1] for words in self.simple if words[0] in WORDS["putting"] and len(words) > 1]

    # What it does by its own words alone.

    @cached_property
    def own(self) -> list[Words]:
        return simple_commands(self._without(self.heredocs))

    @cached_property
    def _unquoted(self) -> str:
        """Without what is in quotes, where `>` is no redirect, and without what goes to another stream or nowhere."""
        bare = re.sub(r"'[^']*'|\"(?:\\.|[^\"\\])*\"", "''", self._without(self.heredocs))
        return re.sub(r"\d?>>?\s*(&\d|/dev/\w+)|&>\s*/dev/\w+|[-=]>", " ", bare)

    @cached_property
    def _redirects(self) -> list[tuple[str, bool]]:
        """Files that it writes, and whether these keep what they had."""
        inside = [(one.path, one.appends) for one in self.heredocs if one.path]
        found = WRITES_TO.finditer(self._unquoted)
        return [*inside, *((relative(one[2]), bool(APPENDS.match(one[0]))) for one in found)]

    @cached_property
    def written(self) -> dict[str, str | None]:
        """Path -> text where the command holds it."""
        return {path: self.files_inside.get(path) for path, _ in self._redirects}

    @cached_property
    def appended(self) -> frozenset[str]:
        """The written files that keep what they had."""
        return frozenset(path for path, appends in self._redirects if appends)

    @cached_property
    def may_write(self) -> bool:
        return not self.only_redirects or bool(self.written) or ">" in self._unquoted

    @cached_property
    def only_redirects(self) -> bool:
        """All that it may write is its own output."""
        return not self.heredocs and all(map(_only_looks, self.own))

    @cached_property
    def shown(self) -> tuple[str, ...]:
        """The files that it prints whole, and nothing else."""
        parts = [words for words in self.own if name_of(words) != "cd"]
        if (
            self.heredocs
            or {">", "|"} & {*self._unquoted}
            or len(parts) != 1
            or name_of(parts[0]) not in WORDS["showing"]
        ):
            return ()
        return tuple(relative(word) for word in parts[0][1:] if not word.startswith("-"))

    @cached_property
    def touched(self) -> tuple[str, ...]:
        """The files that it deletes, moves or rewrites in place."""
        return tuple(relative(path) for words in self.own for path in _touched(words))

    @cached_property
    def tests(self) -> str | None:
        """What the tests that it runs are narrowed to: nothing is the whole suite. None where it runs none."""
        runs = [(place, found) for place, words in enumerate(self.own) if (found := _selection(words)) is not None]
        writing = [place for place, words in enumerate(self.own) if not _only_looks(words)]
        late_write = bool(runs and writing and writing[-1] > runs[-1][0])
        return None if late_write or len(runs) != 1 else runs[0][1]

    @cached_property
    def runs_tests(self) -> bool:
        return any(_selection(words) is not None for words in self.own)

    @cached_property
    def watches(self) -> bool:
        """Something that changes by itself."""
        return not WORDS["watching"].isdisjoint(map(name_of, self.own))


def simple_commands(shell: str) -> list[Words]:
    """The commands of a shell line as lists of words, variables set before them and wrappers taken off.

    Quotes are kept together; what shlex cannot read is split at spaces.
    """
    found = []
    for part in _split(shell):
        try:
            words = shlex.split(part, comments=True)
        except ValueError:
            words = part.split()
        words = [_bare(word) for word in words if word.strip("(){}`")]
        while words and (re.fullmatch(r"\w+=.*", words[0], re.DOTALL) or words[0] in WORDS["wrappers"]):
            words = words[1:]
        if words and words[0] == "timeout" and len(words) > 2:
            words = words[2:]
        if len(words) > 2 and name_of(words) in ("sh", "bash", "dash", "zsh") and "c" in words[1][1:]:
            found += simple_commands(words[2])
        elif words:
            found.append(words)
    return found


def _bare(word: str) -> str:
    """Without the brackets of a subshell. Code in quotes keeps its own."""
    return word.strip("()`") if word.count("(") != word.count(")") and not re.search(r"\s", word) else word.strip("`")


def _split(shell: str) -> list[str]:
    """At separators that are not inside quotes."""
    parts = [""]
    for match in PIECE.finditer(shell):
        if match["separator"]:
            parts.append("")
        else:
            parts[-1] += match[0]
    return [part for part in parts if part.strip()]


def _inline_code(words: Words) -> str | None:
    """The code of `python -c`."""
    for option, code in pairwise(words[1:]):
        if re.fullmatch(r"-[A-Za-z]*c", option):
            return code
        if not option.startswith("-"):
            return None
    return None


def _only_looks(words: Words) -> bool:
    name, rest = name_of(words), words[1:]
    if name.startswith("python"):
        return _selection(words) is not None
    if name == "git":
        return bool(rest) and rest[0] in WORDS["git_looking"] and not (rest[0] == "branch" and len(rest) > 1)
    if name == "find":
        return not WORDS["finds_and_acts"] & {*rest}
    return name in WORDS["looking"] and not (name == "sed" and _in_place(rest))


def _in_place(words: Words) -> bool:
    return any(re.match(r"-[nErszpl0]*i|--in-place", word) for word in words)


def _touched(words: Words) -> Words:
    name, rest = name_of(words), words[1:]
    if name == "git" and rest[:1] in (["rm"], ["mv"]):
        name, rest = rest[0], rest[1:]
    if name in ("sed", "perl"):
        return _edited(rest) if _in_place(rest) else []
    files = [word for word in rest if not word.startswith("-")]
    return files[:-1] if name == "mv" else files if name in WORDS["touching"] else []


def _edited(words: Words) -> Words:
    """The files of `sed -i` or `perl -i`: what is left without options and the script."""
    has_script = re.compile(r"-\w*e|-f|--expression|--file").fullmatch
    files = without_options([word for word in words if word], has_script)
    return files if any(map(has_script, words)) else files[1:]


def without_options(words: Words, takes_value: Callable[[str], object]) -> Words:
    """The words that are neither options nor the values of those that take one."""
    found, skip = list[str](), False
    for word in words:
        if skip:
            skip = False
        elif word.startswith("-"):
            skip = bool(takes_value(word))
        else:
            found.append(word)
    return found


def _selection(words: Words) -> str | None:
    """What a command that runs tests narrows them to; None where it runs none."""
    name, rest = name_of(words), words[1:]
    if name.startswith("python"):
        at = rest.index("-m") if "-m" in rest[:4] else -1
        if at < 0 or rest[at + 1 : at + 2] not in (["pytest"], ["unittest"]):
            return None
        name, rest = rest[at + 1], rest[at + 2 :]
    if name not in ("pytest", "py.test", "unittest"):
        return None
    if WORDS["collects_only"] & {*rest}:
        return None
    narrowed = [word for word in rest if NARROWING.match(word)]
    plain = without_options(rest, WORDS["takes_value"].__contains__)
    named = [word for word in plain if relative(word).rstrip("/") not in WHOLE and not re.match(r"\d?[<>]|&", word)]
    return " ".join([*narrowed, *named])


def commands_in(code: str) -> list[str]:
    """Command lines that Python code starts; what is not written down in it becomes `$x`."""
    named = [(ast.unparse(node.func), node) for node in nodes(try_parse(code), ast.Call) if node.args]
    lines = [(name, _line(node.args[0])) for name, node in named if STARTS.search(name)]
    return [f"pip {line}" if "pip" in name else line for name, line in lines if line]


def _line(node: ast.expr) -> str:
    if isinstance(node, ast.List | ast.Tuple):
        words = [_line(one) for one in node.elts]
        return " ".join(word if word.startswith("$") else shlex.quote(word) for word in words)
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_line(one) for one in node.values)
    if ast.unparse(node) == "sys.executable":
        return "python"
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "split":
        return _line(node.func.value)
    return "$x"
