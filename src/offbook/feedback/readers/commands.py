"""What a shell command does to files and tests, as far as its words show. In doubt it may write anything."""

from __future__ import annotations

import re
from dataclasses import dataclass

from offbook.monitors.acts import HEREDOC, WRITES_TO, simple_commands
from offbook.types import is_test_file

LOOKING = frozenset(
    {
        "ls", "cat", "head", "tail", "grep", "egrep", "fgrep", "rg", "find", "wc", "pwd", "cd", "echo",
        "printf", "sort", "uniq", "cut", "nl", "tree", "file", "stat", "diff", "cmp", "which", "type",
        "true", "false", "test", "[", "awk", "sed", "git", "pytest", "py.test", "tox", "nox", "ag", "fd",
        "less", "more", "sha256sum", "md5sum", "du", "basename", "dirname", "realpath", "date", "tr", "fold",
        "column", "xxd", "hexdump", "jq", "seq", "sleep", "ps",
    }
)  # fmt: skip
GIT_LOOKING = frozenset(
    {
        "log", "diff", "show", "status", "grep", "blame", "ls-files", "ls-tree", "rev-parse", "branch",
        "describe", "cat-file",
    }
)  # fmt: skip
WATCHING = frozenset({"sleep", "wait", "watch", "ps", "top", "curl", "wget", "date", "docker", "jobs", "nc", "ping"})
SHOWING = frozenset({"cat", "less", "more", "nl"})
TOUCHING = frozenset({"rm", "unlink", "mv", "truncate", "shred"})
MADE = re.compile(
    r"__pycache__|\.pytest_cache|\.pyc\b|\.hypothesis|(^|/)(build|dist|htmlcov|node_modules|site-packages|\.\w+)/|\$"
)
SCRATCH = re.compile(r"^/(tmp|var/tmp|dev)(/|$)")
ROOTS = re.compile(r"^(/app/|/testbed/|/workspace/|/repo/|(\./)+)")
APPENDS = re.compile(r">>|tee\s+-a")
NARROWING = re.compile(r"^(-k|-m|--lf|--last-failed|--ff|--failed-first|--sw|--stepwise|--deselect|--nf|-k.+|-k=.*)")
TAKES_VALUE = frozenset(
    {
        "-n", "-p", "-c", "-o", "-r", "-W", "--tb", "--maxfail", "--durations", "--timeout", "--rootdir",
        "--color", "--ignore", "--cov", "--junitxml",
    }
)  # fmt: skip
WHOLE = frozenset({"", ".", "tests", "test"})


@dataclass(frozen=True, slots=True)
class Command:
    """`tests` is None where it runs none, else what they are narrowed to: nothing is the whole suite."""

    may_write: bool
    only_redirects: bool  # all that it may write is its own output
    shown: tuple[str, ...]  # files that it prints whole, and nothing else
    touched: tuple[str, ...]  # files that it deletes, moves or rewrites in place
    written: dict[str, str | None]  # path -> text where the command holds it
    appended: frozenset[str]  # those of them that keep what they had
    tests: str | None
    watches: bool  # something that changes by itself


def relative(path: str) -> str:
    return ROOTS.sub("", path.strip())


def read_command(line: str) -> Command:
    written: dict[str, str | None] = {}
    appended: set[str] = set()

    def take(found: re.Match[str]) -> str:
        start = line[line.rfind("\n", 0, found.start()) + 1 : found.start()]
        target = WRITES_TO.search(f"{start} {found.group(3)}")
        if target:
            path = relative(target.group(2))
            written[path] = found.group(4) + "\n"
            appended.update([path] if APPENDS.match(target.group(0)) else [])
        return f" {found.group(3)}\n"

    shell = HEREDOC.sub(take, line)
    parts = simple_commands(shell)
    bare = _unquoted(shell)
    for target in WRITES_TO.finditer(bare):
        path = relative(target.group(2))
        written.setdefault(path, None)
        appended.update([path] if APPENDS.match(target.group(0)) else [])
    names = [_name(words) for words in parts]
    tests = [(place, found) for place, words in enumerate(parts) if (found := _selection(words)) is not None]
    writing = [place for place, words in enumerate(parts) if not _only_looks(words)]
    late_write = bool(tests and writing and writing[-1] > tests[-1][0])
    return Command(
        may_write=bool(writing or written or ">" in bare or shell != line),
        only_redirects=not writing and shell == line,
        shown=_shown(parts) if shell == line and ">" not in bare and "|" not in bare else (),
        touched=tuple(relative(path) for words in parts for path in _touched(words)),
        written=written,
        appended=frozenset(appended),
        tests=None if late_write or len(tests) != 1 else tests[0][1],
        watches=not WATCHING.isdisjoint(names),
    )


def is_repository_test(path: str) -> bool:
    """A test file or a folder of them that no program made and that is not in a scratch folder."""
    if MADE.search(path) or SCRATCH.match(path):
        return False
    return is_test_file(path) or path.rstrip("/").rpartition("/")[2] == "tests"


def _name(words: list[str]) -> str:
    return words[0].rpartition("/")[2]


def _unquoted(shell: str) -> str:
    """Without what is in quotes, where `>` is no redirect, and without what goes to another stream or nowhere."""
    bare = re.sub(r"'[^']*'|\"(?:\\.|[^\"\\])*\"", "''", shell)
    return re.sub(r"\d?>>?\s*(&\d|/dev/\w+)|&>\s*/dev/\w+|[-=]>", " ", bare)


def _only_looks(words: list[str]) -> bool:
    name, rest = _name(words), words[1:]
    if name.startswith("python"):
        return _selection(words) is not None
    if name == "git":
        return bool(rest) and rest[0] in GIT_LOOKING and not (rest[0] == "branch" and len(rest) > 1)
    if name == "find":
        return not any(word in ("-delete", "-exec", "-execdir", "-ok", "-fprint") for word in rest)
    if name == "sed":
        return not _in_place(rest)
    return name in LOOKING


def _in_place(words: list[str]) -> bool:
    return any(re.match(r"-[nErszpl0]*i|--in-place", word) for word in words)


def _touched(words: list[str]) -> list[str]:
    name, rest = _name(words), words[1:]
    if name == "git" and rest[:1] in (["rm"], ["mv"]):
        name, rest = rest[0], rest[1:]
    if name in ("sed", "perl"):
        return _edited(rest) if _in_place(rest) else []
    files = [word for word in rest if not word.startswith("-")]
    if name == "mv":
        return files[:-1]
    return files if name in TOUCHING else []


def _edited(words: list[str]) -> list[str]:
    """The files of `sed -i` or `perl -i`: what is left without options and the script."""
    files, has_script, skip = list[str](), False, False
    for word in words:
        if skip or not word:
            skip = False
        elif word.startswith("-"):
            skip = bool(re.fullmatch(r"-\w*e|-f|--expression|--file", word))
            has_script |= skip
        else:
            files.append(word)
    return files if has_script else files[1:]


def _shown(parts: list[list[str]]) -> tuple[str, ...]:
    parts = [words for words in parts if _name(words) != "cd"]
    if len(parts) != 1 or _name(parts[0]) not in SHOWING:
        return ()
    return tuple(relative(word) for word in parts[0][1:] if not word.startswith("-"))


def _selection(words: list[str]) -> str | None:
    """What a command that runs tests narrows them to; None where it runs none."""
    name, rest = _name(words), words[1:]
    if name.startswith("python"):
        at = rest.index("-m") if "-m" in rest[:4] else -1
        if at < 0 or rest[at + 1 : at + 2] not in (["pytest"], ["unittest"]):
            return None
        name, rest = rest[at + 1], rest[at + 2 :]
    if name not in ("pytest", "py.test", "unittest"):
        return None
    if any(word in ("--co", "--collect-only", "--version", "--help", "-h", "--fixtures") for word in rest):
        return None
    chosen, skip = list[str](), False
    for word in rest:
        if skip or re.match(r"\d?[<>]|&", word):
            skip = False
        elif NARROWING.match(word):
            chosen.append(word)
        elif word in TAKES_VALUE:
            skip = True
        elif not word.startswith("-") and relative(word).rstrip("/") not in WHOLE and word != "discover":
            chosen.append(word)
    return " ".join(chosen)
