"""Sources as training conversations: in the model's token ids, cut to its context, in batches.

Ids of our own rollouts are kept where they fit the model's chat template; everything else is rendered in it.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from offbook.agent.chat import Chat, is_in, written_again
from offbook.core.config import Config, StageConfig
from offbook.rl.models import Progress, chat_folder, chat_of, described, positions, quiet
from offbook.signals.feedback import Rule
from offbook.signals.trajectory import with_siblings
from offbook.signals.trajectory.formats import UNLEARNED
from offbook.stages.reminders import Conversation, read
from offbook.stages.sources import Source, Tools
from offbook.types import Rollout, Segment

Item = TypeVar("Item")


@dataclass
class Renderer:
    """Renders conversations for a model."""

    chat: Chat
    vocabulary: int
    context: int
    rules: Mapping[str, Rule]  # checked on every message

    @classmethod
    def of(cls, start: Path, config: Config, rules: Mapping[str, Rule] = MappingProxyType({})) -> Renderer:
        """For the model in a folder."""
        context = min(config.harness.context, positions(chat_folder(start)))
        return cls(chat_of(start, config), described(str(start)).get_text_config().vocab_size, context, rules)

    def conversations(
        self, sources: Iterable[Source], counts: Counter[str], progress: Progress = quiet
    ) -> list[Conversation]:
        found = []
        for place, source in enumerate(sources):
            pairs = zip(with_siblings(source.rollouts), source.tools, strict=True)
            for number, ((rollout, siblings), tools) in enumerate(pairs):
                progress(f"reading {source.name}", (number + 1) / len(source.rollouts))
                reading = read(rollout, tools, self.rules, siblings)
                task = f"{place}/{rollout.task}" if rollout.foreign else rollout.task
                for index, whole in enumerate(self.segments(rollout, tools, counts)):
                    segment = self._fitting(whole, counts)
                    if segment is None:
                        continue
                    own = [at for at, message in enumerate(segment.messages) if segment.is_own(message)]
                    kept = {at: reading.kept[index, at] for at in own if (index, at) in reading.kept}
                    spared = {at: reading.spared[index, at] for at in own if (index, at) in reading.spared}
                    key = f"{place}/{number}/{index}"
                    found.append(Conversation(key, task, segment, rollout.tools, kept, spared))
        return found

    def segments(self, rollout: Rollout, tools: Tools, counts: Counter[str]) -> list[Segment]:
        """Render the segments. Tokens of messages with weight 0 are context and not learned."""
        segments = [self._written(segment, tools, counts) for segment in rollout.segments]
        for event in rollout.events:
            if event.kind == UNLEARNED:
                message = segments[event.segment].messages[event.message]
                segments[event.segment].sampled[message.start : message.end] = [False] * (message.end - message.start)
        return segments

    def _written(self, segment: Segment, tools: Tools, counts: Counter[str]) -> Segment:
        if is_in(segment, self.chat, self.vocabulary):
            return segment
        if segment.ids:
            counts["written again"] += 1
        if words := self.chat.telling(tools):  # appended to the system message, which is the first
            first, *rest = segment.messages
            system = replace(first, text="\n\n".join(filter(None, (first.text, words))))
            segment = replace(segment, messages=[system, *rest])
        return written_again(segment, self.chat, tools)

    def _fitting(self, segment: Segment, counts: Counter[str]) -> Segment | None:
        """Cut after the last learned message within the context. None if there is none."""
        learned = [number for number, message in enumerate(segment.messages) if segment.is_own(message)]
        fitting = [number for number in learned if segment.messages[number].end <= self.context]
        if not fitting:
            counts["dropped: too long" if learned else "dropped: nothing to learn"] += 1
            return None
        if len(segment.ids) <= self.context:
            return segment
        counts["cut"] += 1
        return segment.up_to(fitting[-1] + 1)


def split(items: Iterable[Item], name: Callable[[Item], str], share: float, seed: int) -> tuple[list[Item], list[Item]]:
    """Training and validation items: `share` of the names, at least one if there are several."""
    items = list(items)
    names = list(dict.fromkeys(map(name, items)))
    count = min(len(names) - 1, max(1, round(share * len(names)))) if share else 0
    validation = set(random.Random(f"{seed} validation").sample(names, count))
    learned = [item for item in items if name(item) not in validation]
    return learned, [item for item in items if name(item) in validation]


def batches_of_epochs(lengths: list[int], settings: StageConfig, seed: int) -> list[tuple[int, list[int]]]:
    """The epoch and the item numbers of each step."""
    return [
        (epoch, numbers)
        for epoch in range(1, settings.epochs + 1)
        for numbers in batches_of(lengths, settings.batch_tokens, random.Random(f"{seed} {epoch}"))
    ]


def batches_of(lengths: list[int], tokens: int, rng: random.Random) -> list[list[int]]:
    """Item numbers in random order, at most `tokens` per batch; longer items are batches of their own."""
    batches: list[list[int]] = []
    room = 0
    for number in rng.sample(range(len(lengths)), len(lengths)):
        if not batches or lengths[number] > room:
            batches.append([])
            room = tokens
        batches[-1].append(number)
        room -= lengths[number]
    return batches


def fingerprint(conversations: Iterable[Conversation]) -> str:
    """Content hash of all training data."""
    digest = hashlib.sha256()
    for one in conversations:
        digest.update(repr((one.key, one.segment.ids, one.segment.sampled, one.kept, one.spared, one.tools)).encode())
    return digest.hexdigest()
