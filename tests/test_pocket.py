"""What the pocket model is shown."""

from __future__ import annotations

import asyncio
import random

from offbook.feedback import write_hint
from offbook.pocket.demonstrations import TELLING, _demonstrate
from offbook.pocket.script import CLOSINGS, Habits
from offbook.taskgen.pocket import draft_tasks
from offbook.tokens import ChatFormat


def closings(chat: ChatFormat, habits: Habits) -> list[tuple[bool, str]]:
    """Of each demonstration: whether the telling hint stands before its last message, and what that message says."""
    drafts = list(draft_tasks(seed=5, count=16, split="train"))
    hint = write_hint(TELLING, ()).text
    found = []
    for sample in asyncio.run(_demonstrate(chat, drafts, random.Random(5), habits)):
        before, _, message = chat.decode(sample.ids).rpartition("assistant")
        assert before.count(hint) <= 1, "it stands nowhere else"
        found.append((hint in before.rpartition("tool")[2], message.partition('"arguments": ')[2].partition("}")[0]))
    return found


def test_what_was_changed_is_named_after_the_hint_and_never_without(chat: ChatFormat) -> None:
    found = closings(chat, Habits(0, 0, 0, 0, tells=0.5))
    assert {hinted for hinted, _ in found} == {True, False}
    for hinted, said in found:
        assert hinted == (" in " in said and ".py" in said), said
        assert hinted or said in {f'{{"message": "{word}"' for word in CLOSINGS}


def test_a_script_that_does_not_tell_ends_without_a_word(chat: ChatFormat) -> None:
    assert set(closings(chat, Habits(0, 0, 0, 0))) == {(False, "{")}
