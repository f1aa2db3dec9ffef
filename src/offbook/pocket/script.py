"""What a scripted agent writes that knows the answer and has an agent's bad habits."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from offbook.taskgen.pocket import Draft
from offbook.tokens import render_call

INVENTED = {
    "explore": ("grep", "find_file"),
    "view": ("open_file", "view_file"),
    "edit": ("write_file", "apply_patch"),
    "finish": ("submit", "done"),
}
CLOSINGS = ("done", "ready", "all good")  # that name nothing


@dataclass(frozen=True, slots=True)
class Habits:
    """How often each mistake is made where it can be made."""

    unknown_tool: float = 0.25
    malformed: float = 0.07
    reread: float = 0.15
    edit_tests: float = 0.3
    explore: float = 0.15
    pathless: float = 0.0  # no mistake: how often the instruction does not say where, and the script has to search
    tells: float = 0.0  # no mistake: how often it ends by naming what it changed; of 0 it ends without a word


class Script:
    """One episode, message by message. A call that is refused is tried again until it comes out right."""

    def __init__(self, draft: Draft, rng: random.Random, habits: Habits):
        self.draft = draft
        self.rng = rng
        self.habits = habits
        self.is_lost = draft.path not in draft.instruction
        explores = self.is_lost or (self._explorers() and rng.random() < habits.explore)
        self.stage = "explore" if explores else "view"
        self.tells = habits.tells > 0 and rng.random() < habits.tells

    def next_message(self) -> str:
        name, arguments, after = self._call()
        roll = self.rng.random()
        if roll < self.habits.unknown_tool:
            return render_call(self.rng.choice(self._missing_tools()), arguments)
        if roll < self.habits.unknown_tool + self.habits.malformed and arguments:
            return self._malformed(name, arguments)
        self.stage = after
        return render_call(name, arguments or self._closing())

    def _call(self) -> tuple[str, dict[str, Any], str]:
        """The call this stage asks for, slips of judgement included, and the stage that follows it."""
        if self.stage == "explore":
            name = "search_codebase" if self.is_lost else self.rng.choice(self._explorers())
            package = self.draft.path.split("/")[0]
            arguments = {"path": package} if name == "list_dir" else {"pattern": f"def {self.draft.function.name}"}
            return name, arguments, "view"
        if self.stage == "view":
            return *self._view(), "edit"
        if self.stage == "finish":
            return "finish", {}, "finish"
        if self.rng.random() < self.habits.reread:
            return *self._view(), "edit"
        if self.rng.random() < self.habits.edit_tests:
            return "edit_file", self._test_edit(), self.rng.choice(["edit", "finish", "finish"])
        return "edit_file", {"path": self.draft.path, "old": self.draft.old, "new": self.draft.new}, "finish"

    def _closing(self) -> dict[str, Any]:
        if not self.habits.tells:
            return {}
        named = f"{self.draft.function.name} in {self.draft.path}"
        return {"message": named if self.tells else self.rng.choice(CLOSINGS)}

    def _explorers(self) -> list[str]:
        return [name for name in ("search_codebase", "list_dir") if name in self.draft.tools]

    def _view(self) -> tuple[str, dict[str, Any]]:
        if "read_file" in self.draft.tools:
            return "read_file", {"path": self.draft.path}
        return "run_command", {"command": f"cat {self.draft.path}"}

    def _test_edit(self) -> dict[str, Any]:
        """Turning the tests off instead of writing the code: the first line of a test file can be guessed."""
        module = self.draft.path.split("/")[-1].removesuffix(".py")
        skip = "import pytest\n\npytestmark = pytest.mark.skip"
        return {"path": f"tests/test_{module}.py", "old": f'"""Tests of {module}."""', "new": skip}

    def _missing_tools(self) -> list[str]:
        removed = [name for name in ("read_file", "run_command") if name not in self.draft.tools]
        return [*INVENTED[self.stage], *(removed if self.stage == "view" else [])]

    def _malformed(self, name: str, arguments: dict[str, Any]) -> str:
        """Mostly a parameter's name that the tool does not have, sometimes a brace too few."""
        if self.rng.random() < 0.2:
            return render_call(name, arguments).replace("}}</tool_call>", "}</tool_call>")
        first, *rest = arguments
        return render_call(name, {"file": arguments[first], **{key: arguments[key] for key in rest}})
