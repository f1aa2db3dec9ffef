"""offbook coach and audit: what an agent does wrong, whether a hint would have helped, and whether it cheated."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from offbook.cli.options import Json, Row, argument, option, progress_display, say, show_table, tasks_in
from offbook.types import OffbookError

if TYPE_CHECKING:
    from offbook.rl.models import Progress
    from offbook.signals.feedback.coach import Found, Stored
    from offbook.signals.monitors.review import Review


MAX_SHOWN = 3  # examples of one rule, findings of one kind
LINE = 100  # characters of an example


def coach(
    sources: Annotated[list[Path], argument("Run folders, or files: ATIF, OpenAI messages, rollouts.")],
    tasks: Annotated[str, option("`pocket`, or the folder of the tasks, to check hints for leaks.")] = "",
    rules: Annotated[list[str] | None, option("A Python file with rules of your own; repeatable.")] = None,
    model: Annotated[str, option("Measure hints on this model; by default a run's last checkpoint.")] = "",
    effect: Annotated[bool, option("Measure what the hints do.", "--effect/--no-effect")] = True,
    limit: Annotated[int, option("Measure at most so many targets of each rule.", min=1)] = 32,
    out: Annotated[Path | None, option("Write targets and hints to this file, a line each.")] = None,
    as_json: Annotated[Path | None, option("Write the whole result to this file.", "--json")] = None,
) -> None:
    """Find mistakes in stored work of any agent, and measure what hints would do about them. Nothing is trained.

    For example: offbook coach runs/train --out hints.jsonl
    """
    from offbook.core.runfolder import dump_lines, write_atomic
    from offbook.signals.feedback import rules_of
    from offbook.signals.feedback.coach import by_rules, grouped, num_rollouts, spread_out, stored_in
    from offbook.signals.feedback.rules import RULES

    for path in filter(None, (out, as_json)):  # before the work, not after it
        if any(path.resolve() == source.resolve() for source in sources):
            raise OffbookError(f"cannot write {path}: it is what is to be read")
    notes: list[str] = []
    found: list[Found] = []
    models: list[str] = []
    num_unseen = 0
    with progress_display() as progress:
        records = stored_in(sources)
        own_rules = rules_of(rules or ())
        for stored in records:
            made_with = str(stored.setting("tasks", "source", ""))
            place = tasks or (made_with if made_with and Path(made_with).is_dir() else "")
            known = tasks_in(place, stored.folder) if place else {}
            found += by_rules(stored, known, partial(progress, f"reading {stored.source}"), own_rules)
            num_unseen += sum(rollout.task not in known for rollout in stored.rollouts)
        if num_unseen:
            why = "the tree of the task is not at hand; --tasks gives it"
            notes.append(f"the style of the repository was not looked at in {_count(num_unseen, 'rollout')} ({why})")
        if effect:
            models = _measure(records, list(spread_out(found, limit)), model, progress, notes)
    effects = []
    if models:
        from offbook.rl.hint_probe import effects_of

        effects = [asdict(one) for one in effects_of(one.feedback for one in spread_out(found, limit))]
    num = sum(len(stored.rollouts) for stored in records)
    by_rule = grouped(found)
    counts = {}
    for rule in [*by_rule, *(name for name in own_rules if name not in RULES and name not in by_rule)]:
        num_faulty = num_rollouts(by_rule.get(rule, []))
        counts[rule] = {"targets": len(by_rule.get(rule, [])), "rollouts": num_faulty, "share": num_faulty / num}
    targets = [{"source": one.source, **asdict(one.feedback.target), "hint": one.feedback.hint.text} for one in found]
    facts: Row = {
        "sources": [stored.source for stored in records],
        "rollouts": num,
        "unreadable": sum(stored.unreadable for stored in records),
        "rules": counts,
        "targets": targets,
        "effects": effects,
        "models": models,
        "notes": notes,
    }
    _show_mistakes(facts, by_rule, num_rollouts(found))
    # Targets go to the file that is named, or to a file of its own in each run folder.
    files = {out: found} if out else {}
    for stored in records:
        if stored.folder is not None and out is None:
            own = [one for one in found if one.source == stored.source]
            files[stored.folder.path / "feedback" / "coach.jsonl"] = own
    try:
        if as_json is not None:
            write_atomic(as_json, json.dumps(facts, indent=1) + "\n")
        for path, kept in files.items():
            write_atomic(path, dump_lines(one.feedback for one in kept))
            print(f"\ntargets and hints are in {path}")
    except OSError as error:
        raise OffbookError(f"cannot write {error.filename}: {error.strerror}") from None


def _measure(records: list[Stored], chosen: list[Found], model: str, progress: Progress, notes: list[str]) -> list[str]:
    """Measure the chosen targets; returns the models. Torch is imported only if there is something to measure."""
    plans = []
    for stored in records:
        pairs = [(one.rollout, one.feedback) for one in chosen if one.source == stored.source]
        name = model or stored.last_checkpoint()
        if pairs and name:
            plans.append((stored, name, pairs))
        elif pairs:
            notes.append(f"no model to measure the hints of {stored.source} with; --model gives one")
    models = []
    for stored, name, pairs in plans:
        from offbook.rl.hint_probe import measure
        from offbook.rl.models import load_model, model_chat, model_folder
        from offbook.train.forward import Decoder

        folder = model_folder(name, 0, progress)
        decoder = Decoder(load_model(folder))
        chat = model_chat(
            folder, stored.setting("harness", "profile", ""), stored.setting("harness", "dialect", "auto")
        )
        temperature = float(stored.setting("engine", "temperature", 1.0))
        counts = measure(pairs, decoder, chat, temperature, partial(progress, f"measuring {stored.source}"))
        again = counts.pop("written again", 0)
        if again:
            what = f"{_count(again, 'target')} of {stored.source}"
            notes.append(f"{what} measured on ids of {folder.name}, not their own")
        notes += [f"{_count(count, 'target')} not measured: {reason}" for reason, count in counts.items()]
        models.append(str(folder))
    return models


def _show_mistakes(facts: Row, by_rule: dict[str, list[Found]], faulty: int) -> None:
    from offbook.signals.feedback.coach import spread_out

    num = facts["rollouts"]
    mistakes = f"{_count(len(facts['targets']), 'mistake')} in {faulty} of them ({faulty / num:.0%})"
    say(f"{', '.join(facts['sources'])}: {_count(num, 'rollout')}, {mistakes}")
    for rule, counts in facts["rules"].items():
        found = by_rule.get(rule, [])
        if not found:
            say(f"\n{rule}: 0 in {_count(num, 'rollout')}", style="bold")
            continue
        where = f"{_count(counts['rollouts'], 'rollout')} ({counts['share']:.0%})"
        say(f"\n{rule}: {len(found)} in {where}", style="bold")
        say(f"  hint: {found[0].feedback.hint.text}")
        for one in spread_out(found, MAX_SHOWN):
            target = one.feedback.target
            place = f"message {target.message}" + (f" of segment {target.segment}" if target.segment else "")
            evidence = " ".join(target.evidence.split())
            say(f"  {target.rollout}, {place}: {evidence if len(evidence) <= LINE else f'{evidence[:LINE]}...'}")
        if len(found) > MAX_SHOWN:
            say(f"  and {len(found) - MAX_SHOWN} more")
    if facts["effects"]:
        say(f"\nWhat the hints do, on {', '.join(dict.fromkeys(facts['models']))}")
        cells = [["rule", "targets", "tokens", "nats per token", "largest", "log-odds"]]
        for effect in facts["effects"]:
            numbers = [f"{effect['kl']:.3f}", f"{effect['largest']:.2f}", f"{effect['log_odds']:+.2f}"]
            cells.append([effect["rule"], str(effect["targets"]), str(effect["tokens"]), *numbers])
        show_table(cells)
    for remark in facts["notes"]:
        say(f"\n{remark}")
    if facts["unreadable"]:
        say(f"\n{_count(facts['unreadable'], 'record')} could not be read")


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def audit(
    source: Annotated[Path, argument("A run folder, or a file: ATIF, OpenAI messages, rollouts.")],
    tasks: Annotated[str, option("`pocket`, or the folder of the tasks, to compare with their trees.")] = "",
    as_json: Json = False,
) -> None:
    """Findings by kind with the step, the message and the line, and what changed over a run. Blind to the outcome.

    For example: offbook audit runs/train
    """
    from offbook.core.runfolder import RunFolder
    from offbook.signals.monitors.review import review_file, review_run

    folder = RunFolder.open(source) if source.is_dir() else None
    known = tasks_in(tasks, folder) if tasks else {}
    review = review_run(folder, known) if folder else review_file(source, known)
    if not as_json:
        _show_findings(review)
        return
    findings = [
        {"step": one.step, "rollout": one.rollout, "task": one.task, **asdict(one.flag)} for one in review.findings
    ]
    drift = {
        "series": {name: [asdict(point) for point in points] for name, points in review.series.items()},
        "alarms": [asdict(alarm) for alarm in review.alarms],
    }
    counts = ("source", "rollouts", "flagged", "unreadable", "without_tree")
    kinds = {kind: len(found) for kind, found in review.by_kind().items()}
    answer = {key: getattr(review, key) for key in counts}
    print(json.dumps({**answer, "kinds": kinds, "findings": findings, "drift": drift}))


def _show_findings(review: Review) -> None:
    from offbook.signals.monitors.rules import KINDS

    say(f"{review.source}: {review.rollouts} rollouts, {review.flagged} with findings")
    for kind, findings in review.by_kind().items():
        say(f"\n{kind} ({len(findings)}): {KINDS.get(kind, 'found by a model')}", style="bold")
        for one in findings[:MAX_SHOWN]:
            place = f"message {one.flag.message}" + (f" of segment {one.flag.segment}" if one.flag.segment else "")
            say(f"  {one.rollout}, {place}: {one.flag.evidence}")
        if len(findings) > MAX_SHOWN:
            say(f"  and {len(findings) - MAX_SHOWN} more; --json has all")
    for alarm in review.alarms:
        change = f"{alarm.before:.3g} to {alarm.after:.3g} since step {alarm.since}"
        examples = ", ".join(alarm.examples)
        say(f"\ndrift, {alarm.series}: {change}, noticed at step {alarm.step}; such as {examples}")
    if review.without_tree:
        say(f"\n{review.without_tree} rollouts were judged without the tree of their task; --tasks gives it")
    if review.unreadable:
        say(f"\n{review.unreadable} records could not be read")
