"""What the pocket model is shown."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import time
from pathlib import Path

from offbook.agent.chat import ChatFormat
from offbook.pocket.demonstrations import TELLING, _demonstrate
from offbook.pocket.script import CLOSINGS, Habits
from offbook.pocket.tasks import draft_tasks
from offbook.signals.feedback import write_hint


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


def test_workers_end_with_a_process_that_is_killed() -> None:
    code = """
import os, time
from offbook.pocket.demonstrations import _by_all_cores
print(os.getpid(), flush=True)
made = _by_all_cores(time.sleep, [(0.1,), (60,), (60,)])
next(made)
print("begun", flush=True)
time.sleep(60)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    number = parent.stdout.readline().strip()
    assert parent.stdout.readline() == "begun\n"
    by_thread = Path(f"/proc/{number}/task").glob("*/children")
    children = [child for listed in by_thread for child in listed.read_text().split()]
    workers = [child for child in children if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]
    assert workers
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{worker}/cwd").exists() for worker in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [worker for worker in workers if Path(f"/proc/{worker}/cwd").exists()]
