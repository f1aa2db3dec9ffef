"""Hints. Each states a general rule in a sentence; none says what the right message would have been."""

from __future__ import annotations

from offbook.types import Hint

TEXTS = {
    "unknown_tool": "Reminder: available tools are {tools}.",
    "malformed_arguments": "Reminder: give a tool one JSON object with exactly its parameters.",
    "repeated_call": "Reminder: do not repeat a call, its answer is above.",
    "edited_tests": "Reminder: never edit tests, change the source.",
    "whole_suite_again": "Reminder: run all tests once after a change, and only the failing ones in between.",
    "edit_not_applied": "Reminder: copy the text to replace exactly, with enough around it to occur only once.",
    "thinking_in_comments": "Reminder: comments are for readers of the code, think before the call.",
    "lint_introduced": "Reminder: leave no unused names, dead code or other findings for the linter of the repository.",
    "camel_case_name": "Reminder: name functions the way the repository does.",
    "missing_docstring": "Reminder: give a public function a docstring where the others have one.",
    "whole_file_read": "Reminder: search a long file first, then read only the lines around the place.",
    "claimed_success": "Reminder: say which tests still fail, never call work done that was not seen to pass.",
    "asked_instead": "Reminder: nobody answers questions, decide and make the change.",
    "finished_without_edit": "Reminder: make the change that was asked for before finishing.",
    "final_too_long": "Reminder: end with a few sentences.",
    "final_names_nothing": "Reminder: end by naming the files or functions that were changed.",
}


def write_hint(rule: str, tools: tuple[str, ...]) -> Hint:
    return Hint(rule, TEXTS[rule].format(tools=", ".join(tools)))
