"""A scripted expert that solves tasks by their gold patch, as an engine: the real harness and sandbox answer it.

It searches for the place, reads it, edits it towards the gold patch in pieces, runs the visible tests and says what it
did. Its next edit is always the first difference between the file as it is and as the gold patch leaves it, so a
syntax error made on purpose is mended the same way. Tools, wordings and order vary by the seed. With `edit_file` an
edit quotes the old text; in a shell it names line numbers.

Left out: plans (`todo`), several calls in one message, self-summaries.
"""

from __future__ import annotations

import difflib
import random
import re
import shlex
import tomllib
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from offbook.agent.chat import SUBMIT, Chat, behind_header
from offbook.agent.harness import Harness
from offbook.agent.harness.toolsets import Toolset
from offbook.engine import Engine, Session
from offbook.tasks.check import gold_changes
from offbook.types import Completion, Message, Prompt, PromptTooLong, Task, ToolCall

LOOKS = 0.3  # share of episodes that begin by listing a folder
SLIPS = 0.2  # share of episodes with a mistake made on purpose
EDIT_LINES = (16, 60)  # most new lines of an edit, drawn for each
WINDOW = 80  # most lines read at once around a place
CONTEXT_LINES = 60  # most lines that make the text to replace unique
DEFINES = re.compile(r"\s*(?:async )?(def|class) (\w+)")
WORDS: dict[str, list[str]] = tomllib.loads((Path(__file__).parent / "expert.toml").read_text())


@dataclass
class Move:
    words: str
    call: ToolCall
    is_slip: bool = False


Moves = Generator[Move, Message, None]  # is sent the answer to each move


@dataclass
class Edit:
    """Lines [first:last) of a file become `lines`."""

    path: str
    first: int
    last: int
    lines: Sequence[str]


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
        self.tools = {tool.own_name: tool for tool in toolset.tools.values()}
        self.in_shell = "edit_file" not in self.tools
        self.talks = 1.0 if "bash" in self.tools else rng.choice((0.0, 0.5, 0.5, 1.0))
        self.may_slip = rng.random() < SLIPS
        self.gold: dict[str, list[str] | None] = {}
        self.files: dict[str, list[str] | None] = {}  # as they are now
        self.slips: list[int] = []  # numbers of its messages
        self.turns = 0
        self.room = 0  # tokens that this message may have
        self.moves = self.script()

    async def complete(self, prompt: Prompt, max_tokens: int) -> Completion:
        self.room = max_tokens
        move = self.moves.send(prompt.messages[-1] if self.turns else None)  # type: ignore[arg-type]
        ids = self.ids_of(move)
        if len(ids) > max_tokens:
            raise PromptTooLong("a message of the expert does not fit")
        read = [(call.name, call.arguments) for call in self.chat.parse(ids[:-1], self.toolset.specs())]
        if read != [(move.call.name, move.call.arguments)]:
            raise PromptTooLong("the dialect cannot write a call of the expert")
        if move.is_slip:
            self.slips.append(self.turns)
        self.turns += 1
        return Completion(ids, [0.0] * len(ids), [-1] * len(ids))

    def ids_of(self, move: Move) -> list[int]:
        return [*self.chat.answer(behind_header(move.words, self.chat), [move.call]), self.chat.end_id]

    def script(self) -> Moves:
        for path, text in gold_changes(self.task).items():
            file = self.task.tree / path
            self.gold[path] = None if text is None else text.split("\n")
            self.files[path] = file.read_bytes().decode().split("\n") if file.is_file() else None
        if self.rng.random() < LOOKS:
            folder = self.rng.choice((".", str(PurePosixPath(min(self.gold)).parent)))
            yield self.say("look", self.call("list_dir", f"ls {shlex.quote(folder)}", path=folder))
        for path in self.rng.sample(sorted(self.gold), len(self.gold)):
            if self.gold[path] is None:
                yield self.say("edit", self.run(f"rm {shlex.quote(path)}"), path)
            else:
                yield from self.change(path)
        yield from self.test()
        targets = self.task.deleted.targets if self.task.deleted else ()
        names = [f"`{name.partition('::')[2]}`" for name in targets[:4]] or ["the change"]
        done = self.rng.choice(WORDS["done"]).format(names=", ".join(names), paths=", ".join(sorted(self.gold)))
        if "bash" in self.tools:
            yield Move(self.rng.choice(WORDS["submit"]).format(done=done), self.run(f"echo {SUBMIT}"))
        else:
            yield Move("", self.call("finish", message=done))

    def change(self, path: str) -> Moves:
        """Edit a file until it is as in the gold patch."""
        kind = "edit"
        while self.files[path] != self.gold[path]:
            limit = self.rng.randint(*EDIT_LINES)
            if self.files[path] is not None:
                if kind == "edit":
                    yield self.search(self.next_edit(path, limit))
                yield self.read("reread" if kind == "mend" else "read", self.next_edit(path, limit))
            edit = self.next_edit(path, limit)  # again, because there may be less room by now
            broken = self.broken(edit) if self.may_slip and path.endswith(".py") else None
            yield self.edit(kind, broken or edit, is_slip=broken is not None)
            kind = "more"
            if broken is not None:
                self.may_slip = False
                kind = "mend"
                yield from self.test()

    def search(self, edit: Edit) -> Move:
        name = self.definition(edit)[1]
        where = self.rng.choice((".", edit.path))
        command = f"grep -rn {shlex.quote(name)} {shlex.quote(where)}"
        return self.say("search", self.call("search_codebase", command, pattern=name, path=where), edit.path, name)

    def read(self, kind: str, edit: Edit) -> Move:
        at, name = self.definition(edit)
        start = max(at - 1, edit.first - self.rng.randint(2, WINDOW // 2), 0)
        end = min(max(start + self.rng.randint(20, WINDOW), edit.last + 3), len(self.files[edit.path] or ()))
        command = f"cat -n {shlex.quote(edit.path)} | sed -n '{start + 1},{end}p'"
        call = self.call("read_file", command, path=edit.path, start=start + 1, end=end)
        return self.say(kind, call, edit.path, name)

    def edit(self, kind: str, edit: Edit, is_slip: bool) -> Move:
        move = self.say(kind, self.edit_call(edit), edit.path, self.definition(edit)[1], is_slip)
        self.files[edit.path] = self.after(edit)
        return move

    def test(self) -> Moves:
        """Run the visible test file that is named after a changed file, else all visible tests."""
        command = self.task.test_command
        if not command or not self.tools.keys() & {"run_tests", "bash", "run_command"}:
            return
        modules = [PurePosixPath(path).stem for path in self.gold]
        visible = [path for path in self.task.test_files if (self.task.tree / path).is_file()]
        tests = [path for path in visible if any(name in PurePosixPath(path).name for name in modules)][:1]
        words = " ".join([command, *map(shlex.quote, tests)])
        yield self.say("test", self.call("run_tests", words, path="".join(tests)))

    def say(self, kind: str, call: ToolCall, path: str = "", name: str = "", is_slip: bool = False) -> Move:
        move = Move("", call, is_slip)
        if self.rng.random() >= self.talks:
            return move
        spoken = replace(move, words=self.rng.choice(WORDS[kind]).format(name=name, path=path))
        return spoken if len(self.ids_of(spoken)) <= self.room else move

    def call(self, own_name: str, command: str = "", /, **arguments: object) -> ToolCall:
        """In the names that this task shows; `command` does the same in a shell, where there is no such tool."""
        if own_name not in self.tools:
            return self.run(command)
        tool = self.tools[own_name]
        names = {parameter.own_name: name for name, parameter in tool.parameters.items()}
        return ToolCall(tool.name, {names[key]: value for key, value in arguments.items()})

    def run(self, command: str) -> ToolCall:
        shell = "bash" if "bash" in self.tools else "run_command"
        if shell not in self.tools:
            raise PromptTooLong("the task's tools give the expert no way to do what the gold patch does")
        return self.call(shell, command=command)

    def edit_call(self, edit: Edit) -> ToolCall:
        path = edit.path
        new = "\n".join(edit.lines)
        if not self.in_shell:
            return self.call("edit_file", path=path, old=self.old(edit), new=new)
        place = shlex.quote(path)
        if self.files[path] is None:
            folder = shlex.quote(str(PurePosixPath(path).parent))
            return self.run(f"mkdir -p {folder} && cat > {place} <<'EOF'\n{new.removesuffix(chr(10))}\nEOF")
        insert = f" -e '{edit.last or edit.first}r /dev/stdin'" if edit.lines else ""
        delete = f" -e '{edit.first + 1},{edit.last}d'" if edit.last > edit.first else ""
        body = f" <<'EOF'\n{new}\nEOF" if edit.lines else ""
        return self.run(f"sed -i{insert}{delete} {place}{body}")

    def old(self, edit: Edit) -> str:
        return "\n".join((self.files[edit.path] or [])[edit.first : edit.last])

    def after(self, edit: Edit) -> list[str]:
        lines = self.files[edit.path] or []
        return [*lines[: edit.first], *edit.lines, *lines[edit.last :]]

    def next_edit(self, path: str, limit: int) -> Edit:
        """The first difference, or as much of it as fits."""
        now = self.files[path]
        wanted = self.gold[path] or []
        while limit:
            if now is None:
                part = cut(wanted, limit)
                edit = Edit(path, 0, 0, wanted if len(part) == len(wanted) else [*part, ""])
            else:
                codes = difflib.SequenceMatcher(None, now, wanted).get_opcodes()
                _, first, last, start, stop = next(code for code in codes if code[0] != "equal")
                lines = wanted[start:stop]
                edit = self.in_context(Edit(path, first, min(last, first + limit), cut(lines, limit)))
            if len(self.ids_of(Move("", self.edit_call(edit)))) <= self.room:
                return edit
            limit //= 2
        raise PromptTooLong("an edit of the gold patch does not fit into harness.message_tokens")

    def in_context(self, edit: Edit) -> Edit:
        """With as many lines around it as make the text to replace unique. In a shell only the start of a file needs
        one: nothing can be inserted before it by its number."""
        now = self.files[edit.path] or []
        for more in range(int(self.in_shell and not edit.last), CONTEXT_LINES):
            start = max(0, edit.first - more)
            end = min(len(now), edit.last + more)
            wider = Edit(edit.path, start, end, [*now[start : edit.first], *edit.lines, *now[edit.last : end]])
            old = self.old(wider)
            if self.in_shell or (old.strip() and "\n".join(now).count(old) == 1):
                return wider
        raise PromptTooLong("the text to replace is not unique")

    def broken(self, edit: Edit) -> Edit | None:
        """The edit with a syntax error that a run shows."""
        ends = [number for number, line in enumerate(edit.lines) if line.endswith((":", ")", "]"))]
        for number in self.rng.sample(ends, len(ends)):
            line = edit.lines[number][:-1]
            worse = replace(edit, lines=[*edit.lines[:number], line, *edit.lines[number + 1 :]])
            try:
                compile("\n".join(self.after(worse)), edit.path, "exec", dont_inherit=True)
            except (SyntaxError, ValueError):
                return worse
        return None

    def definition(self, edit: Edit) -> tuple[int, str]:
        """Line and name of the function or class above an edit; without one the first line and the module."""
        lines = self.files[edit.path] or []
        for at in range(min(edit.first, len(lines) - 1), -1, -1):
            if found := DEFINES.match(lines[at]):
                return at, found[2]
        return 0, PurePosixPath(edit.path).stem


def cut(lines: Sequence[str], limit: int) -> Sequence[str]:
    """The first lines, up to an empty one if there is one."""
    empty = [number for number in range(limit // 2, min(limit, len(lines))) if not lines[number].strip()]
    return lines[: empty[-1] if empty and len(lines) > limit else limit]
