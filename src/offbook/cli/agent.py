"""A model in use: offbook agent by people, offbook serve by other agents; offbook live learns from both."""

from __future__ import annotations

import asyncio
import getpass
import json
import os
import secrets
import signal
import sys
import time
from contextlib import aclosing, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from offbook.cli.options import (
    Json,
    Model,
    Name,
    Out,
    argument,
    config_from,
    console,
    note,
    option,
    progress_display,
    results,
    say,
    shown,
)
from offbook.types import OffbookError, Rollout

if TYPE_CHECKING:
    from offbook.engine import Engine
    from offbook.engine.sync import Reader
    from offbook.live.agent import Worked
    from offbook.live.cycle import Cycle
    from offbook.live.sessions import LiveFolder


def agent(
    ctx: typer.Context,
    path: Annotated[Path, argument("The folder to work in; best a git repository.")] = Path("."),
    request: Annotated[str, argument("What is to be done.")] = "",
    model: Annotated[str, option("Of a new --out: `pocket`, a run or model folder, a hub id.")] = "",
    out: Annotated[str, option("The folder of `offbook live`; its deployed version is used.")] = "runs/live",
    yes: Annotated[bool, option("Apply the changes without asking.", "--yes")] = False,
    say_: Annotated[str, option("Say something about an earlier session.", "--say")] = "",
    thumb: Annotated[Literal["up", "down"] | None, option("Rate an earlier session.")] = None,
    session: Annotated[str, option("The session of --say and --thumb; your last one if not given.")] = "",
    forget: Annotated[str, option("Delete a session, or `all` of the user's.")] = "",
    user: Annotated[str, option("The user's name; only a digest is stored.")] = "",
    as_json: Json = False,
) -> None:
    """Let the agent do something in a folder. It works in a sandbox on a copy; the diff is applied on yes.

    The session is kept with --live.consent all, without secrets. Takes configuration like `train` does; a folder of
    `offbook live` has its own.

    For example: offbook agent . "Fix the failing test"
    """
    config = config_from(ctx, {"out": out, "model": model}, [Path(out) / "config.toml"], {"model": "pocket"})
    from offbook.live.sessions import LiveFolder, refuse_no_folder, user_digest

    who = user_digest(user or getpass.getuser())
    folder = LiveFolder(config.out)
    if forget or say_ or thumb:
        _about_earlier(folder, who, session, say_, thumb, forget)
        return
    if not request.strip():
        raise OffbookError('say where and what is to be done, as in: offbook agent . "Fix the failing test"')
    refuse_no_folder(path)
    if not folder.decisions_file.is_file():
        from offbook.rl.checks import refuse_missing_model

        refuse_missing_model(config.model)
    from offbook.live.cycle import Cycle  # with it comes torch, which takes seconds

    with progress_display() as progress:
        cycle = Cycle(config, progress=progress)
        cycle.begin()
    _work(cycle, path, request, who, yes, as_json)


def _about_earlier(folder: LiveFolder, who: str, id: str, said: str, thumb: str | None, forget: str) -> None:
    from offbook.live.reactions import follow_up
    from offbook.live.sessions import Reaction

    own = [one for one in folder.sessions() if one.user == who]
    if forget:
        chosen = [one.id for one in own if forget in ("all", one.id)]
        if not chosen and forget != "all":
            raise OffbookError(f"{folder.path} has no session {forget} of yours")
        print(f"{folder.forget(chosen)} sessions deleted")
        return
    if not id and not own:
        raise OffbookError(f"{folder.path} has no session of yours; --session names another")
    id = id or own[-1].id
    if said:
        folder.react(id, follow_up(said))
    if thumb:
        folder.react(id, Reaction("thumbs", 1.0 if thumb == "up" else -1.0))
    print(f"{id}: noted")


def _work(cycle: Cycle, path: Path, request: str, who: str, yes: bool, as_json: bool) -> None:
    from offbook.live.agent import Worked, apply, session_of, work
    from offbook.live.reactions import score
    from offbook.live.sessions import Reaction
    from offbook.rl.collector import Collector

    version, settings = cycle.last.deployed, cycle.settings
    collector = Collector(cycle.config, cycle.folder.weights(version))
    so_far: list[Rollout] = []

    def watch(rollout: Rollout, over: bool) -> None:
        so_far[:] = [rollout]
        own = [one for segment in rollout.segments[-1:] for one in segment.messages if one.role == "assistant"]
        for call in own[-1].calls if own else ():
            words = " ".join(str(value).split("\n")[0][:60] for value in call.arguments.values())
            say(f"  {call.name} {words}", "dim", console)

    is_over, accepted = True, None
    try:
        worked = asyncio.run(work(collector, path, request, secrets.token_hex(6), watch))
        accepted = _accepted(worked, path, yes, as_json)
        if accepted:
            apply(worked, path)
    except KeyboardInterrupt:  # the session ends with what there is
        if not so_far:
            raise
        so_far[0].stop = "wall"
        is_over, worked = False, Worked(so_far[0], {})
    session = session_of(worked, path, request, who, version, accepted)
    if not is_over:
        session.reactions.append(Reaction("interrupted", at=session.at))
    stored = cycle.folder.keep(score(session, settings), settings, collector.chat)
    rollout, changed = session.rollout, sorted(session.rollout.changed)
    if as_json:
        result = {"session": session.id, "version": version, "stop": rollout.stop, "changed": changed}
        print(json.dumps({**result, "applied": accepted is True, "diff": rollout.diff, "stored": stored is not None}))
        return
    what = f"{'applied to' if accepted else 'changed, not applied:'} {', '.join(changed)}" if changed else "no change"
    print(f"{session.id}: {what}; the session is {'kept' if stored else 'not kept'}")


def _accepted(worked: Worked, path: Path, yes: bool, as_json: bool) -> bool | None:
    """Show the diff; whether to apply it, or None without an answer."""
    from rich.syntax import Syntax

    from offbook.signals.trajectory import Trajectory

    if not as_json:
        if words := Trajectory(worked.rollout).final:
            say(words)
        if worked.rollout.diff:
            results.print(Syntax(shown(worked.rollout.diff), "diff", background_color="default"))
    if not worked.rollout.changed:
        return None
    if yes:
        return True
    if not sys.stdin.isatty():
        note("nothing was applied: give --yes, or answer at a terminal")
        return None
    with suppress(EOFError):
        return console.input(f"apply to {path}? [y/N] ", markup=False).strip().lower() in ("y", "yes")
    return None


LOOK_S = 60.0  # between two looks for what is due


def live(
    ctx: typer.Context,
    model: Annotated[str, option("To begin with: `pocket`, a run or model folder, a hub id.")] = "",
    out: Out = "",
    once: Annotated[bool, option("Do what is due and stop.", "--once")] = False,
    hints: Annotated[
        bool, option("List the complaints for the next cycle and which of them teach.", "--hints")
    ] = False,
    approve: Annotated[list[str] | None, option("The id of a complaint (--hints) that may teach; repeatable.")] = None,
    as_json: Json = False,
) -> None:
    """Learn from use: train on settled sessions, gate, deploy, roll back. Until Ctrl-C.

    `offbook agent` and `offbook serve` make sessions. Every decision is in decisions.jsonl; `offbook view` shows them.
    Takes configuration as `train` does; a cycle that has begun has its own.

    For example: offbook live --model pocket --out runs/live --once
    """
    place = Path(out or "runs/live")
    config = config_from(ctx, {"out": str(place), "model": model}, [place / "config.toml"], {"model": "pocket"})
    from offbook.core.runfolder import RunFolder, only_writer, write_atomic
    from offbook.live.cycle import Cycle

    RunFolder(place).refuse_file()
    with progress_display() as progress:
        cycle = Cycle(config, note, progress)
        if approve:
            _approve(cycle, approve)
        if hints or approve:
            found = json.dumps({"folder": str(cycle.folder.path), "complaints": cycle.complaints()})
            print(found) if as_json else results.print_json(found)
            return
        with only_writer(place):
            cycle.begin()
            write_atomic(place / "config.toml", config.to_toml())
            _run(cycle, once)
    if as_json:
        print(json.dumps(asdict(cycle.last)))


def _run(cycle: Cycle, once: bool) -> None:
    said = ""
    while True:
        while cycle.turn():
            pass
        line = f"nothing more is due: {cycle.waits_for()}"
        if said != line:
            note(line)
        said = line
        if once:
            return
        time.sleep(LOOK_S)


def _approve(cycle: Cycle, ids: list[str]) -> None:
    from offbook.live.reactions import refusal

    texts = {row["id"]: row["text"] for row in cycle.complaints()}
    for id in ids:
        if id not in texts:
            raise OffbookError(f"no complaint has the id {id}; `offbook live --hints` lists them")
        if refused := refusal(texts[id]):
            raise OffbookError(f"{id} cannot become a hint: {refused}")
        cycle.folder.approve([id])


SWEEP_S = 10.0
FOLLOW_S = 1.0  # between two looks for new weights
# The client decides when the work is done; sessions do not wait for each other.
DEFAULTS = {
    "out": "runs/serve",
    "engine.kind": "continuous",
    "harness.turns": "100000",
    "harness.tokens": "100000000",
}


def serve(
    ctx: typer.Context,
    model: Model = "",
    port: Annotated[int, option("On this machine alone; 0 is any that is free.", min=0, max=65535)] = 8630,
    name: Name = "",
    out: Out = "",
    idle_s: Annotated[float, option("Seconds after which an unused session ends.", "--idle-s", min=1)] = 3600.0,
    follow: Annotated[
        str, option("A store that a training run publishes to (loop.store): its newest weights are served.")
    ] = "",
    live: Annotated[
        Path | None, option("A folder of `offbook live`: users get its versions, and sessions go there.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Serve a model to any agent that takes a base URL, and keep every session as a rollout, until Ctrl-C.

    Speaks OpenAI's chat completions and responses, and Anthropic's messages. Takes configuration as `train` does.

    For example: offbook serve --model pocket --out runs/serve
    """
    if live and (model or follow):
        raise OffbookError("--live serves the versions of a cycle; leave out --model and --follow")
    own = {"model": model, "out": out}
    if live:  # the cycle's own limits are not for an endpoint
        own = {**DEFAULTS, "out": out or DEFAULTS["out"]}
    config = config_from(ctx, own, [live / "config.toml"] if live else (), {"model": "pocket", **DEFAULTS})
    if config.engine.kind == "lockstep":
        raise OffbookError("in lockstep all sessions would wait for the slowest agent: give --engine.kind continuous")
    from offbook.rl.checks import refuse_missing_model

    if not live:
        refuse_missing_model(config.model)
    from offbook.agent.recorder import Recorder
    from offbook.agent.serve.app import Serving, Sessions, listen, make_app
    from offbook.agent.serve.client import KEY, URL, agent_environment
    from offbook.core.runfolder import RunFolder, only_writer, write_atomic
    from offbook.engine.sync import Reader, open_store
    from offbook.live.serving import Versions, cycle_in
    from offbook.rl.collector import Collector
    from offbook.rl.models import local_or_remote

    reader = Reader(open_store(follow)) if follow else None
    folder = RunFolder(config.out)
    folder.refuse_file()
    if folder.checkpoints():
        raise OffbookError(f"{folder.path} holds a run that was trained; give another --out")
    listener = listen(port)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    owner = os.environ.get(KEY) or secrets.token_urlsafe(24)
    models: Versions | Collector
    with progress_display() as progress:
        if live:
            models = versions = Versions(cycle_in(live), config)
            sessions = Sessions(versions.make, versions.keep, owner, versions.cycle.folder.ids())
        else:
            models = collector = Collector(config, local_or_remote(config.model, name, config.seed, progress), name)
            engine = collector.engine  # loaded before the first request

            def make(rollout: Rollout) -> Recorder:
                return Recorder(rollout, collector.chat, engine.open, collector.limits, collector.harness.prices)

            ended = [rollout.id for rollout in folder.rollouts(0)[0]]
            sessions = Sessions(make, partial(folder.append_rollout, 0), owner, ended)

    async def run() -> None:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        write_atomic(folder.config_file, config.to_toml())
        async with aclosing(models), aclosing(Serving(make_app(sessions), listener)):
            following = asyncio.create_task(_follow(reader, engine)) if reader else None
            session, key = sessions.open()
            variables = agent_environment(url, key)
            if as_json:
                facts = {"url": url, "key": owner, "session": session.rollout.id, "env": variables}
                print(json.dumps(facts), flush=True)
            else:
                key_line = "" if os.environ.get(KEY) else f" {KEY}={owner}"  # a key that the user set is not printed
                print(f"{url}  (Ctrl-C ends it)\nfor its owner:\nexport {URL}={url}{key_line}")
                words = " ".join(f"{name}={value}" for name, value in variables.items())
                print(f"session {session.rollout.id} is open; for its agent:\nexport {words}", flush=True)
            try:
                while True:
                    await asyncio.sleep(SWEEP_S)
                    sessions.end_idle(idle_s)
            finally:
                if following:
                    following.cancel()
                sessions.end_idle(-1.0)  # all of them

    with only_writer(folder.path), suppress(KeyboardInterrupt, asyncio.CancelledError):  # how one leaves it
        asyncio.run(run())
    note(f"{live or config.out}: {sessions.num_kept} sessions kept")


async def _follow(reader: Reader, engine: Engine) -> None:
    """Take new weights between two tokens, while sessions are open."""
    said = ""
    while True:
        line = ""
        try:
            weights = await asyncio.to_thread(reader.poll)
            if weights is not None:
                await asyncio.to_thread(engine.apply, weights)
                line = f"serving the weights of step {weights.version}"
            elif not said:
                line = f"nothing is published in {reader.store} yet: the model is served as it is"
        except OffbookError as error:
            line = f"{error}; the current weights stay"
        if line and line != said:
            note(line)
            said = line
        await asyncio.sleep(FOLLOW_S)
