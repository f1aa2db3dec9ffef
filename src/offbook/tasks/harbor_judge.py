"""The judge of a task folder, for wherever it is run: python3 -I judge.py APP LOGS

What counts of the agent's files is copied onto the tree as it was, together with the hidden tests, all of it in memory:
while tests run, nothing of it can be read but the one tree of the round. Tests run in
processes of another user, each round in a tree of its own and with none of them left when it is over. What they report
is judged here, as in grade.py, and the reward is written last. Standard library only, and
the modules copied next to this.
"""

from __future__ import annotations

import io
import json
import os
import pathlib
import random
import secrets
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

if TYPE_CHECKING:
    from offbook.tasks import judging, mutants
    from offbook.tasks.inside.rounds import end_children
    from offbook.tasks.suite_run import Round, SuiteRun, has_begun, runs_of
else:
    import judging
    import mutants
    from suite_run import Round, SuiteRun, has_begun, runs_of
    from worker import end_children

TIMEOUT_S = 280.0
BIGGEST = 4 << 20  # bytes of a source file
DUMPABLE = 4  # of prctl
SUBREAPER = 36


def main(app: str, logs: str) -> None:
    reward = pathlib.Path(logs)
    reward.mkdir(parents=True, exist_ok=True)
    expected = json.loads((HERE / "expected.json").read_text())
    with tempfile.TemporaryDirectory(prefix="judge-") as place:
        os.chmod(place, 0o755)
        result = judge(pathlib.Path(app), pathlib.Path(place), expected)
    why = result.invalid or f"{len(result.missing)} expected tests do not pass: {min(result.missing, default='')}"
    print("solved" if result.solved else why)
    for name in ("reward.txt", "reward.json"):  # no process is left that could write there
        (reward / name).unlink(missing_ok=True)
    (reward / "reward.txt").write_text(f"{int(result.solved)}\n")


def judge(app: pathlib.Path, place: pathlib.Path, expected: dict[str, Any]) -> judging.Judged:
    hidden = HERE.parent / "hidden"
    plan = judging.plan(
        expected["fail_to_pass"], expected["pass_to_pass"], hidden, mutants.read_mutants(HERE.parent), TIMEOUT_S
    )
    base = place / "base"
    with tarfile.open(HERE / "tree.tar.gz") as archive:
        archive.extractall(base)
    submit(app, base, expected["sources"])
    shutil.copytree(hidden, base, dirs_exist_ok=True)
    for path in plan.replaced:  # every round brings these itself
        (base / path).unlink()
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        archive.add(base, ".")
    shutil.rmtree(base)
    worker = (HERE / "worker.py").read_text()
    with out_of_sight(HERE.parent):
        runs = [
            run(number, one, packed, place, {**expected, "worker": worker}) for number, one in enumerate(plan.rounds)
        ]
    return judging.judged(plan, runs)


@contextmanager
def out_of_sight(tests: pathlib.Path) -> Iterator[None]:
    """While tests run, no other user can read this folder. Where they run as this user, it is taken into memory and put
    back at the end."""
    mode = tests.stat().st_mode
    if another_user() is not None:
        tests.chmod(0o700)
        try:
            yield
        finally:
            tests.chmod(mode)
        return
    kept = {path: (path.stat().st_mode, path.read_bytes()) for path in tests.rglob("*") if path.is_file()}
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))  # so that it is put back
    try:
        for path in kept:
            path.unlink()
        yield
    finally:
        for path, (bits, data) in kept.items():
            if not path.exists():
                path.write_bytes(data)
                path.chmod(bits)


def submit(app: pathlib.Path, base: pathlib.Path, sources: list[str]) -> None:
    """The agent's version of the product's source files. No link is followed."""
    found = set()
    for folder, names, files in os.walk(app):
        names[:] = [name for name in names if not os.path.islink(os.path.join(folder, name)) and name != ".git"]
        for name in files:
            path = os.path.join(folder, name)
            relative = os.path.relpath(path, app).replace(os.sep, "/")
            plain = os.path.isfile(path) and not os.path.islink(path) and os.path.getsize(path) <= BIGGEST
            if plain and judging.is_counted(relative, sources):
                found.add(relative)
                (base / relative).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, base / relative)
    for file in [*base.rglob("*.py")]:
        relative = file.relative_to(base).as_posix()
        if judging.is_counted(relative, sources) and relative not in found:
            file.unlink()


def run(number: int, one: Round, base: io.BytesIO, place: pathlib.Path, expected: dict[str, Any]) -> SuiteRun:
    """One round, in a tree and with a user of its own. Nothing of the tree is left."""
    tree = place / f"{number}-{secrets.token_hex(4)}"
    base.seek(0)
    with tarfile.open(fileobj=base) as archive:
        archive.extractall(tree)
    user = another_user()
    names = [f".order-{secrets.token_hex(16)}" for _ in range(2)]
    order = {
        **expected["settings"],
        "rounds": names[1:],
        "sources": [],
        "product": [],
        "places": [],
        "max_tests": 10**6,
    }
    (tree / names[0]).write_text(json.dumps(order))
    (tree / names[1]).write_text(one.order(expected["options"]))
    if user is not None:
        for folder, _, files in os.walk(tree):
            for path in (folder, *(os.path.join(folder, name) for name in files)):
                os.chown(path, user, user, follow_symlinks=False)
    environment = {"PATH": os.environ.get("PATH", os.defpath), "HOME": str(tree), "PYTHONHASHSEED": "0", "TZ": "UTC"}
    worker = [sys.executable, "-I", "-B", "-c", expected["worker"], names[0]]
    reading, writing = os.pipe()
    # A shell puts the pipe where the worker looks for it, and runs what the tests need first.
    start = f"(\n{expected['start']}\n) 3>&- || exit 1\n" if expected["start"] else ""
    script = f'{start}exec 3>&{writing} {writing}>&-\nexec "$@"'
    process = subprocess.Popen(
        ["/bin/bash" if writing > 9 else "/bin/sh", "-c", script, "judge", *worker],
        cwd=tree, env=environment, pass_fds=(writing,), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, start_new_session=True, user=user, group=user, extra_groups=[] if user else None,
    )  # fmt: skip
    os.close(writing)
    report, timed_out = read(reading, process, time.monotonic() + one.timeout_s)
    end_children()  # this process is the last parent of all that a round started
    process.poll()
    shutil.rmtree(tree, ignore_errors=True)
    if not has_begun(report):  # no fault of the agent's, and so no reward
        what = "the task's start command or pytest" if expected["start"] else "pytest"
        sys.exit(f"the tests cannot be run here: {what} did not start on {sys.executable}")
    (result,) = runs_of(report, 1, "", timed_out)
    return result


def another_user() -> int | None:
    """A user id whose processes cannot touch ours; None if we are not root or other users have no Python."""
    user = random.SystemRandom().randrange(200_000, 900_000)
    return user if os.getuid() == 0 and has_python(65534) else None


@cache
def has_python(user: int) -> bool:
    try:
        command = [sys.executable, "-I", "-c", "import pytest"]
        probe = subprocess.run(command, user=user, group=user, extra_groups=[], capture_output=True, cwd="/")
    except OSError:
        return False
    return probe.returncode == 0


def read(descriptor: int, process: subprocess.Popen[bytes], deadline: float) -> tuple[str, bool]:
    """What is written until the process ends. Its children do not have to."""
    os.set_blocking(descriptor, False)
    data = b""
    is_over = False
    while time.monotonic() < deadline:
        try:
            more = os.read(descriptor, 1 << 16)
        except BlockingIOError:
            more = b""
        data += more
        if not more and is_over:
            break
        if not more:
            is_over = process.poll() is not None
            time.sleep(0.005)
    os.close(descriptor)
    return data.decode(errors="replace"), not is_over


if __name__ == "__main__":
    import ctypes

    ctypes.CDLL(None).prctl(DUMPABLE, 0, 0, 0, 0)  # our memory is not to be had through /proc
    ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)  # what a test leaves running becomes a child of this process
    main(*sys.argv[1:])
