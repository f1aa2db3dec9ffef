"""What can be refused before torch is imported and a model is loaded."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import offbook
from offbook.agent.harness.own import FIND_CODE, more_tools
from offbook.agent.harness.toolsets import TOOLS, refuse_unknown
from offbook.core.config import Config, cache_folder, is_url
from offbook.core.runfolder import checkpoint_named, is_adapter
from offbook.pocket.tasks import level_named
from offbook.signals.feedback import rules_of
from offbook.signals.monitors.policy import Monitors, monitors_of
from offbook.signals.rewards import Rewards, compose
from offbook.types import OffbookError

Progress = Callable[[str, float], None]  # what is being done, and how much of it is done (0 to 1)

TASKSET = "verifiers:"
SMOLLM2 = "smollm2-135m"
MADE = ("pocket", "pocket-moe", SMOLLM2)  # on this machine, where they are not there yet


def quiet(what: str, share: float) -> None:
    """Report no progress."""


def pocket_cache() -> Path:
    """The folder of models and tasks that are made here, by a digest of the code and prompts that make them."""
    package = Path(offbook.__file__).parent
    digest = hashlib.sha256()
    for room in ("agent", "pocket", "sandbox", "signals", "tasks", "train"):
        for path in sorted((package / room).rglob("*")):
            if path.suffix in (".py", ".md"):
                digest.update(path.read_bytes())
    return cache_folder() / digest.hexdigest()[:12]


def refuse_missing_model(name: str) -> None:
    """Refuse what is neither a model made here, a model folder, a URL nor a hub id."""
    if name in MADE or is_url(name):
        return
    place = Path(checkpoint_named(name)) if name else Path("nothing")
    if not place.exists() and (name[:1] in (".", "/", "~") or name.count("/") != 1):
        raise OffbookError(
            f"there is no model folder {name}; give `pocket`, `{SMOLLM2}`, a folder or a hub id (Qwen/Qwen3-0.6B)"
        )
    if place.is_dir() and not is_adapter(place) and not (place / "config.json").is_file():
        raise OffbookError(f"{place} has no config.json, so it is not a model folder")


Judges = tuple[Rewards, Monitors | None]


def refuse_run(config: Config, to_train: bool = False) -> Judges:
    """Refuse a model or tasks that are not there, and a rule, reward, monitor or tool that does not exist. Returns the
    rewards and monitors."""
    if to_train:
        if is_url(config.model):
            raise OffbookError("a model behind a URL can be measured and not trained; give a model folder or a hub id")
        refuse_missing_tasks(config, "train")
    refuse_missing_model(config.model)
    judges = rewards_and_monitors_of(config)
    known = {*TOOLS, FIND_CODE, *more_tools(config.tools)}
    for name in config.tools.add:
        refuse_unknown(name, known)
    return judges


def refuse_missing_tasks(config: Config, part: str = "") -> None:
    """Before minutes go into a model: is the task folder there, and is anything in that part of it?"""
    source = config.tasks.source
    if level_named(source) or is_undivided(source):
        return
    if not Path(source).is_dir():
        raise OffbookError(f"there is no task folder {source}")
    if not any((Path(source) / part).glob("[!.]*/")):
        raise OffbookError(f"{Path(source) / part} holds no task folders")


def is_undivided(source: str) -> bool:
    """Whether the source does not say which tasks are held out: a taskset of verifiers, a folder of Harbor tasks."""
    return source.startswith(TASKSET) or (
        not (Path(source) / "train").is_dir() and any(Path(source).glob("*/task.toml"))
    )


def rewards_and_monitors_of(config: Config) -> Judges:
    """Rewards and monitors, or one sentence about the rule, part, file or kind that there is not. Needs no model."""
    rules_of(config.feedback.files, config.feedback.rules, config.feedback.rule_weights)
    monitors = monitors_of(config.monitors, config.judge, offline=config.sandbox.backend != "process")
    return compose(config.rewards, config.harness, config.judge), monitors
