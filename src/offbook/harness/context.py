"""The first user message: the request and, where the task has it, what the user's editor shows."""

from __future__ import annotations

from offbook.types import Task


def first_message(task: Task) -> str:
    context = task.context
    if context is None:
        return task.instruction
    parts = {"Open files": context.open, "Recent edits": context.edits, "Linter": context.lint}
    shown = [f"{title}:\n" + "\n".join(f"- {line}" for line in lines) for title, lines in parts.items() if lines]
    if not shown:
        return task.instruction
    return "\n\n".join([task.instruction, "My editor, as it is now (not all of it has to do with this):", *shown])
