"""A scripted agent that knows the solution and makes typical mistakes."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass
from typing import Any

from offbook.agent.chat import render_call
from offbook.pocket.repos import Spot, evaluate, passes, path_of_tests, seen_by_first, with_other_constant
from offbook.pocket.tasks import TEST_COMMAND, Draft

INVENTED = {
    "explore": ("grep", "find_file"),
    "view": ("open_file", "view_file"),
    "edit": ("write_file", "apply_patch"),
    "check": ("pytest", "check_tests"),
    "test": ("pytest", "check_tests"),
    "mend": ("write_file", "apply_patch"),
    "finish": ("submit", "done"),
}
OTHER_TOOLS = {  # that a task may lack
    "view": ("read_file", "run_command"),
    "check": ("run_tests", "run_command"),
    "test": ("run_tests", "run_command"),
}
CLOSINGS = ("done", "ready", "all good")  # that name nothing
FORGETS = 0.2  # of the functions that a summary should name


@dataclass(frozen=True)
class Habits:
    """Probability of each mistake."""

    unknown_tool: float = 0.25
    malformed: float = 0.07
    reread: float = 0.15
    edit_tests: float = 0.3
    explore: float = 0.15
    pathless: float = 0.0  # no mistake: how often the instruction does not say where, and the script has to search
    tells: float = 0.0  # no mistake: how often it ends by naming what it changed; of 0 it ends without a word
    # In long tasks only:
    blind: float = 0.0  # an edit of a file that was not read yet, so that the text to replace is not there
    stray: float = 0.0  # no mistake: another file read first
    slips: float = 0.0  # a body with a wrong constant, which a test run shows and which is put right then
    checks: float = 0.0  # no mistake: the tests of a file run after its last edit
    rerun: float = 0.0  # all tests again, though nothing changed


LONG_HABITS = Habits(
    edit_tests=0.04, explore=0.4, blind=0.1, stray=0.1, slips=0.08, checks=0.5, rerun=0.15
)  # a single edit of a test spoils a task, and there are many edits in one


class Script:
    """One episode, message by message. A call that is refused is tried again until it comes out right."""

    def __init__(self, draft: Draft, rng: random.Random, habits: Habits):
        self.draft = draft
        self.spot = draft.spots[0]  # that it is at
        self.rng = rng
        self.habits = habits
        self.is_lost = self.spot.path not in draft.instruction
        explores = self.is_lost or (self._explorers() and rng.random() < habits.explore)
        self.stage = "explore" if explores else "view"
        self.tells = habits.tells > 0 and rng.random() < habits.tells

    def next_message(self) -> str:
        name, arguments, after = self._call()
        roll = self.rng.random()
        if roll < self.habits.unknown_tool:
            return render_call(self.rng.choice(self._missing_tools()), arguments)
        if roll < self.habits.unknown_tool + self.habits.malformed and arguments:
            # Mostly a parameter's name that the tool does not have, sometimes a brace too few.
            if self.rng.random() < 0.2:
                return render_call(name, arguments).replace("}}</tool_call>", "}</tool_call>")
            first, *rest = arguments
            return render_call(name, {"file": arguments[first], **{key: arguments[key] for key in rest}})
        self._enter(after)
        return render_call(name, arguments or (self._closing() if name == "finish" else {}))

    def summary(self) -> str:
        """What is done and what is left, as far as it does not forget it. A file that it was about to edit is not in
        the window any more then, and has to be read again."""
        if self.stage == "edit":
            self.stage = "view"
        return f"Done: {self._named(self._done())}. Left: {self._named(self._left())}."

    def _done(self) -> list[Spot]:
        return [self.spot] if self.stage == "finish" else []

    def _left(self) -> list[Spot]:
        return [self.spot] if self.stage in ("explore", "view", "edit") else []

    def _named(self, spots: list[Spot]) -> str:
        named = [f"{spot.name} in {spot.path}" for spot in spots if self.rng.random() >= FORGETS]
        return ", ".join(named) or "nothing"

    def _enter(self, stage: str) -> None:
        self.stage = stage

    def _call(self) -> tuple[str, dict[str, Any], str]:
        """The call this stage asks for, slips of judgement included, and the stage that follows it."""
        if self.stage == "explore":
            name = "search_codebase" if self.is_lost else self.rng.choice(self._explorers())
            found = {"pattern": f"def {self.spot.name}"}
            return name, {"path": self.draft.gold.package} if name == "list_dir" else found, "view"
        if self.stage == "view":
            return *self._view(), "edit"
        if self.stage == "finish":
            return "finish", {}, "finish"
        if self.rng.random() < self.habits.reread:
            return *self._view(), "edit"
        if self.rng.random() < self.habits.edit_tests:
            return "edit_file", self._test_edit(), self.rng.choice(["edit", "finish", "finish"])
        return "edit_file", self._edit(self.spot.old, self.spot.new), "finish"

    def _edit(self, old: str, new: str) -> dict[str, Any]:
        return {"path": self.spot.path, "old": old, "new": new}

    def _closing(self) -> dict[str, Any]:
        if not self.habits.tells:
            return {}
        named = f"{self.spot.name} in {self.spot.path}"
        return {"message": named if self.tells else self.rng.choice(CLOSINGS)}

    def _explorers(self) -> list[str]:
        return [name for name in ("search_codebase", "list_dir") if name in self.draft.tools]

    def _view(self, path: str = "") -> tuple[str, dict[str, Any]]:
        path = path or self.spot.path
        if "read_file" in self.draft.tools:
            return "read_file", {"path": path}
        return "run_command", {"command": f"cat {path}"}

    def _test_edit(self) -> dict[str, Any]:
        """Turning the tests off instead of writing the code: the first line of a test file can be guessed."""
        module = self.spot.module.name
        skip = "import pytest\n\npytestmark = pytest.mark.skip"
        return {"path": path_of_tests(module), "old": f'"""Tests of {module}."""', "new": skip}

    def _missing_tools(self) -> list[str]:
        removed = [name for name in OTHER_TOOLS.get(self.stage, ()) if name not in self.draft.tools]
        return [*INVENTED[self.stage], *removed]


class LongScript(Script):
    """An episode with several functions: file by file, then all tests. What tests show to be wrong is put right."""

    def __init__(self, draft: Draft, rng: random.Random, habits: Habits):
        super().__init__(draft, rng, habits)
        self.left = deque(draft.spots[1:])
        self.written: list[Spot] = []
        self.body = ""  # that it is about to write
        self.wrong: dict[str, tuple[Spot, str]] = {}  # by function: what was written in the place of the right body
        self.turned_off: set[str] = set()  # files whose tests it has turned off
        self.tests = "test"  # the stage of the last test run

    def _call(self) -> tuple[str, dict[str, Any], str]:
        if self.stage == "explore":
            name = self.rng.choice(self._explorers())
            where = {"path": self.draft.gold.package}
            return name, where if name == "list_dir" else {"pattern": "NotImplementedError"}, "view"
        if self.stage == "view":
            return self._look()
        if self.stage == "edit":
            return self._write()
        if self.stage == "check":
            return *self._run_tests(path_of_tests(self.spot.module.name)), "tested"
        if self.stage == "test":
            return *self._run_tests(), "tested"
        if self.stage == "mend":
            return "edit_file", self._edit(self.wrong[self.spot.name][1], self.spot.new), "mended"
        return "finish", {}, "finish"

    def _look(self) -> tuple[str, dict[str, Any], str]:
        roll = self.rng.random()
        if roll < self.habits.blind:
            return "edit_file", self._edit(f"def {self.spot.name}():\n    pass", self.spot.new), "view"
        if roll < self.habits.blind + self.habits.stray:
            others = [path for path in self.draft.files if path.endswith(".py") and path not in self.draft.paths]
            return *self._view(self.rng.choice(sorted(others))), "view"
        return *self._view(), "edit"

    def _write(self) -> tuple[str, dict[str, Any], str]:
        if self.rng.random() < self.habits.reread:
            return *self._view(), "edit"
        if self.rng.random() < self.habits.edit_tests and self.spot.path not in self.turned_off:
            return "edit_file", self._test_edit(), "turned off"
        self.body = self._wrong_body() if self.rng.random() < self.habits.slips else ""
        return "edit_file", self._edit(self.spot.old, self.body or self.spot.new), "written"

    def _wrong_body(self) -> str:
        """One that the function's first test refuses and that is not in the file yet, or none."""
        function = self.spot.function
        wrong = with_other_constant(self.rng, function)
        is_seen = any(
            not passes(expected, evaluate(wrong.steps, given)) for given, expected in seen_by_first(function.examples)
        )
        bodies = [self.draft.gold.files[self.spot.path], *(body for _, body in self.wrong.values())]
        return wrong.body if is_seen and not any(wrong.body in text for text in bodies) else ""

    def _run_tests(self, path: str = "") -> tuple[str, dict[str, Any]]:
        if "run_tests" in self.draft.tools:
            return "run_tests", {"path": path} if path else {}
        return "run_command", {"command": f"{TEST_COMMAND} {path}".strip()}

    def _enter(self, stage: str) -> None:
        """The stage after a call that went out as it should; some are named by what was done."""
        if stage == "written":
            self.written.append(self.spot)
            if self.body:
                self.wrong[self.spot.name] = self.spot, self.body
            self._next_function()
        elif stage == "turned off":
            self.turned_off.add(self.spot.path)
            if self.rng.random() < 0.5:
                self._next_function()
        elif stage == "tested":
            self.tests = self.stage
            if shown := self._shown():
                self.spot = shown[0]
                self.stage = "mend"
            elif self.stage == "check":
                self._next_file()
            elif self.rng.random() >= self.habits.rerun:
                self.stage = "finish"
        elif stage == "mended":
            del self.wrong[self.spot.name]
            shown = self._shown()
            self.spot, self.stage = (shown[0], "mend") if shown else (self.spot, self.tests)
        else:
            self.stage = stage

    def _done(self) -> list[Spot]:
        return self.written

    def _left(self) -> list[Spot]:
        return [*super()._left(), *self.left]

    def _shown(self) -> list[Spot]:
        """Wrong bodies that the last test run shows, as far as the functions' own tests go."""
        spots = [spot for spot, _ in self.wrong.values() if spot.path not in self.turned_off]
        return [spot for spot in spots if self.tests == "test" or spot.path == self.spot.path]

    def _next_function(self) -> None:
        if self.left and self.left[0].path == self.spot.path:
            self.spot = self.left.popleft()
            self.stage = "edit"
        elif self.rng.random() < self.habits.checks:
            self.stage = "check"
        else:
            self._next_file()

    def _next_file(self) -> None:
        if self.left:
            self.spot = self.left.popleft()
            self.stage = "view"
        else:
            self.stage = "test"
