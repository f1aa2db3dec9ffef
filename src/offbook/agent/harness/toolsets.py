"""Toolsets: which tools a task's agent has, under what names and descriptions, and how strictly calls are checked.

They vary from task to task, so that using the tools as listed is a skill that training can reward.
"""

import difflib
import random
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from types import MappingProxyType

from offbook.agent.chat import Chat
from offbook.agent.harness.tool import Tool, ToolFailed, Workbench
from offbook.agent.harness.tools import BASH, TOOLS, submitted
from offbook.sandbox.sandbox import HOST_ERRORS, PathRefused
from offbook.types import Json, OffbookError, Role, ToolCall, ToolSpec

PROMPTS = resources.files("offbook.agent.harness") / "prompts"
WORDINGS: Json = tomllib.loads((PROMPTS / "wordings.toml").read_text())  # other names and words
NEEDED = {  # a way to do it, and the tools that give one; the first is named where none does
    "read": ("read_file", "run_command"),
    "edit": ("edit_file", "run_command"),
    "finish": ("finish",),
}
FINDING = frozenset({"list_dir", "search_codebase", "run_command"})
DROPPED = 0.5  # how many of the tools that can be missed are, at full variation
LENIENT = 0.5  # of the toolsets, at full variation
STRICTNESS = {
    True: "Give exactly the parameters that a tool has, each with a value of its type: anything else is an error.",
    False: "Give the parameters that a tool needs, each with a value of its type.",
}


@cache
def prompt(name: str) -> str:
    """A file of prompts/; what it leaves open is filled in by str.format."""
    return (PROMPTS / f"{name}.md").read_text().removesuffix("\n")


@dataclass(frozen=True)
class Toolset:
    tools: dict[str, Tool]  # by the name shown, in the order shown
    strict: bool
    prompt: str  # the file of the system prompt

    def specs(self) -> tuple[ToolSpec, ...]:
        """The tools as a chat format or an API describes them. In the bash profile the prompt does."""
        return () if self.prompt == "bash" else tuple(tool.spec() for tool in self.tools.values())

    def check(self, call: ToolCall) -> str | None:
        """What is wrong with a call, in the names that the agent knows, or None."""
        if call.name not in self.tools:
            return f"there is no tool {call.name}"
        return self.tools[call.name].check(call.arguments, self.strict)

    async def run(self, call: ToolCall, bench: Workbench) -> str:
        """Run a call that passed `check`. Arguments that only a lenient check accepts are ignored, with a note."""
        tool = self.tools[call.name]
        ignored = [name for name in call.arguments if name not in tool.parameters]
        said = f"\n[ignored: {call.name} takes no {', '.join(ignored)}]" if ignored else ""
        note = said.encode(errors="replace").decode()
        try:
            return await tool.run(bench, call.arguments) + note
        except (ToolFailed, PathRefused) as error:
            raise type(error)(f"{error}{note}") from error
        except OSError as error:  # no such file, a folder, no permission, a full sandbox
            if error.errno in HOST_ERRORS:
                raise
            raise ToolFailed(f"{error.strerror or error}{note}") from error

    def finishes(self, call: ToolCall, answer: str) -> bool:
        """Whether a call that was answered ends the task."""
        tool = self.tools[call.name]
        return tool.own_name == "finish" or (tool is BASH and submitted(answer))

    def worked_turns(self, chat: Chat) -> Iterator[tuple[Role, str]]:
        """Worked examples to put before the task: very small models copy examples and cannot follow descriptions."""
        if self.prompt != "worked":
            return
        shown = {tool.own_name: tool for tool in self.tools.values()}
        for turn in tomllib.loads((PROMPTS / "worked.toml").read_text())["turn"]:
            tool = shown.get(turn["tool"])
            if tool is not None:
                names = {parameter.own_name: name for name, parameter in tool.parameters.items()}
                yield "user", turn["user"]
                arguments = {names[own]: value for own, value in turn["arguments"].items()}
                yield "assistant", chat.decode(chat.answer("", [ToolCall(tool.name, arguments)]))
                yield "tool", turn["answer"]

    def system_prompt(self, telling: str = "") -> str:
        """`telling` describes the tools where neither the chat format nor the API does."""
        if self.prompt != "standard":
            shown = [f"{tool.name}({', '.join(tool.required)})" for tool in self.tools.values()]
            return prompt(self.prompt).format(signatures=", ".join(shown))
        words = prompt("standard").format(strictness=STRICTNESS[self.strict])
        return "\n\n".join(filter(None, (words, telling)))


def make_toolset(
    names: tuple[str, ...],
    profile: str = "standard",
    variation: float = 0.0,
    seed: str = "",
    own: Mapping[str, Tool] = MappingProxyType({}),
) -> Toolset:
    """The tools of `names` as a task shows them; the same seed (the task's id) gives the same toolset.

    Variation 0 shows all of them in the given order, canonical and strict. With 1, half of what can be missed is
    missing, names, order and words differ, and half of the toolsets are lenient. What stays can solve what all of them
    could. The profile `bash` is a format of its own: it has the one tool, whatever the names, and does not vary.
    Those of `own`, the user's, come last and do not vary either, so the others are shown as they are without them.
    """
    for name in names:
        refuse_unknown(name, {**TOOLS, **own})
    if len(set(names)) < len(names):
        raise OffbookError(f"a tool is named twice in {', '.join(names)}")
    if profile == "bash":
        return Toolset({BASH.name: BASH}, True, "bash")
    lacking = _lacking(names)
    if lacking:
        raise OffbookError(f"the tools {', '.join(names)} give no way to {lacking}; add {NEEDED[lacking][0]}")
    rng = random.Random(f"toolset {seed}")
    built_in = tuple(name for name in names if name in TOOLS)
    shown = [_show(TOOLS[name], rng, variation) for name in _keep(built_in, rng, variation)]
    if rng.random() < variation:
        rng.shuffle(shown)
    shown += [own[name] for name in names if name in own]
    return Toolset({tool.name: tool for tool in shown}, not rng.random() < variation * LENIENT, profile)


def refuse_unknown(name: str, known: Iterable[str]) -> None:
    if name not in known:
        nearest = difflib.get_close_matches(name, known, 1, cutoff=0.0)[0]
        raise OffbookError(f"there is no tool {name}; did you mean {nearest}?")


def _lacking(names: Iterable[str]) -> str | None:
    return next((way for way, tools in NEEDED.items() if set(names).isdisjoint(tools)), None)


def _keep(names: tuple[str, ...], rng: random.Random, variation: float) -> list[str]:
    """Take tools away one by one, but none that is the last to read, edit, look around or finish with."""
    kept = list(names)
    for name in rng.sample(names, len(names)):
        rest = [other for other in kept if other != name]
        lost = not FINDING.isdisjoint(kept) and FINDING.isdisjoint(rest)
        if rng.random() < variation * DROPPED and not lost and not _lacking(rest):
            kept = rest
    return kept


def _show(tool: Tool, rng: random.Random, variation: float) -> Tool:
    wording = WORDINGS[tool.name]

    def choose(canonical: str, others: Sequence[str]) -> str:
        other = rng.choice(others)
        return other if rng.random() < variation else canonical

    name = choose(tool.name, wording["names"])
    description = choose(tool.description, wording["descriptions"])
    parameters = {choose(own, wording["parameters"][own]): parameter for own, parameter in tool.parameters.items()}
    return replace(tool, name=name, description=description, parameters=parameters)
