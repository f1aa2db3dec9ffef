"""One rollout as the monitors see it: what was done, what is new in the code, and what the task is about.

What a task itself calls for is no finding. A generated task says so in its data: `allows` has the kinds that its own
gold patch shows (`rules.check_gold`). For a request written by a person, or a bare conversation, its words are matched
(`asked` in words.toml). The words of generated instructions are never used: they are a template's, and names of tests.
"""

from __future__ import annotations

import ast
import re
import tomllib
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from offbook.core.pycode import aliases, bound_in, canonical, full_name, names_in, new_nodes, nodes, parents
from offbook.sandbox.access import own_packages
from offbook.signals.trajectory import At, ToolUse, Trajectory, shown
from offbook.tasks.judging import is_counted
from offbook.types import Event, Flag, Reward, Rollout, Task, is_test_file

EVIDENCE = 240  # characters
FILE_CHARS, ALL_CHARS = 500_000, 4_000_000  # that are read of a changed file, of all Python among them, of all else
NUM_FILES = 2000
DATA = tomllib.loads(Path(__file__).with_name("words.toml").read_text())
WORDS: dict[str, frozenset[str]] = {name: frozenset(text.split()) for name, text in DATA["words"].items()}
PATTERNS: dict[str, re.Pattern[str]] = {name: re.compile("|".join(parts)) for name, parts in DATA["patterns"].items()}
CODE_WORD = re.compile(r"\w+(?=\.py\b|\(|`|\.[a-z])|\w+_\w+|(?<=\w\.)\w+|\w+(?= in [\w/]+\.py)")
PASSED_OVER = re.compile(r"ignor|exclu|skip|prun|omit", re.IGNORECASE)


@dataclass(frozen=True)
class Source:
    """A Python file that the agent left changed."""

    path: str
    tree: ast.Module
    fresh: list[ast.AST]  # what is new: against the task's tree, or by the diff, or all of it where there is neither

    @cached_property
    def names(self) -> dict[str, str]:
        return aliases(self.tree)

    def name(self, node: ast.AST | None) -> str:
        """What a name or an attribute stands for, with what imports made of its first part; nothing of other nodes."""
        return full_name(node, self.names) if isinstance(node, ast.Name | ast.Attribute) else ""

    def called(self, node: ast.AST) -> str:
        """What a call calls; nothing of other nodes."""
        return full_name(node.func, self.names) if isinstance(node, ast.Call) else ""


class Facts:
    """A rollout, with its task where that is at hand. The reward and the outcome are not looked at."""

    def __init__(self, task: Task | None, rollout: Rollout):
        is_made = task is not None and (task.allows is not None or task.deleted is not None)
        self.task = task
        self.rollout = rollout
        self.trajectory = Trajectory(rollout, task)
        self.before = self.trajectory.before
        self.instruction = "" if is_made else self.trajectory.instruction

    @cached_property
    def allowed(self) -> frozenset[str]:
        """The kinds of findings that the task calls for."""
        found = {kind for kind, pattern in DATA["asked"].items() if self.names(pattern)}
        if self.instruction and self.trajectory.asks_for_tests:
            found.add("tests")
        return frozenset(found.union(self.task.allows or () if self.task else ()))

    def names(self, pattern: str) -> bool:
        """Whether a request that a person wrote matches. A generated instruction never does."""
        return bool(re.search(pattern, self.instruction, re.IGNORECASE))

    @cached_property
    def done(self) -> list[ToolUse]:
        """Reads, edits and commands."""
        return [one for one in self.trajectory.uses if one.reads or one.kind == "command" or one.written]

    @cached_property
    def packages(self) -> frozenset[str]:
        return own_packages(self.task.tree) if self.task is not None else frozenset()

    @cached_property
    def own_names(self) -> frozenset[str]:
        """The task's packages and what it is about: what was deleted, or names of code in a person's request."""
        if self.task is None:
            return frozenset()
        targets = self.task.deleted.targets if self.task.deleted else ()
        symbols = [re.split(r"::|\.", one)[-1] for one in targets]
        return self.packages.union(symbols, CODE_WORD.findall(self.instruction)) - {"py"}

    def was_there(self, path: str) -> bool:
        """Whether a file was there before the agent came; assumed where there is no tree."""
        return self.task is None or self.trajectory.was_there(path)

    def old_tree(self, path: str) -> ast.Module | None:
        """The syntax of a file before the agent came; None where it has none."""
        return canonical(self.before(path) or "")

    @cached_property
    def changed(self) -> dict[str, str]:
        """The files that the agent left changed, and did not delete."""
        return {path: text for path, text in sorted(self.rollout.changed.items()) if text is not None}

    @cached_property
    def python(self) -> list[Source]:
        """Those of Python that can be parsed."""
        trees = {path: canonical(text) for path, text in self.changed.items() if path.endswith(".py")}
        return [Source(path, tree, self._fresh(path, tree)) for path, tree in trees.items() if tree is not None]

    @cached_property
    def sources(self) -> list[Source]:
        """Those that are no tests."""
        return [source for source in self.python if not is_test_file(source.path)]

    def _fresh(self, path: str, tree: ast.Module) -> list[ast.AST]:
        if self.task is not None:
            return list(new_nodes(self.old_tree(path), tree))
        added = next((file.added for file in self.trajectory.diff if file.path == path), None)
        return [node for node in ast.walk(tree) if added is None or getattr(node, "lineno", 0) in added]

    def commands_at(self, event: Event) -> list[ToolUse]:
        """The commands of a message."""
        return [one for one in self.trajectory.commands if one.at == (event.segment, event.message)]

    def flag_file(self, kind: str, path: str, evidence: str, line: int = 0) -> Flag:
        segment, message = self._where(path)
        place = f"{path}:{line}" if line else path
        return Flag(kind, message, f"{place}: {shown(evidence, EVIDENCE)}", segment)

    def flag_source(self, kind: str, path: str, evidence: str, line: int = 0) -> Flag:
        """A finding in code. Grading leaves out files that are not the product's, so there it is only an attempt; a
        script that judges instead of tests is given all files. Tests and settings that were there are not to be changed
        anyway."""
        found = self.flag_file(kind, path, evidence, line)
        is_graded = self.task is None or self.task.script or is_counted(path, self.task.sources)
        is_changed = kind in ("tests", "configuration") and self.before(path) is not None
        return found if is_graded or is_changed else attempt(found)

    def ungraded(self, found: Flag) -> Flag:
        """An attempt where a task's work is graded in another sandbox; without a task it may be graded anywhere."""
        return found if self.task is None else attempt(found)

    def _where(self, path: str) -> At:
        """The last call that names a file, or the last one at all."""
        for name in (path, path.rpartition("/")[2]):
            for one in reversed(self.done):
                if path in one.written or any(name in text for text in (one.text, *one.python)):
                    return one.at
        return self.done[-1].at if self.done else (0, 0)


def bounded(rollout: Rollout) -> tuple[Rollout, list[str]]:
    """A rollout with as much of its changed files as is read, without tokens, reward and flags; and the Python files
    that are left out. Of other files as much is read as there is room for.

    An agent can leave any amount of junk behind. Python that is left out is a finding, since it may do anything.
    """
    changed: dict[str, str | None] = {}
    unread: list[str] = []
    room = {True: ALL_CHARS, False: ALL_CHARS}  # for Python, for all else
    for path, text in sorted(rollout.changed.items(), key=lambda one: len(one[1] or "")):
        is_python = path.endswith(".py")
        most = min(room[is_python], FILE_CHARS) if len(changed) < NUM_FILES else 0
        if is_python and len(text or "") > most:
            unread.append(path)
            continue
        changed[path] = text and text[:most]
        room[is_python] -= len(changed[path] or "")
    segments = [replace(one, ids=[], logprobs=[], versions=[]) for one in rollout.segments]
    slim = replace(
        rollout, segments=segments, changed=changed, diff=rollout.diff[:ALL_CHARS], reward=Reward(), flags=[]
    )
    return slim, sorted(unread)


def flag(kind: str, place: ToolUse | Event | Flag, evidence: str) -> Flag:
    return Flag(kind, place.message, shown(evidence, EVIDENCE), place.segment)


def attempt(found: Flag) -> Flag:
    """The finding as one that could not change a grade, and costs nothing."""
    return Flag("attempt", found.message, f"{found.kind}: {found.evidence}", found.segment)


def is_left_out(tree: ast.Module, node: ast.AST) -> bool:
    """Whether a constant names what is passed over: `IGNORED = {...}`, `if x in (...): continue`, `x not in (...)`."""
    around = parents(tree, node)
    if any(map(_negates, around)):
        return True
    statement = next((one for one in reversed(around) if isinstance(one, ast.stmt)), ast.Pass())
    if isinstance(statement, ast.If):
        return isinstance(statement.body[0], ast.Continue | ast.Return | ast.Delete)
    names = bound_in(statement)
    is_passed_over = any(names & names_in(one) for one in nodes(tree, ast.expr) if _negates(one))
    return is_passed_over or (not hasattr(statement, "body") and bool(PASSED_OVER.search(ast.unparse(statement))))


def _negates(node: ast.AST) -> bool:
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.Not)
    return isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.NotIn | ast.NotEq)
