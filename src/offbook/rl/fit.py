"""Which profile and dialect fit a model, by what it writes when it is first asked.

A model may write its calls in a format that a run does not read. Then each rollout ends at its first message, and
nothing is learned. `fit` tries every profile with every dialect, with the model loaded once; `refuse_unreadable` asks
for a few messages before a run's first step.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

import tomli_w

from offbook.agent.chat.dialects import BASH, HERMES, JSON, XML
from offbook.agent.harness.agent import first_message, opening
from offbook.core.config import Config
from offbook.engine import Engine, Session
from offbook.rl.checks import rewards_and_monitors_of
from offbook.rl.collector import Collector
from offbook.rl.models import Progress, model_folder, quiet
from offbook.rl.tasks import task_sets
from offbook.signals.trajectory import Trajectory
from offbook.types import Message, OffbookError, Prompt, PromptTooLong, Task

FIRST_TOKENS = 768  # of a first message; one that is longer says nothing about its call
CAN_CALL = 0.2  # share of first messages with a readable call from which a candidate fits
HARDLY = 0.1  # share below which training does not start
FORMS = {  # in which order a message is read, what it does, and what would read it
    HERMES: ("between <tool_call> tags", "harness.dialect hermes"),
    XML: ("as <function=...> between tags", "harness.dialect xml"),
    JSON: ("as JSON in a code block, or alone", "harness.dialect json"),
    BASH: ("as commands in a bash block", "harness.profile bash"),
}


@dataclass(frozen=True)
class FirstMessages:
    """How a model's first messages were read."""

    total: int
    readable: int  # with a call that was read, whatever its tool answered
    others: dict[str, int]  # by the dialect that would read their call
    cut: int  # at the limit of tokens, before a call

    @property
    def share(self) -> float:
        """Of the readable among those that came to an end."""
        return self.readable / max(1, self.total - self.cut)

    @property
    def problem(self) -> str:
        """What most of the others do."""
        name, count = max(self.others.items(), key=lambda entry: entry[1], default=("", 0))
        rest = self.total - self.readable - self.cut - sum(self.others.values())
        if count and count >= max(rest, self.cut):
            form, change = next(words for dialect, words in FORMS.items() if dialect.name == name)
            return f"{count} of {self.total} messages write calls {form}, which --{change} reads"
        if self.cut > rest:
            return f"{self.cut} of {self.total} messages are cut off before a call"
        return f"{rest} of {self.total} messages have no call, or a malformed one"


@dataclass(frozen=True)
class Candidate:
    """A profile and a dialect, and what a model did with them. The counts are of whole rollouts."""

    profile: str
    dialect: str
    first: FirstMessages
    rollouts: int = 0
    read: int = 0  # that read a file
    edited: int = 0
    handed_in: int = 0
    solved: int = 0

    @property
    def fits(self) -> bool:
        return self.first.share >= CAN_CALL

    def row(self) -> dict[str, str]:
        counts = {"read": self.read, "edited": self.edited, "handed in": self.handed_in, "solved": self.solved}
        return {
            "profile": self.profile,
            "dialect": self.dialect,
            "readable": f"{self.first.readable} of {self.first.total}",
            "other format": str(sum(self.first.others.values())),
            **{name: f"{count} of {self.rollouts}" if self.rollouts else "-" for name, count in counts.items()},
        }


def best(found: Sequence[Candidate]) -> Candidate:
    """By what whole rollouts came to, then by readable messages; of equals the first."""

    def score(one: Candidate) -> tuple[float, ...]:
        rollouts = max(1, one.rollouts)
        return one.solved / rollouts, one.edited / rollouts, one.read / rollouts, one.first.share

    return max(found, key=score)


def next_step(found: Sequence[Candidate], config: Config, recipe: str) -> tuple[str, str]:
    """What was found, in a sentence, and the command that comes next."""
    chosen = best(found)
    demonstrations = f"offbook sft @ {recipe} --sft.data demos:{config.tasks.source}"
    if not chosen.fits:
        return f"{config.model} fits none: {chosen.first.problem}; teach it by demonstrations", demonstrations
    if chosen.rollouts and not chosen.edited:
        return f"{config.model} makes calls, but no rollout changed a file: begin with demonstrations", demonstrations
    return f"{chosen.profile} with {chosen.dialect} fits {config.model} best", f"offbook train @ {recipe}"


def recipe_of(found: Sequence[Candidate], config: Config) -> str:
    """TOML with the best candidate."""
    chosen = best(found)
    harness = {"profile": chosen.profile} | ({} if chosen.profile == "bash" else {"dialect": chosen.dialect})
    tree = {"model": config.model, "tasks": {"source": config.tasks.source}, "harness": harness}
    return f"# By `offbook fit`\n\n{tomli_w.dumps(tree)}"


def fit(
    config: Config, num_tasks: int = 8, samples: int = 4, rollouts: int = 8, progress: Progress = quiet
) -> list[Candidate]:
    """Every profile with every dialect, on training tasks: first messages, and whole rollouts where calls are read."""
    if config.harness.command:
        raise OffbookError("your own agent reads calls itself, so there is nothing to fit: leave harness.command out")
    start = model_folder(config.model, config.seed, progress)
    tasks = _some(task_sets(config, progress).train, num_tasks, config.seed)
    judges = rewards_and_monitors_of(config)
    profiles = ("pocket",) if config.harness.profile == "pocket" else ("standard", "worked")
    pairs = [(profile, dialect.name) for profile in profiles for dialect in (HERMES, XML, JSON)]
    if "pocket" not in profiles and not config.tools.add:
        pairs.append(("bash", "auto"))

    async def tried(profile: str, dialect: str, engine: Engine) -> Candidate:
        harness = config.harness.model_copy(update={"profile": profile, "dialect": dialect})
        changed = config.model_copy(update={"harness": harness})
        async with aclosing(Collector(changed, start, judges=judges, lent=engine)) as collector:
            one = Candidate(profile, dialect, await first_messages(collector, tasks, samples, "fit"))
            if not one.fits or not rollouts:
                return one
            groups = await collector.groups(tasks[:rollouts], max(1, rollouts // len(tasks)), "fit/whole")
        done = [rollout for group in groups for rollout in group]
        reads = [any(use.went_well and use.kind == "read" for use in Trajectory(rollout).uses) for rollout in done]
        return replace(
            one,
            rollouts=len(done),
            read=sum(reads),
            edited=sum(bool(rollout.changed) for rollout in done),
            handed_in=sum(rollout.stop in ("finish", "answer") and rollout.has_acted for rollout in done),
            solved=sum(rollout.solved for rollout in done),
        )

    async def all_tried() -> list[Candidate]:
        found = []
        async with aclosing(Collector(config, start, judges=judges, progress=progress)) as owner:
            for number, pair in enumerate(pairs):
                progress("profiles and dialects", number / len(pairs))
                found.append(await tried(*pair, owner.engine))
        progress("profiles and dialects", 1.0)
        return found

    return asyncio.run(all_tried())


async def first_messages(collector: Collector, tasks: Sequence[Task], samples: int, name: str) -> FirstMessages:
    """Of each task so many. No sandbox is opened."""
    asked = [  # all before the first one asks: they decode together
        (task, collector.engine.open(f"{name}/{task.id}/{number}")) for task in tasks for number in range(samples)
    ]
    drawn = await asyncio.gather(*(_first(collector, *each) for each in asked))
    others = Counter[str]()
    readable = cut = 0
    for message, has_ended in drawn:
        text = message.text if message else ""
        forms = [one.name for one in FORMS if any(not call.error for call in one.parse(text, (), False))]
        if message and any(not call.error for call in message.calls):
            readable += 1
        elif forms:
            others[forms[0]] += 1
        else:
            cut += not has_ended
    return FirstMessages(len(drawn), readable, dict(others), cut)


async def _first(collector: Collector, task: Task, session: Session) -> tuple[Message | None, bool]:
    """A message, and whether it came to an end. None where the prompt does not fit."""
    chat, limits, toolset = collector.chat, collector.limits, collector.harness.toolset(task)
    transcript = opening(toolset, chat, collector.harness, first_message(task))
    prompt = Prompt(transcript.prompt(), tuple(transcript.segment.messages), toolset.specs())
    room = min(FIRST_TOKENS, limits.message_tokens, limits.context - len(prompt.ids))
    try:
        if room <= 0:
            return None, False
        completion = await session.complete(prompt, room)
    except PromptTooLong:
        return None, False
    finally:
        session.close()
    return transcript.add_sampled(completion), completion.ids[-1] in chat.stop_ids


def _some(tasks: Sequence[Task], count: int, seed: int) -> list[Task]:
    return random.Random(f"fit {seed}").sample(tasks, min(count, len(tasks)))


async def refuse_unreadable(collector: Collector, tasks: Sequence[Task]) -> None:
    """Before the first step: a model that hardly writes a call learns nothing from rewards."""
    config = collector.config
    found = await first_messages(collector, _some(tasks, 8, config.seed), 2, "fit")
    if found.share < HARDLY and found.total > 2 * found.cut:
        raise OffbookError(
            f"{found.readable} of the model's {found.total} first messages have a call that can be read, so no rollout "
            f"would get anywhere ({found.problem}); `offbook fit {config.model} --tasks.source {config.tasks.source}` "
            "finds the profile and dialect that fit, and --no-fit-check trains anyway"
        )
