"""What Harbor needs to judge a task folder by itself: an image, and a judge in tests/ that is as strict as ours.

tests/test.sh starts tests/judge/judge.py, which is harbor_judge.py; next to it are copies of the modules that grading
uses, the expected results, and the original tree.
"""

from __future__ import annotations

import inspect
import io
import json
import os
import re
import sys
import tarfile
from functools import cache
from pathlib import Path

from offbook.tasks.suite import options_of, settings_of, worker_text
from offbook.types import Suite, Task, is_test_file

DOCKERFILE = """\
FROM python:{version}-slim
RUN apt-get update && apt-get install -y --no-install-recommends git patch && rm -rf /var/lib/apt/lists/*
COPY requirements.txt /requirements.txt
RUN pip install --no-cache-dir -r /requirements.txt
{modules}COPY repo /app
RUN ln -s /app /testbed
WORKDIR /app
{start}ENV PYTHONPATH={roots}
"""
# Stand-ins for what no index has, among the packages; and the start command that gets the tree ready.
MODULES_LINES = """\
COPY modules /modules
RUN cp -r /modules/. "$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
"""
START_LINES = """\
COPY start.sh /start.sh
RUN sh /start.sh
"""

TEST_SH = """\
#!/bin/sh
# Judges what is in /app and writes the reward, 1 or 0. Nothing of /app is imported by the judge or runs as its user.
exec python3 -I "$(dirname "$0")/judge/judge.py" /app /logs/verifier
"""
MODULES = ("suite_run", "blanks", "mutants", "judging")


def dockerfile(suite: Suite) -> str:
    """With the task's own version of Python."""
    roots = ":".join(os.path.normpath(f"/app/{root}") for root in suite.import_roots)
    return DOCKERFILE.format(
        version=python_version(suite),
        roots=roots,
        modules=MODULES_LINES if modules_of(suite) else "",
        start=START_LINES if suite.start else "",
    )


def modules_of(suite: Suite) -> Path | None:
    """A folder with modules that its environment has and that come from no index."""
    folder = suite.environment / "modules" if suite.environment else None
    return folder if folder and folder.is_dir() else None


def python_version(suite: Suite) -> str:
    found = sorted(suite.environment.glob("python/lib/python3.*")) if suite.environment else []
    return found[0].name.removeprefix("python") if found else f"{sys.version_info[0]}.{sys.version_info[1]}"


def write_judge(task: Task) -> None:
    """Into tests/, when the tree is there."""
    folder = task.folder / "tests" / "judge"
    folder.mkdir(parents=True, exist_ok=True)
    (folder.parent / "test.sh").write_text(TEST_SH)
    for name, data in _parts().items():
        (folder / name).write_bytes(data)
    expected = {
        "fail_to_pass": list(task.fail_to_pass),
        "pass_to_pass": list(task.pass_to_pass),
        "sources": list(task.sources),
        "start": task.suite.start,
        "options": options_of(task.suite),
        "settings": settings_of(task.suite),
    }
    (folder / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
    (folder / "tree.tar.gz").write_bytes(_packed(task.tree))


@cache
def _parts() -> dict[str, bytes]:
    """The judge, the worker, and the modules as they can be imported where there is no offbook."""
    here = Path(__file__)
    parts = {"worker.py": worker_text().encode(), "judge.py": here.with_name("harbor_judge.py").read_bytes()}
    for name in MODULES:
        text = here.with_name(f"{name}.py").read_text()
        text = text.replace("from offbook.types import is_test_file\n", f"\n\n{inspect.getsource(is_test_file)}\n")
        parts[f"{name}.py"] = re.sub(r"^from offbook\.tasks\.", "from ", text, flags=re.M).encode()
    return parts


def _packed(tree: Path) -> bytes:
    """The tree without its history, the same bytes for the same files."""

    def plain(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        if ".git" in member.name.split("/"):
            return None
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        member.mtime = 0
        return member

    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=6) as archive:
        archive.add(tree, ".", filter=plain)
    return packed.getvalue()
