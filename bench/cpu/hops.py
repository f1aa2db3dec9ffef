"""How far a reader has to go: hops from `offbook train` to the next policy version, and what each room holds.

One training step of the pocket model runs in this process under a profile hook, from the verb to the second load of
weights into the engine. A hop is a function that is entered from another file by a room on that way: cli, loop, engine,
algo, rewards, train. However often and from wherever it is called, a reader goes there once. The other rooms (harness,
sandbox, tasks, tokens, feedback, monitors) are called by a name that says what they do: the way in is a hop, and what
lies behind it is not. Nor are accessors (properties, dunders, lambdas), the helpers of types.py, config.py and
runfolder.py, callbacks into the rooms that a call came from, and what the event loop calls. A call that passes through
another library, such as torch, counts for the function of ours before it.

    python bench/cpu/hops.py [--json FILE]        # PYTHONPATH=OTHER/src for another tree
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import inspect
import json
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import offbook

PACKAGE = Path(offbook.__file__).parent
EVENT_LOOP = Path(asyncio.__file__).parent
WAY = ("cli", "rl", "engine", "train/algorithms.py", "signals/rewards", "train")
SMALL = ("--train.groups", "2", "--train.group_size", "4")
LEAVES = ("types.py", "core/runfolder.py")
WEIGHTS = ("load_weights", "apply", "apply_weights")  # of the engine: where a policy version begins
Function = tuple[str, str]  # its file, from the package's folder, and its name there


class Stop(BaseException):
    """The next policy version is there."""


class Recorder:
    """Which function of ours called which."""

    def __init__(self) -> None:
        self.calls: set[tuple[Function, Function]] = set()
        self.entered: set[Function] = set()
        self.loads = 0
        self._known: dict[CodeType, Function | None] = {}

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or (function := self._ours(frame.f_code)) is None:
            return
        self.entered.add(function)
        if function[0].startswith("engine/") and function[1].rpartition(".")[2] in WEIGHTS:
            self.loads += 1
            if self.loads == 2:
                raise Stop
        caller = frame.f_back
        while caller is not None and (of := self._ours(caller.f_code)) is None:
            caller = None if EVENT_LOOP in Path(caller.f_code.co_filename).parents else caller.f_back
        if caller is not None and of is not None:
            self.calls.add((of, function))

    def _ours(self, code: CodeType) -> Function | None:
        if code not in self._known:
            path = Path(code.co_filename)
            # Bodies of modules and classes run when they are imported: nobody calls them.
            ours = PACKAGE in path.parents and code.co_flags & inspect.CO_OPTIMIZED
            # What is written inside a function is that function's.
            name = code.co_qualname.partition(".<locals>")[0]
            self._known[code] = (path.relative_to(PACKAGE).as_posix(), name) if ours else None
        return self._known[code]


def room(file: str) -> str:
    """Its folder at the top, or one below that is a room on the way of its own."""
    inner = "/".join(file.split("/")[:2])
    return inner if inner in WAY else file.partition("/")[0]


def accessors() -> set[Function]:
    """Properties and dunders."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            for method in node.body if isinstance(node, ast.ClassDef) else ():
                if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef):
                    marks = {ast.unparse(mark).rpartition(".")[2] for mark in method.decorator_list}
                    if marks & {"property", "cached_property"} or method.name.startswith("__"):
                        found.add((path.relative_to(PACKAGE).as_posix(), f"{node.name}.{method.name}"))
    return found


def hops_of(calls: set[tuple[Function, Function]]) -> set[tuple[Function, Function]]:
    """Those that a reader follows, with where from."""
    skipped = accessors()
    return {
        (caller, function)
        for caller, function in calls
        if caller[0] != function[0] and room(caller[0]) in WAY
        if function not in skipped and not function[1].endswith("<lambda>")
        if function[0] not in LEAVES and not is_callback(room(caller[0]), room(function[0]))
    }


def is_callback(caller: str, called: str) -> bool:
    return called in WAY[:2] and WAY.index(caller) > WAY.index(called)


def record() -> Recorder:
    """A first run makes the model and the tasks, so that making them is not counted."""
    from offbook.cli import app

    recorder = Recorder()
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["train", "--model", "pocket", *SMALL, "--out"]
        app([*arguments, f"{folder}/first", "--train.steps", "1"], standalone_mode=False)
        threading.setprofile(recorder)
        sys.setprofile(recorder)
        try:
            app([*arguments, f"{folder}/second", "--train.steps", "2"], standalone_mode=False)
        except Stop:
            pass
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]
    return recorder


def rooms() -> dict[str, dict[str, int]]:
    """Lines, files and public names (functions and classes of a module) of each room."""
    found: dict[str, Counter[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        file = path.relative_to(PACKAGE).as_posix()
        text = path.read_text()
        public = [
            node
            for node in ast.parse(text).body
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.name.startswith("_")
        ]
        of_room = found.setdefault(room(file), Counter())
        of_room.update({"lines": text.count("\n"), "files": 1, "public names": len(public)})
    return {name: dict(counts) for name, counts in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--list", action="store_true", help="every hop")
    arguments = parser.parse_args()
    recorder = record()
    hops, sizes = hops_of(recorder.calls), rooms()
    figures = {
        "hops": len({function for _, function in hops}),
        "files on the way": len({function[0] for pair in hops for function in pair}),
        "functions entered, of all rooms": len(recorder.entered),
        "files entered, of all rooms": len({file for file, _ in recorder.entered}),
        **{f"{key} in all": sum(size[key] for size in sizes.values()) for key in ("lines", "files", "public names")},
    }
    for (caller, name), (file, function) in sorted(hops) if arguments.list else ():
        print(f"{caller}:{name} -> {file}:{function}")
    print("| | |\n|---|---:|")
    print("\n".join(f"| {key} | {value} |" for key, value in figures.items()))
    into = Counter(room(file) for file, _ in {function for _, function in hops})
    print("\n| room | hops into it | lines | files | public names |\n|---|---:|---:|---:|---:|")
    for name, size in sizes.items():
        print(f"| {name} | {into[name]} | {size['lines']} | {size['files']} | {size['public names']} |")
    if arguments.json:
        listed = [[*caller, *function] for caller, function in sorted(hops)]
        arguments.json.write_text(json.dumps({**figures, "rooms": sizes, "each": listed}, indent=1) + "\n")


if __name__ == "__main__":
    main()
