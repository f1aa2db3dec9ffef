"""What the verbs share: configuration on the command line, output, tables and progress."""

from __future__ import annotations

import difflib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal
from unicodedata import category

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from offbook.core.config import Config, ConfigError, load_config, refuse_without_effect
from offbook.core.runfolder import checkpoint_named
from offbook.types import OffbookError, Rollout, Task

if TYPE_CHECKING:
    from offbook.core.runfolder import RunFolder


def option(words: str, *names: str, **more: Any) -> Any:
    """An option of a verb; `words` are its help."""
    return typer.Option(*names, help=words, **more)


def argument(words: str) -> Any:
    """An argument of a verb."""
    return typer.Argument(help=words)


Json = Annotated[bool, option("Print the result as JSON.", "--json")]
Model = Annotated[str, option("`pocket`, `smollm2-135m`, a run or model folder, a hub id, or a URL.")]
ModelArgument = Annotated[str, argument("A run or model folder, `pocket`, `smollm2-135m`, a hub id, or a URL.")]
Name = Annotated[str, option("The model's name, if --model is a URL.")]
Out = Annotated[str, option("The run folder; runs/VERB if not given.")]
Log = Annotated[Literal["trackio", "wandb", "tensorboard"] | None, option("A tracker for the metrics.")]
DryRun = Annotated[bool, option("Print the resolved configuration and stop.", "--dry-run")]
CHOICES = "`--model pocket`, `--model smollm2-135m` or `--model Qwen/Qwen3-0.6B`"
Row = dict[str, Any]
console = Console(stderr=True, highlight=False)  # progress and notes
results = Console(width=None if sys.stdout.isatty() else 1000, highlight=False)  # files have whole lines


# Configuration


def config_from(
    ctx: typer.Context,
    own: Mapping[str, str] | None = None,
    base: Iterable[Path] = (),
    defaults: Mapping[str, str] | None = None,
) -> Config:
    """`@ a.toml b.toml --section.key value`: files, or recipes by name, left to right, then overrides.

    An override that the verb does not read is refused. `own` has the values of the verb's own options, empty if not
    given; they win. A run folder as the model becomes its newest checkpoint here: the run may continue.
    """
    files: list[Path | str] = [path for path in base if path.is_file()]
    options = [name for param in ctx.command.params for name in param.opts if name.startswith("--")]
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
            near = difflib.get_close_matches(f"--{key}", options, n=1, cutoff=0.8)
            if near and key.partition(".")[0] not in Config.model_fields:
                raise ConfigError(f"there is no option --{key}; did you mean {near[0]}?")
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


def given_model(ctx: typer.Context, argument: str) -> str:
    """The model of a verb that takes it as an argument or as the configuration's --model."""
    return argument or dict(zip(ctx.args, ctx.args[1:], strict=False)).get("--model", "")


def config_to_train(ctx: typer.Context, own: Mapping[str, str], out: str = "runs/train") -> Config:
    """The same, with a model, and `out` for the run folder if none is given."""
    config = config_from(ctx, own, defaults={"out": out})
    if not config.model:
        raise ConfigError(f"there is no model to train; give one, such as {CHOICES}")
    if not ctx.params.get("dry_run"):  # the machine that trains may be another
        from offbook.rl.checks import refuse_missing_model

        refuse_missing_model(config.model)
    return config


def show_config(config: Config, as_json: bool) -> None:
    print(json.dumps(config.model_dump(), indent=2) if as_json else config.to_toml(), end="\n" if as_json else "")


def tasks_in(source: str, run: RunFolder | None = None) -> dict[str, Task]:
    """All tasks below a folder by their ids; of `pocket` and `pocket-long` those of a run's seed and numbers."""
    from offbook.pocket.tasks import level_named
    from offbook.rl.tasks import task_sets
    from offbook.tasks import load_task

    if level_named(source):
        sets = task_sets(load_config([run.config_file if run else "pocket"], {"tasks.source": source}))
        found = [*sets.train, *sets.heldout]
    else:
        found = [load_task(path.parent) for path in sorted(Path(source).rglob("task.toml"))]
    if not found:
        raise OffbookError(f"{source} has no task in it")
    return {task.id: task for task in found}


# Output


def say(line: str, style: str = "", to: Console = results) -> None:
    """Print a line without markup; only the terminal wraps it."""
    to.print(Text(shown(line), style=style), soft_wrap=True)


note = partial(say, to=console)


def shown(text: str) -> str:
    """A model's text with control characters spelled out: nothing in it speaks to the terminal or hides a line."""
    return "".join(one if one in "\n\t\r" or category(one) not in ("Cc", "Cf") else ascii(one)[1:-1] for one in text)


def show_table(cells: Sequence[Sequence[str]], to: Console = results) -> None:
    """The first row is the header; numbers are in the columns after the first."""
    header, *rows = cells
    table = Table(*header)
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        table.add_row(*map(Text, row))
    to.print(table)


# Progress


@contextmanager
def progress_display() -> Iterator[Callable[..., None]]:
    """A callback of what is done, the share, and a remark: bars at a terminal, else a line at every quarter."""
    seen: dict[str, int] = {}
    if not sys.stderr.isatty():

        def line(what: str, share: float, remark: str = "") -> None:
            if int(4 * share) > seen.get(what, -1):
                seen[what] = int(4 * share)
                note(f"{what}: {remark or f'{share:.0%}'}")

        yield line
        return
    columns = (TextColumn("{task.description:<26}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
    with Progress(*columns, TextColumn("{task.fields[remark]}"), TimeElapsedColumn(), console=console) as bars:

        def bar(what: str, share: float, remark: str = "") -> None:
            if what not in seen:
                seen[what] = bars.add_task(what, total=1.0, remark="")
            bars.update(seen[what], completed=share, remark=remark)  # type: ignore[arg-type]

        yield bar


@contextmanager
def rollout_display(label: str, total: int, each: bool = False) -> Iterator[Callable[..., None]]:
    """A callback of rollouts: their progress with the score so far, and `each` finished one in a line of its own."""
    finished: list[Rollout] = []
    with progress_display() as progress:

        def watch(rollout: Rollout, over: bool) -> None:
            if not over:
                return
            finished.append(rollout)
            solved = sum(one.solved for one in finished)
            crashed = sum(one.stop == "crash" for one in finished)
            score = f"{solved / len(finished):.0%} solved" + (f", {crashed} crashed" if crashed else "")
            if each:
                ended = f"crash ({rollout.cause})" if rollout.stop == "crash" else rollout.stop
                usage = rollout.usage
                calls = f"{usage.turns} turns, {usage.calls} calls, {usage.invalid_calls} invalid"
                note(f"{rollout.id}: {ended}, {'solved' if rollout.solved else 'not solved'}; {calls}")
            progress(label, len(finished) / total, f"{len(finished)} of {total}, {score}")

        yield watch


def follow_run(
    run: Callable[..., RunFolder],
    config: Config,
    numbers: Mapping[str, str],
    as_json: bool,
    log: str | None = None,
    next_steps: str = "",
) -> None:
    """Train, with a line for each step: `numbers` are its metrics by label. Prints the last metrics;
    nothing where another rank is the run."""
    from offbook.rl.trackers import Tracker

    tracker = Tracker(log, config) if log else None  # type: ignore[arg-type]  # before minutes go into the run
    with progress_display() as progress:

        def on_step(row: Row) -> None:
            if tracker:
                tracker.follow()
            shown = ", ".join(f"{name} {row[key]:.3g}" for name, key in numbers.items() if key in row)
            of = f" of {row['steps']}" if "steps" in row else ""
            note(f"step {row['step']}{of}: {shown}")
            if "waited_for" in row:
                note(f"step {row['step']} {row['waited_for']}")
            if "no_signal" in row:
                note(f"step {row['step']} had no signal: {row['no_signal']}")

        folder = run(config, on_step, progress, note)
    if int(os.environ.get("RANK", "0")):
        return
    if tracker:
        tracker.close()
    last = folder.metrics()[0][-1]
    print(json.dumps(last) if as_json else f"{config.out}: {last['step']} steps done")
    if next_steps and not as_json:
        note(f"next: {next_steps}")
