"""A scripted agent that knows the solution and makes typical mistakes."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass
from typing import Any

from offbook.agent.chat import render_call
from offbook.pocket.repos import WORDS, Spot, evaluate, passes, path_of_tests, seen_by_first, with_other_constant
from offbook.pocket.tasks import TEST_COMMAND, Draft

FORGETS = 0.2  # of the functions that a summary should name
Call = tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class Habits:
    """Probability of each mistake."""

    unknown_tool: float = 0.25
    malformed: float = 0.07
    reread: float = 0.15
    edit_tests: float = 0.3
    explore: float = 0.15
    pathless: float = 0.0  # no mistake: how often the instruction does not say where, and the script has to search
    # In long tasks only:
    blind: float = 0.0  # an edit of a file that was not read yet, so that the text to replace is not there
    slips: float = 0.0  # a body with a wrong constant, which a test run shows and which is put right then


LONG_HABITS = Habits(
    edit_tests=0.04, explore=0.4, blind=0.1, slips=0.08
)  # a single edit of a test spoils a task, and there are many edits in one


class Script:
    """One episode, message by message. A call that is refused is tried again until it comes out right."""

    def __init__(self, draft: Draft, rng: random.Random, habits: Habits):
        self.draft = draft
        self.spot = draft.spots[0]  # that it is at
        self.rng = rng
        self.habits = habits
        self.explorers = [name for name in ("search_codebase", "list_dir") if name in draft.tools]
        self.is_lost = self.spot.path not in draft.instruction
        explores = self.is_lost or (self.explorers and rng.random() < habits.explore)
        self.stage = "explore" if explores else "view"

    def next_message(self) -> str:
        (name, arguments), after = self._call()
        roll = self.rng.random()
        if roll < self.habits.unknown_tool:
            removed = [tool for tool in WORDS["other_tools"].get(self.stage, ()) if tool not in self.draft.tools]
            return render_call(self.rng.choice([*WORDS["invented"][self.stage], *removed]), arguments)
        if roll < self.habits.unknown_tool + self.habits.malformed and arguments:
            # Mostly a parameter's name that the tool does not have, sometimes a brace too few.
            if self.rng.random() < 0.2:
                return render_call(name, arguments).replace("}}</tool_call>", "}</tool_call>")
            first, *rest = arguments
            return render_call(name, {"file": arguments[first], **{key: arguments[key] for key in rest}})
        self._enter(after)
        return render_call(name, arguments)

    def summary(self) -> str:
        """What is done and what is left, as far as it does not forget it. A file that it was about to edit is not in
        the window any more then, and has to be read again."""
        if self.stage == "edit":
            self.stage = "view"
        return f"Done: {self._named(self._done())}. Left: {self._named(self._left())}."

    def _named(self, spots: list[Spot]) -> str:
        named = [f"{spot.name} in {spot.path}" for spot in spots if self.rng.random() >= FORGETS]
        return ", ".join(named) or "nothing"

    def _done(self) -> list[Spot]:
        return [self.spot] if self.stage == "finish" else []

    def _left(self) -> list[Spot]:
        return [self.spot] if self.stage in ("explore", "view", "edit") else []

    def _enter(self, stage: str) -> None:
        self.stage = stage

    def _call(self) -> tuple[Call, str]:
        """The call this stage asks for, slips of judgement included, and the stage that follows it."""
        if self.stage == "explore":
            return self._explore(f"def {self.spot.name}"), "view"
        if self.stage == "view":
            return self._view(self.spot.path), "edit"
        if self.stage == "finish":
            return ("finish", {}), "finish"
        if self.rng.random() < self.habits.reread:
            return self._view(self.spot.path), "edit"
        if self.rng.random() < self.habits.edit_tests:
            return self._test_edit(), self.rng.choice(["edit", "finish", "finish"])
        return self._edit(self.spot.function.stub, self.spot.function.body), "finish"

    def _explore(self, pattern: str) -> Call:
        name = "search_codebase" if self.is_lost and not self.draft.is_long else self.rng.choice(self.explorers)
        return name, {"path": self.draft.gold.package} if name == "list_dir" else {"pattern": pattern}

    def _view(self, path: str) -> Call:
        if "read_file" in self.draft.tools:
            return "read_file", {"path": path}
        return "run_command", {"command": f"cat {path}"}

    def _edit(self, old: str, new: str) -> Call:
        return "edit_file", {"path": self.spot.path, "old": old, "new": new}

    def _test_edit(self) -> Call:
        """Turning the tests off instead of writing the code: the first line of a test file can be guessed."""
        module = self.spot.module.name
        skip = "import pytest\n\npytestmark = pytest.mark.skip"
        return "edit_file", {"path": path_of_tests(module), "old": f'"""Tests of {module}."""', "new": skip}


class LongScript(Script):
    """An episode with several functions: file by file, then all tests. What tests show to be wrong is put right."""

    def __init__(self, draft: Draft, rng: random.Random, habits: Habits):
        super().__init__(draft, rng, habits)
        self.left = deque(draft.spots[1:])
        self.written: list[Spot] = []
        self.body = ""  # that it is about to write
        self.wrong: dict[Spot, str] = {}  # what was written in the place of the right body
        self.turned_off: set[str] = set()  # files whose tests it has turned off

    def _call(self) -> tuple[Call, str]:
        function = self.spot.function
        if self.stage == "explore":
            return self._explore("NotImplementedError"), "view"
        if self.stage == "view":
            if self.rng.random() < self.habits.blind:
                return self._edit(f"def {self.spot.name}():\n    pass", function.body), "view"
            return self._view(self.spot.path), "edit"
        if self.stage == "test":
            is_tool = "run_tests" in self.draft.tools
            return ("run_tests", {}) if is_tool else ("run_command", {"command": TEST_COMMAND}), "tested"
        if self.stage == "mend":
            return self._edit(self.wrong[self.spot], function.body), "mended"
        if self.stage == "finish":
            return ("finish", {}), "finish"
        if self.rng.random() < self.habits.reread:
            return self._view(self.spot.path), "edit"
        if self.rng.random() < self.habits.edit_tests and self.spot.path not in self.turned_off:
            return self._test_edit(), "turned off"
        self.body = self._wrong_body() if self.rng.random() < self.habits.slips else ""
        return self._edit(function.stub, self.body or function.body), "written"

    def _wrong_body(self) -> str:
        """One that the function's first test refuses and that is not in the file yet, or none."""
        function = self.spot.function
        wrong = with_other_constant(self.rng, function)
        shown = seen_by_first(function.examples)
        is_seen = any(not passes(expected, evaluate(wrong.steps, given)) for given, expected in shown)
        texts = [self.draft.gold.files[self.spot.path], *self.wrong.values()]
        return wrong.body if is_seen and not any(wrong.body in text for text in texts) else ""

    def _enter(self, stage: str) -> None:
        """The stage after a call that went out as it should; some are named by what was done."""
        self.stage = stage
        if stage == "written":
            self.written.append(self.spot)
            if self.body:
                self.wrong[self.spot] = self.body
            self._next_function()
        elif stage == "turned off":
            self.turned_off.add(self.spot.path)
            self.stage = "edit"
            if self.rng.random() < 0.5:
                self._next_function()
        elif stage in ("tested", "mended"):
            if stage == "mended":
                del self.wrong[self.spot]
            shown = [spot for spot in self.wrong if spot.path not in self.turned_off]
            self.spot = shown[0] if shown else self.spot
            self.stage = "mend" if shown else "test" if stage == "mended" else "finish"

    def _next_function(self) -> None:
        if not self.left:
            self.stage = "test"
            return
        path = self.spot.path
        self.spot = self.left.popleft()
        self.stage = "edit" if self.spot.path == path else "view"

    def _done(self) -> list[Spot]:
        return self.written

    def _left(self) -> list[Spot]:
        return [*super()._left(), *self.left]
