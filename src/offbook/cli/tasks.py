"""offbook tasks: make tasks from repositories, look at them, check them, make them harder, pass them on."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from offbook.cli.options import Json, Plain, console, note, progress_display, say, show_table
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
BAD_INPUT = 2  # exit code of `grade` if there is nothing to grade; 1 is not solved
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
    wording: Annotated[
        Literal["terse", "normal", "detailed"], typer.Option(help="The style of the instruction.")
    ] = "normal",
    limit: Annotated[int, typer.Option(min=0, help="Stop a repository after so many tasks; 0 is never.")] = 0,
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
    brings. The same command resumes."""
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

    with started(num_workers - 1, help_out, out / ".factory"), progress_display(plain) as progress:

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
        names = ", ".join(held_out(out))
        why = f"{names} was to be held out and gave no task" if names else "repositories are held out as a whole"
        print(
            f"no task is held out: {why}. To measure on unseen code, add another repository: offbook tasks make "
            f"ANOTHER --out {shlex.quote(str(out))}. Or train with --tasks.heldout_share 0.2, which holds some of "
            "these tasks out"
        )


def _show_made(result: list[Made]) -> None:
    """The repositories, and what became of the candidates."""
    from offbook.tasks.factory.records import funnel

    rows = []
    for made in result:
        if made.unprepared:
            note(f"{made.source}: {made.unprepared}" + (f" (see {made.log})" if made.log else ""))
            continue
        lines = statistics.median(outcome.lines for outcome in made.verified) if made.verified else 0
        numbers = [made.num_tests, made.num_excluded, made.candidates, len(made.verified)]
        rows.append([f"{made.name} {made.version}", made.split, *map(str, numbers), f"{lines:g}"])
    if not rows:
        return
    header = ["repository", "split", "tests", "left out", "candidates", "tasks", "lines (median)"]
    show_table([header, *rows], to=console)
    outcomes = [outcome for made in result for outcome in made.outcomes]
    tasks = [outcome for outcome in outcomes if not outcome.refused]
    shown = sum(outcome.shown for outcome in tasks)
    note(f"{len(tasks)} candidates became tasks; {shown} of their tests cannot run with expected values hidden")
    for reason, count in funnel(outcomes).items():
        example = next(outcome for outcome in outcomes if outcome.refused == reason)
        note(f"{count} refused: {reason}; {example.id}: {example.evidence}"[:200])


def read_sources(path: Path) -> list[str]:
    """One a line; a # at the beginning or after a space begins a comment."""
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
                unknown[task.id] = [*map(str, missing)]
    answer = {"checked": num_folders, "bad": bad, "insufficient": unknown}
    everything: dict[str, Sequence[object]] = {**{id: [why] for id, why in bad.items()}, **unknown}
    _judge(num_folders, everything, "task folders hold", answer if as_json else None)


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
    everything: dict[str, Sequence[object]] = {**{id: [why] for id, why in bad.items()}, **leaking}
    answer = {"audited": num_folders, "bad": bad, "leaks": as_dicts}
    _judge(num_folders, everything, "tasks have no leak", answer if as_json else None)


def _judge(num_tasks: int, bad: Mapping[str, Sequence[object]], words: str, answer: dict[str, Any] | None) -> None:
    """Print the answer as JSON, or the reasons. Exits with 1 if a task is bad."""
    if answer is not None:
        print(json.dumps(answer))
    else:
        for task_id, reasons in bad.items():
            for reason in reasons:
                note(f"{task_id}: {reason}")
        print(f"{num_tasks - len(bad)} of {num_tasks} {words}")
    if bad:
        raise typer.Exit(1)


@app.command("grade", epilog="For example: offbook tasks grade tasks/train/my-task ./my-tree")
def grade(
    task: Annotated[Path, typer.Argument(help="A task folder.")],
    solution: Annotated[Path, typer.Argument(help="The task's tree as it was solved, or a patch for it.")],
    plain: Plain = False,
    as_json: Json = False,
) -> None:
    """Whether a solution is right: the reward that a rollout would get for it, the failing tests, what monitors find.
    Exits with 0 if it is solved, with 1 if not, and with 2 if it cannot be graded."""
    from offbook.signals.monitors.rules import KINDS
    from offbook.tasks import load_task
    from offbook.tasks.check import why_refused
    from offbook.tasks.grade import counted

    try:
        with progress_display(plain) as progress:
            loaded = load_task(task)
            progress("grading", 0.0)
            rollout, result = asyncio.run(_scored(loaded, _changes(loaded, solution)))
            progress("grading", 1.0)
    except OffbookError as error:
        error.exit_code = BAD_INPUT
        raise
    why = "" if rollout.solved else "a finding takes the reward" if rollout.flags else ""
    if result is not None and not result.solved:
        why = why_refused(result)
    elif result is None and not loaded.script and not any(counted(loaded, path) for path in rollout.changed):
        why = "it changes no file that is graded"
    failing, reward = sorted(result.missing) if result else [], rollout.reward
    if as_json:
        facts = {"id": loaded.id, "solved": rollout.solved, "reward": reward.total, "parts": reward.parts}
        facts |= {"weights": reward.weights, "why": why, "failing": failing}
        print(json.dumps({**facts, "flags": [asdict(flag) for flag in rollout.flags]}))
    else:
        parts = []
        for name, value in reward.parts.items():
            weight = reward.weights.get(name, 1.0)
            parts.append(f"{name} {value:g}" + (f" x {weight:g}" if weight != 1 else ""))
        say(f"{loaded.id}: {'solved' if rollout.solved else 'not solved'}{f' ({why})' if why else ''}")
        say(f"reward {reward.total:g}: {', '.join(parts)}")
        if failing:
            say("\n  ".join([f"failing ({len(failing)}):", *failing[:MAX_SHOWN]]))
        if len(failing) > MAX_SHOWN:
            say(f"  and {len(failing) - MAX_SHOWN} more; --json has all")
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


@app.command("show", epilog="For example: offbook tasks show tasks --run runs/train")
def show(
    places: Places,
    runs: Annotated[list[Path] | None, typer.Option("--run", help="Run folders: pass rates are taken there.")] = None,
    as_json: Json = False,
) -> None:
    """One task in full, or a table of many; with --run, how often each was solved."""
    from offbook.tasks.check import readable
    from offbook.tasks.folder import tasks_at
    from offbook.tasks.select import History

    bad: dict[str, str] = {}
    tasks = tasks_at(places, bad)
    history, rows = History.of_runs(runs or []), list[dict[str, Any]]()
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
        # Plain lines with the id last: only the terminal wraps them, and they can be copied.
        keys = ("difficulty", "level", "lines", "files", "tests", "blank", "mutants", "bare", "floor", "solved", "id")
        columns = [[key, *(str(row[key]) for row in rows)] for key in keys if any(row[key] != "" for row in rows)]
        widths = [max(map(len, column)) for column in columns]
        for cells in zip(*columns, strict=True):
            print("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip())
    if bad:
        raise typer.Exit(1)


def _facts(task: Task, history: History) -> dict[str, Any]:
    from offbook.tasks.grade import mutants_of
    from offbook.tasks.mutants import base_of

    deleted = asdict(task.deleted) if task.deleted else {}
    mutants = mutants_of(task)
    blank = mutants.blank(task.fail_to_pass)
    others = {base_of(node) for node in task.fail_to_pass} - blank
    record = history.records.get(task.id)
    return {
        "id": task.id,
        "origin": task.origin,
        "difficulty": task.difficulty,
        **{key: deleted.get(key, "") for key in ("kind", "level", "lines", "files", "callers", "floor")},
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
    way: Annotated[list[str] | None, typer.Option(help="terser, gone, widen, merge; all if not given.")] = None,
) -> None:
    """Harder tasks from one that has become easy, each verified from the start. Existing ones are left as they are."""
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


@app.command("export", epilog="For example: offbook tasks export tasks --out tasks.jsonl")
def export(
    places: Places,
    out: Annotated[Path, typer.Option(help="The file to write; with --to harbor, the folder.")] = Path("tasks.jsonl"),
    to: Annotated[
        Literal["swebench", "harbor"], typer.Option(help="A file of instances, or whole task folders.")
    ] = "swebench",
) -> None:
    """All tasks as one file of SWE-bench instances, a JSON object a line, or as folders for Harbor."""
    from offbook.tasks.export import swebench_instance
    from offbook.tasks.folder import tasks_at, write_whole

    tasks = tasks_at(places)
    if to == "swebench":
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text("".join(json.dumps(swebench_instance(task)) + "\n" for task in tasks))
        print(f"{out}: {len(tasks)} instances")
        return
    for task in tasks:
        if (out / task.id).exists():
            raise OffbookError(f"{out / task.id} is there already; give another --out")
        write_whole(task, out / task.id)
    print(f"{out}: {len(tasks)} task folders")
