"""What the verbs share: configuration on the command line, and progress for people or for logs."""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal
from unicodedata import category

import typer
from pydantic import BaseModel
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from offbook.core.config import Config, ConfigError, load_config, refuse_without_effect
from offbook.core.runfolder import checkpoint_named
from offbook.types import OffbookError, Rollout, Task

if TYPE_CHECKING:
    from offbook.core.runfolder import RunFolder
    from offbook.rl.collector import OnRollout
    from offbook.rl.models import Progress as OnProgress

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Plain = Annotated[bool, typer.Option("--plain", help="No live display; a line now and then.")]
Log = Annotated[Literal["trackio", "wandb", "tensorboard"] | None, typer.Option(help="Show the metrics there, too.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the resolved configuration and stop.")]
CONFIGURED = {"allow_extra_args": True, "ignore_unknown_options": True}  # context settings of a verb that takes keys
CHOICES = "`--model pocket`, `--model smollm2-135m` or `--model Qwen/Qwen3-0.6B`"
WIDE = 1000  # columns of a file or a pipe: tables keep their lines whole there
# What most people set; `docs/config.md` has every key.
MOST_USED = (
    *("model", "tasks.source", "train.steps", "train.groups", "train.group_size", "train.learning_rate"),
    *("train.lora.rank", "feedback.weight", "engine.kind", "harness.context"),
)
ROWS = 20  # of the table
LINES = 10  # of progress, when plain
COLUMNS = ("rollout", "turns", "calls", "invalid", "tokens", "state", "last call")
console = Console(stderr=True)  # progress and notes
results = Console(width=None if sys.stdout.isatty() else WIDE, highlight=False)  # what was asked for


def most_used() -> str:
    """The keys that most people set with their defaults and descriptions, as paragraphs for a verb's help."""
    lines = ["Most used keys (all are in docs/config.md):"]
    for key in MOST_USED:
        section: type[BaseModel] = Config
        *parents, name = key.split(".")
        for parent in parents:
            section = section.model_fields[parent].annotation  # type: ignore[assignment]
        field = section.model_fields[name]
        default = field.get_default(call_default_factory=False)
        lines.append(f"--{key} {'' if default in ('', None) else default}: {field.description}".replace(" :", ":"))
    return "\n\n".join(lines)


def say(line: str, style: str = "", to: Console = results) -> None:
    """A line as it is: brackets are no markup, and the terminal alone breaks what is too long."""
    to.print(Text(shown(line), style=style), soft_wrap=True)


def shown(text: str) -> str:
    """What a model wrote, as it is read: nothing in it speaks to the terminal, hides a line or turns one around."""
    return "".join(one if one in "\n\t\r" or category(one) not in ("Cc", "Cf") else ascii(one)[1:-1] for one in text)


def config_from(
    ctx: typer.Context,
    own: Mapping[str, str] | None = None,
    base: Iterable[Path] = (),
    defaults: Mapping[str, str] | None = None,
) -> Config:
    """`@ a.toml b.toml --section.key value`: files, or recipes by name, left to right, then overrides.

    An override that the verb does not read is refused. `own` is what the verb's own options come to, empty where one is
    not given, and wins. A run folder as the model is its newest checkpoint from here on: the run may go on.
    """
    _refuse_mistyped(ctx)
    files: list[Path | str] = list(base)
    overrides: dict[str, str] = {}
    rest = iter(ctx.args)
    in_files = False
    for argument in rest:
        if argument.startswith("@"):
            in_files = True
            files += [argument[1:]] if argument != "@" else []
        elif argument.startswith("--"):
            in_files = False
            key, equals, value = argument[2:].partition("=")
            given = value if equals else next(rest, None)
            if given is None:
                raise ConfigError(f"--{key} needs a value, as in: --{key} VALUE")
            overrides[key] = given
        elif in_files:
            files.append(argument)
        else:
            example = f"{ctx.command_path} @ {argument}"
            raise ConfigError(f"unexpected argument {argument}; configuration files come after @, as in: {example}")
    named = {key: value for key, value in (own or {}).items() if value}
    config = load_config(files, {**overrides, **named}, defaults)
    refuse_without_effect(ctx.command.name or "", overrides)
    return config.model_copy(update={"model": checkpoint_named(config.model)}) if config.model else config


def config_to_train(ctx: typer.Context, own: Mapping[str, str], out: str = "") -> Config:
    """The same, with a model, and `out` for the run folder where none is given."""
    config = config_from(ctx, own, defaults={"out": out} if out else None)
    if not config.model:
        raise ConfigError(f"there is no model to train; give one, such as {CHOICES}")
    if not ctx.params.get("dry_run"):  # the machine that trains may be another
        from offbook.rl.checks import refuse_missing_model

        refuse_missing_model(config.model)
    return config


def show_config(config: Config, as_json: bool) -> None:
    print(json.dumps(config.model_dump(), indent=2) if as_json else config.to_toml(), end="\n" if as_json else "")


def _refuse_mistyped(ctx: typer.Context) -> None:
    """What is no option of the verb is taken for configuration: one that nearly is, is meant to be it."""
    own = [name for param in ctx.command.params for name in param.opts if name.startswith("--")]
    for given in (argument.partition("=")[0] for argument in ctx.args if argument.startswith("--")):
        near = difflib.get_close_matches(given, own, n=1, cutoff=0.8)
        if near and given[2:].partition(".")[0] not in Config.model_fields:
            raise ConfigError(f"there is no option {given}; did you mean {near[0]}?")


def tasks_in(source: str, run: RunFolder | None = None) -> dict[str, Task]:
    """All tasks below a folder by their ids; of `pocket` and `pocket-long` those of a run's seed and numbers."""
    from offbook.pocket.tasks import level_named
    from offbook.tasks import load_task

    if level_named(source):
        files: list[Path | str] = [run.config_file] if run else ["pocket"]
        return pocket_tasks(load_config(files, {"tasks.source": source}))
    found = [load_task(path.parent) for path in sorted(Path(source).rglob("task.toml"))]
    if not found:
        raise OffbookError(f"{source} has no task in it")
    return {task.id: task for task in found}


def pocket_tasks(config: Config) -> dict[str, Task]:
    """The pocket tasks of a configuration by their ids; none where its tasks are others."""
    from offbook.pocket.tasks import level_named
    from offbook.rl.tasks import task_sets

    if level_named(config.tasks.source) is None:
        return {}
    sets = task_sets(config)
    return {task.id: task for task in (*sets.train, *sets.heldout)}


def is_plain(plain: bool) -> bool:
    return plain or not sys.stderr.isatty()


@contextmanager
def progress_display(plain: bool) -> Iterator[OnProgress]:
    """A bar for each kind of work; when plain, a line at its start, at every quarter and at its end."""
    if is_plain(plain):
        quarters: dict[str, int] = {}

        def line(what: str, share: float) -> None:
            if int(4 * share) > quarters.get(what, -1):
                quarters[what] = int(4 * share)
                say(f"{what}: {share:.0%}", to=console)

        yield line
        return
    columns = (TextColumn("{task.description:<26}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
    with Progress(*columns, TimeElapsedColumn(), console=console) as bars:
        known: dict[str, int] = {}

        def bar(what: str, share: float) -> None:
            if what not in known:
                known[what] = bars.add_task(what, total=1.0)
            bars.update(known[what], completed=share)  # type: ignore[arg-type]

        yield bar


@contextmanager
def rollout_display(label: str, total: int, plain: bool, each: bool = False) -> Iterator[OnRollout]:
    """A table of the newest, and a bar with the score so far and the time that is left.

    When plain: `each` that is over in a line of its own, or ten lines of the score so far.
    """
    if is_plain(plain):
        yield _lines() if each else _scores(label, total)
        return
    seen: dict[str, tuple[Rollout, bool]] = {}
    score = TextColumn("{task.fields[score]}")
    numbers = (MofNCompleteColumn(), score, TimeElapsedColumn(), TimeRemainingColumn())
    bars = Progress(TextColumn("{task.description}"), BarColumn(), *numbers, console=console)
    bar = bars.add_task(label, total=total, score="")
    with Live(bars, console=console, refresh_per_second=4) as live:

        def update(rollout: Rollout, over: bool) -> None:
            seen[rollout.id] = rollout, over
            finished = [rollout for rollout, is_over in seen.values() if is_over]
            bars.update(bar, completed=len(finished), score=_score(finished))
            live.update(Group(_table(seen), bars))

        yield update


def _lines() -> OnRollout:
    header = iter([COLUMNS])

    def line(rollout: Rollout, over: bool) -> None:
        for cells in (*header, _cells(rollout, over)) if over else ():
            say("  ".join(cells), to=console)

    return line


def _scores(label: str, total: int) -> OnRollout:
    finished: list[Rollout] = []

    def line(rollout: Rollout, over: bool) -> None:
        finished.extend([rollout] if over else [])
        done = len(finished)
        if over and (done == total or done * LINES // total > (done - 1) * LINES // total):
            say(f"{label}: {done} of {total}, {_score(finished)}", to=console)

    return line


def _score(finished: list[Rollout]) -> str:
    if not finished:
        return ""
    crashed = sum(rollout.stop == "crash" for rollout in finished)
    score = f"{sum(rollout.solved for rollout in finished) / len(finished):.0%} solved"
    return f"{score}, {crashed} crashed" if crashed else score


def _table(seen: dict[str, tuple[Rollout, bool]]) -> Table:
    table = Table(*COLUMNS)
    for rollout, over in sorted(seen.values(), key=lambda entry: not entry[1])[-ROWS:]:
        table.add_row(*(Text(cell, overflow="ellipsis", no_wrap=True) for cell in _cells(rollout, over)))
    return table


def _cells(rollout: Rollout, over: bool) -> list[str]:
    usage = rollout.usage
    sampled = sum(sum(segment.sampled) for segment in rollout.segments)
    ended = f"crash ({rollout.cause})" if rollout.stop == "crash" else rollout.stop
    state = f"{ended}, {'solved' if rollout.solved else 'not solved'}" if over else "working"
    numbers = [str(number) for number in (usage.turns, usage.calls, usage.invalid_calls, sampled)]
    return [rollout.id, *numbers, state, _last_call(rollout)]


def _last_call(rollout: Rollout) -> str:
    calls = [call for segment in rollout.segments for message in segment.messages for call in message.calls]
    if not calls:
        return ""
    arguments = ", ".join(str(value) for value in calls[-1].arguments.values())
    return f"{calls[-1].name}({arguments})".replace("\n", " ")[:60]
