"""offbook coach: what does an agent do wrong, and would a one-line hint have helped?"""

from __future__ import annotations

import asyncio
import json
import tempfile
import tomllib
from collections import Counter
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from offbook.cli.options import Plain, progress_display
from offbook.types import OffbookError

if TYPE_CHECKING:
    from offbook.feedback.coach import Found, Stored
    from offbook.feedback.model import Reading
    from offbook.loop.effect import Effect
    from offbook.loop.models import Progress
    from offbook.types import Feedback, Task

MAX_SHOWN = 3  # examples of one rule
LINE = 100  # characters of an example
KEPT = "coach.jsonl"  # in a run's feedback/, beside what training recorded there


@dataclass(slots=True)
class Result:
    sources: list[Stored]
    found: list[Found] = field(default_factory=list)
    reading: Reading | None = None
    effects: list[Effect] = field(default_factory=list)
    models: list[str] = field(default_factory=list)  # that the effects were measured on
    unmeasured: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)

    @property
    def num_rollouts(self) -> int:
        return sum(len(stored.rollouts) for stored in self.sources)


def coach(
    sources: Annotated[list[Path], typer.Argument(help="Run folders, or files: ATIF, OpenAI messages, rollouts.")],
    tasks: Annotated[Path | None, typer.Option(help="The folder of the tasks, to check hints for leaks.")] = None,
    model: Annotated[str, typer.Option(help="Measure hints on this model; by default a run's last checkpoint.")] = "",
    effect: Annotated[bool, typer.Option("--effect/--no-effect", help="Measure what the hints do.")] = True,
    limit: Annotated[int, typer.Option(min=1, help="Measure at most so many targets of each rule.")] = 32,
    url: Annotated[str, typer.Option(help="A model that reads the rollouts too, behind an OpenAI-like URL.")] = "",
    reader_model: Annotated[str, typer.Option(help="Its name there.")] = "",
    rate: Annotated[float, typer.Option(min=0, max=1, help="The share of the rollouts that it reads.")] = 1.0,
    out: Annotated[Path | None, typer.Option(help="Write targets and hints to this file, a line each.")] = None,
    as_json: Annotated[Path | None, typer.Option("--json", help="Write the whole result to this file.")] = None,
    plain: Plain = False,
) -> None:
    """Find mistakes in stored work of any agent, and measure what hints would do about them. Nothing is trained."""
    from offbook.feedback.coach import stored_in

    for path in (out, as_json):
        if path is not None:
            _refuse_unwritable(path, sources)
    if bool(url) != bool(reader_model):
        raise OffbookError("a reader model needs both --url and --reader-model")
    with progress_display(plain) as progress:
        result = Result(stored_in(sources))
        _read(result, tasks, url, reader_model, rate, progress)
        if effect:
            _measure(result, model, limit, progress)
    _show(result)
    try:
        written = _write(result, out, as_json)
    except OSError as error:
        raise OffbookError(f"cannot write {error.filename}: {error.strerror}") from None
    for path in written:
        print(f"\ntargets and hints are in {path}")


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


def _read(result: Result, tasks: Path | None, url: str, name: str, rate: float, progress: Progress) -> None:
    from offbook.feedback.coach import by_model, by_rules, not_looked_for
    from offbook.feedback.model import ModelReader, Reading

    reader = ModelReader(url, name, rate) if url else None
    unseen: Counter[tuple[str, str]] = Counter()
    for stored in result.sources:
        known = _tasks_of(stored, tasks)
        result.found += by_rules(stored, known, partial(progress, f"reading {stored.source}"))
        unseen += not_looked_for(stored, known)
        if reader is None:
            continue
        pairs = [(rollout, known.get(rollout.task)) for rollout in stored.rollouts]
        reading = asyncio.run(reader.read(pairs, partial(progress, f"{name} reads {stored.source}")))
        result.found += by_model(stored, reading)
        result.reading = result.reading or Reading()
        result.reading.add(reading)
    if unseen:
        told = [f"{rules} in {_count(count, 'rollout')} ({reason})" for (rules, reason), count in unseen.items()]
        result.notes.append(f"not looked for: {'; '.join(told)}")
    if result.reading and result.reading.unchecked:
        what = f"{_count(result.reading.unchecked, 'hint')} of {name} not checked for leaks"
        result.notes.append(f"{what}: the tasks are not at hand; --tasks gives them")


def _tasks_of(stored: Stored, folder: Path | None) -> dict[str, Task]:
    """By id: those in the folder that is named, or else in the one that the run was made with."""
    from offbook.tasks import load_task

    if folder is None and stored.folder is not None:
        source = Path(str(_setting(stored, "tasks", "source", "")))
        folder = source if source.name and source.is_dir() else None
    if folder is None:
        return {}
    found = [load_task(path.parent) for path in sorted(folder.rglob("task.toml"))]
    if not found:
        raise OffbookError(f"{folder} has no task in it")
    return {task.id: task for task in found}


def _setting(stored: Stored, section: str, name: str, default: Any) -> Any:
    """Of a run's configuration, which an older or newer offbook may have written."""
    if stored.folder is None:
        return default
    try:
        return tomllib.loads(stored.folder.config_file.read_text()).get(section, {}).get(name, default)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError):
        raise OffbookError(f"{stored.folder.config_file} is not valid TOML") from None


def _measure(result: Result, model: str, limit: int, progress: Progress) -> None:
    from offbook.feedback.coach import spread_out

    chosen = list(spread_out(result.found, limit))
    others: list[Feedback] = []
    for stored in result.sources:
        pairs = [(one.rollout, one.feedback) for one in chosen if one.source == stored.source]
        if not pairs:
            continue
        folder = _model_of(stored, model, progress)
        if folder is None:
            result.notes.append(f"no model to measure the hints of {stored.source} with; --model gives one")
            continue
        from offbook.loop.effect import measure, with_donor_hints
        from offbook.loop.models import load_model
        from offbook.tokens import chat_for

        profile = _setting(stored, "harness", "profile", "")
        donors = with_donor_hints(pairs)
        others += [item for _, item in donors]
        counts = measure(
            [*pairs, *donors],
            load_model(folder),
            chat_for(folder, "bash" if profile == "bash" else "auto"),
            float(_setting(stored, "engine", "temperature", 1.0)),
            partial(progress, f"measuring {stored.source}"),
        )
        if again := counts.pop("written again", 0):
            what = f"{_count(again, 'target')} of {stored.source}"
            result.notes.append(f"{what} measured on ids of {folder.name}, not their own")
        result.unmeasured += counts
        result.models.append(str(folder))
    if not result.models:
        return
    from offbook.loop.effect import effects_of

    result.effects = effects_of((one.feedback for one in chosen), others)


def _model_of(stored: Stored, model: str, progress: Progress) -> Path | None:
    if model:
        from offbook.loop.models import model_folder

        return model_folder(model, 0, progress)
    if stored.folder is None or not (checkpoints := stored.folder.path / "ckpt").is_dir():
        return None
    from offbook.train.checkpoint import checkpoint_path, finished_steps

    steps = finished_steps(checkpoints)
    return checkpoint_path(checkpoints, steps[-1]) if steps else None


def _write(result: Result, out: Path | None, as_json: Path | None) -> list[Path]:
    """Targets go to the file that is named, or to a file of its own in each run folder."""
    from offbook.runfolder import dump_lines, write_atomic

    if as_json is not None:
        write_atomic(as_json, json.dumps(_as_dict(result), indent=1) + "\n")
    if out is not None:
        write_atomic(out, dump_lines(one.feedback for one in result.found))
        return [out]
    written = []
    for stored in result.sources:
        if stored.folder is not None:
            path = stored.folder.path / "feedback" / KEPT
            write_atomic(path, dump_lines(one.feedback for one in result.found if one.source == stored.source))
            written.append(path)
    return written


def _as_dict(result: Result) -> dict[str, Any]:
    from offbook.feedback.coach import grouped, num_rollouts

    reading = result.reading
    return {
        "sources": [stored.source for stored in result.sources],
        "rollouts": result.num_rollouts,
        "unreadable": sum(stored.unreadable for stored in result.sources),
        "rules": {
            rule: {
                "targets": len(found),
                "rollouts": num_rollouts(found),
                "share": num_rollouts(found) / result.num_rollouts,
            }
            for rule, found in grouped(result.found).items()
        },
        "targets": [
            {"source": one.source, **asdict(one.feedback.target), "hint": one.feedback.hint.text}
            for one in result.found
        ],
        "effects": [asdict(effect) for effect in result.effects],
        "models": result.models,
        "unmeasured": dict(result.unmeasured),
        "reader": {
            "rollouts": reading.rollouts,
            "asked": reading.asked,
            "found": len(reading.found),
            "refused": dict(reading.refused),
            "unchecked": reading.unchecked,
        }
        if reading
        else None,
        "notes": result.notes,
    }


def _show(result: Result) -> None:
    from offbook.feedback.coach import grouped, num_rollouts

    console = Console(highlight=False)
    faulty, of = num_rollouts(result.found), result.num_rollouts
    names = ", ".join(stored.source for stored in result.sources)
    mistakes = f"{_count(len(result.found), 'mistake')} in {faulty} of them ({faulty / of:.0%})"
    console.print(Text(f"{names}: {_count(of, 'rollout')}, {mistakes}"), soft_wrap=True)
    for rule, found in grouped(result.found).items():
        _show_rule(rule, found, of, console)
    _show_effects(result, console)
    _show_reading(result, console)
    for note in result.notes:
        console.print(Text(f"\n{note}"), soft_wrap=True)
    if unreadable := sum(stored.unreadable for stored in result.sources):
        console.print(Text(f"\n{_count(unreadable, 'record')} could not be read"))


def _show_rule(rule: str, found: list[Found], of: int, console: Console) -> None:
    from offbook.feedback.coach import num_rollouts, spread_out
    from offbook.feedback.model import PREFIX

    count = num_rollouts(found)
    console.print(Text(f"\n{rule}: {len(found)} in {_count(count, 'rollout')} ({count / of:.0%})", style="bold"))
    by_model = rule.startswith(PREFIX)  # then every target has a hint of its own
    if not by_model:
        console.print(Text(f"  hint: {found[0].feedback.hint.text}"), soft_wrap=True)
    for one in spread_out(found, MAX_SHOWN):
        target = one.feedback.target
        place = f"message {target.message}" + (f" of segment {target.segment}" if target.segment else "")
        evidence = " ".join(target.evidence.split())
        line = evidence if len(evidence) <= LINE else f"{evidence[:LINE]}..."
        console.print(Text(f"  {target.rollout}, {place}: {line}"), soft_wrap=True)
        if by_model:
            console.print(Text(f"    hint: {one.feedback.hint.text}"), soft_wrap=True)
    if len(found) > MAX_SHOWN:
        console.print(Text(f"  and {len(found) - MAX_SHOWN} more"))


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _show_effects(result: Result, console: Console) -> None:
    if not result.effects:
        return
    console.print(Text(f"\nWhat the hints do, on {', '.join(dict.fromkeys(result.models))}"), soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    table.add_column("rule", no_wrap=True)
    for name in ("targets", "tokens", "nats a token", "largest", "log-odds", "donor"):
        table.add_column(name, justify="right")
    for one in result.effects:
        odds = ["" if value is None else f"{value:+.2f}" for value in (one.log_odds, one.donor_log_odds)]
        figures = f"{one.kl:.3f}", f"{one.largest:.2f}", *odds
        table.add_row(one.rule, str(one.targets), str(one.tokens), *figures)
    console.print(table)
    for reason, count in result.unmeasured.items():
        console.print(Text(f"{_count(count, 'target')} not measured: {reason}"))


def _show_reading(result: Result, console: Console) -> None:
    if (reading := result.reading) is None:
        return
    asked = f"{_count(reading.asked, 'question')} about {_count(reading.rollouts, 'rollout')}"
    told = f"{asked}, {_count(len(reading.found), 'mistake')} taken"
    console.print(Text(f"\nThe reader model: {told}"))
    for reason, count in reading.refused.most_common():
        console.print(Text(f"  refused {count}: {reason}"))
