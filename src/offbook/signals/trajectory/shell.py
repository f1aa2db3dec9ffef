"""Command lines: the simple commands in them, the files they bring along, the Python inside, and what they do.

Read by hand: a parser of the whole grammar gives a tree to walk, and the walk would be as long. Agents' lines are also
often cut off or wrong, and then the words that are there still count. In doubt a command may write anything.
"""

from __future__ import annotations

import ast
import re
import shlex
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile
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


@dataclass(frozen=True)
class Command:
    """One command line, with what the agent had written before it: path -> text."""

    line: str
    files: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def _heredocs(self) -> list[tuple[re.Match[str], str, bool]]:
        """Each with the file that it is written to, if it is, and whether Python runs it."""
        found = []
        for match in HEREDOC.finditer(self.line) if "<<" in self.line else ():
            before = self.line[: match.start()].rpartition("\n")[2]
            target = WRITES_TO.search(f"{before} {match[3]}")
            path = relative(target[2]) if target else ""
            found.append((match, path, not path and bool(PYTHON.search(before))))
        return found

    @property
    def files_inside(self) -> dict[str, str]:
        """The files that it writes from heredocs."""
        return {path: f"{match[4]}\n" for match, path, _ in self._heredocs if path}

    def _without(self, heredocs: Iterable[re.Match[str]]) -> str:
        text = self.line
        for match in reversed([*heredocs]):
            text = f"{text[: match.start()]} {match[3]}\n{text[match.end() :]}"
        return text

    # What it runs: with the scripts that the agent wrote, and what Python starts.

    @cached_property
    def _run(self) -> tuple[str, list[str]]:
        python = [match[4] for match, _, is_python in self._heredocs if is_python]
        shell = self._without(match for match, path, is_python in self._heredocs if path or is_python)
        files = {**self.files, **self.files_inside}
        for words in simple_commands(shell):
            starts_python = bool(PYTHON.search(words[0]))
            python += _inline_code(words) if starts_python else []
            for path in map(relative, words[1:] if starts_python else words):
                if path in files and path.endswith(".py") and PYTHON.search(" ".join(words)):
                    python.append(files[path])
                elif path in files and path.endswith((".sh", ".bash")):
                    shell += "\n" + files[path]
        shell += "".join(f"\n{line}" for code in python for line in commands_in(code))
        return shell, python

    @property
    def text(self) -> str:
        """The line and the lines that it runs, without the files that it brings along."""
        return self._run[0]

    @property
    def python(self) -> list[str]:
        """The code that it runs."""
        return self._run[1]

    @cached_property
    def simple(self) -> list[Words]:
        """The commands of `text`."""
        return simple_commands(self.text)

    @property
    def targets(self) -> list[str]:
        """What it writes to, as far as its words say so."""
        found = [match[2] for match in WRITES_TO.finditer(self.text)]
        return found + [words[-1] for words in self.simple if words[0] in WORDS["putting"] and len(words) > 1]

    # What it does by its own words alone.

    @cached_property
    def bare(self) -> str:
        """The line without heredocs."""
        return self._without(match for match, _, _ in self._heredocs)

    @cached_property
    def own(self) -> list[Words]:
        return simple_commands(self.bare)

    @cached_property
    def _unquoted(self) -> str:
        """Without what is in quotes, where `>` is no redirect, and without what goes to another stream or nowhere."""
        bare = re.sub(r"'[^']*'|\"(?:\\.|[^\"\\])*\"", "''", self.bare)
        return re.sub(r"\d?>>?\s*(&\d|/dev/\w+)|&>\s*/dev/\w+|[-=]>", " ", bare)

    @cached_property
    def written(self) -> dict[str, bool]:
        """The files that it writes, and whether they keep what they had."""
        found = {relative(one[2]): bool(APPENDS.match(one[0])) for one in WRITES_TO.finditer(self._unquoted)}
        return dict.fromkeys(self.files_inside, False) | found

    @property
    def may_write(self) -> bool:
        return not self.only_redirects or ">" in self._unquoted

    @cached_property
    def only_redirects(self) -> bool:
        """All that it may write is its own output."""
        return not self._heredocs and all(map(_only_looks, self.own))

    @cached_property
    def shown(self) -> list[str]:
        """The files that it prints whole, and nothing else."""
        parts = [words for words in self.own if name_of(words) != "cd"]
        is_plain = self.only_redirects and not {">", "|"} & {*self._unquoted}
        is_shown = is_plain and len(parts) == 1 and name_of(parts[0]) in WORDS["showing"]
        return [relative(word) for word in parts[0][1:] if word[:1] != "-"] if is_shown else []

    @cached_property
    def touched(self) -> list[str]:
        """The files that it deletes, moves or rewrites in place."""
        return [relative(path) for words in self.own for path in _touched(words)]

    @cached_property
    def tests(self) -> str | None:
        """What the tests that it runs are narrowed to: nothing is the whole suite. None where it runs none."""
        selections = [_selection(words) for words in self.own]
        runs = [one for one in selections if one is not None]
        after = self.own[selections.index(runs[0]) :] if runs else []
        return runs[0] if len(runs) == 1 and all(map(_only_looks, after)) else None

    @property
    def runs_tests(self) -> bool:
        return any(_selection(words) is not None for words in self.own)

    @property
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


def _inline_code(words: Words) -> list[str]:
    """The code of `python -c`."""
    options = list(takewhile(lambda word: word.startswith("-"), words[1:]))
    is_code = options and re.fullmatch(r"-[A-Za-z]*c", options[-1])
    return words[len(options) + 1 :][:1] if is_code else []


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
