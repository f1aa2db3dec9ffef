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

from offbook.cli.options import Json, Plain, config_from, console, progress_display, results, say, shown
from offbook.types import OffbookError, Rollout

if TYPE_CHECKING:
    from offbook.live.agent import Worked
    from offbook.live.cycle import Cycle
    from offbook.live.sessions import LiveFolder, Session
    from offbook.rl.collector import Collector


def agent(
    ctx: typer.Context,
    path: Annotated[Path, typer.Argument(help="The folder to work in; best a git repository.")] = Path("."),
    request: Annotated[str, typer.Argument(help="What is to be done.")] = "",
    model: Annotated[str, typer.Option(help="Of a new --out: `pocket`, a run or model folder, a hub id.")] = "",
    out: Annotated[str, typer.Option(help="The folder of `offbook live`; its deployed version is used.")] = "runs/live",
    yes: Annotated[bool, typer.Option("--yes", help="Apply the changes without asking.")] = False,
    kept: Annotated[
        bool, typer.Option("--kept", help="Measure which lines of earlier sessions are still there.")
    ] = False,
    say_: Annotated[str, typer.Option("--say", help="Say something about an earlier session.")] = "",
    thumb: Annotated[Literal["up", "down"] | None, typer.Option(help="Rate an earlier session.")] = None,
    session: Annotated[
        str, typer.Option(help="The one that --say and --thumb are about; the last of the user's.")
    ] = "",
    forget: Annotated[str, typer.Option(help="Delete a session, or `all` of the user's.")] = "",
    user: Annotated[str, typer.Option(help="Who asks; a digest of it is kept.")] = "",
    plain: Plain = False,
    as_json: Json = False,
) -> None:
    """Let the agent do something in a folder. It works in a sandbox on a copy; the diff is applied on yes.

    The session is kept with --live.consent all, without secrets. Takes configuration like `train`
    does; a folder of `offbook live` has its own.
    """
    before = Path(out) / "config.toml"
    own = {"out": out, "model": model}
    config = config_from(ctx, own, [before] if before.is_file() else (), {"model": "pocket"})
    from offbook.live.sessions import LiveFolder, refuse_no_folder, user_digest

    who = user_digest(user or getpass.getuser())
    folder = LiveFolder(config.out)
    if forget or say_ or thumb or kept:
        _about_earlier(folder, who, session, say_, thumb, kept, forget, as_json)
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


def _about_earlier(
    folder: LiveFolder, who: str, id: str, said: str, thumb: str | None, kept: bool, forget: str, as_json: bool
) -> None:
    from offbook.live.kept import kept_in
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
    if kept:
        shares = {one.id: kept_in(Path(one.place), one.lines) if one.place else None for one in own}
        if as_json:
            print(json.dumps([{"session": name, "kept": share} for name, share in shares.items()]))
        for name, share in shares.items():
            if not as_json:
                say(f"{name}: {'nothing to measure' if share is None else f'{share:.0%} of its lines are there'}")
            if share is not None:
                folder.react(name, Reaction("kept", share))
        return
    id = id or own[-1].id
    if said:
        folder.react(id, follow_up(said))
    if thumb:
        folder.react(id, Reaction("thumbs", 1.0 if thumb == "up" else -1.0))
    print(f"{id}: noted")


def _work(cycle: Cycle, path: Path, request: str, who: str, yes: bool, as_json: bool) -> None:
    from offbook.live.agent import apply, session_of
    from offbook.live.reactions import score
    from offbook.live.sessions import Reaction
    from offbook.rl.collector import Collector

    version, settings = cycle.last.deployed, cycle.settings
    collector = Collector(cycle.config, cycle.folder.weights(version))
    worked, is_over = _worked(collector, path, request, secrets.token_hex(6))
    said = _shown(worked, path, yes, as_json) if is_over else None
    if said:
        apply(worked, path)
    session = session_of(worked, path, request, who, version, said)
    if not is_over:
        session.reactions.append(Reaction("interrupted", at=session.at))
    stored = cycle.folder.keep(score(session, settings), settings, collector.chat)
    _told(session, stored, version, said is True, as_json)


def _worked(collector: Collector, path: Path, request: str, id: str) -> tuple[Worked, bool]:
    """And whether it came to its end: Ctrl-C ends it with what there is."""
    from offbook.live.agent import Worked, work

    so_far: list[Rollout] = []

    def watch(rollout: Rollout, over: bool) -> None:
        so_far[:] = [rollout]
        if not rollout.segments:
            return
        last = [message for message in rollout.segments[-1].messages if message.role == "assistant"][-1:]
        for call in last[0].calls if last else ():
            words = " ".join(str(value).split("\n")[0][:60] for value in call.arguments.values())
            say(f"  {call.name} {words}", "dim", console)

    try:
        return asyncio.run(work(collector, path, request, id, watch)), True
    except KeyboardInterrupt:
        if not so_far:
            raise
        so_far[0].stop = "wall"
        return Worked(so_far[0], {}), False


def _shown(worked: Worked, path: Path, yes: bool, as_json: bool) -> bool | None:
    """The diff, and whether to apply it; None without an answer."""
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
        say("nothing was applied: give --yes, or answer at a terminal", to=console)
        return None
    with suppress(EOFError):
        return console.input(f"apply to {path}? [y/N] ", markup=False).strip().lower() in ("y", "yes")
    return None


def _told(session: Session, stored: Session | None, version: int, is_applied: bool, as_json: bool) -> None:
    changed = sorted(session.rollout.changed)
    if as_json:
        result = {"session": session.id, "version": version, "stop": session.rollout.stop, "changed": changed}
        print(json.dumps({**result, "applied": is_applied, "diff": session.rollout.diff, "stored": stored is not None}))
        return
    what = f"{'applied to' if is_applied else 'changed, not applied:'} {', '.join(changed)}" if changed else "no change"
    print(f"{session.id}: {what}; the session is {'kept' if stored else 'not kept'}")
