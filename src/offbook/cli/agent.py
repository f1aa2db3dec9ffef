"""offbook agent: the agent as a person uses it."""

from __future__ import annotations

import asyncio
import getpass
import json
import secrets
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from offbook.cli.options import Json, Plain, config_from, console, note, progress_display, results, say, shown
from offbook.types import OffbookError, Rollout

if TYPE_CHECKING:
    from offbook.live.agent import Worked
    from offbook.live.cycle import Cycle
    from offbook.live.sessions import LiveFolder


def agent(
    ctx: typer.Context,
    path: Annotated[Path, typer.Argument(help="The folder to work in; best a git repository.")] = Path("."),
    request: Annotated[str, typer.Argument(help="What is to be done.")] = "",
    model: Annotated[str, typer.Option(help="Of a new --out: `pocket`, a run or model folder, a hub id.")] = "",
    out: Annotated[str, typer.Option(help="The folder of `offbook live`; its deployed version is used.")] = "runs/live",
    yes: Annotated[bool, typer.Option("--yes", help="Apply the changes without asking.")] = False,
    say_: Annotated[str, typer.Option("--say", help="Say something about an earlier session.")] = "",
    thumb: Annotated[Literal["up", "down"] | None, typer.Option(help="Rate an earlier session.")] = None,
    session: Annotated[str, typer.Option(help="The session of --say and --thumb; your last one if not given.")] = "",
    forget: Annotated[str, typer.Option(help="Delete a session, or `all` of the user's.")] = "",
    user: Annotated[str, typer.Option(help="The user's name; only a digest is stored.")] = "",
    plain: Plain = False,
    as_json: Json = False,
) -> None:
    """Let the agent do something in a folder. It works in a sandbox on a copy; the diff is applied on yes.

    The session is kept with --live.consent all, without secrets. Takes configuration like `train` does; a folder of
    `offbook live` has its own.
    """
    before = Path(out) / "config.toml"
    base = [before] if before.is_file() else []
    config = config_from(ctx, {"out": out, "model": model}, base, {"model": "pocket"})
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

    with progress_display(plain) as progress:
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
