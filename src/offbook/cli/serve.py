"""offbook serve: a model for your own agents, and a record of what they do."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
from contextlib import aclosing, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from offbook.cli.options import Json, Plain, config_from, note, progress_display
from offbook.types import OffbookError, Rollout

if TYPE_CHECKING:
    from offbook.engine import Engine
    from offbook.engine.sync import Reader

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
    model: Annotated[
        str, typer.Option(help="`pocket`, `smollm2-135m`, a run or model folder, a hub id, or a URL.")
    ] = "",
    port: Annotated[int, typer.Option(min=0, max=65535, help="On this machine alone; 0 is any that is free.")] = 8630,
    name: Annotated[str, typer.Option(help="The model's name, if --model is a URL.")] = "",
    out: Annotated[str, typer.Option(help="The run folder; runs/serve if not given.")] = "",
    idle_s: Annotated[
        float, typer.Option("--idle-s", min=1, help="Seconds after which an unused session ends.")
    ] = 3600.0,
    follow: Annotated[
        str, typer.Option(help="A store that a training run publishes to (loop.store): its newest weights are served.")
    ] = "",
    live: Annotated[
        Path | None, typer.Option(help="A folder of `offbook live`: users get its versions, and sessions go there.")
    ] = None,
    plain: Plain = False,
    as_json: Json = False,
) -> None:
    """Serve a model to any agent that takes a base URL, and keep every session as a rollout, until Ctrl-C.

    Speaks OpenAI's chat completions and responses, and Anthropic's messages. Takes configuration as `train` does.
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
    from offbook.agent.recorder import Session
    from offbook.agent.serve.app import Sessions, make_app
    from offbook.agent.serve.client import KEY, URL, agent_environment
    from offbook.agent.serve.server import Serving, listen
    from offbook.core.runfolder import RunFolder, only_writer, write_atomic
    from offbook.engine.sync import Reader, open_store
    from offbook.rl.collector import Collector
    from offbook.rl.models import local_or_remote

    reader = Reader(open_store(follow)) if follow else None
    folder = RunFolder(config.out)
    folder.refuse_file()
    if folder.checkpoints():
        raise OffbookError(f"{folder.path} holds a run that was trained; give another --out")
    listener = listen(port)
    versions = None
    with progress_display(plain) as progress:
        if live:
            from offbook.live.serving import Versions, cycle_in

            versions = Versions(cycle := cycle_in(live), config)
            collector = Collector(config, cycle.folder.weights(cycle.last.deployed))
        else:
            collector = Collector(config, local_or_remote(config.model, name, config.seed, progress), name)
            _ = collector.engine  # loaded before the first request
    url, owner = f"http://127.0.0.1:{listener.getsockname()[1]}", os.environ.get(KEY) or secrets.token_urlsafe(24)

    def began(session: str, key: str) -> None:
        variables = agent_environment(url, key)
        if as_json:
            print(json.dumps({"url": url, "key": owner, "session": session, "env": variables}), flush=True)
            return
        key_line = "" if os.environ.get(KEY) else f" {KEY}={owner}"  # a key that the user set is not printed
        print(f"{url}  (Ctrl-C ends it)\nfor its owner:\nexport {URL}={url}{key_line}")
        words = " ".join(f"{name}={value}" for name, value in variables.items())
        print(f"session {session} is open; for its agent:\nexport {words}", flush=True)

    def make(rollout: Rollout) -> Session:
        return Session(rollout, collector.chat, collector.engine.open, collector.limits, collector.harness.prices)

    async def run() -> None:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        write_atomic(folder.config_file, config.to_toml())
        if versions:
            sessions = Sessions(versions.make, versions.keep, owner, versions.cycle.folder.ids())
        else:
            ended = [rollout.id for rollout in folder.rollouts(0)[0]]
            sessions = Sessions(make, partial(folder.append_rollout, 0), owner, ended)
        async with aclosing(versions or collector), aclosing(Serving(make_app(sessions), listener)):
            following = asyncio.create_task(_follow(reader, collector.engine)) if reader else None
            session, key = sessions.open()
            began(session.rollout.id, key)
            try:
                while True:
                    await asyncio.sleep(SWEEP_S)
                    sessions.end_idle(idle_s)
            finally:
                if following:
                    following.cancel()
                sessions.end_all()

    with only_writer(folder.path), suppress(KeyboardInterrupt, asyncio.CancelledError):  # how one leaves it
        asyncio.run(run())
    kept = len(folder.rollouts(0)[0]) if versions is None else len(versions.cycle.folder.ids())
    note(f"{live or config.out}: {kept} sessions kept")


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
