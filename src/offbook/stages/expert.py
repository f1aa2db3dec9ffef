"""A scripted expert that solves tasks by their gold patch, as an engine: the real harness and sandbox answer it.

It searches for the place, reads it, edits it towards the gold patch in pieces, runs the visible tests and says what it
did. Its next edit is always the first difference between the file as it is and as the gold patch leaves it, so what it
got wrong on purpose is mended the same way. Tools, wordings and order vary by the seed. With `edit_file` an edit quotes
the old text; in a shell it names line numbers.

Left out: plans (`todo`), several calls in one message, self-summaries.
"""

from __future__ import annotations

import difflib
import posixpath
import random
import re
import shlex
import tomllib
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from offbook.agent.chat import SUBMIT, Chat, behind_header
from offbook.agent.harness import Harness, ToolFailed
from offbook.agent.harness.editing import apply_edits
from offbook.agent.harness.toolsets import Toolset
from offbook.engine import Engine, Session
from offbook.tasks.check import gold_changes
from offbook.types import Completion, Message, Prompt, PromptTooLong, Task, ToolCall

SLIPS = 0.25  # share of episodes with a mistake made on purpose
EDIT_LINES = (16, 60)  # most new lines of an edit, drawn for each
WINDOW = 80  # most lines read at once around a place
CONTEXT_LINES = 60  # most lines that make the text to replace unique
DEFINES = re.compile(r"\s*(?:async )?(def|class) (\w+)")
WORDS: dict[str, list[str]] = tomllib.loads((Path(__file__).parent / "expert.toml").read_text())


@dataclass(frozen=True, slots=True)
class Move:
    words: str
    call: ToolCall
    is_slip: bool = False


Work = Generator[Move, Message, None]  # is sent the answer to each move


@dataclass(frozen=True, slots=True)
class Edit:
    """Lines [first:last) of a file become `lines`."""

    path: str
    first: int
    last: int
    lines: tuple[str, ...]


class Experts(Engine):
    """Keeps its sessions, because what they got wrong on purpose is not learned."""

    def __init__(self, tasks: Mapping[str, Task], chat: Chat):
        self.tasks = tasks  # by the key of a session
        self.chat = chat
        self.harness: Harness | None = None  # that of the collector that this is lent to
        self.sessions: dict[str, Expert] = {}

    def open(self, key: str) -> Session:
        assert self.harness is not None
        task = self.tasks[key]
        expert = Expert(task, self.harness.toolset(task), self.chat, random.Random(f"{self.seed} {key}"))
        self.sessions[key] = expert
        return expert


class Expert(Session):
    def __init__(self, task: Task, toolset: Toolset, chat: Chat, rng: random.Random):
        self.task = task
        self.toolset = toolset
        self.chat = chat
        self.rng = rng
        self.own = {tool.own_name: tool for tool in toolset.tools.values()}
        self.is_bash = "bash" in self.own
        self.in_shell = "edit_file" not in self.own
        self.talks = 1.0 if self.is_bash else rng.choice((0.0, 0.5, 0.5, 1.0))
        self.around = rng.choice((0, 0, 1, 3))  # lines of context in an edit that it could do without
        kinds = ["syntax"] if self.in_shell else ["syntax", "old"]
        self.slip = rng.choice(kinds) if rng.random() < SLIPS else ""
        self.gold: dict[str, list[str] | None] = {}
        self.files: dict[str, list[str] | None] = {}  # as they are now
        self.read: dict[str, tuple[int, int]] = {}  # first and last line of what was read last
        self.slips: list[int] = []  # numbers of its messages
        self.turns = 0
        self.room = 0  # tokens that this message may have
        self.passed = ""  # the tests that passed last
        self._work = self._script()

    async def complete(self, prompt: Prompt, max_tokens: int) -> Completion:
        self.room = max_tokens
        move = self._work.send(prompt.messages[-1] if self.turns else None)  # type: ignore[arg-type]
        ids = self._ids(move)
        if len(ids) > max_tokens:
            raise PromptTooLong("a message of the expert does not fit")
        read = [(call.name, call.arguments) for call in self.chat.parse(ids[:-1], self.toolset.specs())]
        if read != [(move.call.name, move.call.arguments)]:
            raise PromptTooLong("the dialect cannot write a call of the expert")
        if move.is_slip:
            self.slips.append(self.turns)
        self.turns += 1
        return Completion(ids, [0.0] * len(ids), [-1] * len(ids))

    def _ids(self, move: Move) -> list[int]:
        return [*self.chat.answer(behind_header(move.words, self.chat), [move.call]), self.chat.end_id]

    # What it does.

    def _script(self) -> Work:
        for path, text in gold_changes(self.task).items():
            file = self.task.tree / path
            self.gold[path] = None if text is None else text.split("\n")
            self.files[path] = file.read_bytes().decode().split("\n") if file.is_file() else None
        if self.rng.random() < 0.3:
            yield self._say("look", self._list(self.rng.choice((".", posixpath.dirname(min(self.gold)) or "."))))
        begun: set[str] = set()
        for path in self.rng.sample(sorted(self.gold), len(self.gold)):
            if self.gold[path] is None:
                yield self._say("edit", self._run(f"rm {shlex.quote(path)}"), path)
                continue
            while self.files[path] != self.gold[path]:
                limit = self.rng.randint(*EDIT_LINES)
                if self.files[path] is not None:
                    yield from self._find(self._next_edit(path, limit))
                    yield from self._miss(self._next_edit(path, limit))
                edit = self._next_edit(path, limit)  # again, because there may be less room by now
                is_last = self._after(edit) == self.gold[path]
                broken = self._broken(edit) if self.slip == "syntax" and is_last else None
                if broken:
                    yield from self._break(broken)
                    continue
                yield self._say("more" if path in begun else "edit", self._edit_call(edit), path, edit.first)
                begun.add(path)
                self._apply(edit)
        yield from self._try()
        yield self._finish()

    def _find(self, edit: Edit) -> Work:
        """Read what an edit replaces, if it was not read yet; before the first time look for it."""
        path = edit.path
        if path not in self.read:
            self.read[path] = (0, 0)
            yield self._search(edit)
        first, last = self.read[path]
        if first <= edit.first and edit.last < last:
            return
        above = self.rng.randint(2, WINDOW // 2)
        start = max(self._definition(path, edit.first) or 0, edit.first - above, 0)
        yield self._look("read", edit, max(0, start - 1), max(start + self.rng.randint(20, WINDOW), edit.last + 3))

    def _look(self, kind: str, edit: Edit, start: int, end: int) -> Move:
        end = min(end, len(self.files[edit.path] or ()))
        self.read[edit.path] = (start, end + 1)
        return self._say(kind, self._read(edit.path, start, end), edit.path, edit.first)

    def _miss(self, edit: Edit) -> Work:
        """A call that fails: the text to replace is not there."""
        old = self._old(edit)
        if self.slip != "old" or not old.strip():
            return
        last = old.rstrip().rpartition("\n")[2]
        mistaken = old.replace(last, last.lstrip() if last[:1].isspace() else f"    {last}")
        failing = self._edit_call(edit, mistaken)
        if not _is_unique(self._text(edit.path), mistaken) and self._fits(failing):
            self.slip = ""
            yield self._say("edit", failing, edit.path, edit.first, is_slip=True)

    def _break(self, broken: Edit) -> Work:
        """An edit with a syntax error, found by a run, looked at again. The next edit puts it right."""
        self.slip = ""
        path = broken.path
        yield self._say("edit", self._edit_call(broken), path, broken.first, is_slip=True)
        self._apply(broken)
        yield from self._try()
        edit = self._next_edit(path, 9)
        yield self._look("reread", edit, max(0, edit.first - 8), edit.last + 8)
        yield self._say("mend", self._edit_call(edit), path, edit.first)
        self._apply(edit)

    def _try(self) -> Work:
        """Run the visible tests of what was changed."""
        tests = self._visible_tests()
        command = self.task.test_command
        self.passed = ""
        if "run_tests" in self.own and command:
            call = self._call("run_tests", **({"path": tests} if tests else {}))
        elif command and {"bash", "run_command"} & self.own.keys():
            call = self._run(f"{command} {shlex.quote(tests)}" if tests else command)
        else:
            return
        answer = yield self._say("test", call)
        failed = "<returncode>0<" not in answer.text if self.is_bash else answer.text.startswith(("exit ", "error"))
        if answer.status == "ok" and not failed:
            self.passed = tests or "the whole test suite"

    def _finish(self) -> Move:
        names = [f"`{name}`" for name in self._deleted()] or ["the change"]
        shown = ", ".join(names[:4]) + (" and others" if len(names) > 4 else "")
        done = self.rng.choice(WORDS["done"]).format(names=shown, paths=", ".join(sorted(self.gold)))
        if self.passed:
            done += self.rng.choice(WORDS["passed"]).format(tests=self.passed)
        if self.is_bash:
            return Move(self.rng.choice(WORDS["submit"]).format(done=done), self._run(f"echo {SUBMIT}"))
        return Move("", self._call("finish", message=done))

    # How it says it.

    def _say(self, kind: str, call: ToolCall, path: str = "", line: int = 0, is_slip: bool = False) -> Move:
        words = ""
        if self.rng.random() < self.talks:
            path = path or min(self.gold)
            words = self.rng.choice(WORDS[kind]).format(name=self._name_at(path, line), path=path)
        move = Move(words, call, is_slip)
        return move if len(self._ids(move)) <= self.room else Move("", call, is_slip)

    def _call(self, own_name: str, **arguments: object) -> ToolCall:
        """In the names that this task shows."""
        tool = self.own[own_name]
        names = {parameter.own_name: name for name, parameter in tool.parameters.items()}
        return ToolCall(tool.name, {names[key]: value for key, value in arguments.items()})

    def _run(self, command: str) -> ToolCall:
        shell = "bash" if self.is_bash else "run_command"
        if shell not in self.own:
            raise PromptTooLong("the task's tools give the expert no way to do what the gold patch does")
        return self._call(shell, command=command)

    def _list(self, path: str) -> ToolCall:
        return self._call("list_dir", path=path) if "list_dir" in self.own else self._run(f"ls {shlex.quote(path)}")

    def _search(self, edit: Edit) -> Move:
        """For the name of the definition, or for all definitions of the file."""
        name = self._name_at(edit.path, edit.first)
        kind, pattern, where = "search", name, self.rng.choice(("", edit.path))
        if name not in {deleted.rpartition(".")[2] for deleted in self._deleted()}:
            kind, pattern, where = "outline", r"^\s*(class|def) ", edit.path
        if "search_codebase" in self.own:
            call = self._call("search_codebase", pattern=pattern, **({"path": where} if where else {}))
        else:
            call = self._run(f"grep -rnE {shlex.quote(pattern)} {shlex.quote(where or '.')}")
        return self._say(kind, call, edit.path, edit.first)

    def _read(self, path: str, start: int, end: int) -> ToolCall:
        """Lines [start:end), counted from 0."""
        if "read_file" in self.own:
            is_whole = start == 0 and end >= len(self.files[path] or ())
            span = {} if is_whole else {"start": start + 1, "end": end}
            return self._call("read_file", path=path, **span)
        numbered = self.rng.choice(("cat -n", "nl -ba"))
        return self._run(f"{numbered} {shlex.quote(path)} | sed -n '{start + 1},{end}p'")

    def _edit_call(self, edit: Edit, old: str | None = None) -> ToolCall:
        path = edit.path
        new = "\n".join(edit.lines)
        if not self.in_shell:
            return self._call("edit_file", path=path, old=self._old(edit) if old is None else old, new=new)
        if self.files[path] is None:
            folder = posixpath.dirname(path)
            begin = f"mkdir -p {shlex.quote(folder)} && " if folder else ""
            return self._run(f"{begin}cat > {shlex.quote(path)} <<'EOF'\n{new.removesuffix(chr(10))}\nEOF")
        insert = [f"-e '{edit.last or edit.first}r /dev/stdin'"] if edit.lines else []
        delete = [f"-e '{edit.first + 1},{edit.last}d'"] if edit.last > edit.first else []
        body = f" <<'EOF'\n{new}\nEOF" if edit.lines else ""
        return self._run(f"sed -i {' '.join([*insert, *delete])} {shlex.quote(path)}{body}")

    def _fits(self, call: ToolCall) -> bool:
        return len(self._ids(Move("", call))) <= self.room

    # What it knows.

    def _text(self, path: str) -> str:
        return "\n".join(self.files[path] or ())

    def _old(self, edit: Edit) -> str:
        return "\n".join((self.files[edit.path] or [])[edit.first : edit.last])

    def _after(self, edit: Edit) -> list[str]:
        lines = self.files[edit.path] or []
        return [*lines[: edit.first], *edit.lines, *lines[edit.last :]]

    def _apply(self, edit: Edit) -> None:
        start, end = self.read.get(edit.path, (0, 0))
        more = len(edit.lines) - (edit.last - edit.first)
        if self.in_shell and more:  # the lines below have other numbers than those that were read
            end = edit.first + len(edit.lines)
        self.read[edit.path] = (start, end if self.in_shell else end + more)
        self.files[edit.path] = self._after(edit)

    def _next_edit(self, path: str, limit: int) -> Edit:
        """The first difference, or as much of it as fits."""
        now = self.files[path]
        wanted = self.gold[path] or []
        while limit:
            if now is None:
                part = _cut(wanted, limit)
                edit = Edit(path, 0, 0, tuple(wanted if len(part) == len(wanted) else [*part, ""]))
            else:
                first, last, lines = _first_difference(now, wanted)
                edit = self._in_context(Edit(path, first, min(last, first + limit), tuple(_cut(lines, limit))))
            if self._fits(self._edit_call(edit)):
                return edit
            limit //= 2
        raise PromptTooLong("an edit of the gold patch does not fit into harness.message_tokens")

    def _in_context(self, edit: Edit) -> Edit:
        """With as many lines around it as make the text to replace unique. In a shell only the start of a file needs
        one: nothing can be inserted before it by its number."""
        now = self.files[edit.path] or []
        is_first = edit.first == edit.last == 0
        for more in range(int(is_first) if self.in_shell else self.around, CONTEXT_LINES):
            start = max(0, edit.first - more)
            end = min(len(now), edit.last + (more if is_first else more // 3))
            lines = (*now[start : edit.first], *edit.lines, *now[edit.last : end])
            wider = Edit(edit.path, start, end, lines)
            if self.in_shell or (self._old(wider).strip() and _is_unique(self._text(edit.path), self._old(wider))):
                return wider
        raise PromptTooLong("the text to replace is not unique")

    def _broken(self, edit: Edit) -> Edit | None:
        """The edit with a syntax error that a run shows."""
        for number in self.rng.sample(range(len(edit.lines)), len(edit.lines)):
            line = edit.lines[number].rstrip()
            if not line.endswith((":", ")", "]")) or not edit.path.endswith(".py"):
                continue
            lines = (*edit.lines[:number], line[:-1], *edit.lines[number + 1 :])
            worse = Edit(edit.path, edit.first, edit.last, lines)
            try:
                compile("\n".join(self._after(worse)), edit.path, "exec", dont_inherit=True)
            except (SyntaxError, ValueError):
                return worse
        return None

    def _definition(self, path: str, line: int) -> int | None:
        """The line of the function or class that a line is in, as far as the indentation shows."""
        lines = self.files[path] or []
        return next((at for at in range(min(line, len(lines) - 1), -1, -1) if DEFINES.match(lines[at])), None)

    def _name_at(self, path: str, line: int) -> str:
        at = self._definition(path, line)
        found = DEFINES.match((self.files[path] or [])[at]) if at is not None else None
        return found[2] if found else posixpath.splitext(posixpath.basename(path))[0]

    def _deleted(self) -> list[str]:
        """Names of the functions that are asked for."""
        return [name.partition("::")[2] for name in self.task.deleted.targets] if self.task.deleted else []

    def _visible_tests(self) -> str:
        """The test file that is named after a changed file; empty for all tests."""
        modules = {posixpath.splitext(posixpath.basename(path))[0] for path in self.gold}
        there = (path for path in self.task.test_files if (self.task.tree / path).is_file())
        return next((path for path in there if any(name in posixpath.basename(path) for name in modules)), "")


def _is_unique(text: str, old: str) -> bool:
    try:
        apply_edits("", text, [(old, "\0")])
    except ToolFailed:
        return False
    return True


def _first_difference(now: list[str], wanted: list[str]) -> tuple[int, int, list[str]]:
    """Lines [first:last) of `now`, and what is to be there."""
    same = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(now, wanted, strict=False))))
    rest = now[same:]
    goal = wanted[same:]
    end = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(reversed(rest), reversed(goal), strict=False))))
    matcher = difflib.SequenceMatcher(None, rest[: len(rest) - end], goal[: len(goal) - end], autojunk=False)
    for kind, first, last, start, stop in matcher.get_opcodes():
        if kind != "equal":
            return same + first, same + last, goal[start:stop]
    return same, same, []


def _cut(lines: Sequence[str], limit: int) -> Sequence[str]:
    """The first lines, up to a place where one may stop: before an empty line, or else the least indented."""
    if len(lines) <= limit:
        return lines

    def depth(number: int) -> tuple[int, int]:
        line = lines[number]
        return (len(line) - len(line.lstrip()) if line.strip() else -1), -number

    return lines[: min(range(max(1, limit // 2), limit + 1), key=depth)]
