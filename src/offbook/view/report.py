"""report.html: one file that shows what a run did. It asks nothing of the network and runs only its own script."""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from importlib import resources
from pathlib import Path
from typing import Any

from offbook.runfolder import write_atomic
from offbook.view.charts import (
    NUM_COLOURS,
    PANELS,
    PART_PREFIX,
    legend,
    line_panel,
    part_names,
    part_panels,
    rule_panel,
    rule_totals,
    run_class,
)
from offbook.view.load import Pick, Run, flatten, is_number, load_run, pick_rollouts, sentence
from offbook.view.markup import MINUS, Html, duration, number, plural, tag
from offbook.view.rollouts import rollout_section
from offbook.view.scales import max_points
from offbook.view.signature import is_scored, key

TOKEN_BUDGET = 1600  # target tokens drawn in one report; a token is about 300 bytes of markup
COLUMNS = (  # key, heading, unit of the change, better direction
    ("solved", "solved", " pts", 1),
    ("invalid_per_100", "invalid calls per 100", "", -1),
    ("turns", "turns", "", 0),
    ("tokens", "tokens", "", 0),
)


def write_report(
    out: Path,
    runs: dict[str, Path],
    *,
    before: dict[str, Any] | None,
    title: str,
    seconds: float | None,
    max_rollouts: int = 6,
) -> None:
    """Write the report of one run or several, side by side. `before` is the measurement that training started from."""
    loaded = [load_run(name, path) for name, path in runs.items()]
    picks = pick_rollouts(loaded, max_rollouts)
    sections = [
        _header(title, loaded, seconds),
        _unreadable(loaded),
        _result(loaded, before),
        _curves(loaded),
        _rollouts(picks),
    ]
    write_atomic(out, _page(title, sections))


def _page(title: str, sections: list[Html]) -> str:
    style = resources.files("offbook.view").joinpath("style.css").read_text()
    script = resources.files("offbook.view").joinpath("app.js").read_text()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'"
    head = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"{tag('title', title)}\n<style>\n{style}</style>\n</head>\n<body>\n"
    )
    main = tag("main", *sections)
    return f"{head}{main}\n<script>{script}</script>\n</body>\n</html>\n"


def _header(title: str, runs: list[Run], seconds: float | None) -> Html:
    button = tag("button", "dark", type="button", id="theme", hidden=True)
    links = [tag("a", label, href=f"#{label.lower()}") for label in ("Result", "Curves", "Rollouts")]
    return tag(
        "header",
        tag("div", tag("nav", *links, aria_label="Sections"), button, class_="bar-top"),
        tag("h1", title),
        tag(
            "p",
            sentence([run.config for run in runs], [run.rows for run in runs], any(run.final for run in runs)),
            f" It took {duration(seconds)}." if seconds is not None else "",
            class_="lead",
        ),
        _differences(runs),
    )


def _differences(runs: list[Run]) -> Html:
    """Which settings tell the runs apart."""
    flat = [flatten(run.config) for run in runs]
    keys = [name for name in dict.fromkeys(name for one in flat for name in one) if name != "out"]
    rows = [
        tag("tr", tag("th", name, scope="row"), *(tag("td", str(one.get(name, "—"))) for one in flat))
        for name in keys
        if len({str(one.get(name)) for one in flat}) > 1
    ]
    if not rows:
        return Html("")
    head = tag("tr", tag("th", "what differs", scope="col"), *(_run_heading(i, run) for i, run in enumerate(runs)))
    table = tag("div", tag("table", tag("thead", head), tag("tbody", *rows), class_="differences"), class_="scroll")
    if len(rows) <= 6:
        return table
    return tag(
        "details", tag("summary", f"{plural(len(rows), 'setting')} tell the runs apart"), table, class_="differs"
    )


def _run_heading(index: int, run: Run) -> Html:
    return tag("th", tag("span", class_=f"swatch {run_class(index)}"), run.name, scope="col")


def _result(runs: list[Run], before: dict[str, Any] | None) -> Html:
    measured = [evaluation for evaluation in (before, *(run.final for run in runs)) if evaluation]
    if not measured:
        return tag("section", tag("h2", "Result"), tag("p", "Not measured yet.", class_="aside"), id="result")
    most = {key_: max((one[key_] for one in measured if is_number(one.get(key_))), default=0) for key_, *_ in COLUMNS}
    if len(measured) == 1:
        most["invalid_per_100"] = 0  # a bar needs another to be compared with
    rows = [] if before is None else [_row("before", before, None, most, "before")]
    rows += [_row(run.name, run.final, before, most, run_class(index)) for index, run in enumerate(runs)]
    heads = [tag("td"), *(tag("th", heading, scope="col") for _, heading, _, _ in COLUMNS)]
    table = tag("table", tag("thead", tag("tr", *heads)), tag("tbody", *rows), class_="result")
    counts = sorted({one["rollouts"] for one in measured if is_number(one.get("rollouts"))})
    over = f" over {' or '.join(f'{count:,}' for count in counts)} rollouts" if counts else ""
    note = tag("p", f"Held-out tasks; means{over}.", class_="aside")
    scroll = tag("div", table, class_="scroll")
    return tag("section", tag("h2", "Result"), scroll, note, _parts(runs, before), id="result")


def _parts(runs: list[Run], before: dict[str, Any] | None) -> Html:
    """What each part of the reward came to, apart; the outcome is what `solved` says."""
    measured = {name: one for name, one in (("before", before), *((run.name, run.final) for run in runs)) if one}
    names = part_names(list(measured.values()))
    if not names:
        return Html("")
    rows = []
    for name, one in measured.items():
        values = [one.get(PART_PREFIX + part) for part in names]
        cells = [tag("td", f"{value:.3f}".replace("-", MINUS) if is_number(value) else "—") for value in values]
        rows.append(tag("tr", tag("th", name, scope="row"), *cells))
    heads = [tag("th", part.replace("_", " "), scope="col") for part in names]
    head = tag("tr", tag("th", "part of the reward", scope="col"), *heads)
    table = tag("table", tag("thead", head), tag("tbody", *rows), class_="parts")
    note = tag("p", "Means before the weights.", class_="aside")
    return tag("div", table, note, class_="scroll")


def _row(
    name: str, evaluation: dict[str, Any] | None, before: dict[str, Any] | None, most: dict[str, float], colour: str
) -> Html:
    head = tag("th", tag("span", class_=f"swatch {colour}"), name, scope="row")
    if evaluation is None:
        return tag("tr", head, tag("td", "not measured yet", colspan=len(COLUMNS), class_="missing"))
    cells = []
    for key_, _, unit, better in COLUMNS:
        value = evaluation.get(key_)
        if not is_number(value):
            cells.append(tag("td", "—", class_="missing"))
            continue
        beside = []
        interval = evaluation.get(f"{key_}_ci")
        if interval:
            low, high = (_figure(key_, bound).removesuffix("%") for bound in interval)
            beside.append(tag("span", f"{low} to {high}", class_="interval"))
        if before and is_number(before.get(key_)):
            beside.append(_change(key_, value - before[key_], unit, better))
        parts = [tag("span", _figure(key_, value), class_="figure"), tag("span", *beside, class_="beside")]
        full = 1.0 if key_ == "solved" else most[key_]
        if better and full:
            parts.append(tag("span", class_=f"meter {colour}", style=f"--share:{value / full:.3f}"))
        cells.append(tag("td", *parts))
    return tag("tr", head, *cells)


def _figure(key_: str, value: float) -> str:
    if key_ == "solved":
        return f"{100 * value:.1f}%"
    return f"{value:,.0f}" if key_ == "tokens" else f"{value:.1f}"


def _change(key_: str, change: float, unit: str, better: int) -> Html:
    text = _figure(key_, abs(change)).removesuffix("%")
    if not any(digit in text for digit in "123456789"):
        return tag("span", "no change", class_="change")
    verdict = "" if not better else " good" if change * better > 0 else " bad"
    return tag("span", f"{'+' if change > 0 else MINUS}{text}{unit}", class_=f"change{verdict}")


def _curves(runs: list[Run]) -> Html:
    panels = [drawn for drawn in (line_panel(panel, runs) for panel in (*PANELS, *part_panels(runs))) if drawn]
    totals = {run.name: rule_totals(run) for run in runs}
    overall = sum((Counter(one) for one in totals.values()), Counter[str]())
    order = sorted(overall, key=lambda rule: (-overall[rule], rule))
    rules = [_rules(run, order, totals[run.name]) for run in runs if any(totals[run.name].values())]
    if not panels and not rules:
        empty = tag("p", "No step is recorded yet.", class_="aside")
        return tag("section", tag("h2", "Curves"), empty, id="curves")
    thinned = any(len(run.rows) > max_points(len(runs)) for run in runs)
    faint = "means of neighbouring steps" if thinned else "every step"
    note = tag("p", f"Faint: {faint}. Bold: a moving average. Rollouts on training tasks.", class_="aside")
    return tag(
        "section",
        tag("h2", "Curves"),
        tag("div", legend(runs), note, class_="key"),
        tag("div", *panels, class_="panels"),
        *rules,
        id="curves",
    )


def _rules(run: Run, order: list[str], totals: dict[str, float]) -> Html:
    """Which rules were hinted; a rule has the same colour in every run."""
    rows = []
    for index, rule in enumerate(order):
        if not totals.get(rule):
            continue
        swatch = tag("span", class_=f"swatch rule-{index % NUM_COLOURS}")
        name = tag("th", swatch, rule.replace("_", " "), scope="row")
        rows.append(tag("tr", name, tag("td", number(totals[rule]))))
    head = tag("tr", tag("th", "rule", scope="col"), tag("th", "messages hinted", scope="col"))
    table = tag("table", tag("thead", head), tag("tbody", *rows), class_="rule-table")
    return tag("div", rule_panel(run, order), table, class_="rule-row")


def _rollouts(picks: list[Pick]) -> Html:
    feedback = [one for pick in picks for one in pick.feedback]
    scale = max((max(one.divergence) for one in feedback if is_scored(one)), default=0.0)
    max_tokens = max(80, TOKEN_BUDGET // max(1, len(feedback)))
    shown = [rollout_section(pick, index, scale, max_tokens, is_open=index == 1) for index, pick in enumerate(picks, 1)]
    if not picks:
        intro = tag("p", "No rollout is stored yet.", class_="aside")
    elif not feedback:
        intro = tag("p", "No message was hinted in these runs. A few rollouts, early to late:", class_="lead")
    else:
        intro = tag(
            "p",
            "In each of these a message broke a rule. A one-line hint was put right before that message, and the same "
            "model read it again: which tokens would it still have written? From early to late; of each stretch of "
            "training, the rollout that the hint moved most.",
            class_="lead",
        )
    keys = [key(scale)] if feedback else []
    button = [tag("button", "open all", type="button", id="open-all", hidden=True)] if len(picks) > 1 else []
    return tag(
        "section",
        tag("h2", "Rollouts"),
        intro,
        tag("div", *keys, *button, class_="key"),
        *shown,
        id="rollouts",
    )


def _unreadable(runs: list[Run]) -> Html:
    found = [f"{plural(count, what)} of {run.name}" for run in runs for what, count in run.unreadable.items() if count]
    if not found:
        return Html("")
    why = ". A crash in the middle of a write leaves such lines."
    return tag("p", "Left out, because unreadable: ", tag("strong", ", ".join(found)), why, class_="unreadable")
