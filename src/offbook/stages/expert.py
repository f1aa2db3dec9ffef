"""A scripted expert that solves tasks by their gold patch, as an engine: the real harness and sandbox answer it.

It searches for the place, reads it, edits it towards the gold patch in pieces, runs the visible tests and says what it
did. Its next edit is always the first difference between the file as it is and as the gold patch leaves it, so what it
got wrong on purpose is mended the same way. Tools, wordings, order and detours vary by the seed.

Left out: plans (`todo`), several calls in one message, self-summaries.
"""

from __future__ import annotations

import difflib
import posixpath
import random
import re
import shlex
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from offbook.agent.chat import SUBMIT, Chat, behind_header
from offbook.agent.chat.dialects import HERMES, JSON, XML, Dialect
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
INVENTED = ("open", "str_replace_editor", "execute_bash", "pytest", "view")
WORDS = {
    "look": (
        "First I look at what is there.",
        "Let me see how the repository is laid out.",
        "I start with the layout.",
    ),
    "search": ("I look for `{name}`.", "Where is `{name}`?", "Let me find `{name}`.", "First the place: `{name}`."),
    "outline": ("What is in {path}?", "I look at the outline of {path}.", "Let me see what {path} defines."),
    "read": ("I read the code around it.", "Let me read that part of {path}.", "Now I look at {path} there."),
    "edit": ("Now I write `{name}`.", "I make the change in {path}.", "With that I can fill in `{name}`."),
    "more": ("The rest of it follows.", "Next the part below.", "I go on with the next part of {path}."),
    "test": ("I run the tests that are there.", "Let me see whether the tests pass.", "Now the tests."),
    "check": ("Does the module still import?", "I check that the module can be imported."),
    "reread": (
        "Something is wrong; I look at it again.",
        "I look at what I wrote.",
        "Let me see the lines again.",
    ),
    "mend": ("That was my mistake; I put it right.", "I mend what I got wrong.", "This is what was wrong with it."),
    "retry": ("I take the text exactly as the file has it.", "The call was wrong; I make it as it has to be."),
    "done": (
        "Implemented {names} in {paths}.",
        "{names} in {paths} works now.",
        "I wrote {names} in {paths}.",
        "Done: {names} in {paths}.",
    ),
    "submit": ("{done} That is all, so I hand it in.", "The task is done: {done}", "{done}"),
}


@dataclass(frozen=True, slots=True)
class Move:
    words: str
    call: ToolCall
    is_slip: bool = False
    dialect: Dialect | None = None  # another one than the chat's


Work = Generator[Move, Message, None]  # is sent the answer to each move


@dataclass(frozen=True, slots=True)
class Edit:
    """Lines [first:last) of a file become `lines`."""

    path: str
    first: int
    last: int
    lines: tuple[str, ...]
    by_lines: bool = False  # a shell command that names line numbers, not the old text


class Experts(Engine):
    """Keeps its sessions, because what they got wrong on purpose is not learned."""

    def __init__(self, tasks: Mapping[str, Task], chat: Chat):
        self.tasks, self.chat = tasks, chat  # tasks by the key of a session
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
        self.task, self.toolset, self.chat, self.rng = task, toolset, chat, rng
        self.own = {tool.own_name: tool for tool in toolset.tools.values()}
        self.shell = "bash" if "bash" in self.own else "run_command"
        self.talks = 1.0 if "bash" in self.own else rng.choice((0.0, 0.5, 0.5, 1.0))
        self.around = rng.choice((0, 0, 1, 3))  # lines of context in an edit that it could do without
        kinds = ["old", "syntax", "early", "dialect", *([] if "bash" in self.own else ["tool", "argument"])]
        self.slip = rng.choice(kinds) if rng.random() < SLIPS else ""
        self.gold: dict[str, list[str] | None] = {}
        self.files: dict[str, list[str] | None] = {}  # as they are now
        self.seen: dict[str, list[bool]] = {}  # of each line, whether it was read or written
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
        read = self.chat.parse(ids[:-1], self.toolset.specs())
        if not move.dialect and [(call.name, call.arguments) for call in read] != [
            (move.call.name, move.call.arguments)
        ]:
            raise PromptTooLong("the dialect cannot write a call of the expert")
        if move.is_slip:
            self.slips.append(self.turns)
        self.turns += 1
        return Completion(ids, [0.0] * len(ids), [-1] * len(ids))

    def _ids(self, move: Move) -> list[int]:
        words = behind_header(move.words, self.chat)
        if move.dialect:
            return [*self.chat.encode(move.dialect.answer(words, [move.call])), self.chat.end_id]
        return [*self.chat.answer(words, [move.call]), self.chat.end_id]

    # What it does.

    def _script(self) -> Work:
        for path, text in gold_changes(self.task).items():
            file = self.task.tree / path
            self.gold[path] = None if text is None else text.split("\n")
            self.files[path] = file.read_bytes().decode().split("\n") if file.is_file() else None
        looks = self.rng.random() < 0.3 or self.slip == "dialect"
        if looks and not {"list_dir", self.shell}.isdisjoint(self.own):
            move = self._say("look", self._list(self.rng.choice((".", posixpath.dirname(min(self.gold)) or "."))))
            if self.slip == "dialect":
                others = [other for other in (HERMES, JSON, XML) if self._is_foreign(replace(move, dialect=other))]
                if others:
                    yield replace(move, is_slip=True, dialect=self.rng.choice(others))
                    move = self._say("retry", move.call)
            yield move
        if self.slip == "tool":
            wrong = self.rng.choice([name for name in INVENTED if name not in self.toolset.names])
            yield self._say("look", ToolCall(wrong, {"path": min(self.gold)}), is_slip=True)
        begun: set[str] = set()
        limit, by_lines = self.rng.randint(*EDIT_LINES), self.rng.random() < 0.5 and self.slip != "old"
        for path in self.rng.sample(sorted(self.gold), len(self.gold)):
            if self.gold[path] is None and self.files[path] is not None:
                yield self._say("edit", self._run(f"rm {shlex.quote(path)}"), path)
                self.files[path] = None
            while self.files[path] != self.gold[path]:
                if self.files[path] is not None:
                    yield from self._find(self._next_edit(path, limit, by_lines))
                    yield from self._slip_before(self._next_edit(path, limit, by_lines))
                edit = self._next_edit(path, limit, by_lines)  # again, because there may be less room by now
                is_last = self._after(edit) == self.gold[path]
                if self.slip == "early" and path not in begun:
                    self.slip = "syntax"
                if self.slip == "syntax" and is_last and (broken := self._broken(edit)):
                    yield from self._break(broken)
                    continue
                if self.slip == "early" and is_last and path in begun:
                    self.slip = ""
                    yield from self._try(is_slip=True)
                yield self._say("more" if path in begun else "edit", self._edit_call(edit), path, edit.first)
                begun.add(path)
                self._apply(edit)
                limit = self.rng.randint(*EDIT_LINES)
        yield from self._try()
        yield self._finish()

    def _is_foreign(self, move: Move) -> bool:
        """Whether the harness takes a call in its dialect for one that it does not read."""
        read = self.chat.parse(self._ids(move)[:-1], self.toolset.specs())
        return any(call.other_dialect for call in read)

    def _find(self, edit: Edit) -> Work:
        """Read what an edit replaces, if it was not read yet; before the first time look for it."""
        lines, path = self.files[edit.path] or [], edit.path
        if path not in self.seen:
            self.seen[path] = [False] * len(lines)
            yield self._search(edit)
        around = 1 if edit.by_lines else 0
        if all(self.seen[path][max(0, edit.first - around) : edit.last + around]):
            return
        start = self._definition(path, edit.first)
        start = edit.first if start is None or edit.first - start > WINDOW // 2 else start
        start = max(0, start - self.rng.randint(2, 12))
        end = min(len(lines), max(edit.last + self.rng.randint(3, 20), start + self.rng.randint(20, WINDOW // 2)))
        end = max(min(end, start + WINDOW), edit.last)
        yield self._say("read", self._read(path, start, end, numbered=edit.by_lines), path, edit.first)
        self.seen[path][start:end] = [True] * (end - start)

    def _slip_before(self, edit: Edit) -> Work:
        """A call that fails: a text to replace that is not there, or a parameter that there is not."""
        call = self._edit_call(edit)
        if self.slip == "argument" and self.toolset.strict:
            first, *rest = call.arguments
            wrong = {f"{first}_name": call.arguments[first], **{key: call.arguments[key] for key in rest}}
            yield self._say("edit", ToolCall(call.name, wrong), edit.path, edit.first, is_slip=True)
        elif self.slip == "old" and not edit.by_lines and (old := self._old(edit)).strip():
            last = old.rstrip().rpartition("\n")[2]
            mistaken = old.replace(last, last.lstrip() if last[:1].isspace() else f"    {last}")
            try:
                apply_edits(edit.path, self._text(edit.path), [(mistaken, "")])
            except ToolFailed:
                failing = self._edit_call(edit, mistaken)
                if self._fits(failing):
                    yield self._say("edit", failing, edit.path, edit.first, is_slip=True)
        else:
            return
        if self.slip:
            self.slip = ""
            if self.rng.random() < 0.4:
                self.seen[edit.path] = [False] * len(self.files[edit.path] or ())
                yield from self._find(edit)

    def _break(self, broken: Edit) -> Work:
        """An edit with a syntax error, found by a run, looked at again. The next edit puts it right."""
        self.slip, path = "", broken.path
        yield self._say("edit", self._edit_call(broken), path, broken.first, is_slip=True)
        self._apply(broken)
        yield from self._try()
        edit = self._next_edit(path, 9, broken.by_lines)
        if self.rng.random() < 0.6 or broken.by_lines:
            start, end = max(0, edit.first - 8), min(len(self.files[path] or ()), edit.last + 8)
            yield self._say("reread", self._read(path, start, end, numbered=broken.by_lines), path, edit.first)
        self.seen[path][edit.first : edit.last] = [True] * (edit.last - edit.first)
        yield self._say("mend", self._edit_call(edit), path, edit.first)
        self._apply(edit)

    def _try(self, is_slip: bool = False) -> Work:
        """Run the visible tests of what was changed, or else import it."""
        tests, command = self._visible_tests(), self.task.test_command
        module = self._module()
        self.passed = ""
        if "run_tests" in self.own and command:
            arguments = {"path": tests} if tests else {}
            call, kind = self._call("run_tests", **arguments), "test"
        elif command and self.shell in self.own:
            call, kind = self._run(f"{command} {shlex.quote(tests)}" if tests else command), "test"
        elif module and self.shell in self.own:
            call, kind = self._run(f"python -c {shlex.quote(f'import {module}')}"), "check"
        else:
            return
        answer = yield self._say(kind, call, is_slip=is_slip)
        words = answer.text
        went_well = "<returncode>0<" in words if self.shell == "bash" else not words.startswith(("exit ", "error"))
        if kind == "test" and went_well and answer.status == "ok":
            self.passed = tests or "the whole test suite"

    def _finish(self) -> Move:
        names = [f"`{name}`" for name in self._deleted()] or ["the change"]
        paths = ", ".join(sorted(self.gold))
        shown = ", ".join(names[:4]) + (" and others" if len(names) > 4 else "")
        done = self.rng.choice(WORDS["done"]).format(names=shown, paths=paths)
        if self.passed:
            done += self.rng.choice((" {tests} passes.", " I ran {tests}, and it passes.", "")).format(
                tests=self.passed
            )
        if "bash" in self.own:
            words = self.rng.choice(WORDS["submit"]).format(done=done)
            return Move(words, self._run(f"echo {SUBMIT}"))
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
        if self.shell not in self.own:
            raise PromptTooLong("the task's tools give the expert no way to do what the gold patch does")
        return self._call(self.shell, command=command)

    def _list(self, path: str) -> ToolCall:
        return self._call("list_dir", path=path) if "list_dir" in self.own else self._run(f"ls {shlex.quote(path)}")

    def _search(self, edit: Edit) -> Move:
        path, at = edit.path, self._definition(edit.path, edit.first)
        found = DEFINES.match((self.files[path] or [])[at]) if at is not None else None
        is_outline = found is None or found[2] not in {name.rpartition(".")[2] for name in self._deleted()}
        if is_outline and self.rng.random() < 0.7:
            kind, pattern, where = "outline", r"^\s*(class|def) ", path
        else:
            kind, pattern = "search", f"{found[1]} {found[2]}" if found else posixpath.basename(path).partition(".")[0]
            where = self.rng.choice(("", "", path, path.partition("/")[0] if "/" in path else ""))
        if "search_codebase" in self.own:
            call = self._call("search_codebase", pattern=pattern, **({"path": where} if where else {}))
        elif self.shell in self.own:
            flags = "-nE" if where == path else "-rnE"
            call = self._run(f"grep {flags} {shlex.quote(pattern)} {shlex.quote(where or '.')}")
        else:
            kind, call = "look", self._list(posixpath.dirname(path) or ".")
        return self._say(kind, call, path, edit.first)

    def _read(self, path: str, start: int, end: int, numbered: bool) -> ToolCall:
        """Lines [start:end), counted from 0."""
        if "read_file" in self.own:
            is_whole = start == 0 and end >= len(self.files[path] or ())
            span = {} if is_whole else {"start": start + 1, "end": end}
            return self._call("read_file", path=path, **span)
        quoted = shlex.quote(path)
        ways = (f"cat -n {quoted} | sed -n '{start + 1},{end}p'", f"nl -ba {quoted} | sed -n '{start + 1},{end}p'")
        if numbered or self.rng.random() < 0.3:
            return self._run(self.rng.choice(ways))
        return self._run(f"sed -n '{start + 1},{end}p' {quoted}")

    def _edit_call(self, edit: Edit, old: str | None = None) -> ToolCall:
        path, quoted = edit.path, shlex.quote(edit.path)
        old, new = self._old(edit) if old is None else old, "\n".join(edit.lines)
        if "edit_file" in self.own:
            return self._call("edit_file", path=path, old=old, new=new)
        if self.files[path] is None:
            folder = posixpath.dirname(path)
            begin = f"mkdir -p {shlex.quote(folder)} && " if folder else ""
            return self._run(f"{begin}cat > {quoted} <<'EOF'\n{new.removesuffix(chr(10))}\nEOF")
        if edit.by_lines:
            insert = [f"{edit.last or edit.first}r /dev/stdin"] if edit.lines else []
            span = f"{edit.first + 1},{edit.last}" if edit.last > edit.first + 1 else f"{edit.last}"
            delete = [f"{span}d"] if edit.last > edit.first else []
            scripts = " ".join(f"-e '{one}'" for one in (*insert, *delete))
            body = f" <<'EOF'\n{new}\nEOF" if edit.lines else ""
            return self._run(f"sed -i {scripts} {quoted}{body}")
        return self._run(
            f"python - <<'EOF'\nfrom pathlib import Path\n\npath = Path({path!r})\ntext = path.read_text()\n"
            f"old = r'''{old}\n'''\nnew = r'''{new}\n'''\nassert text.count(old) == 1, text.count(old)\n"
            "path.write_text(text.replace(old, new))\nEOF"
        )

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
        seen = self.seen.setdefault(edit.path, [])
        seen[edit.first : edit.last] = [True] * len(edit.lines)
        if edit.by_lines and len(edit.lines) != edit.last - edit.first:  # other numbers by now
            seen[edit.first + len(edit.lines) :] = [False] * len(seen[edit.first + len(edit.lines) :])
        self.files[edit.path] = self._after(edit)

    def _next_edit(self, path: str, limit: int, by_lines: bool) -> Edit:
        """The first difference, or as much of it as fits."""
        now, wanted = self.files[path], self.gold[path] or []
        while limit:
            if now is None:
                part = _cut(wanted, limit)
                edit = Edit(path, 0, 0, tuple(wanted if len(part) == len(wanted) else [*part, ""]))
            else:
                first, last, lines = _first_difference(now, wanted)
                part = _cut(lines, limit)
                last = min(last, first + limit)
                edit = self._in_context(path, first, last, part, by_lines)
            if self._fits(self._edit_call(edit)):
                return edit
            limit //= 2
        raise PromptTooLong("an edit of the gold patch does not fit into harness.message_tokens")

    def _in_context(self, path: str, first: int, last: int, lines: Sequence[str], by_lines: bool) -> Edit:
        """With as many lines around it as make the text to replace unique; by its line numbers in a shell, if it is to
        be or if quotes leave no other way."""
        now = self.files[path] or []
        in_shell = "edit_file" not in self.own
        for more in range(self.around, CONTEXT_LINES):
            for below in range(more // 3, -1, -1):
                start, end = first - more + below, last + below
                if start < 0 or end > len(now) - in_shell:
                    continue
                old = "\n".join(now[start:end]) + "\n" * in_shell
                edit = Edit(path, start, end, (*now[start:first], *lines, *now[last:end]))
                quoted = in_shell and ("'''" in old or any("'''" in line for line in edit.lines))
                if (by_lines and in_shell and first + last) or quoted:
                    return Edit(path, first, last, tuple(lines), by_lines=True)
                if old.strip() and _is_unique(self._text(path), old):
                    return edit
        raise PromptTooLong("the text to replace is not unique")

    def _broken(self, edit: Edit) -> Edit | None:
        """The edit with a syntax error that a run shows."""
        for number in self.rng.sample(range(len(edit.lines)), len(edit.lines)):
            line = edit.lines[number]
            if not line.rstrip().endswith((":", ")", "]")) or not edit.path.endswith(".py"):
                continue
            broken = (*edit.lines[:number], line.rstrip()[:-1], *edit.lines[number + 1 :])
            worse = Edit(edit.path, edit.first, edit.last, broken, edit.by_lines)
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
        """The test file that names what was changed; empty for all tests."""
        modules = {posixpath.splitext(posixpath.basename(path))[0] for path in self.gold}
        names = {name.rpartition(".")[2] for name in self._deleted()}
        best, most = "", 0
        for path in self.task.test_files:
            file = self.task.tree / path
            if not file.is_file() or not posixpath.basename(path).startswith("test"):
                continue
            text, stem = file.read_text(errors="replace"), posixpath.basename(path)
            score = 4 * any(name in stem for name in modules) + 2 * any(name in text for name in names)
            score += any(name in text for name in modules)
            best, most = (path, score) if score > most else (best, most)
        return best

    def _module(self) -> str:
        parts = posixpath.splitext(min(self.gold))[0].removesuffix("/__init__").split("/")
        parts = parts[parts[0] in self.task.suite.import_roots :]
        return ".".join(parts) if all(map(str.isidentifier, parts)) else ""


def _is_unique(text: str, old: str) -> bool:
    try:
        apply_edits("", text, [(old, "\0")])
    except ToolFailed:
        return False
    return True


def _first_difference(now: list[str], wanted: list[str]) -> tuple[int, int, list[str]]:
    """Lines [first:last) of `now`, and what is to be there."""
    same = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(now, wanted, strict=False))))
    rest, goal = now[same:], wanted[same:]
    end = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(reversed(rest), reversed(goal), strict=False))))
    rest, goal = rest[: len(rest) - end], goal[: len(goal) - end]
    for kind, first, last, start, stop in difflib.SequenceMatcher(None, rest, goal, autojunk=False).get_opcodes():
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
