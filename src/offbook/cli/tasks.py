"""offbook tasks: make tasks from repositories, look at them, check them, make them harder, pass them on."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Column, Table
from rich.text import Text

from offbook.cli.options import CONFIGURED, Json, Plain, config_from, console, progress_display, say
from offbook.core.config import load_config
from offbook.types import OffbookError, Rollout, Task

if TYPE_CHECKING:
    from offbook.tasks.factory.pipeline import Made
    from offbook.tasks.grade import Grade
    from offbook.tasks.select import History

app = typer.Typer(
    help="Make tasks from repositories, check them, make them harder.",
    no_args_is_help=True,
    epilog="For example: offbook tasks make ./my-repository --out tasks",
)
POCKET = "pocket"
BAD_INPUT = 2  # exit code of `grade` where it cannot be said; 1 is not solved
MAX_SHOWN = 8  # failing tests
Places = Annotated[list[Path], typer.Argument(help="Task folders, or folders of them.")]


@app.command("make", epilog="For example: offbook tasks make ./my-repository --out tasks")
def make(
    sources: Annotated[
        list[str] | None,
        typer.Argument(
            help="A folder, git URL, archive, pypi:NAME[==VERSION], release:NAME==OLD..NEW, commit:URL@REF."
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Where the tasks go.")] = Path("tasks"),
    level: Annotated[str, typer.Option(help="stub, hybrid, gone, or mix.")] = "hybrid",
    wording: Annotated[str, typer.Option(help="The instruction: terse, normal or detailed.")] = "normal",
    limit: Annotated[int, typer.Option(min=0, help="Stop a repository after so many tasks; 0 is never.")] = 0,
    jobs: Annotated[int, typer.Option(min=0, help="Candidates at a time; 0 is one more than the cores.")] = 0,
    heldout: Annotated[float, typer.Option(min=0.0, max=1.0, help="Share of the repositories held out.")] = 0.2,
    url: Annotated[str, typer.Option(help="A model behind this URL helps, as the next options say.")] = "",
    name: Annotated[str, typer.Option(help="That model's name.")] = "",
    rewrite: Annotated[bool, typer.Option("--rewrite", help="The model says the instructions in its words.")] = False,
    set_up: Annotated[bool, typer.Option("--set-up", help="The model sets up what does not prepare.")] = False,
    allow: Annotated[list[str] | None, typer.Option(help="A host, added to the package index, for --set-up.")] = None,
    pytest_options: Annotated[str, typer.Option(help="For pytest, instead of what its settings ask for.")] = "",
    start: Annotated[str, typer.Option(help="A command that gets a sandbox ready for the tests.")] = "",
    python: Annotated[str, typer.Option(help="Another interpreter for the repositories: a version or a path.")] = "",
    context: Annotated[
        bool, typer.Option("--context", help="With what an editor would show; releases have it.")
    ] = False,
    listed: Annotated[Path | None, typer.Option("--from", help="A file with more repositories, one per line.")] = None,
    workers: Annotated[int, typer.Option(min=0, help="Processes; 0 is one for every two cores.")] = 0,
    plain: Plain = False,
    as_json: Json = False,
) -> None:
    """Turn repositories into verified feature-deletion tasks, and pairs of releases into tasks of what the newer one
    brings. The same command goes on where it was stopped."""
    from offbook.sandbox import SandboxSpec
    from offbook.signals.monitors.rules import annotated
    from offbook.tasks.factory.instruction.instruct import rewriter
    from offbook.tasks.factory.make import MakeSettings
    from offbook.tasks.factory.pipeline import make_tasks
    from offbook.tasks.factory.prepare.prepare import PrepareSettings
    from offbook.tasks.factory.records import held_out
    from offbook.tasks.factory.workers import workers as started

    sources = [*(sources or []), *(read_sources(listed) if listed else [])]
    if not sources:
        kinds = "a folder, a git URL, an archive, or pypi:NAME"
        raise OffbookError(f"give at least one repository: {kinds}, as in: offbook tasks make ./my-repository")
    if wording not in ("terse", "normal", "detailed"):
        raise OffbookError(f"there is no wording {wording}; it is one of terse, normal and detailed")
    if (rewrite or set_up) and not (url and name):
        raise OffbookError("--rewrite and --set-up need a model: say where it is with --url and which with --name")
    cores = os.cpu_count() or 1
    num_workers = min(workers or max(1, cores // 2), len(sources))
    agents = None
    if set_up:
        from offbook.tasks.factory.prepare.agents import SetUpAgent  # it brings torch along

        agents = SetUpAgent(url, name, tuple(allow or ()))
    settings = MakeSettings(
        level=level,
        wording=wording,
        max_tasks=limit,
        jobs=jobs or cores // num_workers + 1,
        annotate=annotated,
        heldout=heldout,
        prepare=PrepareSettings(
            python=python, pytest_options=tuple(shlex.split(pytest_options)), start=start, set_up=agents
        ),
        rewrite=rewriter(url, name) if rewrite else None,
        context=context,
    )
    tell = partial(say, to=console)

    def help_out() -> None:
        asyncio.run(make_tasks(sources, out, SandboxSpec(), settings, tell))

    with (
        started(num_workers - 1, help_out, out / ".factory"),
        progress_display(plain) as progress,
    ):

        def on_outcome(made: Made) -> None:
            if made.candidates:
                progress(f"{made.name}: candidates", len(made.outcomes) / made.candidates)

        result = asyncio.run(make_tasks(sources, out, SandboxSpec(), settings, tell, on_outcome))
    if as_json:
        print(json.dumps([asdict(made) for made in result]))
        return
    for table in summary(result):
        console.print(table, soft_wrap=isinstance(table, Text))
    num = sum(len(made.verified) for made in result)
    print(f"{out}: {num} tasks from {sum(bool(made.verified) for made in result)} of {len(result)} repositories")
    if not num:
        raise typer.Exit(1)
    if heldout and not any((out / "heldout").glob("[!.]*")):
        names = ", ".join(held_out(out))
        why = f"{names} was to be held out and gave no task" if names else "repositories are held out as a whole"
        print(
            f"no task is held out: {why}. To measure on unseen code, add another repository: offbook tasks make "
            f"ANOTHER --out {shlex.quote(str(out))}. Or train with --tasks.heldout_share 0.2, which holds some of "
            "these tasks out"
        )


def summary(result: list[Made]) -> Iterator[Table | Text]:
    """The repositories, and what became of the candidates."""
    from offbook.tasks.factory.records import funnel

    for made in result:
        if made.unprepared:
            yield Text(f"{made.source}: {made.unprepared}" + (f" (see {made.log})" if made.log else ""))
    if all(made.unprepared for made in result):
        return
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
    outcomes = [outcome for made in result for outcome in made.outcomes]
    reasons = Table("what became of the candidates", "number", Column("for example", overflow="fold"))
    made_of = [outcome for outcome in outcomes if not outcome.refused]
    blank, shown = sum(outcome.blank for outcome in made_of), sum(outcome.shown for outcome in made_of)
    bare = sum(outcome.bare for outcome in made_of)
    hidden = (
        f"{blank} of their tests are also run with expected values hidden, {shown} cannot be; of these {bare} cannot "
        "be run with other expected values either"
        if shown
        else ""
    )
    reasons.add_row("became tasks", str(len(made_of)), hidden)
    if open_tasks := [outcome.id for outcome in made_of if outcome.shown > outcome.blank]:
        reasons.add_row("  of these, most expected values cannot be hidden", str(len(open_tasks)), Text(open_tasks[0]))
    for reason, count in funnel(outcomes).items():
        example = next(outcome for outcome in outcomes if outcome.refused == reason)
        reasons.add_row(reason, str(count), Text(f"{example.id}: {example.evidence}"[:150]))
    yield reasons
    sizes = [(outcome.kind, outcome.changed, outcome.files, outcome.characters) for outcome in made_of]
    yield Text("\n".join(medians(sizes)))


def medians(sizes: Sequence[tuple[str, int, int, int]]) -> Iterator[str]:
    """A line per kind, from (kind, changed lines, files, characters of the request) of each task."""
    names = {"single": "deletions", "cluster": "deletions, clusters", "release": "releases"}
    for kind in sorted({size[0] for size in sizes}, key=lambda kind: [*names, kind].index(kind)):
        lines, files, characters = (
            statistics.median(values) for values in zip(*(size[1:] for size in sizes if size[0] == kind), strict=True)
        )
        count = sum(size[0] == kind for size in sizes)
        yield (
            f"median of {count} {names.get(kind, 'others')}: {lines:g} changed lines, {files:g} files, "
            f"{characters:g} characters of the request"
        )


def read_sources(path: Path) -> list[str]:
    """One a line; what follows a # at its beginning or behind a space is a remark."""
    if not path.is_file():
        raise OffbookError(f"there is no file {path} with repositories")
    try:
        lines = path.read_text().splitlines()
    except UnicodeDecodeError:
        raise OffbookError(f"{path} is no text; give a file with a repository a line") from None
    if found := [source for line in lines if (source := re.split(r"(?:^|\s)#", line)[0].strip())]:
        return found
    raise OffbookError(f"{path} names no repository; give one per line")


@app.command("check", epilog="For example: offbook tasks check tasks")
def check(places: Places, plain: Plain = False, as_json: Json = False) -> None:
    """Gold accepted, doing nothing refused, all that tests check can be known. Exits with 1 if a task does not hold."""
    from offbook.tasks.check import check_all, readable
    from offbook.tasks.factory.instruction.needs import missing_in
    from offbook.tasks.folder import tasks_at

    bad: dict[str, str] = {}
    tasks = tasks_at(places, bad)
    num_folders = len(tasks) + len(bad)
    with progress_display(plain) as progress:
        results = asyncio.run(check_all(tasks, lambda share: progress("checking tasks", share)))
    bad |= {task.id: why for task, why in zip(tasks, results, strict=True) if why}
    unknown = {}
    for task in tasks:
        with readable(task, bad):
            if task.id not in bad and (missing := missing_in(task)):
                unknown[task.id] = missing
    reasons = Counter(missing[0].reason for missing in unknown.values())
    answer = {"checked": num_folders, "bad": bad, "insufficient": {i: [*map(str, m)] for i, m in unknown.items()}}
    if not as_json and unknown:
        counted = ", ".join(f"{count} because {reason}" for reason, count in reasons.most_common())
        print(f"{len(unknown)} of {num_folders} cannot be solved from what is shown: {counted}")
    everything: dict[str, Sequence[object]] = {**{task_id: [why] for task_id, why in bad.items()}, **unknown}
    _judge(num_folders, everything, "task folders hold", answer if as_json else None)


@app.command("grade", epilog="For example: offbook tasks grade tasks/train/my-task ./my-tree")
def grade(
    task: Annotated[Path, typer.Argument(help="A task folder.")],
    solution: Annotated[Path, typer.Argument(help="The task's tree as it was solved, or a patch for it.")],
    plain: Plain = False,
    as_json: Json = False,
) -> None:
    """Whether a solution is right: the reward that a rollout would get for it, the failing tests, what monitors find.
    Exits with 0 if it is solved, with 1 if not, and with 2 if that cannot be said."""
    from offbook.tasks import load_task

    with _as_bad_input(), progress_display(plain) as progress:
        loaded = load_task(task)
        progress("grading", 0.0)
        rollout, result = asyncio.run(_scored(loaded, _changes(loaded, solution)))
        progress("grading", 1.0)
    facts = _graded(loaded, rollout, result)
    print(json.dumps(facts)) if as_json else _show_grade(facts)
    if not rollout.solved:
        raise typer.Exit(1)


@contextmanager
def _as_bad_input() -> Iterator[None]:
    try:
        yield
    except OffbookError as error:
        error.exit_code = BAD_INPUT
        raise


def _changes(task: Task, solution: Path) -> dict[str, str | None]:
    """Path -> new text, None where a file went."""
    from offbook.tasks.check import changes_by
    from offbook.tasks.git import BadPatch

    if solution.is_dir():
        return _differences(task, solution)
    if not solution.is_file():
        raise OffbookError(f"there is no folder or patch {solution}")
    try:
        patch = solution.read_bytes().decode()
    except UnicodeDecodeError:
        raise OffbookError(f"{solution} is no patch: it is no text") from None
    try:
        return changes_by(task, patch)
    except BadPatch as error:
        raise OffbookError(f"{solution} is no patch for the tree of {task.folder}: {error}") from error


def _differences(task: Task, solved: Path) -> dict[str, str | None]:
    before, after = _tree_files(task.tree), _tree_files(solved)
    if not any(after.get(path) == content for path, content in before.items()):
        raise OffbookError(f"{solved} has no file of the tree of {task.folder}; give the whole tree, or a patch")
    changed: dict[str, str | None] = dict.fromkeys(before.keys() - after.keys())
    new = {path: content for path, content in after.items() if before.get(path) != content}
    return changed | {path: content.decode(errors="replace") for path, content in new.items()}


def _tree_files(tree: Path) -> dict[str, bytes]:
    """A tree's files without compiled code and dot folders."""
    found = {}
    for path in sorted(tree.rglob("*")):
        *folders, _ = path.relative_to(tree).parts
        if path.is_file() and not any(part == "__pycache__" or part.startswith(".") for part in folders):
            found[path.relative_to(tree).as_posix()] = path.read_bytes()
    return found


async def _scored(task: Task, changed: dict[str, str | None]) -> tuple[Rollout, Grade | None]:
    """As a rollout that left these changes and did nothing else."""
    from offbook.agent.harness.agent import diff_of
    from offbook.core.config import load_config
    from offbook.rl.collector import Collector

    rollout = Rollout(f"{task.id}/by-hand", task.id, "by-hand", task.tools, stop="finish", changed=changed)
    rollout.diff = diff_of(task, changed)
    result = await Collector(load_config([], {}), None).scored(task, rollout)
    if rollout.fault:
        raise OffbookError(f"it could not be graded: {rollout.fault}")
    return rollout, result


def _graded(task: Task, rollout: Rollout, result: Grade | None) -> dict[str, Any]:
    from offbook.tasks.check import why_refused
    from offbook.tasks.grade import counted

    why = "" if rollout.solved else "a finding takes the reward" if rollout.flags else ""
    if result is not None and not result.solved:
        why = why_refused(result)
    elif result is None and not task.script and not any(counted(task, path) for path in rollout.changed):
        why = "it changes no file that is graded"
    return {
        "id": task.id,
        "solved": rollout.solved,
        "reward": rollout.reward.total,
        "parts": rollout.reward.parts,
        "weights": rollout.reward.weights,
        "why": why,
        "failing": sorted(result.missing) if result else [],
        "flags": [asdict(flag) for flag in rollout.flags],
    }


def _show_grade(facts: dict[str, Any]) -> None:
    from offbook.signals.monitors.rules import KINDS

    why = f" ({facts['why']})" if facts["why"] else ""
    parts = ", ".join(
        f"{name} {value:g}" + (f" x {weight:g}" if (weight := facts["weights"].get(name, 1.0)) != 1 else "")
        for name, value in facts["parts"].items()
    )
    say(f"{facts['id']}: {'solved' if facts['solved'] else 'not solved'}{why}")
    say(f"reward {facts['reward']:g}: {parts}")
    if failing := facts["failing"]:
        say(f"failing ({len(failing)}):")
        for test in failing[:MAX_SHOWN]:
            say(f"  {test}")
        if len(failing) > MAX_SHOWN:
            say(f"  and {len(failing) - MAX_SHOWN} more; --json has all")
    for flag in facts["flags"]:
        say(f"finding {flag['kind']}: {KINDS.get(flag['kind'], 'found by a model')} ({flag['evidence']})")


@app.command("leaks", epilog="For example: offbook tasks leaks tasks")
def leaks(places: Places, plain: Plain = False, as_json: Json = False) -> None:
    """Look for the deleted code in everything that the agent can read. Exits with 1 if it is found."""
    from offbook.tasks.factory.audit.corpus import audit_all
    from offbook.tasks.folder import tasks_at

    bad: dict[str, str] = {}
    tasks = tasks_at(places, bad)
    num_folders = len(tasks) + len(bad)
    with progress_display(plain) as progress:
        found = audit_all(tasks, bad, lambda share: progress("looking for leaks", share))
    leaking = {task_id: leaks for task_id, leaks in found.items() if leaks}
    as_dicts = {task_id: [asdict(leak) for leak in leaks] for task_id, leaks in leaking.items()}
    everything: dict[str, Sequence[object]] = {**{task_id: [why] for task_id, why in bad.items()}, **leaking}
    answer = {"audited": num_folders, "bad": bad, "leaks": as_dicts}
    _judge(num_folders, everything, "tasks have no leak", answer if as_json else None)


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
    from offbook.pocket.tasks import level_named
    from offbook.tasks.check import readable
    from offbook.tasks.folder import tasks_at
    from offbook.tasks.select import History

    made = [place for place in places if level_named(str(place))]
    tasks = [task for place in made for task in _made(str(place), limit, plain)]
    bad: dict[str, str] = {}
    tasks += tasks_at([place for place in places if place not in made], bad)
    history, rows = History.of_runs(runs or []), list[dict[str, Any]]()
    for task in tasks:
        with readable(task, bad):
            rows.append(_facts(task, history))
    for name, why in bad.items():
        say(f"{name}: {why}", to=console)
    if as_json:
        print(json.dumps(rows))
    elif len(tasks) == len(rows) == 1:
        _show_one(tasks[0], rows[0])
    elif rows:
        _show_many(rows)
    if bad:
        raise typer.Exit(1)


def _made(source: str, limit: int, plain: bool) -> list[Task]:
    from offbook.rl.tasks import task_sets

    few = {"tasks.num_train": "1", "tasks.num_heldout": str(limit)} if limit else {}
    with progress_display(plain) as progress:
        return task_sets(load_config([POCKET], {"tasks.source": source, **few}), progress).heldout


def _show_many(rows: list[dict[str, Any]]) -> None:
    """Plain lines with the id last: what is too long is broken by the terminal alone, and can still be copied."""
    keys = ("difficulty", "level", "lines", "files", "tests", "blank", "mutants", "bare", "floor", "solved", "id")
    columns = [[key, *(str(row[key]) for row in rows)] for key in keys if any(row[key] != "" for row in rows)]
    widths = [max(map(len, column)) for column in columns]
    for cells in zip(*columns, strict=True):
        print("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip())
    sizes = [(row["kind"], row["changed"], row["patched"], row["characters"]) for row in rows]
    print("", *medians(sizes), sep="\n")


def _facts(task: Task, history: History) -> dict[str, Any]:
    from offbook.tasks.git import touched_by
    from offbook.tasks.grade import mutants_of

    deleted = asdict(task.deleted) if task.deleted else {}
    mutants = mutants_of(task)
    blank = mutants.blank(task.fail_to_pass)
    others = {mutants.test_of(node) for node in task.fail_to_pass} - blank
    record = history.records.get(task.id)
    patch = task.folder / "solution" / "gold.patch"
    touched = touched_by(patch.read_text()) if patch.is_file() else {}
    changed = {path: lines for path, lines in touched.items() if path.endswith(".py")}
    return {
        "id": task.id,
        "origin": task.origin,
        "difficulty": task.difficulty,
        **{key: deleted.get(key, "") for key in ("kind", "level", "lines", "files", "callers", "floor")},
        "changed": sum(map(sum, changed.values())),
        "patched": len(changed),
        "characters": len(task.instruction),
        "tests": len(task.fail_to_pass),
        "blank": len(blank) or "none",
        "mutants": len(mutants.tests) or "none",
        "bare": len(others - mutants.tests),
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
    out: Annotated[Path | None, typer.Option(help="Where the harder ones go; by default next to the task.")] = None,
    way: Annotated[list[str] | None, typer.Option(help="terser, gone, widen, merge; all where left out.")] = None,
    as_json: Json = False,
) -> None:
    """Harder tasks from one that has become easy, each verified from the start. Those that are there are left."""
    from offbook.sandbox import SandboxSpec
    from offbook.signals.monitors.rules import annotated
    from offbook.tasks import load_task
    from offbook.tasks.factory.harden import WAYS
    from offbook.tasks.factory.harden import harden as make_harder
    from offbook.tasks.factory.make import MakeSettings

    unknown = [name for name in way or () if name not in WAYS]
    if unknown:
        raise OffbookError(f"there is no way {unknown[0]}; it is one of {', '.join(WAYS)}")
    ways = [known for known in WAYS if not way or known in way]
    settings = MakeSettings(annotate=annotated)
    outcomes = asyncio.run(make_harder(load_task(task), out or task.parent, SandboxSpec(), ways, settings=settings))
    if as_json:
        print(json.dumps([asdict(outcome) for outcome in outcomes]))
        return
    for name, one in zip(ways, outcomes, strict=True):
        size = f"{one.lines} lines in {one.files} files, {one.num_tests} tests"
        made = f"{(out or task.parent) / one.id}: {size}"
        print(f"{name:8}{f'none: {one.refused} ({one.evidence})' if one.refused else made}")


@app.command(
    "demos", epilog="For example: offbook tasks demos tasks --model Qwen/Qwen3-0.6B", context_settings=CONFIGURED
)
def demos(
    ctx: typer.Context,
    tasks: Annotated[str, typer.Argument(help="A folder of tasks; held-out ones are left out.")],
    model: Annotated[str, typer.Option(help="Whose chat they are written in: a folder, run or hub id.")] = "",
    out: Annotated[Path, typer.Option(help="The file to write, a demonstration a line.")] = Path("demos.jsonl"),
    samples: Annotated[int, typer.Option("-n", min=1, help="Demonstrations a task.")] = 4,
    to: Annotated[str, typer.Option(help="rollouts, for `offbook sft`; atif or openai, with all code.")] = "rollouts",
    plain: Plain = False,
) -> None:
    """Solve training tasks by their gold patches with a script, through the real tools, and keep what it did.

    Takes configuration of the harness, as in --harness.profile bash. `offbook sft --data demos:DIR` does the same.
    """
    config = config_from(ctx, {"model": model, "tasks.source": tasks})
    if to not in ("rollouts", "atif", "openai"):
        raise OffbookError(f"there is no form {to}; it is one of rollouts, atif and openai")
    if not model:
        raise OffbookError("give the model that is to learn from them: --model, as in --model Qwen/Qwen3-0.6B")
    from offbook.core.runfolder import dump_lines, write_atomic
    from offbook.evals.export import to_atif, to_messages
    from offbook.rl.models import chat_folder, model_folder
    from offbook.stages.demos import Demos, demonstrated

    wanted = Demos(tasks, samples)
    wanted.refuse(config)
    with progress_display(plain) as progress:
        folder = chat_folder(model_folder(config.model, config.seed, progress))
        rollouts, left_out = demonstrated(wanted, config, folder, progress)
    if to == "rollouts":
        write_atomic(out, dump_lines(rollouts))
    else:
        write = to_atif if to == "atif" else to_messages
        write_atomic(out, "".join(json.dumps(one) + "\n" for rollout in rollouts for one in write(rollout)))
    for why, count in left_out.items():
        say(f"left out: {count} {why}", to=console)
    print(f"{out}: {len(rollouts)} demonstrations of {len({rollout.task for rollout in rollouts})} tasks")
    if not rollouts:
        raise typer.Exit(1)


@app.command("export", epilog="For example: offbook tasks export tasks --out tasks.jsonl")
def export(
    places: Places,
    out: Annotated[Path, typer.Option(help="The file to write; with --to harbor, the folder.")] = Path("tasks.jsonl"),
    to: Annotated[str, typer.Option(help="swebench: a file of instances; harbor: whole task folders.")] = "swebench",
) -> None:
    """All tasks as one file of SWE-bench instances, a JSON object a line, or as folders that Harbor takes."""
    from offbook.tasks.export import swebench_instance
    from offbook.tasks.folder import tasks_at, write_whole

    if to not in ("swebench", "harbor"):
        raise OffbookError(f"there is no form {to}; it is one of swebench and harbor")
    tasks = tasks_at(places)
    if to == "harbor":
        for task in tasks:
            if (out / task.id).exists():
                raise OffbookError(f"{out / task.id} is there already; give another --out")
            write_whole(task, out / task.id)
        print(f"{out}: {len(tasks)} task folders")
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("".join(json.dumps(swebench_instance(task)) + "\n" for task in tasks))
    print(f"{out}: {len(tasks)} instances")
