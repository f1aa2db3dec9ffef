"""offbook coach: what does an agent do wrong, and would a one-line hint have helped?"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from offbook.cli.options import Plain, progress_display, say, show_table, tasks_in
from offbook.types import OffbookError

if TYPE_CHECKING:
    from offbook.rl.hint_probe import Effect
    from offbook.rl.models import Progress
    from offbook.signals.feedback import Rule
    from offbook.signals.feedback.coach import Found, Stored
    from offbook.types import Task

MAX_SHOWN = 3  # examples of one rule
LINE = 100  # characters of an example
KEPT = "coach.jsonl"  # in a run's feedback/, next to what training recorded


@dataclass(slots=True)
class Result:
    sources: list[Stored]
    rules: dict[str, Rule]
    found: list[Found] = field(default_factory=list)
    effects: list[Effect] = field(default_factory=list)
    models: list[str] = field(default_factory=list)  # that the effects were measured on
    notes: list[str] = field(default_factory=list)


def coach(
    sources: Annotated[list[Path], typer.Argument(help="Run folders, or files: ATIF, OpenAI messages, rollouts.")],
    tasks: Annotated[str, typer.Option(help="`pocket`, or the folder of the tasks, to check hints for leaks.")] = "",
    rules: Annotated[list[str] | None, typer.Option(help="A Python file with rules of your own; repeatable.")] = None,
    model: Annotated[str, typer.Option(help="Measure hints on this model; by default a run's last checkpoint.")] = "",
    effect: Annotated[bool, typer.Option("--effect/--no-effect", help="Measure what the hints do.")] = True,
    limit: Annotated[int, typer.Option(min=1, help="Measure at most so many targets of each rule.")] = 32,
    out: Annotated[Path | None, typer.Option(help="Write targets and hints to this file, a line each.")] = None,
    as_json: Annotated[Path | None, typer.Option("--json", help="Write the whole result to this file.")] = None,
    plain: Plain = False,
) -> None:
    """Find mistakes in stored work of any agent, and measure what hints would do about them. Nothing is trained."""
    from offbook.core.runfolder import dump_lines, write_atomic
    from offbook.signals.feedback import rules_of
    from offbook.signals.feedback.coach import stored_in

    for path in filter(None, (out, as_json)):  # before the work, not after it
        if path.is_symlink() or (path.exists() and not path.is_file()):
            raise OffbookError(f"cannot write {path}: it is there and is no plain file")
        if any(path.resolve() == source.resolve() for source in sources):
            raise OffbookError(f"cannot write {path}: it is what is to be read")
    with progress_display(plain) as progress:
        result = Result(stored_in(sources), rules_of(rules or ()))
        _read(result, tasks, progress)
        if effect:
            _measure(result, model, limit, progress)
    facts = _facts(result)
    _show(result, facts)
    # Targets go to the file that is named, or to a file of its own in each run folder.
    files = {out: result.found} if out else {}
    for stored in result.sources if out is None else ():
        if stored.folder is not None:
            own = [one for one in result.found if one.source == stored.source]
            files[stored.folder.path / "feedback" / KEPT] = own
    try:
        if as_json is not None:
            write_atomic(as_json, json.dumps(facts, indent=1) + "\n")
        for path, found in files.items():
            write_atomic(path, dump_lines(one.feedback for one in found))
            print(f"\ntargets and hints are in {path}")
    except OSError as error:
        raise OffbookError(f"cannot write {error.filename}: {error.strerror}") from None


def _read(result: Result, tasks: str, progress: Progress) -> None:
    from offbook.signals.feedback.coach import by_rules

    num_unseen = 0
    for stored in result.sources:
        known = _tasks_of(stored, tasks)
        result.found += by_rules(stored, known, partial(progress, f"reading {stored.source}"), result.rules)
        num_unseen += sum(rollout.task not in known for rollout in stored.rollouts)
    if num_unseen:
        why = "the tree of the task is not at hand; --tasks gives it"
        result.notes.append(f"the style of the repository was not looked at in {_count(num_unseen, 'rollout')} ({why})")


def _tasks_of(stored: Stored, tasks: str) -> dict[str, Task]:
    own = str(stored.setting("tasks", "source", ""))  # the folder that the run was made with
    source = tasks or (own if own and Path(own).is_dir() else "")
    return tasks_in(source, stored.folder) if source else {}


def _measure(result: Result, model: str, limit: int, progress: Progress) -> None:
    """Torch is imported only if there is something to measure, and a model to measure it on."""
    from offbook.signals.feedback.coach import spread_out

    chosen = list(spread_out(result.found, limit))
    plans = []
    for stored in result.sources:
        pairs = [(one.rollout, one.feedback) for one in chosen if one.source == stored.source]
        name = model or stored.last_checkpoint()
        if pairs and name:
            plans.append((stored, name, pairs))
        elif pairs:
            result.notes.append(f"no model to measure the hints of {stored.source} with; --model gives one")
    if not plans:
        return
    from offbook.rl.hint_probe import effects_of, measure
    from offbook.rl.models import load_model, model_chat, model_folder
    from offbook.train.forward import Decoder

    for stored, name, pairs in plans:
        folder = model_folder(name, 0, progress)
        decoder = Decoder(load_model(folder))
        profile, dialect = stored.setting("harness", "profile", ""), stored.setting("harness", "dialect", "auto")
        temperature = float(stored.setting("engine", "temperature", 1.0))
        watch = partial(progress, f"measuring {stored.source}")
        counts = measure(pairs, decoder, model_chat(folder, profile, dialect), temperature, watch)
        again = counts.pop("written again", 0)
        if again:
            what = f"{_count(again, 'target')} of {stored.source}"
            result.notes.append(f"{what} measured on ids of {folder.name}, not their own")
        result.notes += [f"{_count(count, 'target')} not measured: {reason}" for reason, count in counts.items()]
        result.models.append(str(folder))
    result.effects = effects_of(one.feedback for one in chosen)


def _facts(result: Result) -> dict[str, Any]:
    """What --json writes."""
    from offbook.signals.feedback.coach import grouped, num_rollouts
    from offbook.signals.feedback.rules import RULES

    of = sum(len(stored.rollouts) for stored in result.sources)
    by_rule = grouped(result.found)
    by_rule |= {name: [] for name in result.rules if name not in RULES and name not in by_rule}
    counts = {rule: (len(found), num_rollouts(found)) for rule, found in by_rule.items()}
    return {
        "sources": [stored.source for stored in result.sources],
        "rollouts": of,
        "unreadable": sum(stored.unreadable for stored in result.sources),
        "rules": {rule: {"targets": num, "rollouts": in_, "share": in_ / of} for rule, (num, in_) in counts.items()},
        "targets": [
            {"source": one.source, **asdict(one.feedback.target), "hint": one.feedback.hint.text}
            for one in result.found
        ],
        "effects": [asdict(effect) for effect in result.effects],
        "models": result.models,
        "notes": result.notes,
    }


def _show(result: Result, facts: dict[str, Any]) -> None:
    from offbook.signals.feedback.coach import grouped, num_rollouts, spread_out

    faulty, of = num_rollouts(result.found), facts["rollouts"]
    mistakes = f"{_count(len(result.found), 'mistake')} in {faulty} of them ({faulty / of:.0%})"
    say(f"{', '.join(facts['sources'])}: {_count(of, 'rollout')}, {mistakes}")
    by_rule = grouped(result.found)
    for rule, counts in facts["rules"].items():
        found = by_rule.get(rule, [])
        share = f" ({counts['share']:.0%})" if found else ""
        say(f"\n{rule}: {len(found)} in {_count(counts['rollouts'] if found else of, 'rollout')}{share}", style="bold")
        if found:
            say(f"  hint: {found[0].feedback.hint.text}")
        for one in spread_out(found, MAX_SHOWN):
            target = one.feedback.target
            place = f"message {target.message}" + (f" of segment {target.segment}" if target.segment else "")
            evidence = " ".join(target.evidence.split())
            say(f"  {target.rollout}, {place}: {evidence if len(evidence) <= LINE else f'{evidence[:LINE]}...'}")
        if len(found) > MAX_SHOWN:
            say(f"  and {len(found) - MAX_SHOWN} more")
    if result.effects:
        say(f"\nWhat the hints do, on {', '.join(dict.fromkeys(result.models))}")
        cells = [["rule", "targets", "tokens", "nats per token", "largest", "log-odds"]]
        for effect in result.effects:
            numbers = [f"{effect.kl:.3f}", f"{effect.largest:.2f}", f"{effect.log_odds:+.2f}"]
            cells.append([effect.rule, str(effect.targets), str(effect.tokens), *numbers])
        show_table(cells)
    for remark in result.notes:
        say(f"\n{remark}")
    if facts["unreadable"]:
        say(f"\n{_count(facts['unreadable'], 'record')} could not be read")


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
