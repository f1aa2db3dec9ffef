"""Results as tables, for the terminal and for Markdown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from offbook.evals.metrics import metric_of, show, show_interval, shown_keys
from offbook.rl.tasks import SHARED

Cells = list[list[str]]  # the first row is the header


def result_cells(result: Mapping[str, Any]) -> Cells:
    """One evaluation: every metric with its interval."""
    cells = [["", "value", "95% interval"]]
    for key in shown_keys([result]):
        metric = metric_of(key)
        cells.append([metric.heading, show(metric, result[key]), show_interval(metric, result["intervals"].get(key))])
    return cells


def bucket_cells(buckets: Mapping[str, Mapping[str, Any]], name: str) -> Cells:
    keys = ("solved", "tokens", "turns", "invalid_per_100", "edit_rate")
    cells = [[name, "tasks", "solved", "95% interval", *(metric_of(key).label for key in keys[1:])]]
    for bucket, one in buckets.items():
        around = show_interval(metric_of("solved"), one["solved_ci"])
        rest = [show(metric_of(key), one[key]) for key in keys[1:]]
        cells.append([bucket, str(one["tasks"]), show(metric_of("solved"), one["solved"]), around, *rest])
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
    return (
        f"contamination: {found['contained']} of {found['suite_tasks']} tasks have something in the "
        f"{found['train_tasks']} training tasks (same task {found['same_task']}, same repository "
        f"{found['same_repository']}, 13 words {found['tasks_words_13']}, 8 code tokens {found['tasks_code_8']}, equal "
        f"function body {found['tasks_equal_body']}); mean share of 13 words {found['words_13']:.1%}, of 8 code tokens "
        f"{found['code_8']:.1%}"
        + (f"; {found['too_short']} tasks are too short to tell" if found.get("too_short") else "")
        + (f"; tasks of the same repository were trained on, {SHARED}" if found["same_repository"] else "")
    )


def markdown(cells: Cells) -> str:
    header, *rows = [[cell.replace("|", "\\|") for cell in row] for row in cells]
    lines = [header, ["---", *("---:" for _ in header[1:])], *rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in lines) + "\n"
