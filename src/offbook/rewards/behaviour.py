"""How an agent behaves beside solving the task. Each part is a plain function of task and rollout, between -1 and 0.

A part is bounded, so its weight is the most that it can ever cost. Every part can be earned by solving less or by
faking; docs/rewards.md says how, and so all of them are off unless the configuration gives them a weight.
"""

from __future__ import annotations

import difflib
import io
import re
import tokenize
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from offbook.rewards.lint import bare_strings, introduced
from offbook.types import Message, Rollout, Task, ToolCall, is_test_file

BROKEN_CALLS = 5  # so many cost the whole part
LINT_FINDINGS = 10
FREE_COMMENTS = 0.25  # share of the added lines that may be comments
FREE_TERMINAL = 0.5  # share of the calls that may go to the terminal
FINAL_WORDS = 150
TERMINAL = frozenset({"run_command", "bash", "run_tests"})
CODE = re.compile(r"```.*?(?:```|\Z)|`[^`\n]*`", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Answered:
    """A call, the tool's own name whatever it was shown as, and the answer if there is one."""

    tool: str
    call: ToolCall
    answer: Message | None


def answered(rollout: Rollout) -> Iterator[Answered]:
    for segment in rollout.segments:
        for index, message in enumerate(segment.messages):
            if message.role != "assistant" or not any(segment.sampled[message.body : message.end]):
                continue  # a worked example is not the agent's
            for place, call in enumerate(message.calls, index + 1):
                answer = segment.messages[place] if place < len(segment.messages) else None
                yield Answered(rollout.own_names.get(call.name, call.name), call, answer)


def broken_calls(task: Task, rollout: Rollout) -> float:
    """Calls that could not be run: unknown tools, malformed arguments. They are scored, never thrown away: an agent
    whose broken rollouts are discarded learns to break those that go badly."""
    return -min(1.0, rollout.usage.invalid_calls / BROKEN_CALLS)


def open_todos(task: Task, rollout: Rollout) -> float:
    """The share of the last todo list that is not done."""
    items = _last_todos(rollout)
    return -sum(item.get("status") != "done" for item in items) / len(items) if items else 0.0


def _last_todos(rollout: Rollout) -> list[dict[str, str]]:
    items: list[dict[str, str]] = []
    for one in answered(rollout):
        if one.tool == "todo" and one.answer and one.answer.status == "ok":
            lists = [value for value in one.call.arguments.values() if isinstance(value, list)]
            items = lists[0] if lists else []
    return items


def lint(task: Task, rollout: Rollout) -> float:
    """Findings in changed Python sources that were not there before (lint.py)."""
    found = sum(introduced(path, _before(task, path), text) for path, text in _sources(rollout))
    return -min(1.0, found / LINT_FINDINGS)


def comments(task: Task, rollout: Rollout) -> float:
    """How far the share of comments among the added lines goes beyond a quarter. Bare strings count as comments."""
    added = spoken = 0
    for path, text in _sources(rollout):
        lines = _added_lines(_before(task, path), text)
        added += len(lines)
        spoken += len(lines & _comment_lines(text))
    excess = spoken / added - FREE_COMMENTS if added else 0.0
    return -max(0.0, excess / (1 - FREE_COMMENTS))


def question(task: Task, rollout: Rollout) -> float:
    """-1 where the agent changed nothing and ended by asking something."""
    words = CODE.sub("", final_message(rollout)).strip()
    last = words.splitlines()[-1] if words else ""
    return -1.0 if "?" in last and not rollout.changed else 0.0


def final_word(task: Task, rollout: Rollout) -> float:
    """The share of three demands that the closing message fails: it is there, names something that was changed, and
    takes no more than 150 words."""
    words = final_message(rollout)
    names = {name for path in rollout.changed for name in (path, path.rpartition("/")[2])} | _defined(rollout.diff)
    demands = (
        bool(words.strip()),
        not rollout.changed or any(re.search(rf"(?<!\w){re.escape(name)}(?!\w)", words) for name in names),
        0 < len(words.split()) <= FINAL_WORDS,
    )
    return -(len(demands) - sum(demands)) / len(demands)


def terminal_only(task: Task, rollout: Rollout) -> float:
    """How far the share of calls to the terminal goes beyond a half, where the task has tools besides it."""
    offered = {rollout.own_names.get(name, name) for name in rollout.tools}
    if not offered - TERMINAL - {"finish", "todo"}:
        return 0.0
    tools = [one.tool for one in answered(rollout) if one.tool in offered and one.tool not in ("finish", "todo")]
    share = sum(tool in TERMINAL for tool in tools) / len(tools) if tools else 0.0
    return -max(0.0, (share - FREE_TERMINAL) / (1 - FREE_TERMINAL))


PARTS: dict[str, Callable[[Task, Rollout], float]] = {
    part.__name__: part for part in (broken_calls, open_todos, lint, comments, question, final_word, terminal_only)
}


def final_message(rollout: Rollout) -> str:
    """What the user reads at the end: what `finish` was told, or a last message without a call. No thinking."""
    messages = [m for segment in rollout.segments for m in segment.messages if m.role == "assistant"]
    if not messages or rollout.stop not in ("finish", "answer"):
        return ""
    last = messages[-1]
    if not last.calls:
        return last.text.rpartition("</think>")[2].strip()
    told = [value for value in last.calls[-1].arguments.values() if isinstance(value, str)]
    spoken = last.text[: last.calls[0].start].rpartition("</think>")[2].strip()
    is_finish = rollout.own_names.get(last.calls[-1].name, last.calls[-1].name) == "finish"
    return "\n".join(part for part in (spoken, *(told if is_finish else [])) if part)


def _sources(rollout: Rollout) -> list[tuple[str, str]]:
    return [
        (path, text)
        for path, text in sorted(rollout.changed.items())
        if text is not None and path.endswith(".py") and not is_test_file(path)
    ]


def _before(task: Task, path: str) -> str:
    original = task.tree / path
    return original.read_text(errors="replace") if original.is_file() else ""


def _added_lines(before: str, after: str) -> set[int]:
    """Numbers, from 1, of the lines of `after` that are new and not blank."""
    old, new = before.splitlines(), after.splitlines()
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    changed = [(start, end) for kind, _, _, start, end in matcher.get_opcodes() if kind in ("insert", "replace")]
    return {number + 1 for start, end in changed for number in range(start, end) if new[number].strip()}


def _comment_lines(source: str) -> set[int]:
    """Lines with nothing but a comment or a bare string on them. Of source that does not parse, only the comments."""
    lines: set[int] = set()
    with suppress(tokenize.TokenError, SyntaxError):
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT and not token.line[: token.start[1]].strip():
                lines.add(token.start[0])
    with suppress(SyntaxError, ValueError, RecursionError, MemoryError):
        for statement in bare_strings(source):
            lines.update(range(statement.lineno, (statement.end_lineno or statement.lineno) + 1))
    return lines


def _defined(diff: str) -> set[str]:
    """Functions and classes in or around which lines were added."""
    return set(re.findall(r"^[+ ]\s*(?:async\s+)?(?:def|class)\s+(\w+)", diff, re.MULTILINE))
