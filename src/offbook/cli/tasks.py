"""offbook tasks: make tasks from repositories, look at them, check them, make them harder, pass them on."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from offbook.cli.options import Json, Row, argument, console, note, option, progress_display, say, show_table
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
Places = Annotated[list[Path], argument("Task folders, or folders of them.")]


@app.command()
def make(
    sources: Annotated[
        list[str] | None,
        argument("A folder, git URL, archive, pypi:NAME[==VERSION], release:NAME==OLD..NEW, commit:URL@REF."),
    ] = None,
    out: Annotated[Path, option("Where the tasks go.")] = Path("tasks"),
    level: Annotated[str, option("stub, hybrid, gone, or mix.")] = "hybrid",
    wording: Annotated[Literal["terse", "normal", "detailed"], option("The style of the instruction.")] = "normal",
    limit: Annotated[int, option("Stop a repository after so many tasks; 0 is never.", min=0)] = 0,
    heldout: Annotated[float, option("Share of the repositories held out.", min=0.0, max=1.0)] = 0.2,
    url: Annotated[str, option("A model behind this URL helps, as the next options say.")] = "",
    name: Annotated[str, option("That model's name.")] = "",
    rewrite: Annotated[bool, option("The model says the instructions in its words.", "--rewrite")] = False,
    set_up: Annotated[bool, option("The model sets up what does not prepare.", "--set-up")] = False,
    allow: Annotated[list[str] | None, option("A host, added to the package index, for --set-up.")] = None,
    pytest_options: Annotated[str, option("For pytest, instead of what its settings ask for.")] = "",
    start: Annotated[str, option("A command that gets a sandbox ready for the tests.")] = "",
    python: Annotated[str, option("Another interpreter for the repositories: a version or a path.")] = "",
    context: Annotated[bool, option("With what an editor would show; releases have it.", "--context")] = False,
    workers: Annotated[int, option("Processes; 0 is one for every two cores.", min=0)] = 0,
    as_json: Json = False,
) -> None:
    """Turn repositories into verified feature-deletion tasks, and pairs of releases into tasks of what the newer one
    brings. The same command resumes.

    For example: offbook tasks make ./my-repository --out tasks
    """
    from offbook.sandbox import SandboxSpec
    from offbook.signals.monitors.rules import annotated
    from offbook.tasks.factory.instruction.instruct import rewriter
    from offbook.tasks.factory.make import MakeSettings
    from offbook.tasks.factory.pipeline import make_tasks
    from offbook.tasks.factory.prepare.prepare import PrepareSettings
    from offbook.tasks.factory.workers import workers as started

    if not sources:
        kinds = "a folder, a git URL, an archive, or pypi:NAME"
        raise OffbookError(f"give at least one repository: {kinds}, as in: offbook tasks make ./my-repository")
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
        jobs=cores // num_workers + 1,
        annotate=annotated,
        heldout=heldout,
        prepare=PrepareSettings(
            python=python, pytest_options=tuple(shlex.split(pytest_options)), start=start, set_up=agents
        ),
        rewrite=rewriter(url, name) if rewrite else None,
        context=context,
    )

    def help_out() -> None:
        asyncio.run(make_tasks(sources, out, SandboxSpec(), settings, note))

    with started(num_workers - 1, help_out, out / ".factory"), progress_display() as progress:

        def on_outcome(made: Made) -> None:
            if made.candidates:
                progress(f"{made.name}: candidates", len(made.outcomes) / made.candidates)

        result = asyncio.run(make_tasks(sources, out, SandboxSpec(), settings, note, on_outcome))
    if as_json:
        print(json.dumps([asdict(made) for made in result]))
        return
    _show_made(result)
    num = sum(len(made.verified) for made in result)
    print(f"{out}: {num} tasks from {sum(bool(made.verified) for made in result)} of {len(result)} repositories")
    if not num:
        raise typer.Exit(1)
    if heldout and not any((out / "heldout").glob("[!.]*")):
        names = ", ".join(made.name for made in result if made.split == "heldout")
        why = f"{names} was to be held out and gave no task" if names else "repositories are held out as a whole"
        print(
            f"no task is held out: {why}. To measure on unseen code, add another repository: offbook tasks make "
            f"ANOTHER --out {shlex.quote(str(out))}. Or train with --tasks.heldout_share 0.2, which holds some of "
            "these tasks out"
        )


def _show_made(result: list[Made]) -> None:
    """The repositories, and what became of the candidates."""
    from offbook.tasks.factory.records import funnel

    cells = [["repository", "split", "tests", "left out", "candidates", "tasks"]]
    for made in result:
        if made.unprepared:
            note(f"{made.source}: {made.unprepared}")
        else:
            numbers = [made.num_tests, made.num_excluded, made.candidates, len(made.verified)]
            cells.append([f"{made.name} {made.version}", made.split, *map(str, numbers)])
    if len(cells) == 1:
        return
    show_table(cells, to=console)
    outcomes = [outcome for made in result for outcome in made.outcomes]
    note(f"{sum(not outcome.refused for outcome in outcomes)} candidates became tasks")
    for reason, count in funnel(outcomes).items():
        example = next(outcome for outcome in outcomes if outcome.refused == reason)
        note(f"{count} refused: {reason}; {example.id}: {example.evidence}"[:200])


@app.command()
def check(places: Places, as_json: Json = False) -> None:
    """Gold accepted, doing nothing refused. Exits with 1 if a task does not hold.

    For example: offbook tasks check tasks
    """
    from offbook.tasks.check import check_all

    def found(tasks: list[Task], bad: dict[str, str], progress: Callable[[float], None]) -> dict[str, list[Any]]:
        results = asyncio.run(check_all(tasks, progress))
        bad |= {task.id: why for task, why in zip(tasks, results, strict=True) if why}
        return {}

    _judge(places, "checked", "faults", found, as_json)


@app.command()
def leaks(places: Places, as_json: Json = False) -> None:
    """Look for the deleted code in everything that the agent can read. Exits with 1 if it is found.

    For example: offbook tasks leaks tasks
    """
    from offbook.tasks.factory.audit.corpus import audit_all

    _judge(places, "audited", "leaks", audit_all, as_json)


def _judge(
    places: list[Path],
    done: str,
    kind: str,
    find: Callable[[list[Task], dict[str, str], Callable[[float], None]], Mapping[str, list[Any]]],
    as_json: bool,
) -> None:
    """Look at tasks and print what is found. Exits with 1 if that is anything."""
    from offbook.tasks.folder import tasks_at

    bad: dict[str, str] = {}
    tasks = tasks_at(places, bad)
    num_tasks = len(tasks) + len(bad)
    with progress_display() as progress:
        found = {id: ones for id, ones in find(tasks, bad, partial(progress, f"{kind} in tasks")).items() if ones}
    if as_json:
        records = {id: [asdict(one) if kind == "leaks" else one for one in ones] for id, ones in found.items()}
        print(json.dumps({done: num_tasks, "bad": bad} | ({kind: records} if kind == "leaks" else {})))
    else:
        reasons = {**{id: [why] for id, why in bad.items()}, **found}
        for task_id, ones in reasons.items():
            for reason in ones:
                note(f"{task_id}: {reason}")
        words = "tasks have no leak" if kind == "leaks" else "task folders hold"
        print(f"{num_tasks - len(reasons)} of {num_tasks} {words}")
    if bad or found:
        raise typer.Exit(1)


@app.command()
def grade(
    task: Annotated[Path, argument("A task folder.")],
    solution: Annotated[Path, argument("The task's tree as it was solved, or a patch for it.")],
    as_json: Json = False,
) -> None:
    """Whether a solution is right: the reward that a rollout would get for it, the failing tests, what monitors find.
    Exits with 0 if it is solved, with 1 if not, and with 2 if it cannot be graded.

    For example: offbook tasks grade tasks/train/my-task ./my-tree
    """
    from offbook.signals.monitors.rules import KINDS
    from offbook.tasks import load_task
    from offbook.tasks.check import why_refused
    from offbook.tasks.grade import counted

    try:
        with progress_display() as progress:
            loaded = load_task(task)
            progress("grading", 0.0)
            rollout, result = asyncio.run(_scored(loaded, _changes(loaded, solution)))
            progress("grading", 1.0)
    except OffbookError as error:
        error.exit_code = 2  # 1 is not solved
        raise
    why = ""
    if result is not None and not result.solved:
        why = why_refused(result)
    elif rollout.flags and not rollout.solved:
        why = "a finding takes the reward"
    elif result is None and not loaded.script and not any(counted(loaded, path) for path in rollout.changed):
        why = "it changes no file that is graded"
    failing = sorted(result.missing) if result else []
    reward = rollout.reward
    if as_json:
        facts = {"id": loaded.id, "solved": rollout.solved, "why": why, "failing": failing}
        facts |= {"reward": reward.total, "parts": reward.parts, "weights": reward.weights}
        print(json.dumps({**facts, "flags": [asdict(flag) for flag in rollout.flags]}))
    else:
        weights = reward.weights
        parts = [
            f"{name} {value:g} x {weights.get(name, 1):g}".removesuffix(" x 1") for name, value in reward.parts.items()
        ]
        say(f"{loaded.id}: {'solved' if rollout.solved else 'not solved'}{f' ({why})' if why else ''}")
        say(f"reward {reward.total:g}: {', '.join(parts)}")
        if failing:
            say("\n  ".join([f"failing ({len(failing)}):", *failing]))
        for flag in rollout.flags:
            say(f"finding {flag.kind}: {KINDS.get(flag.kind, 'found by a model')} ({flag.evidence})")
    if not rollout.solved:
        raise typer.Exit(1)


def _changes(task: Task, solution: Path) -> dict[str, str | None]:
    """Path -> new text, None if a file is deleted."""
    from offbook.tasks.check import changes_by
    from offbook.tasks.git import BadPatch

    if solution.is_dir():
        before, after = _tree_files(task.tree), _tree_files(solution)
        if not any(after.get(path) == content for path, content in before.items()):
            raise OffbookError(f"{solution} has no file of the tree of {task.folder}; give the whole tree, or a patch")
        changed: dict[str, str | None] = dict.fromkeys(before.keys() - after.keys())
        new = {path: content for path, content in after.items() if before.get(path) != content}
        return changed | {path: content.decode(errors="replace") for path, content in new.items()}
    if not solution.is_file():
        raise OffbookError(f"there is no folder or patch {solution}")
    try:
        return changes_by(task, solution.read_bytes().decode())
    except UnicodeDecodeError:
        raise OffbookError(f"{solution} is no patch: it is no text") from None
    except BadPatch as error:
        raise OffbookError(f"{solution} is no patch for the tree of {task.folder}: {error}") from error


def _tree_files(tree: Path) -> dict[str, bytes]:
    """A tree's files without compiled code and dot folders."""
    found = {}
    for path in sorted(tree.rglob("*")):
        *folders, _ = path.relative_to(tree).parts
        if path.is_file() and not any(part == "__pycache__" or part.startswith(".") for part in folders):
            found[path.relative_to(tree).as_posix()] = path.read_bytes()
    return found


async def _scored(task: Task, changed: dict[str, str | None]) -> tuple[Rollout, Grade | None]:
    """Score the changes as a rollout that did nothing else."""
    from offbook.agent.harness.agent import diff_of
    from offbook.rl.collector import Collector

    rollout = Rollout(f"{task.id}/by-hand", task.id, "by-hand", task.tools, stop="finish", changed=changed)
    rollout.diff = diff_of(task, changed)
    result = await Collector(load_config([], {}), None).scored(task, rollout)
    if rollout.fault:
        raise OffbookError(f"it could not be graded: {rollout.fault}")
    return rollout, result


@app.command()
def show(
    places: Places,
    runs: Annotated[list[Path] | None, option("Run folders: pass rates are taken there.", "--run")] = None,
    as_json: Json = False,
) -> None:
    """One task in full, or a table of many; with --run, how often each was solved.

    For example: offbook tasks show tasks --run runs/train
    """
    from offbook.tasks.check import readable
    from offbook.tasks.folder import tasks_at
    from offbook.tasks.select import History

    bad: dict[str, str] = {}
    tasks = tasks_at(places, bad)
    history = History.of_runs(runs or [])
    rows: list[Row] = []
    for task in tasks:
        with readable(task, bad):
            rows.append(_facts(task, history))
    for name, why in bad.items():
        note(f"{name}: {why}")
    if as_json:
        print(json.dumps(rows))
    elif len(tasks) == len(rows) == 1:
        _show_one(tasks[0], rows[0])
    elif rows:
        show_table([list(rows[0]), *(list(map(str, row.values())) for row in rows)])
    if bad:
        raise typer.Exit(1)


def _facts(task: Task, history: History) -> Row:
    from offbook.tasks.grade import mutants_of

    mutants = mutants_of(task)
    record = history.records.get(task.id)
    facts: Row = {"id": task.id, "difficulty": task.difficulty}
    for key in ("level", "lines", "files", "floor"):
        facts[key] = getattr(task.deleted, key) if task.deleted else ""
    facts["tests"] = len(task.fail_to_pass)
    facts["blank"] = len(mutants.blank(task.fail_to_pass))
    facts["mutants"] = len(mutants.tests)
    facts["solved"] = f"{record.solved} of {record.rollouts}" if record else ""
    return facts


def _show_one(task: Task, facts: Row) -> None:
    print(task.instruction, end="\n\n")
    for key, value in facts.items():
        if value != "":
            print(f"{key:12}{value}")
    for name, nodes in (("needs it", task.fail_to_pass), ("keeps passing", task.pass_to_pass)):
        print(f"\n{name} ({len(nodes)}):", *nodes, sep="\n  ")
    patch = task.folder / "solution" / "gold.patch"
    if patch.is_file():
        print(f"\n{patch.read_text()}", end="")


@app.command()
def harden(
    task: Annotated[Path, argument("A task folder made by `offbook tasks make`.")],
    out: Annotated[Path | None, option("Where the harder ones go; by default next to the task.")] = None,
    way: Annotated[list[str] | None, option("terser, gone, widen, merge; all if not given.")] = None,
) -> None:
    """Harder tasks from one that has become easy, each verified from the start. Existing ones are left as they are.

    For example: offbook tasks harden tasks/train/my-task --way terser
    """
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
    place, settings = out or task.parent, MakeSettings(annotate=annotated)
    outcomes = asyncio.run(make_harder(load_task(task), place, SandboxSpec(), ways, settings=settings))
    for name, one in zip(ways, outcomes, strict=True):
        made = f"{place / one.id}: {one.lines} lines in {one.files} files, {one.num_tests} tests"
        print(f"{name:8}{f'none: {one.refused} ({one.evidence})' if one.refused else made}")


@app.command()
def export(places: Places, out: Annotated[Path, option("The folder to write.")] = Path("harbor")) -> None:
    """All tasks as whole folders for Harbor.

    For example: offbook tasks export tasks --out for-harbor
    """
    from offbook.tasks.folder import tasks_at, write_whole

    tasks = tasks_at(places)
    for task in tasks:
        if (out / task.id).exists():
            raise OffbookError(f"{out / task.id} is there already; give another --out")
        write_whole(task, out / task.id)
    print(f"{out}: {len(tasks)} task folders")
