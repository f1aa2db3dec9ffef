"""Results as tables, for the terminal and for Markdown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from offbook.evals.metrics import metric_of, show, show_interval, shown_keys
from offbook.rl.tasks import SHARED

Cells = list[list[str]]  # the first row is the header
BUCKET_KEYS = ("solved", "tokens", "turns", "invalid_per_100", "edit_rate")


def result_cells(result: Mapping[str, Any]) -> Cells:
    """One evaluation: every metric with its interval."""
    cells = [["", "value", "95% interval"]]
    for key in shown_keys([result]):
        metric = metric_of(key)
        cells.append([metric.heading, show(metric, result[key]), show_interval(metric, result["intervals"].get(key))])
    return cells


def bucket_cells(buckets: Mapping[str, Mapping[str, Any]], name: str) -> Cells:
    cells = [[name, "tasks", *(metric_of(key).label for key in BUCKET_KEYS), "95% interval of solved"]]
    for bucket, found in buckets.items():
        values = [show(metric_of(key), found[key]) for key in BUCKET_KEYS]
        cells.append([bucket, str(found["tasks"]), *values, show_interval(metric_of("solved"), found["solved_ci"])])
    return cells


def notes_of(result: Mapping[str, Any]) -> list[str]:
    """Sentences below a table: what was measured, what was left out, contamination."""
    notes = [
        f"{result['rollouts']} rollouts of {result['tasks']} tasks ({', '.join(result['suites'])}); intervals by "
        "bootstrap over tasks, of shares that are none or all by Wilson's score"
    ]
    if result["resumed"]:
        notes[0] += f"; {result['resumed']} rollouts were there from before"
    if result["unreadable"]:
        notes.append(f"{result['unreadable']} unreadable lines were skipped, their rollouts run again")
    if result.get("crashes"):
        notes.append(crashes_sentence(result["crashes"]))
    flags = {key.removeprefix("flags/"): value for key, value in result.items() if key.startswith("flags/")}
    if flags:
        notes.append("flags: " + ", ".join(f"{kind} {number}" for kind, number in flags.items()))
    return [*notes, contamination_sentence(result.get("contamination"))]


def crashes_sentence(causes: Mapping[str, int]) -> str:
    listed = ", ".join(f"{cause} ({number})" for cause, number in causes.items())
    return (
        f"{sum(causes.values())} rollouts crashed and count as not solved: {listed}; the same command retries those "
        "that the machine or the model's server ended"
    )


def contamination_sentence(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return "contamination: not checked; --train FOLDER names the training tasks"
    sentence = (
        "contamination: {contained} of {suite_tasks} tasks have something in the {train_tasks} training tasks (same "
        "task {same_task}, same repository {same_repository}, 13 words {tasks_words_13}, 8 code tokens {tasks_code_8}, "
        "equal function body {tasks_equal_body}); mean share of 13 words {words_13:.1%}, of 8 code tokens {code_8:.1%}"
    ).format(**found)
    if found.get("too_short"):
        sentence += f"; {found['too_short']} tasks are too short to tell"
    if found["same_repository"]:
        sentence += f"; tasks of the same repository were trained on, {SHARED}"
    return sentence


def markdown(cells: Cells) -> str:
    header, *rows = [[cell.replace("|", "\\|") for cell in row] for row in cells]
    lines = [header, ["---", *("---:" for _ in header[1:])], *rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in lines) + "\n"
