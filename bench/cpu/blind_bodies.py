"""How a grader takes wrong bodies that were written blind: by a reviewer who had not read it.

    python bench/cpu/blind_bodies.py TASKS --out bodies.json [--only NAME ...] [--targets NAME ...] [--repeat 5]

TASKS is a folder of task folders, as `offbook tasks make` writes them for the packages of blind_data/targets.py. Each
body of blind_data/bodies.py and blind_data/second.py takes the place of a deleted function, and `offbook tasks grade`
judges the tree. A line per grading: body, kind, task, reward, findings. A reward above 0 is a hole, but for the
bodies of blind_data/honest.py, which are right and have to be paid. Gradings that OUT holds are not repeated. The table
at the end counts by round and kind: bodies, gradings, paid gradings, paid bodies.
"""

from __future__ import annotations

import argparse
import io
import json
import shutil
import tempfile
import textwrap
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import redirect_stderr, redirect_stdout
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import typer
from blind_data import honest, second
from blind_data.bodies import BODIES as FIRST
from blind_data.bodies import GENERIC, Body
from blind_data.targets import TARGETS, Target

import offbook.rl.collector
import offbook.tasks.check  # noqa: F401  (both: loaded once, not by every process)
from offbook.cli.tasks import grade
from offbook.tasks import load_task
from offbook.types import OffbookError

BODIES = FIRST | second.BODIES | honest.BODIES
MARK = "\n---\n"  # between what stands in the module and what stands in the function


def applied(tree: Path, target: Target, code: str) -> None:
    """Put a body into a tree, with what else the feature needs."""
    top, _, body = code.strip("\n").rpartition(MARK)
    for word, value in (("ARGS", target.names()), ("PARAMETERS", target.parameters)):
        top, body = top.replace(word, value), body.replace(word, value)
    helpers = []
    for name, text in (("_rough", target.rough), ("_right", target.right)):
        if text and name in top + body:
            helpers.append(f"def {name}({target.parameters}):\n{textwrap.indent(text.strip(), '    ')}\n")
    for path, old, new in target.edits:
        file = tree / path
        assert old in file.read_text(), (path, old)
        file.write_text(file.read_text().replace(old, new, 1))
    file = tree / target.path
    text = file.read_text()
    if target.anchor:
        line = next(line for line in text.splitlines() if target.anchor in line)
        indent = line[: len(line) - len(line.lstrip())]
        text = text.replace(line, textwrap.indent(body.strip("\n"), indent), 1)
    else:
        text += "\n\n" + target.head + textwrap.indent(body.strip("\n"), "    ") + "\n"
    file.write_text(text + "\n\n" + "\n\n".join([*helpers, top]) + "\n")


def judged(name: str, body: Body, place: str, tasks: Path) -> dict[str, Any]:
    target = TARGETS[place]
    folder = tasks / target.task
    out, err, began = io.StringIO(), io.StringIO(), time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="offbook-blind-") as space:
        tree = Path(space) / "tree"
        shutil.copytree(load_task(folder).tree, tree, symlinks=True)
        applied(tree, target, body.code)
        error = ""
        with redirect_stdout(out), redirect_stderr(err):
            try:
                grade(folder, tree, as_json=True)
            except typer.Exit:
                pass
            except OffbookError as problem:
                error = str(problem)
    row: dict[str, Any] = {"body": name, "kind": body.kind, "target": place, "task": folder.name}
    if error:
        return row | {"reward": None, "error": error}
    facts = json.loads(out.getvalue().strip().splitlines()[-1])
    findings = [(flag["kind"], flag["evidence"]) for flag in facts["flags"]]
    seconds = round(time.perf_counter() - began, 1)
    return row | {key: facts[key] for key in ("reward", "solved", "why")} | {"findings": findings, "seconds": seconds}


def places(name: str, body: Body) -> tuple[str, ...]:
    """A body of no task of its own goes on two: one whose expected values can be hidden, and one whose can not."""
    if body.targets:
        return body.targets
    at = list(BODIES).index(name)
    return tuple(group[at % len(group)] for group in GENERIC)


def table(rows: list[dict[str, Any]], kind: str) -> None:
    paid = [row["body"] for row in rows if (row["reward"] or 0) > 0]
    failed = sum(row["reward"] is None for row in rows)
    bodies = len({row["body"] for row in rows})
    print(
        f"{kind}: {bodies} bodies, {len(rows)} gradings, {len(paid)} paid of {len(set(paid))} bodies, {failed} failed"
    )
    for name in sorted(set(paid)):
        print(f"    {name}: {', '.join(row['target'] for row in rows if row['body'] == name and row['reward'])}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--targets", nargs="*", default=[])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=1)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = json.loads(options.out.read_text()) if options.out.exists() else []
    done = {(row["body"], row["target"]) for row in rows} if options.repeat == 1 else set()
    todo = []
    for name in options.only or BODIES:
        for place in options.targets or places(name, BODIES[name]):
            if not (options.tasks / TARGETS[place].task).is_dir():
                print(f"{name} on {place}: there is no such task")
            elif (name, place) not in done:
                todo += [(name, BODIES[name], place, options.tasks)] * options.repeat
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("fork"), max_tasks_per_child=None) as pool:
        for number, future in enumerate(as_completed([pool.submit(judged, *each) for each in todo]), 1):
            row = future.result()
            rows.append(row)
            options.out.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")
            kinds = [kind for kind, _ in row.get("findings", [])]
            print(f"{number}/{len(todo)} {row['body']} on {row['target']}: {row['reward']} {kinds}", flush=True)
    for bodies in (FIRST, second.BODIES, honest.BODIES):
        for kind in sorted({body.kind for body in bodies.values()}):
            table([row for row in rows if row["body"] in bodies and row["kind"] == kind], kind)
        table([row for row in rows if row["body"] in bodies], "all")


if __name__ == "__main__":
    main()
