"""The agent as a person uses it: on a real git repository, with a diff, a yes, and a later look at what is left."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import Callable
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from scripted import Scripted
from starting import run
from test_loop import environment

from offbook.agent.chat import byte_chat, render_call
from offbook.cli import agent as cli
from offbook.cli.options import shown
from offbook.core.config import Config, load_config
from offbook.core.runfolder import write_atomic
from offbook.live import agent
from offbook.live.agent import Elsewhere, Worked, apply, copy_of, work
from offbook.live.cycle import Cycle
from offbook.live.reactions import score
from offbook.live.sessions import Decision, kept_in, lines_of
from offbook.rl.collector import Collector
from offbook.sandbox.sandbox import CHANGED_BYTES

SHAPES = """def area(width, height):
    return width * height


def border(width, height):
    raise NotImplementedError
"""
OLD, NEW = (
    "    raise NotImplementedError",
    "    longest = max(width, height)\n    return 2 * (width + height) + 0 * longest",
)


def git(repository: Path, *arguments: str) -> str:
    names = ("-c", "user.name=Ada", "-c", "user.email=ada@example.org")
    done = subprocess.run(["git", "-C", repository, *names, *arguments], capture_output=True, text=True, check=True)
    return done.stdout


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """With a file that is ignored, one that is not tracked, and a script that may be run."""
    root = tmp_path / "shapes"
    root.mkdir()
    (root / "shapes.py").write_text(SHAPES)
    (root / "run.sh").write_text("python shapes.py\n")
    (root / "run.sh").chmod(0o755)
    (root / ".gitignore").write_text(".env\n")
    git(root, "init", "--quiet", "--initial-branch=main")
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message", "Shapes")
    (root / ".env").write_text("PASSWORD=hunter22\n")
    (root / "notes.txt").write_text("not tracked\n")
    return root


def call(name: str, **arguments: Any) -> str:
    return render_call(name, arguments)


EDIT = call("edit_file", path="shapes.py", old=OLD, new=NEW)
DONE = call("finish", message="border in shapes.py adds up the sides.")


def asked(repository: Path, *answers: str) -> Worked:
    config = Config.model_validate({"model": "http://nowhere", "engine": {"kind": "continuous"}})

    async def main() -> Worked:
        engine = Scripted(byte_chat(), [*answers])
        async with aclosing(Collector(config, None, "m", lent=engine)) as collector:  # type: ignore[arg-type]
            return await work(collector, repository, "Write border in shapes.py.", "one")

    return asyncio.run(main())


def test_the_agent_works_on_a_copy_and_sees_what_git_would(repository: Path) -> None:
    listing = call("list_dir", path=".")
    worked = asked(repository, listing, EDIT, call("run_command", command="rm notes.txt; printf x >> run.sh"), DONE)
    assert (repository / "shapes.py").read_text() == SHAPES
    shown = worked.rollout.segments[0].messages[3].text.split()
    assert shown == [".gitignore", "notes.txt", "run.sh", "shapes.py"], "neither .env nor .git"
    assert "+    return 2 * (width + height)" in worked.rollout.diff
    assert apply(worked, repository) == ["notes.txt", "run.sh", "shapes.py"]
    assert NEW in (repository / "shapes.py").read_text()
    assert os.access(repository / "run.sh", os.X_OK), "what it could be run by stays"
    assert not (repository / "notes.txt").exists()


def test_a_folder_of_a_repository_keeps_its_secrets(repository: Path) -> None:
    (repository / "part").mkdir()
    (repository / "part" / "code.py").write_text("x = 1\n")
    (repository / "part" / ".env").write_text("KEY=1\n")
    with (repository / ".gitignore").open("a") as ignored:
        ignored.write(".env\n")
    with copy_of(repository / "part") as tree:
        assert [path.name for path in tree.iterdir()] == ["code.py"]


@pytest.mark.parametrize(
    ("path", "request_", "says"), [("nowhere", "Fix it", "not a folder"), (".", "  ", "say where")]
)
def test_bad_input_is_refused_before_a_model_is_made(path: str, request_: str, says: str, tmp_path: Path) -> None:
    done = run("agent", path, request_, "--out", "live", cwd=tmp_path, env=environment(tmp_path / "cache"))
    assert done.returncode == 1
    assert says in done.stderr
    assert not (tmp_path / "live").exists()
    assert not (tmp_path / "cache").exists()


def test_what_changed_meanwhile_is_not_overwritten(repository: Path) -> None:
    worked = asked(repository, EDIT, call("edit_file", path="run.sh", old="shapes", new="forms"), DONE)
    (repository / "shapes.py").write_text("# mine\n")
    with pytest.raises(Elsewhere, match=r"shapes\.py changed while the agent worked; nothing was applied"):
        apply(worked, repository)
    assert (repository / "run.sh").read_text() == "python shapes.py\n"


def test_what_cannot_be_written_leaves_nothing_applied(repository: Path) -> None:
    new = call("run_command", command="mkdir zz; echo x > zz/new.py")
    worked = asked(repository, EDIT, call("edit_file", path="run.sh", old="shapes", new="forms"), new, DONE)
    assert [*worked.rollout.changed][-1] == "zz/new.py"
    before = {name: (repository / name).read_text() for name in ("shapes.py", "run.sh")}
    (repository / "zz").write_text("a file where a folder is to be\n")
    with pytest.raises(Elsewhere, match=r"zz/new\.py: .*; nothing was applied"):
        apply(worked, repository)
    assert {name: (repository / name).read_text() for name in before} == before


def contents(root: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in root.rglob("*") if file.is_file() and ".git" not in file.parts}


def test_what_fails_halfway_is_taken_back(repository: Path) -> None:
    """A name that has no room for what is written beside it; the files before it are as they were, with their modes."""
    long = "z" * 254
    worked = asked(repository, EDIT, call("run_command", command=f"rm run.sh; echo x > a.py; echo x > {long}"), DONE)
    before = contents(repository)
    with pytest.raises(Elsewhere, match=r"too long.*; nothing was applied"):
        apply(worked, repository)
    assert contents(repository) == before
    assert os.access(repository / "run.sh", os.X_OK)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_lost_where_it_is_ended_in_between(repository: Path, number: int) -> None:
    worked = asked(repository, EDIT, call("edit_file", path="run.sh", old="shapes", new="forms"), DONE)
    before = contents(repository)
    child = os.fork()
    if not child:
        signal.signal(signal.SIGINT, signal.SIG_DFL)

        def ended(path: Path, data: bytes | str) -> None:
            write_atomic(path, data)
            if path.name == "run.sh":
                signal.raise_signal(number)

        agent.write_atomic = ended
        apply(worked, repository)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == number
    after = contents(repository)
    assert {*before.values()} <= {*after.values()}, "what was overwritten lies beside it"


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("sed -i s/name/Name/ latin.txt", "latin.txt is not text in UTF-8"),
        ("printf '\\377\\376' > new.bin", "new.bin is not text in UTF-8"),
        ("mkdir -p lib/.git; echo x > lib/.git/config", "lib/.git/config is git's own"),
        ("rm notes.txt; mkdir notes.txt; echo x > notes.txt/a", "notes.txt is no folder"),
        ("sed -i 1s/name/Name/ large.csv", "large.csv: not text, or too large to be kept whole"),
        ("printf 'a\\000b' > data.bin", "data.bin: not text, or too large to be kept whole"),
    ],
)
def test_what_would_spoil_something_is_not_applied(repository: Path, command: str, says: str) -> None:
    (repository / "latin.txt").write_bytes("name caf\u00e9\n".encode("latin-1"))
    (repository / "large.csv").write_text("name\n" + "1,2,3\n" * (CHANGED_BYTES // 6 + 1))
    before = contents(repository)
    worked = asked(repository, EDIT, call("run_command", command=command), DONE)
    with pytest.raises(Elsewhere, match=f"{says}.*; nothing was applied"):
        apply(worked, repository)
    assert contents(repository) == before


def test_lines_that_end_otherwise_stay_as_they_are(repository: Path) -> None:
    (repository / "dos.txt").write_bytes(b"one\r\ntwo\r\nthree")
    worked = asked(repository, call("run_command", command="sed -i s/two/2/ dos.txt"), DONE)
    assert lines_of(worked.rollout).count == 2, "one was added and one removed"
    apply(worked, repository)
    assert (repository / "dos.txt").read_bytes() == b"one\r\n2\r\nthree"


def test_nothing_that_is_shown_speaks_to_the_terminal() -> None:
    assert shown("+a\x1b[2K\x9b1A\u202eb\n\t+c\r\n") == "+a\\x1b[2K\\x9b1A\\u202eb\n\t+c\r\n"


def _format(file: Path) -> None:
    file.write_text(file.read_text().replace("0 * longest", "0*longest").replace("    return", "        return"))


@pytest.mark.parametrize(
    ("afterwards", "kept"),
    [
        (lambda root: None, 1.0),
        (lambda root: git(root, "checkout", "--", "shapes.py"), 0.0),
        (lambda root: _format(root / "shapes.py"), 1.0),
        (lambda root: (git(root, "commit", "-qam", "border"), git(root, "revert", "--no-edit", "HEAD")), 0.0),
        (
            lambda root: (root / "shapes.py").write_text(
                (root / "shapes.py")
                .read_text()
                .replace("    longest = max(width, height)\n", "")
                .replace(" + 0 * longest", "")
            ),
            1 / 3,  # one line is gone, one was rewritten, and what it had removed stays away
        ),
        (lambda root: (root / "shapes.py").unlink(), 1 / 3),
    ],
    ids=["left alone", "checked out", "formatted", "reverted", "rewritten", "deleted"],
)
def test_kept_lines_are_measured_from_git(repository: Path, afterwards: Callable[[Path], object], kept: float) -> None:
    worked = asked(repository, EDIT, DONE)
    apply(worked, repository)
    lines = lines_of(worked.rollout)
    assert {path: len(each) for path, each in lines.added.items()} == {"shapes.py": 2}
    afterwards(repository)
    assert kept_in(repository, lines) == pytest.approx(kept)


def test_the_verb_keeps_nothing_unless_told_otherwise(cache: Path, model: Path, repository: Path) -> None:
    """With a half-made pocket model, which changes something or does not; what is kept and shown is the same."""
    out = repository.parent / "live"
    begin = ["agent", repository, "Write the body of border in shapes.py.", "--out", out, "--yes", "--json"]

    def offbook(*arguments: str | Path) -> Any:
        done = run(*arguments, cwd=repository.parent, env=environment(cache))
        assert done.returncode == 0, done.stderr
        return done.stdout

    first = json.loads(offbook(*begin, "--model", model))
    assert (first["stored"], (out / "sessions").exists()) == (False, False)
    second = json.loads(offbook(*begin, "--live.consent", "all"))
    stored = json.loads((out / "sessions" / f"{second['session']}.json").read_text())
    assert "border" in stored["rollout"]["segments"][0]["messages"][1]["text"]
    assert load_config([out / "config.toml"], {}).live.consent == "none", "of whoever says nothing"
    assert offbook("agent", "--out", out, "--say", "No, that is wrong.") == f"{second['session']}: noted\n"
    offbook("agent", "--out", out, "--thumb", "down", "--session", second["session"])
    stored = json.loads((out / "sessions" / f"{second['session']}.json").read_text())
    assert [(one["kind"], one["value"]) for one in stored["reactions"]][-2:] == [("follow_up", -1.0), ("thumbs", -1.0)]
    assert offbook("agent", "--out", out, "--forget", "all") == "1 sessions deleted\n"
    assert not [*(out / "sessions").iterdir()]


def test_an_interrupted_request_is_a_reaction(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What there is of it stays, and nothing is applied."""
    sections = {"engine": {"kind": "continuous"}, "live": {"consent": "all"}}
    out = str(repository.parent / "live")
    cycle = Cycle(Config.model_validate({"model": "http://nowhere", "out": out, **sections}))
    cycle.folder.decide(Decision("start", "", deployed=0, version=0, path="nowhere"))
    engine = Scripted(byte_chat(), [EDIT, KeyboardInterrupt()])
    scripted = partial(Collector, remote_name="m", lent=engine)
    monkeypatch.setattr("offbook.rl.collector.Collector", lambda config, weights: scripted(config, None))
    cli._work(cycle, repository, "Write border in shapes.py.", "user", yes=True, as_json=True)
    (one,) = cycle.folder.sessions()
    assert (one.place, [reaction.kind for reaction in one.reactions]) == ("", ["interrupted"])
    assert score(one, cycle.settings).rollout.reward.parts["interrupted"] == -1.0
    assert (repository / "shapes.py").read_text() == SHAPES
