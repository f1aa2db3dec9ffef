"""Sources as training conversations: in the model's token ids, cut to its context, in batches.

Ids of our own rollouts are kept where they fit the model's chat template; everything else is rendered in it.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from offbook.agent.chat import Chat, has_no_thoughts, is_in, written_again
from offbook.core.config import Config, StageConfig
from offbook.core.thoughts import answer_start
from offbook.rl.collector import chat_of
from offbook.rl.models import Progress, chat_folder, described, positions, quiet
from offbook.signals.feedback import Rule
from offbook.signals.trajectory import At, with_siblings
from offbook.signals.trajectory.formats import UNLEARNED, UNLEARNED_CODE
from offbook.signals.trajectory.tool_calls import inserted_code
from offbook.stages.reminders import WITHOUT_EFFECT, Conversation, Pair, read
from offbook.stages.sources import Source, Tools
from offbook.stages.wordings import WORDINGS
from offbook.train.algorithms import demonstration_block, reference_block
from offbook.types import Message, Rollout, Segment

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
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
        self, sources: Iterable[Source], config: Config, counts: Counter[str], progress: Progress = quiet
    ) -> list[Conversation]:
        found = []
        for place, source in enumerate(sources):
            pairs = zip(with_siblings(source.rollouts), source.tools, strict=True)
            for number, ((rollout, siblings), tools) in enumerate(pairs):
                reading, shown = read(rollout, tools, self.rules, siblings), dict[str, list[int]]()
                if config.sft.teachers.get("opsd") and rollout.diff:
                    shown["opsd"] = reference_block(self.chat, rollout.diff)
                if config.sft.teachers.get("sdft"):
                    shown["sdft"] = demonstration_block(self.chat, rollout)
                progress(f"reading {source.name}", (number + 1) / len(source.rollouts))
                for index, segment in enumerate(self.segments(rollout, tools, counts)):
                    conversation = Conversation(
                        key=f"{place}/{number}/{index}",
                        task=f"{place}/{rollout.task}" if rollout.foreign else rollout.task,
                        segment=segment,
                        tools=rollout.tools,
                        kept=_in_segment(reading.kept, index),
                        broken=_in_segment(reading.broken, index),
                        spared=_in_segment(reading.spared, index),
                        shown=shown,
                    )
                    if self._fit(conversation, config, counts):
                        found.append(conversation)
        held_out = config.sft.hold_out_rules
        for conversation in found:
            _hold_out(conversation, [*held_out, *(name for name in self.rules if name not in WORDINGS)])
        return found

    def segments(self, rollout: Rollout, tools: Tools, counts: Counter[str]) -> list[Segment]:
        """Render the segments. Tokens of messages with weight 0 are context and not learned."""
        segments = [self._written(segment, tools, counts) for segment in rollout.segments]
        for event in rollout.events:
            if event.kind not in (UNLEARNED, UNLEARNED_CODE):
                continue
            segment = segments[event.segment]
            message = segment.messages[event.message]
            is_code = event.kind == UNLEARNED_CODE
            spans = self._code(segment, message) if is_code else [(message.start, message.end)]
            for start, end in spans:
                segment.sampled[start:end] = [False] * (end - start)
        return segments

    def _code(self, segment: Segment, message: Message) -> Iterator[tuple[int, int]]:
        """Tokens that lie wholly in code which the message's calls insert, however their dialect spells it. If it
        cannot be found, all from the call on."""
        pieces = self.chat.pieces(segment.ids[message.body : message.body_end])
        starts, text = [0, *accumulate(map(len, pieces))], "".join(pieces)
        for call in message.calls:
            for code in filter(str.strip, inserted_code(call)):
                spellings = {code, json.dumps(code)[1:-1], json.dumps(code, ensure_ascii=False)[1:-1]}
                at = "|".join(re.escape(one) for one in sorted(spellings, key=len, reverse=True))
                found = [match.span() for match in re.compile(at).finditer(text, call.start)]
                for first, last in found or [(call.start, len(text))]:
                    start, end = bisect_left(starts, first), bisect_right(starts, last) - 1
                    yield message.body + start, message.body + max(start, end)

    def _written(self, segment: Segment, tools: Tools, counts: Counter[str]) -> Segment:
        if is_in(segment, self.chat, self.vocabulary):
            return segment
        if segment.ids:
            counts["written again"] += 1
        elif has_no_thoughts(self.chat) and any(
            segment.is_own(one) and answer_start(one.text) for one in segment.messages
        ):
            counts["without their thoughts, which this chat has switched off"] += 1
        if words := self.chat.telling(tools):
            segment = _with_words(segment, words)
        return written_again(segment, self.chat, tools)

    def _fit(self, conversation: Conversation, config: Config, counts: Counter[str]) -> bool:
        """Cut after the last learned message within the context. False if there is none."""
        segment = conversation.segment
        learned = [number for number, message in enumerate(segment.messages) if segment.is_own(message)]
        fitting = [number for number in learned if segment.messages[number].end <= self.context]
        if not fitting:
            counts["dropped: too long" if learned else "dropped: nothing to learn"] += 1
            return False
        if len(segment.ids) > self.context:
            counts["cut"] += 1
            conversation.segment = segment.up_to(fitting[-1] + 1)
            for by_message in (conversation.kept, conversation.broken, conversation.spared):
                for number in [number for number in by_message if number > fitting[-1]]:
                    del by_message[number]
        return True


def _with_words(segment: Segment, words: str) -> Segment:
    """Append the tool description to the system message, which is the first."""
    first, *rest = segment.messages
    return replace(segment, messages=[replace(first, text="\n\n".join(filter(None, (first.text, words)))), *rest])


def _in_segment(by_message: Mapping[At, Item], segment: int) -> dict[int, Item]:
    return {message: item for (place, message), item in by_message.items() if place == segment}


def _hold_out(conversation: Conversation, rules: Sequence[str]) -> None:
    """No reminder states a held-out rule or precedes a message that is not learned; no such message is in a pair."""
    segment = conversation.segment

    def stated(by_message: dict[int, tuple[str, ...]]) -> dict[int, tuple[str, ...]]:
        own = {number: names for number, names in by_message.items() if segment.is_own(segment.messages[number])}
        left = {number: tuple(name for name in names if name not in rules) for number, names in own.items()}
        return {number: names for number, names in left.items() if names}

    conversation.kept, conversation.spared = stated(conversation.kept), stated(conversation.spared)
    conversation.broken = {number: rule for number, rule in conversation.broken.items() if rule not in rules}


def find_pairs(conversations: list[Conversation]) -> None:
    """Pair each faulty message with a right one: of a conversation with the same prefix, or a later retry."""
    right: dict[bytes, list[tuple[Conversation, int]]] = {}
    for conversation in conversations:
        for number, place in _places(conversation.segment, conversation.kept):
            right.setdefault(place, []).append((conversation, number))
    for conversation in conversations:
        for number, place in _places(conversation.segment, conversation.broken):
            rule = conversation.broken[number]
            here = [(other, at) for other, at in right.get(place, ()) if rule in other.kept[at]]
            if not here and (at := _made_good(conversation, number)):
                here = [(conversation, at)]
            if here:
                other, at = here[0]
                conversation.pairs.append(Pair(number, rule, other.segment, at))


def _made_good(conversation: Conversation, faulty: int) -> int | None:
    """The later message that was right, if nothing in between had an effect, so it would have been right at once. An
    edit of the source would also have applied before the tests were edited."""
    rule, messages = conversation.broken[faulty], conversation.segment.messages
    idle = (*WITHOUT_EFFECT, rule) if rule == "edited_tests" else WITHOUT_EFFECT
    for number in range(faulty, len(messages)):
        if messages[number].role == "assistant" and conversation.broken.get(number) not in idle:
            return number if rule in conversation.kept.get(number, ()) else None
        if messages[number].role not in ("assistant", "tool"):
            return None
    return None


def _places(segment: Segment, numbers: Iterable[int]) -> Iterator[tuple[int, bytes]]:
    """Messages with a hash of their prefix."""
    digest, done = hashlib.blake2b(digest_size=16), 0
    for number in sorted(numbers):
        start = segment.messages[number].start
        digest.update(array("q", segment.ids[done:start]).tobytes())
        done = start
        yield number, digest.digest()


def split(items: Iterable[Item], name: Callable[[Item], str], share: float, seed: int) -> tuple[list[Item], list[Item]]:
    """Training and validation items: `share` of the names, at least one if there are several."""
    named = [(item, name(item)) for item in items]
    names = list(dict.fromkeys(own for _, own in named))
    count = min(len(names) - 1, max(1, round(share * len(names)))) if share else 0
    validation = set(random.Random(f"{seed} validation").sample(names, count))
    return [item for item, own in named if own not in validation], [item for item, own in named if own in validation]


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
    for conversation in conversations:
        segment = conversation.segment
        digest.update(array("q", segment.ids).tobytes() + bytes(segment.sampled))
        rules = conversation.kept, conversation.broken, conversation.spared
        digest.update(repr((conversation.key, *rules, conversation.tools)).encode())
    return digest.hexdigest()
