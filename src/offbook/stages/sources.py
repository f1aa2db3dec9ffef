"""Data sources of imitation: rollouts of runs, other agents' trajectories, chat, datasets, generated demonstrations.

A source's format is detected by its content, not its name. Unreadable lines are counted, reported and skipped; an empty
source is an error.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from offbook.agent.harness import Harness
from offbook.agent.harness.tools import TOOLS
from offbook.core.config import Config, ConfigError
from offbook.core.runfolder import RunFolder, read_lines
from offbook.pocket.demonstrations import harness_of, write_demonstrations
from offbook.pocket.tasks import level_named
from offbook.rl.models import Progress, chat_folder, pocket_cache, positions
from offbook.signals.trajectory.formats import from_value, load_trajectories, lost_of
from offbook.stages.demos import Demos, demonstrated
from offbook.train.checkpoint import TOKENIZER_FILES
from offbook.types import Message, OffbookError, Rollout, ToolSpec

POCKET = re.compile(r"(pocket[\w-]*):(\d+)")
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?")
SHOWN = 3  # of the lines that could not be read
WAYS = (
    "a run folder, a file of trajectories or chat, a dataset's hub name, `demos:DIR`, or `pocket:6000`, "
    "`pocket-long:6000`"
)

Tools = tuple[ToolSpec, ...]


@dataclass
class Source:
    name: str
    rollouts: list[Rollout] = field(default_factory=list)
    tools: list[Tools] = field(default_factory=list)  # of each rollout, where the source has them
    problems: list[str] = field(default_factory=list)  # each with its file and line
    left_out: Counter[str] = field(default_factory=Counter)  # by the reason

    def add_foreign(self, rollout: Rollout, tools: Tools, place: str) -> None:
        """Skip a rollout that was read in part: training would take it as complete."""
        if lost := lost_of(rollout):
            self.problems.append(f"{place} ({lost})")
        else:
            self.add(rollout, tools)

    def add(self, rollout: Rollout, tools: Tools = ()) -> None:
        if not any(segment.is_own(message) for segment in rollout.segments for message in segment.messages):
            why = "; harness.context has no room for one" if rollout.stop == "context" else ""
            self.left_out[f"no message of an assistant{why}"] += 1
            return
        first = rollout.segments[0]
        if tools and first.messages[0].role != "system":  # tools are described in it
            first.messages.insert(0, Message("system", "", 0, 0, 0, 0))
            for number, event in enumerate(rollout.events):
                if event.segment == 0 and event.message >= 0:
                    rollout.events[number] = replace(event, message=event.message + 1)
        self.rollouts.append(rollout)
        self.tools.append(tools)

    def __str__(self) -> str:
        parts = [f"{count} left out ({reason})" for reason, count in self.left_out.items()]
        if self.problems:
            more = ", ..." if len(self.problems) > SHOWN else ""
            parts.append(f"{len(self.problems)} could not be read ({', '.join(self.problems[:SHOWN])}{more})")
        return "; ".join([f"{self.name}: {len(self.rollouts)} conversations", *parts])


def refuse_missing_data(config: Config) -> None:
    """Check that each name exists, before a model is loaded."""
    if not config.sft.data:
        raise ConfigError(f"there is no data to imitate; give --data: {WAYS}")
    for name in config.sft.data:
        if demos := Demos.named(name, config):
            demos.refuse(config)
        elif made := POCKET.fullmatch(name):
            if config.harness.profile == "bash" or not int(made[2]) or level_named(made[1]) is None:
                why = "nothing" if config.harness.profile != "bash" else "no calls of the profile bash"
                raise ConfigError(f"{name} demonstrates {why}; give a count, and another --harness.profile")
        elif not Path(name).exists():
            if not HUB_NAME.fullmatch(name) or name.startswith("."):
                raise ConfigError(f"there is no {name}; --data is {WAYS}")
            _datasets(name)


def read_sources(config: Config, model: Path, progress: Progress) -> Iterator[Source]:
    for name in config.sft.data:
        source = _read(name, config, model, progress)
        if not source.rollouts:
            reasons = [*source.problems[:SHOWN], *source.left_out] or ["it is empty"]
            raise OffbookError(f"{name} has nothing to learn from: {'; '.join(reasons)}")
        yield source


def _read(name: str, config: Config, model: Path, progress: Progress) -> Source:
    source = Source(name)
    path = Path(name)
    min_reward = config.sft.min_reward
    if demos := Demos.named(name, config):
        rollouts, source.left_out = demonstrated(demos, config, chat_folder(model), progress)
        for rollout in rollouts:
            source.add(rollout, _own_tools(rollout))
    elif made := POCKET.fullmatch(name):
        _read_rollouts(source, _demonstrated(made[1], int(made[2]), config, chat_folder(model), progress), "any")
    elif path.is_file():
        _read_file(source, path, min_reward)
    elif not path.is_dir():
        _read_dataset(source)
    elif (path / "config.toml").is_file():
        for step in RunFolder.open(path).steps():
            _read_rollouts(source, path / "rollouts" / f"step_{step:05d}.jsonl", min_reward)
        if (path / "results.json").is_file():
            source.name += " (an evaluation: what is trained on it has seen the held-out tasks)"
    else:
        for file in sorted(path.rglob("*.json*")):
            _read_file(source, file, min_reward)
    return source


def _read_rollouts(source: Source, path: Path, min_reward: Literal["any"] | float) -> None:
    rollouts, unreadable = read_lines(path, Rollout)
    source.problems += [f"{path}:{line}" for line in unreadable]
    for rollout in rollouts:
        if rollout.fault:
            source.left_out["ended by the machine"] += 1
        elif min_reward != "any" and rollout.reward.total < min_reward:
            source.left_out[f"earned less than {min_reward:g}"] += 1
        else:
            source.add(rollout, _own_tools(rollout))


def _own_tools(rollout: Rollout) -> Tools:
    """Tool specs for chats that render tools themselves; none where the system message already has them."""
    messages = rollout.segments[0].messages if rollout.segments else []
    system = messages[0].text if messages and messages[0].role == "system" else ""
    own = {shown: name for shown, name in rollout.own_names.items() if name in TOOLS}
    if all(shown in system for shown in own):
        return ()
    return tuple(replace(TOOLS[name].spec(), name=shown) for shown, name in own.items())


def _read_file(source: Source, path: Path, min_reward: Literal["any"] | float) -> None:
    with path.open("rb") as file:
        is_ours = b'"segments"' in file.readline()
    if is_ours:
        _read_rollouts(source, path, min_reward)
        return
    try:
        loaded = load_trajectories(path, str(path))  # files in a folder may all have the same name
    except OffbookError as error:
        source.problems.append(str(error))
        return
    if not loaded.rollouts and not loaded.problems:
        source.problems.append(f"{path} has no trajectory in it")
    source.problems += [f"{path}:{line} ({reason})" for line, reason in loaded.problems]
    for rollout, tools, line in zip(loaded.rollouts, loaded.tools, loaded.lines, strict=True):
        source.add_foreign(rollout, tools, f"{path}:{line}")


def _read_dataset(source: Source) -> None:
    name, _, split = source.name.partition(":")
    datasets = _datasets(name)
    try:
        rows = datasets.load_dataset(name, split=split or "train")
    except Exception as error:  # of any type: network, file, missing split
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise OffbookError(f"there is no {name} here, and datasets cannot read {name}: {reason}") from None
    for number, row in enumerate(rows):
        try:
            source.add_foreign(*from_value(row, f"{source.name}/{number}"), f"row {number}")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            source.problems.append(f"row {number} ({error})")


def _datasets(name: str) -> Any:
    try:
        return importlib.import_module("datasets")
    except ImportError:
        how = "pip install 'offbook[datasets]'"
        raise ConfigError(f"there is no {name}; --data is {WAYS}. If it is a hub name: {how}") from None


def _demonstrated(which: str, count: int, config: Config, model: Path, progress: Progress) -> Path:
    """The cached file of scripted rollouts on pocket tasks in the model's chat; made on first use. Tool names are never
    varied, because the script calls tools by their own names."""
    level = level_named(which)
    assert level is not None
    limits = replace(
        config.harness.limits(),
        turns=max(harness_of(level).limits.turns, config.harness.turns),
        context=min(config.harness.context, positions(model)),
    )
    digest = hashlib.sha256(json.dumps([asdict(limits), config.harness.profile]).encode())
    for file in (model / name for name in TOKENIZER_FILES):
        digest.update(file.read_bytes() if file.is_file() else b"")
    path = pocket_cache() / f"{which}-demonstrations-{config.seed}-{count}-{digest.hexdigest()[:12]}.jsonl"
    if not path.is_file():
        harness = Harness(limits, config.harness.profile)
        write_demonstrations(path, model, harness, config.seed, count, partial(progress, "demonstrations"), level)
    return path
