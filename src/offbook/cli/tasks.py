"""offbook tasks: make tasks from repositories, look at them, check them, make them harder, pass them on."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Column, Table
from rich.text import Text

from offbook.cli.options import Json, Plain, console, progress_display, say
from offbook.config import load_config
from offbook.types import OffbookError, Task

if TYPE_CHECKING:
    from offbook.taskgen.make import Outcome
    from offbook.taskgen.pipeline import Made
    from offbook.tasks.select import History

app = typer.Typer(
    help="Make tasks from repositories, check them, make them harder.",
    no_args_is_help=True,
    epilog="For example: offbook tasks make ./my-repository --out tasks",
)
POCKET = "pocket"
Places = Annotated[list[Path], typer.Argument(help="Task folders, or folders of them.")]


@app.command("make", epilog="For example: offbook tasks make ./my-repository --out tasks")
def make(
    sources: Annotated[
        list[str] | None, typer.Argument(help="A folder, a git URL, an archive, or pypi:NAME[==VERSION].")
    ] = None,
    out: Annotated[Path, typer.Option(help="Where the tasks go.")] = Path("tasks"),
    level: Annotated[str, typer.Option(help="stub, hybrid, gone, or mix.")] = "hybrid",
    wording: Annotated[str, typer.Option(help="The instruction: terse, normal or detailed.")] = "normal",
    limit: Annotated[int, typer.Option(min=0, help="Stop a repository after so many tasks; 0 is never.")] = 0,
    jobs: Annotated[int, typer.Option(min=0, help="Candidates at a time; 0 is one more than the cores.")] = 0,
    heldout: Annotated[float, typer.Option(min=0.0, max=1.0, help="Share of the repositories held out.")] = 0.2,
    proposals: Annotated[Path | None, typer.Option(help="Proposed deletions, a JSON object a line.")] = None,
    url: Annotated[str, typer.Option(help="A model behind this URL helps with --rewrite and --propose.")] = "",
    name: Annotated[str, typer.Option(help="That model's name.")] = "",
    rewrite: Annotated[bool, typer.Option("--rewrite", help="The model says the instructions in its words.")] = False,
    propose: Annotated[int, typer.Option(min=0, help="Deletions that the model proposes for each.")] = 0,
    pytest_options: Annotated[str, typer.Option(help="For pytest, instead of what its settings ask for.")] = "",
    start: Annotated[str, typer.Option(help="A command that gets a box ready for the tests.")] = "",
    python: Annotated[Path | None, typer.Option(help="Another interpreter for the repositories.")] = None,
    plain: Plain = False,
    as_json: Json = False,
) -> None:
    """Turn repositories into verified feature-deletion tasks. The same command goes on where it was stopped."""
    from offbook.sandbox import BoxSpec
    from offbook.taskgen.instruct import rewriter
    from offbook.taskgen.make import MakeSettings
    from offbook.taskgen.pipeline import make_tasks
    from offbook.taskgen.prepare.prepare import PrepareSettings
    from offbook.taskgen.proposals import proposer, read_proposals

    if not sources and proposals is None:
        kinds = "a folder, a git URL, an archive, or pypi:NAME"
        raise OffbookError(f"give at least one repository: {kinds}, as in: offbook tasks make ./my-repository")
    if wording not in ("terse", "normal", "detailed"):
        raise OffbookError(f"there is no wording {wording}; it is one of terse, normal and detailed")
    if (rewrite or propose) and not (url and name):
        raise OffbookError("--rewrite and --propose need a model: say where it is with --url and which with --name")
    settings = MakeSettings(
        level=level,
        wording=wording,
        max_tasks=limit,
        jobs=jobs or (os.cpu_count() or 1) + 1,
        heldout=heldout,
        prepare=PrepareSettings(python=python, pytest_options=tuple(shlex.split(pytest_options)), start=start),
        rewrite=rewriter(url, name) if rewrite else None,
        propose=proposer(url, name) if propose else None,
        num_proposals=propose,
    )
    with progress_display(plain) as progress:

        def on_outcome(made: Made) -> None:
            if made.candidates:
                progress(f"{made.name}: candidates", len(made.outcomes) / made.candidates)

        proposed = read_proposals(proposals) if proposals else []
        tell = partial(say, to=console)
        result = asyncio.run(make_tasks(sources or [], out, BoxSpec(), settings, tell, on_outcome, proposed))
    if as_json:
        print(json.dumps([asdict(made) for made in result]))
        return
    for table in summary(result):
        console.print(table)
    num = sum(len(made.verified) for made in result)
    print(f"{out}: {num} tasks from {sum(bool(made.verified) for made in result)} of {len(result)} repositories")
    if not num:
        raise typer.Exit(1)
    if heldout and not any((out / "heldout").glob("[!.]*")):
        print(f"none is held out, because whole repositories are: make another one into tasks in {out}, and it will be")


def summary(result: list[Made]) -> Iterator[Table | Text]:
    """The repositories, and what became of the candidates."""
    from offbook.taskgen.pipeline import funnel

    table = Table(
        Column("repository", overflow="fold"), "split", "tests", "left out", "found", "tasks", "wide", "lines"
    )
    table.caption = "wide: tasks over several files; lines: of the gold patch, median"
    for made in result:
        if made.unprepared:
            table.add_row(made.source, "", "", "", "", "0", "", "")
            continue
        wide = sum(outcome.files > 1 for outcome in made.verified)
        lines = statistics.median(outcome.lines for outcome in made.verified) if made.verified else 0
        numbers = [made.num_tests, made.num_excluded, made.candidates, len(made.verified), wide]
        table.add_row(f"{made.name} {made.version}", made.split, *map(str, numbers), f"{lines:g}")
    yield table
    for made in result:
        if made.unprepared:
            yield Text(f"{made.source}: {made.unprepared}" + (f" (see {made.log})" if made.log else ""))
    outcomes = [outcome for made in result for outcome in made.outcomes]
    reasons = Table("what became of the candidates", "number", Column("for example", overflow="fold"))
    made_of = [outcome for outcome in outcomes if not outcome.refused]
    bare, twins = sum(outcome.bare for outcome in made_of), sum(outcome.twins for outcome in made_of)
    without = sum(not outcome.twins for outcome in made_of)
    told = f"{twins} tests have twins, {bare} are bare; {without} tasks have no twin at all" if bare else ""
    reasons.add_row("became tasks", str(len(made_of)), told)
    for reason, count in funnel(outcomes).items():
        example = next(outcome for outcome in outcomes if outcome.refused == reason)
        reasons.add_row(reason, str(count), Text(f"{example.id}: {example.evidence}"[:150]))
    reasons.add_section()
    left_out = [(why, function) for made in result for function, why in made.left_out.items()]
    for why, count in Counter(why for why, _ in left_out).most_common():
        function = next(function for reason, function in left_out if reason == why)
        reasons.add_row(f"functions in no candidate: {why}", str(count), Text(function))
    yield reasons


def tasks_in(places: list[Path]) -> list[Task]:
    from offbook.tasks import load_task, load_tasks

    found: list[Task] = []
    for place in places:
        if (place / "task.toml").is_file():
            found.append(load_task(place))
            continue
        splits = [place / name for name in ("train", "heldout") if (place / name).is_dir()]
        for folder in splits or [place]:
            found += load_tasks(folder)
    return found


@app.command("check", epilog="For example: offbook tasks check tasks")
def check(places: Places, plain: Plain = False, as_json: Json = False) -> None:
    """Gold accepted, doing nothing refused, for every task folder. Exits with 1 if one does not hold."""
    from offbook.tasks.check import check_all

    tasks = tasks_in(places)
    with progress_display(plain) as progress:
        results = asyncio.run(check_all(tasks, lambda share: progress("checking tasks", share)))
    bad = {task.id: why for task, why in zip(tasks, results, strict=True) if why}
    answer = {"checked": len(tasks), "bad": bad} if as_json else None
    _judge(len(tasks), {task_id: [why] for task_id, why in bad.items()}, "task folders hold", answer)


@app.command("leaks", epilog="For example: offbook tasks leaks tasks")
def leaks(places: Places, plain: Plain = False, as_json: Json = False) -> None:
    """Look for the deleted code in everything that the agent can read. Exits with 1 if it is found."""
    from offbook.taskgen.audit.corpus import audit_all

    tasks = tasks_in(places)
    with progress_display(plain) as progress:
        results = audit_all(tasks, lambda share: progress("looking for leaks", share))
    found = {task.id: leaks for task, leaks in zip(tasks, results, strict=True) if leaks}
    as_dicts = {task_id: [asdict(leak) for leak in leaks] for task_id, leaks in found.items()}
    _judge(len(tasks), found, "tasks have no leak", {"audited": len(tasks), "leaks": as_dicts} if as_json else None)


def _judge(num_tasks: int, bad: Mapping[str, Sequence[object]], words: str, answer: dict[str, Any] | None) -> None:
    """`answer` is for machines. Exits with 1 if a task is bad."""
    if answer is not None:
        print(json.dumps(answer))
    else:
        for task_id, reasons in bad.items():
            for reason in reasons:
                say(f"{task_id}: {reason}", to=console)
        print(f"{num_tasks - len(bad)} of {num_tasks} {words}")
    if bad:
        raise typer.Exit(1)


@app.command("show", epilog="For example: offbook tasks show tasks --run runs/train")
def show(
    places: Annotated[list[Path], typer.Argument(help="Task folders, folders of them, `pocket` or `pocket-long`.")],
    runs: Annotated[list[Path] | None, typer.Option("--run", help="Run folders: pass rates are taken there.")] = None,
    limit: Annotated[int, typer.Option(min=0, help="Of those, make only so many; 0 is all.")] = 0,
    plain: Plain = False,
    as_json: Json = False,
) -> None:
    """One task in full, or a table of many; with --run, how often each was solved.

    `pocket` is the held-out pocket tasks, `pocket-long` those that lack several functions, `pocket-long-3-8` with a
    number of them; they are made if they are not there yet.
    """
    from offbook.taskgen.pocket import level_named
    from offbook.tasks.select import History

    made = [place for place in places if level_named(str(place))]
    tasks = [task for place in made for task in _made(str(place), limit, plain)]
    tasks += tasks_in([place for place in places if place not in made])
    history = History.of_runs(runs or [])
    rows = [_facts(task, history) for task in tasks]
    if as_json:
        print(json.dumps(rows))
    elif len(tasks) == 1:
        _show_one(tasks[0], rows[0])
    else:
        _show_many(rows)


def _made(source: str, limit: int, plain: bool) -> list[Task]:
    from offbook.loop.tasks import task_sets

    few = {"tasks.num_train": "1", "tasks.num_heldout": str(limit)} if limit else {}
    with progress_display(plain) as progress:
        return task_sets(load_config([POCKET], {"tasks.source": source, **few}), progress).heldout


def _show_many(rows: list[dict[str, Any]]) -> None:
    """Plain lines with the id last: what is too long is broken by the terminal alone, and can still be copied."""
    keys = ("difficulty", "level", "lines", "files", "tests", "twins", "bare", "floor", "solved", "id")
    columns = [[key, *(str(row[key]) for row in rows)] for key in keys if any(row[key] != "" for row in rows)]
    widths = [max(map(len, column)) for column in columns]
    for cells in zip(*columns, strict=True):
        print("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip())


def _facts(task: Task, history: History) -> dict[str, Any]:
    from offbook.tasks.grade import twins_of

    deleted = asdict(task.deleted) if task.deleted else {}
    twins = twins_of(task)
    record = history.records.get(task.id)
    return {
        "id": task.id,
        "origin": task.origin,
        "difficulty": task.difficulty,
        **{key: deleted.get(key, "") for key in ("kind", "level", "lines", "files", "callers", "floor")},
        "tests": len(task.fail_to_pass),
        "twins": len(twins.tests) or "none",
        "bare": len({twins.test_of(node) for node in task.fail_to_pass} - twins.tests),
        "solved": f"{record.solved} of {record.rollouts}" if record else "",
    }


def _show_one(task: Task, facts: dict[str, Any]) -> None:
    print(task.instruction, end="\n\n")
    for key, value in facts.items():
        if value != "":
            print(f"{key:12}{value}")
    for name, nodes in (("needs it", task.fail_to_pass), ("keeps passing", task.pass_to_pass)):
        print(f"\n{name} ({len(nodes)}):", *nodes[:12], *(["..."] if len(nodes) > 12 else []), sep="\n  ")
    patch = task.folder / "solution" / "gold.patch"
    if patch.is_file():
        print(f"\n{patch.read_text()}", end="")


@app.command("harden", epilog="For example: offbook tasks harden tasks/train/my-task --way terser")
def harden(
    task: Annotated[Path, typer.Argument(help="A task folder made by `offbook tasks make`.")],
    out: Annotated[Path | None, typer.Option(help="Where the harder ones go; beside it where left out.")] = None,
    way: Annotated[list[str] | None, typer.Option(help="terser, gone, widen, merge; all where left out.")] = None,
    as_json: Json = False,
) -> None:
    """Harder tasks from one that has become easy, each verified from the start."""
    from offbook.sandbox import BoxSpec
    from offbook.taskgen.harden import WAYS
    from offbook.taskgen.harden import harden as make_harder
    from offbook.tasks import load_task

    unknown = [name for name in way or () if name not in WAYS]
    if unknown:
        raise OffbookError(f"there is no way {unknown[0]}; it is one of {', '.join(WAYS)}")
    ways = [known for known in WAYS if not way or known in way]
    outcomes = asyncio.run(make_harder(load_task(task), out or task.parent, BoxSpec(), ways))
    if as_json:
        print(json.dumps([asdict(outcome) for outcome in outcomes]))
        return
    for name, outcome in zip(ways, outcomes, strict=True):
        print(f"{name:8}{_said(outcome, out or task.parent)}")


def _said(outcome: Outcome, out: Path) -> str:
    if outcome.refused:
        return f"none: {outcome.refused} ({outcome.evidence})"
    return f"{out / outcome.id}: {outcome.lines} lines in {outcome.files} files, {outcome.num_tests} tests"


@app.command("export", epilog="For example: offbook tasks export tasks --out tasks.jsonl")
def export(
    places: Places,
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("tasks.jsonl"),
) -> None:
    """All tasks as one file of SWE-bench instances, a JSON object a line."""
    from offbook.tasks.export import swebench_instance

    tasks = tasks_in(places)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("".join(json.dumps(swebench_instance(task)) + "\n" for task in tasks))
    print(f"{out}: {len(tasks)} instances")
