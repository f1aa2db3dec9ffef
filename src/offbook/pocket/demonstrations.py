"""Demonstrations: scripted rollouts in real sandboxes, some good messages preceded by a hint.

The worker processes that make them do not load torch.
"""

from __future__ import annotations

import ast
import asyncio
import builtins
import multiprocessing
import os
import random
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from tokenizers import Tokenizer

from offbook.agent.chat import HERMES, Chat, ChatFormat, chat_for
from offbook.agent.harness import Harness, run_agent
from offbook.agent.harness.toolsets import prompt as prompt_named
from offbook.core.processes import end_with
from offbook.core.runfolder import dump_lines, write_atomic
from offbook.pocket.script import LONG_HABITS, Habits, LongScript, Script
from offbook.pocket.tasks import SHORT_LEVEL, TEST_COMMAND, Draft, Level, draft_tasks
from offbook.sandbox import ProcessSandbox
from offbook.sandbox.sandbox import ExecResult
from offbook.signals.feedback import read_rollout, write_hint
from offbook.tasks.folder import write_files
from offbook.train.algorithms import hint_block, sft_sample
from offbook.types import Completion, Limits, Prompt, Rollout, Sample, Task

T = TypeVar("T")
HARNESS = Harness(Limits(turns=12, tokens=1024, context=1024, message_tokens=256), profile="pocket")
LONG_HARNESS = Harness(Limits(turns=80, tokens=8192, context=8192, message_tokens=512), profile="pocket")
HINTED_EPISODES = 0.6
HINTED_MESSAGES = 0.5
CONTEXT_WEIGHT = 0.1
CHUNK = 250
SHARED_MEMORY = "/dev/shm"
SUMMARIZE = prompt_named("summarize")
LEARNED = ("unknown_tool", "malformed_arguments", "repeated_call", "edited_tests")  # rules with hints in the data
WIDTH = 80  # of pytest's lines where there is no terminal
TOOK = "0.02s"


class Demonstrator:
    """The script as a Policy, so that ids and tool output come from the real harness.

    The script writes hermes calls; valid ones are rendered in the model's own chat format.
    """

    def __init__(self, script: Script, chat: Chat):
        self.script = script
        self.chat = chat

    async def complete(self, prompt: Prompt, max_tokens: int) -> Completion:
        asked = prompt.messages[-1].text if prompt.messages else ""
        text = self.script.summary() if asked == SUMMARIZE else self.script.next_message()
        calls = HERMES.parse(text, (), False)
        is_right = calls and not any(call.error for call in calls)
        words = self.chat.answer(text[: calls[0].start].rstrip(), calls) if is_right else self.chat.encode(text)
        ids = [*words, self.chat.end_id]
        return Completion(ids, [0.0] * len(ids), [-1] * len(ids))


class QuickSandbox(ProcessSandbox):
    """For our own script's commands, which are trusted. Test runs are computed instead of run."""

    async def exec(self, command: str, timeout_s: float, report: bool = False) -> ExecResult:
        if not command.startswith(TEST_COMMAND):
            return await super().exec(command, timeout_s, report)
        files = {path: await self.read(path) for path in await self.files() if path.endswith(".py")}
        exit_code, output = report_of(files, command.removeprefix(TEST_COMMAND).strip())
        return ExecResult(exit_code, output, timed_out=False, truncated=False)


def make_demonstrations(
    tokenizer: Tokenizer, seed: int, count: int, habits: Habits, progress: Callable[[float], None]
) -> list[Sample]:
    """`count` imitation samples in a fixed order, made in parallel."""
    spelled = tokenizer.to_str()
    chunks = [(spelled, seed, start, min(CHUNK, count - start), habits) for start in range(0, count, CHUNK)]
    samples: list[Sample] = []
    for part in _by_all_cores(_samples, chunks):
        samples += part
        progress(len(samples) / count)
    return samples


def write_demonstrations(
    path: Path,
    model: Path,
    harness: Harness,
    seed: int,
    count: int,
    progress: Callable[[float], None],
    level: Level = SHORT_LEVEL,
) -> None:
    """`count` rollouts of the script in a model's chat, in a fixed order, made in parallel."""
    chunks = [(model, harness, seed, start, min(CHUNK, count - start), level) for start in range(0, count, CHUNK)]
    parts = []
    for part in _by_all_cores(_rollouts, chunks):
        parts.append(part)
        progress(len(parts) / len(chunks))
    write_atomic(path, b"".join(parts))


def _by_all_cores(work: Callable[..., T], chunks: list[tuple[Any, ...]]) -> Iterator[T]:
    context = multiprocessing.get_context("spawn")
    with _without_main(), ProcessPoolExecutor(os.cpu_count(), context, _begin, (os.getpid(),)) as pool:
        yield from pool.map(work, *zip(*chunks, strict=True))


@contextmanager
def _without_main() -> Iterator[None]:
    """Hide the main module: spawned workers import it again, and a script without a guard would train in each."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _begin(parent: int) -> None:
    """Start a worker: it ends with its parent. Thousands of small trees go to shared memory, because disks are slow."""
    end_with(parent)
    if os.access(SHARED_MEMORY, os.W_OK):
        tempfile.tempdir = SHARED_MEMORY


def _drafted(seed: int, start: int, count: int, level: Level = SHORT_LEVEL) -> tuple[list[Draft], random.Random]:
    drafts = draft_tasks(seed=seed * 1_000_003 + start, count=count, split="train", level=level)
    return list(drafts), random.Random(f"{seed}/{start}")


def _samples(tokenizer: str, seed: int, start: int, count: int, habits: Habits) -> list[Sample]:
    """With hint blocks before some messages that broke no rule, so that the model learns to follow hints."""
    chat = ChatFormat(Tokenizer.from_str(tokenizer))
    drafts, rng = _drafted(seed, start, count)
    rules = sorted(LEARNED)

    async def run() -> list[Sample]:
        samples = []
        async for rollout in episodes(chat, drafts, rng, habits, HARNESS):
            hints = {}
            if rng.random() <= HINTED_EPISODES:
                faulty = {target.message for target in read_rollout(rollout, LONG_HARNESS.limits.turns, rules=LEARNED)}
                for index, message in enumerate(rollout.segments[0].messages):
                    if message.calls and index not in faulty and rng.random() < HINTED_MESSAGES:
                        hints[index] = hint_block(chat, write_hint(rng.choice(rules), rollout.tools))
            samples.append(sft_sample(rollout.segments[0], hints, CONTEXT_WEIGHT))
        return samples

    return asyncio.run(run())


def _rollouts(model: Path, harness: Harness, seed: int, start: int, count: int, level: Level = SHORT_LEVEL) -> bytes:
    async def run() -> list[Rollout]:
        drafts, rng = _drafted(seed, start, count, level)
        habits = LONG_HABITS if level.is_long else Habits()
        return [rollout async for rollout in episodes(_chat_for(model), drafts, rng, habits, harness)]

    rollouts = asyncio.run(run())
    for number, rollout in enumerate(rollouts, start):
        rollout.id = rollout.task = rollout.group = f"pocket/{number}"
    return dump_lines(rollouts)


_chat_for = cache(chat_for)


def harness_of(level: Level) -> Harness:
    return LONG_HARNESS if level.is_long else HARNESS


async def episodes(
    chat: Chat, drafts: list[Draft], rng: random.Random, habits: Habits, harness: Harness
) -> AsyncIterator[Rollout]:
    with tempfile.TemporaryDirectory(prefix="offbook-demo-") as place:
        for number, draft in enumerate(drafts):
            can_search = habits.pathless and "search_codebase" in draft.tools and not draft.is_long
            if can_search and rng.random() < habits.pathless:
                draft = replace(draft, instruction=without_path(draft.instruction, draft.paths[0]))
            tree = Path(place) / str(number)
            write_files(tree, draft.files)
            script = (LongScript if draft.is_long else Script)(draft, rng, habits)
            task = task_of(draft, number, tree)
            async with QuickSandbox(tree) as sandbox:
                policy = Demonstrator(script, chat)
                rollout = await run_agent(task, sandbox, policy, chat, harness, str(number), "demonstration")
            assert rollout.stop != "crash", rollout.events
            yield rollout


def task_of(draft: Draft, number: int, tree: Path) -> Task:
    return Task(
        id=str(number),
        folder=tree,
        instruction=draft.instruction,
        tree=tree,
        hidden_tests=tree,
        test_files=(),
        fail_to_pass=(),
        pass_to_pass=(),
        tools=draft.tools,
        origin=draft.gold.name,
        test_command=draft.test_command,
    )


def without_path(instruction: str, path: str) -> str:
    return instruction.replace(f" in {path}", "")


def report_of(files: Mapping[str, str], selection: str = "") -> tuple[int, str]:
    """The exit code and the text of `python -m pytest`, of one test file or of all, computed: a real run takes half a
    second, and demonstrations need thousands. A test compares this with real pytest output."""
    paths = sorted(path for path in files if path.startswith("tests/") and (not selection or path == selection))
    letters = ""
    failures = []
    for path in paths:
        tree = ast.parse(files[path])
        imports: list[ast.stmt] = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
        is_skipped = "pytestmark" in files[path]
        namespace: dict[str, Any] = {"__builtins__": vars(builtins) | {"__import__": _importer(files)}}
        if not is_skipped:
            exec(compile(ast.Module(imports, []), path, "exec"), namespace)
        for test in tree.body:
            if not isinstance(test, ast.FunctionDef):
                continue
            failure = "" if is_skipped else _failure(test, namespace)
            letters += "s" if is_skipped else "F" if failure else "."
            if failure:
                line = f"FAILED {path}::{test.name} - {failure}"
                failures.append(line if len(line) <= WIDTH else line[: WIDTH - 3] + "...")  # as pytest cuts it
    counts = {"failed": letters.count("F"), "passed": letters.count("."), "skipped": letters.count("s")}
    summary = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    heading = [" short test summary info ".center(WIDTH, "=")] if failures else []
    return int(bool(failures)), "\n".join([letters, *heading, *failures, f"{summary} in {TOOK}"]) + "\n"


def _failure(test: ast.FunctionDef, namespace: dict[str, Any]) -> str:
    for check in test.body:
        assert isinstance(check, ast.Assert)
        assert isinstance(check.test, ast.Compare)
        sides = check.test.left, check.test.comparators[0]
        try:
            left, right = (eval(compile(ast.Expression(side), test.name, "eval"), namespace) for side in sides)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        by_identity = isinstance(check.test.ops[0], ast.Is)
        if not (left is right if by_identity else left == right):
            return f"assert {left!r} {'is' if by_identity else '=='} {right!r}"
    return ""


def _importer(files: Mapping[str, str]) -> Callable[..., ModuleType]:
    """An __import__ for `from package.module import name` limited to these files."""
    loaded: dict[str, ModuleType] = {}

    def load(name: str, *_: object) -> ModuleType:
        if name not in loaded:
            loaded[name] = ModuleType(name)
            vars(loaded[name])["__builtins__"] = vars(builtins) | {"__import__": load}
            exec(compile(files[name.replace(".", "/") + ".py"], name, "exec"), vars(loaded[name]))
        return loaded[name]

    return load
