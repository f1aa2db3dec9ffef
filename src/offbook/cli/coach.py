"""offbook coach: what does an agent do wrong, and would a one-line hint have helped?"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from offbook.cli.options import Plain, pocket_tasks, progress_display, results, say, tasks_in
from offbook.types import OffbookError

if TYPE_CHECKING:
    from offbook.rl.hint_probe import Effect, ProbedHint
    from offbook.rl.models import Progress
    from offbook.signals.feedback import Rule
    from offbook.signals.feedback.coach import Found, Stored
    from offbook.signals.judge import Judgement
    from offbook.types import Task

MAX_SHOWN = 3  # examples of one rule
LINE = 100  # characters of an example
KEPT = "coach.jsonl"  # in a run's feedback/, next to what training recorded


@dataclass(slots=True)
class Result:
    sources: list[Stored]
    rules: dict[str, Rule]
    found: list[Found] = field(default_factory=list)
    judgement: Judgement | None = None
    unchecked: int = 0  # hints of the judge in rollouts whose task is not at hand: they may leak
    effects: list[Effect] = field(default_factory=list)
    models: list[str] = field(default_factory=list)  # that the effects were measured on
    unmeasured: Counter[str] = field(default_factory=Counter)
    looked: dict[str, list[ProbedHint]] = field(default_factory=dict)  # by source
    notes: list[str] = field(default_factory=list)


def coach(
    sources: Annotated[list[Path], typer.Argument(help="Run folders, or files: ATIF, OpenAI messages, rollouts.")],
    tasks: Annotated[str, typer.Option(help="`pocket`, or the folder of the tasks, to check hints for leaks.")] = "",
    rules: Annotated[list[str] | None, typer.Option(help="A Python file with rules of your own; repeatable.")] = None,
    model: Annotated[str, typer.Option(help="Measure hints on this model; by default a run's last checkpoint.")] = "",
    effect: Annotated[bool, typer.Option("--effect/--no-effect", help="Measure what the hints do.")] = True,
    limit: Annotated[int, typer.Option(min=1, help="Measure at most so many targets of each rule.")] = 32,
    samples: Annotated[
        int, typer.Option(min=0, help="Messages to sample at each place, with the hint and without; 0 is none.")
    ] = 8,
    url: Annotated[
        str, typer.Option(help="A judge model that reads the rollouts too, behind an OpenAI-like URL.")
    ] = "",
    judge_model: Annotated[str, typer.Option(help="Its name there.")] = "",
    rate: Annotated[float, typer.Option(min=0, max=1, help="The share of the rollouts that it reads.")] = 1.0,
    out: Annotated[Path | None, typer.Option(help="Write targets and hints to this file, a line each.")] = None,
    as_json: Annotated[Path | None, typer.Option("--json", help="Write the whole result to this file.")] = None,
    plain: Plain = False,
) -> None:
    """Find mistakes in stored work of any agent, and measure what hints would do about them. Nothing is trained."""
    from offbook.core.runfolder import dump_lines, write_atomic
    from offbook.signals.feedback import rules_of
    from offbook.signals.feedback.coach import stored_in

    for path in filter(None, (out, as_json)):
        _refuse_unwritable(path, sources)
    if bool(url) != bool(judge_model):
        raise OffbookError("a judge model needs both --url and --judge-model")
    with progress_display(plain) as progress:
        result = Result(stored_in(sources), rules_of(rules or ()))
        _read(result, tasks, url, judge_model, rate, progress)
        if effect:
            _measure(result, model, limit, tasks, samples, progress)
    facts = _facts(result)
    _show(result, facts)
    try:
        if as_json is not None:
            write_atomic(as_json, json.dumps(facts, indent=1) + "\n")
        for path, found in _files(result, out):
            write_atomic(path, dump_lines(one.feedback for one in found))
            print(f"\ntargets and hints are in {path}")
    except OSError as error:
        raise OffbookError(f"cannot write {error.filename}: {error.strerror}") from None


def _refuse_unwritable(path: Path, sources: list[Path]) -> None:
    """Before the work, not after it. A file is put in the place of what is there, so that has to be a file too."""
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise OffbookError(f"cannot write {path}: it is there and is no plain file")
    if any(path.resolve() == source.resolve() for source in sources):
        raise OffbookError(f"cannot write {path}: it is what is to be read")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise OffbookError(f"cannot write {path}: {error.strerror}") from None


def _read(result: Result, tasks: str, url: str, name: str, rate: float, progress: Progress) -> None:
    """By rules and, where there is one, by a judge."""
    from offbook.core.client import Client
    from offbook.signals.feedback import MISTAKES
    from offbook.signals.feedback.coach import by_judge, by_rules
    from offbook.signals.judge import Judge

    judge = Judge(Client(url, name), MISTAKES, rate) if url else None
    pairs = []
    for stored in result.sources:
        known = _tasks_of(stored, tasks)
        result.found += by_rules(stored, known, partial(progress, f"reading {stored.source}"), result.rules)
        pairs += [(rollout, known.get(rollout.task)) for rollout in stored.rollouts]
    if unseen := sum(task is None for _, task in pairs):
        why = "the tree of the task is not at hand; --tasks gives it"
        result.notes.append(f"the style of the repository was not looked at in {_count(unseen, 'rollout')} ({why})")
    if judge is None:
        return
    result.judgement = asyncio.run(judge.read(pairs, partial(progress, f"{name} reads")))
    result.found += by_judge(result.sources, result.judgement)
    bare = {id(rollout) for rollout, task in pairs if task is None}
    result.unchecked = sum(id(one.rollout) in bare for one in result.judgement.found)
    if result.unchecked:
        what = f"{_count(result.unchecked, 'hint')} of {name} not checked for leaks"
        result.notes.append(f"{what}: the tasks are not at hand; --tasks gives them")


def _tasks_of(stored: Stored, tasks: str) -> dict[str, Task]:
    own = str(stored.setting("tasks", "source", ""))  # the folder that the run was made with
    source = tasks or (own if own and Path(own).is_dir() else "")
    return tasks_in(source, stored.folder) if source else {}


def _measure(result: Result, model: str, limit: int, tasks: str, samples: int, progress: Progress) -> None:
    """Torch is imported only if there is something to measure, and a model to measure it on."""
    from offbook.signals.feedback.coach import spread_out

    chosen, plans = list(spread_out(result.found, limit)), []
    for stored in result.sources:
        pairs = [(one.rollout, one.feedback) for one in chosen if one.source == stored.source]
        name = model or stored.last_checkpoint()
        if pairs and name:
            plans.append((stored, name, pairs))
        elif pairs:
            result.notes.append(f"no model to measure the hints of {stored.source} with; --model gives one")
    if not plans:
        return
    from offbook.core.config import load_config
    from offbook.rl.collector import Collector
    from offbook.rl.hint_probe import HintProbe, effects_of, measure
    from offbook.rl.models import load_model, model_chat, model_folder
    from offbook.train.forward import Decoder

    for stored, name, pairs in plans:
        folder = model_folder(name, 0, progress)
        decoder = Decoder(load_model(folder))
        counts = measure(
            pairs,
            decoder,
            model_chat(folder, stored.setting("harness", "profile", ""), stored.setting("harness", "dialect", "auto")),
            float(stored.setting("engine", "temperature", 1.0)),
            partial(progress, f"measuring {stored.source}"),
        )
        if again := counts.pop("written again", 0):
            what = f"{_count(again, 'target')} of {stored.source}"
            result.notes.append(f"{what} measured on ids of {folder.name}, not their own")
        result.unmeasured += counts
        result.models.append(str(folder))
        has_own_tools = not stored.setting("harness", "command", "") and not any(
            rollout.foreign for rollout in stored.rollouts
        )
        if samples and not again and stored.folder is not None and has_own_tools:  # which answer what is sampled
            # as training probes hints before step 1, on what the run did and with the run's own settings
            config = load_config([stored.folder.config_file], {"engine.kind": "lockstep"})
            known = _tasks_of(stored, tasks) or pocket_tasks(config)
            probe = HintProbe(Collector(config, folder), known, result.rules, samples)
            found = [one for one in result.found if one.source == stored.source]
            result.looked[stored.source] = probe.measured(asyncio.run(probe.sampled(found, "coach")), found, decoder)
    result.effects = effects_of(one.feedback for one in chosen)


def _files(result: Result, out: Path | None) -> list[tuple[Path, list[Found]]]:
    """Targets go to the file that is named, or to a file of its own in each run folder."""
    if out is not None:
        return [(out, result.found)]
    return [
        (stored.folder.path / "feedback" / KEPT, [one for one in result.found if one.source == stored.source])
        for stored in result.sources
        if stored.folder is not None
    ]


def _facts(result: Result) -> dict[str, Any]:
    """What --json writes."""
    from offbook.signals.feedback.coach import grouped, num_rollouts
    from offbook.signals.feedback.rules import RULES

    judgement = result.judgement
    of = sum(len(stored.rollouts) for stored in result.sources)
    by_rule = grouped(result.found)
    rules = [*by_rule, *(name for name in result.rules if name not in RULES and name not in by_rule)]
    counts = {rule: (len(by_rule.get(rule, [])), num_rollouts(by_rule.get(rule, []))) for rule in rules}
    return {
        "sources": [stored.source for stored in result.sources],
        "rollouts": of,
        "unreadable": sum(stored.unreadable for stored in result.sources),
        "rules": {
            rule: {"targets": targets, "rollouts": rollouts, "share": rollouts / of}
            for rule, (targets, rollouts) in counts.items()
        },
        "targets": [
            {"source": one.source, **asdict(one.feedback.target), "hint": one.feedback.hint.text}
            for one in result.found
        ],
        "effects": [asdict(effect) for effect in result.effects],
        "models": result.models,
        "unmeasured": result.unmeasured,
        "look": [{"source": source, **one.row()} for source, looked in result.looked.items() for one in looked],
        "judge": judgement
        and {
            "rollouts": judgement.rollouts,
            "asked": judgement.asked,
            "found": len(judgement.found),
            "refused": judgement.refused,
            "unanswered": judgement.unanswered,
            "unchecked": result.unchecked,
        },
        "notes": result.notes,
    }


def _show(result: Result, facts: dict[str, Any]) -> None:
    from offbook.signals.feedback.coach import grouped, num_rollouts

    faulty, of = num_rollouts(result.found), facts["rollouts"]
    mistakes = f"{_count(len(result.found), 'mistake')} in {faulty} of them ({faulty / of:.0%})"
    say(f"{', '.join(facts['sources'])}: {_count(of, 'rollout')}, {mistakes}")
    by_rule = grouped(result.found)
    for rule in facts["rules"]:
        if rule in by_rule:
            _show_rule(rule, by_rule[rule], of)
        else:
            say(f"\n{rule}: 0 in {_count(of, 'rollout')}", style="bold")
    if result.effects:
        say(f"\nWhat the hints do, on {', '.join(dict.fromkeys(result.models))}")
        effects = Table(box=None, pad_edge=False)
        effects.add_column("rule", no_wrap=True)
        for name in ("targets", "tokens", "nats per token", "largest", "log-odds"):
            effects.add_column(name, justify="right")
        for one in result.effects:
            moved = f"{one.kl:.3f}", f"{one.largest:.2f}", f"{one.log_odds:+.2f}"
            effects.add_row(one.rule, str(one.targets), str(one.tokens), *moved)
        results.print(effects)
        for reason, count in result.unmeasured.items():
            say(f"{_count(count, 'target')} not measured: {reason}")
    for source, looked in result.looked.items():
        from offbook.rl.hint_probe import table  # brings torch along

        say(f"\nMessages sampled where a rule was broken in {source}, without the hint and with it")
        for line in table(looked):
            say(line)
    if judge := result.judgement:
        asked = f"{_count(judge.asked, 'question')} about {_count(judge.rollouts, 'rollout')}"
        say(f"\nThe judge model: {asked}, {_count(len(judge.found), 'mistake')} taken")
        for what, counts in (("refused", judge.refused), ("unanswered", judge.unanswered)):
            for reason, count in counts.most_common():
                say(f"  {what} {count}: {reason}")
    for note in result.notes:
        say(f"\n{note}")
    if facts["unreadable"]:
        say(f"\n{_count(facts['unreadable'], 'record')} could not be read")


def _show_rule(rule: str, found: list[Found], of: int) -> None:
    from offbook.signals.feedback.coach import num_rollouts, spread_out
    from offbook.signals.judge import PREFIX

    count = num_rollouts(found)
    say(f"\n{rule}: {len(found)} in {_count(count, 'rollout')} ({count / of:.0%})", style="bold")
    by_judge = rule.startswith(PREFIX)  # then every target has a hint of its own
    if not by_judge:
        say(f"  hint: {found[0].feedback.hint.text}")
    for one in spread_out(found, MAX_SHOWN):
        target = one.feedback.target
        place = f"message {target.message}" + (f" of segment {target.segment}" if target.segment else "")
        evidence = " ".join(target.evidence.split())
        say(f"  {target.rollout}, {place}: {evidence if len(evidence) <= LINE else f'{evidence[:LINE]}...'}")
        if by_judge:
            say(f"    hint: {one.feedback.hint.text}")
    if len(found) > MAX_SHOWN:
        say(f"  and {len(found) - MAX_SHOWN} more")


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
