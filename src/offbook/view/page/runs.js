"use strict";

// The page of one run. What it shares with the comparison of several: panels, the table of measurements, what was left out.

const PANELS = [
  { key: "solved", label: "Solved in training", aside: "higher is better", percent: true, fromZero: true },
  { key: "invalid_per_100", label: "Invalid calls per 100", aside: "lower is better", fromZero: true },
  { key: "reward", label: "Reward", aside: "higher is better" },
  { key: "hint/kl", label: "Divergence from teacher", aside: "nats a token", fromZero: true },
  { key: "rl/kl", label: "KL from the start", aside: "nats a token", fromZero: true },
  { key: "staleness", label: "Staleness", aside: "steps behind", fromZero: true },
  { key: "tokens", label: "Effort: tokens", aside: "sampled, per rollout", fromZero: true },
  { key: "turns", label: "Effort: turns", aside: "per rollout" },
  { key: "hinted_targets", label: "Messages hinted", aside: "per step", fromZero: true },
  { key: "flagged", label: "Flagged rollouts", aside: "share of all", percent: true, fromZero: true },
];
// Folded away, each with a sentence: for whoever looks for a fault.
const EXPLAINED = {
  "rl/mismatch": { label: "Engine against trainer", aside: "nats a token", fromZero: true,
    note: "How far apart the engine that sampled a token and the trainer are on its probability. It comes of rounding; if it grows, something is wrong." },
  "reward/outcome_withheld": { label: "Outcome withheld", aside: "per rollout", fromZero: true,
    note: "What rollouts that a monitor found to be cheating would have earned by solving the task. It was not paid." },
};
const FRACTIONS = /^(solved|flagged|padding_share|hint\/capped|stop\/.*)$/;
const SAID_ELSEWHERE = /^(reward\/outcome|targets\/.*|flags\/.*)$/; // by `solved` and by the stacked bars
const MEASURES = [["solved", "solved", 1], ["invalid_per_100", "invalid calls per 100", -1], ["turns", "turns", 0], ["tokens", "tokens", 0]];
const PART = "reward/", OUTCOME = "reward/outcome"; // which `solved` says
const section = (id, heading, ...inside) => h("section", { id }, h("h2", null, heading), ...inside);

// Which curves are shown at once, and which are folded away: every number of metrics.jsonl is in one of the two.
function panelsOf(keys) {
  const drawn = keys.filter((key) => !SAID_ELSEWHERE.test(key));
  const parts = drawn.filter((key) => key.startsWith("reward/") && !(key in EXPLAINED))
    .map((key) => ({ key, label: `Reward part: ${spaced(key.slice(7))}`, aside: "before its weight" }));
  const stale = drawn.filter((key) => key.includes("stale") && key !== "staleness")
    .map((key) => ({ key, label: spaced(key), aside: "steps behind", fromZero: true }));
  const shown = [...PANELS.slice(0, 3), ...parts, ...PANELS.slice(3), ...stale].filter((panel) => drawn.includes(panel.key));
  const rest = drawn.filter((key) => !shown.some((panel) => panel.key === key));
  return { shown, rest: rest.map((key) => ({ key, label: spaced(key), percent: FRACTIONS.test(key), ...EXPLAINED[key] })) };
}

const lineOf = (curves, key, name, kind) => ({ name, kind, points: [], smooth: [], skipped: 0, ...curves.series[key] });

// Panels that are drawn when somebody unfolds them.
function foldedPanels(panels, draw, label) {
  if (!panels.length) return null;
  const more = h("details", { class: "more" }, h("summary", null, label));
  more.addEventListener("toggle", () => {
    if (more.open && more.children.length === 1) more.append(h("div", { class: "panels" }, panels.map(draw)));
  });
  return more;
}

// All numbers whose names begin with `prefix`, one on top of the other.
function stackOf(curves, prefix, label) {
  const keys = Object.keys(curves.series).filter((key) => key.startsWith(prefix));
  const layers = keys.map((key) => {
    const { points } = curves.series[key], rule = key.slice(prefix.length);
    return { rule, name: spaced(rule), points, total: points.reduce((sum, point) => sum + point[1], 0) };
  }).filter((layer) => layer.total > 0).sort((a, b) => b.total - a.total);
  layers.forEach((layer, index) => { layer.kind = `layer-${index % NUM_COLOURS}`; });
  return { layers, panel: layers.length ? stackPanel({ label, aside: "per step" }, layers) : null };
}

function stackRow(run, stack, filter, heading) {
  const row = (layer) => h("tr", null,
    h("th", { scope: "row" }, swatch(layer.kind), link("", `#/rollouts/${run}?${new URLSearchParams({ [filter]: layer.rule })}`, layer.name)),
    h("td", null, number(layer.total)));
  const head = h("tr", null, h("th", { scope: "col" }, heading), h("th", { scope: "col" }, "in all"));
  return h("div", { class: `rule-row of-${filter}` }, stack.panel,
    h("table", { class: "rule-table" }, h("thead", null, head), h("tbody", null, stack.layers.map(row))));
}

const curvesHead = (heading, thinned) => h("div", { class: "key" }, h("h2", null, heading),
  h("p", { class: "aside" }, `Faint: ${thinned ? "means of neighbouring steps" : "every step"}. Bold: a moving average. Rollouts on training tasks.`));

// Of rollouts without training: one value each.
function numbersSection({ series }) {
  const rows = Object.entries(series).map(([key, { points }]) => h("tr", null, h("th", { scope: "row" }, spaced(key)),
    h("td", null, FRACTIONS.test(key) ? share(points[0][1]) : number(points[0][1])),
    h("td", null, EXPLAINED[key]?.note)));
  return rows.length > 0 && section("numbers", "Numbers", h("div", { class: "scroll" }, h("table", { class: "differences" }, h("tbody", null, rows))));
}

function curveSections(run, curves) {
  if (!state.runs[run].trains && state.runs[run].rollouts) return numbersSection(curves);
  const keys = Object.keys(curves.series), { shown, rest } = panelsOf(keys), name = state.runs[run].name;
  if (!keys.length) return section("curves", "Curves", empty("No step is recorded yet. The curves appear after the first one."));
  const draw = (panel) => linePanel(panel, [lineOf(curves, panel.key, name, kindOf(state.runs[run], run))]);
  const hints = stackOf(curves, "targets/", "Hints by rule"), flags = stackOf(curves, "flags/", "Monitor flags");
  return [
    h("section", { id: "curves" }, curvesHead("Curves", curves.thinned),
      h("div", { class: "panels" }, shown.map(draw)),
      foldedPanels(rest, draw, `${plural(rest.length, "other number")} of metrics.jsonl`)),
    section("hints", "Hints", hints.panel ? stackRow(run, hints, "rule", "rule that was broken") : empty("No message was hinted in this run.")),
    section("monitors", "Monitors", flags.panel ? stackRow(run, flags, "flag", "what was found") : empty("No monitor found anything.")),
  ];
}

// What hints were found to do before they taught: of each look a line a rule.
function lookTable(rows) {
  const faulty = (row, count) => (row.samples ? `${count} of ${row.samples}` : "not judged");
  const line = (row) => h("tr", null, h("th", { scope: "row" }, spaced(row.rule)), h("td", null, number(row.step)),
    h("td", null, number(row.targets)), h("td", null, faulty(row, row.faults)), h("td", null, faulty(row, row.hinted_faults)),
    h("td", null, row.nats === null ? "\u2014" : row.nats.toFixed(1).replace("-", MINUS)),
    h("td", null, row.why_not ? `no: ${row.why_not}` : "yes", row.unjudged && ` (${row.unjudged})`));
  const heads = ["rule", "before step", "places", "faulty messages", "with the hint", "nats", "taught"];
  return [h("div", { class: "scroll" }, h("table", { class: "parts" },
    h("thead", null, h("tr", null, heads.map((text) => h("th", { scope: "col" }, text)))), h("tbody", null, rows.map(line)))),
    h("p", { class: "aside" }, "Messages sampled where a rule was broken, judged by the rule. Nats: what the hint adds to the log-probability of the faulty message.")];
}

// How rollouts stand while a run samples them: a line for where they are, and one for the engine and the machine.
function nowTable(now) {
  const slot = "slots ", entries = Object.entries(now), isSlot = ([name]) => name.startsWith(slot);
  const table = (some) => some.length > 0 && h("div", { class: "scroll" }, h("table", { class: "parts" },
    h("thead", null, h("tr", null, some.map(([name]) => h("th", { scope: "col" }, name.replace(slot, ""))))),
    h("tbody", null, h("tr", null, some.map(([, value]) => h("td", null, number(value)))))));
  return [table(entries.filter(isSlot)), table(entries.filter((one) => !isSlot(one)))];
}

const measured = (key, value) => (key === "solved" ? share(value) : key === "tokens" ? whole(value) : value.toFixed(1));

// How far it went from the measurement before training; bold where that is better, in the colour of faults where worse.
function changeOf(key, better, value, before) {
  if (!Number.isFinite(before)) return null;
  const change = value - before, verdict = better * change > 0 ? " good" : better * change < 0 ? " bad" : "";
  const size = measured(key, Math.abs(change)).replace("%", " pts");
  return span(`change${verdict}`, Number.parseFloat(size.replace(",", "")) ? (change > 0 ? "+" : MINUS) + size : "\u00b10");
}

function measureCell(key, better, result, most, kind, before) {
  const value = result[key], interval = result[`${key}_ci`];
  if (!Number.isFinite(value)) return h("td", { class: "missing" }, "\u2014");
  const bound = (at) => measured(key, interval[at]).replace("%", "");
  return h("td", null, span("figure", measured(key, value)),
    span("beside", interval?.length === 2 && span("interval", `${bound(0)} to ${bound(1)}`), before && changeOf(key, better, value, before[key])),
    better !== 0 && most > 0 && h("span", { class: `meter ${kind}`, style: { "--share": (value / most).toFixed(3) } }));
}

// rows: [{name, kind, result}]. A bar needs another to be compared with, but for the share that was solved.
function resultTable(rows) {
  const highest = (key) => (rows.length > 1 ? Math.max(0, ...rows.map((row) => row.result[key] || 0)) : 0);
  const most = Object.fromEntries(MEASURES.map(([key]) => [key, key === "solved" ? 1 : highest(key)]));
  const before = rows.find((row) => row.kind === "before")?.result;
  const line = ({ name, kind, result }) => h("tr", null, h("th", { scope: "row" }, swatch(kind), name),
    MEASURES.map(([key, , better]) => measureCell(key, better, result, most[key], kind, result !== before && before)));
  const head = h("tr", null, h("td"), MEASURES.map(([, heading]) => h("th", { scope: "col" }, heading)));
  const counts = [...new Set(rows.map((row) => row.result.rollouts))].filter(Number.isFinite).map(whole).join(" or ");
  const note = `Means${counts && ` over ${counts} rollouts`}; the range is a 95% interval${before ? ", then the change from before" : ""}.`;
  return [h("div", { class: "scroll" }, h("table", { class: "result" }, h("thead", null, head), h("tbody", null, rows.map(line)))),
    h("p", { class: "aside" }, note), partTable(rows)];
}

// What each part of the reward came to, apart.
function partTable(rows) {
  const parts = [...new Set(rows.flatMap((row) => Object.keys(row.result)))].filter((key) => key.startsWith(PART) && key !== OUTCOME);
  if (!parts.length) return null;
  const head = h("tr", null, h("th", { scope: "col" }, "part of the reward"), parts.map((key) => h("th", { scope: "col" }, spaced(key.slice(PART.length)))));
  const figure = (value) => h("td", null, Number.isFinite(value) ? value.toFixed(3).replace("-", MINUS) : "\u2014");
  const line = ({ name, result }) => h("tr", null, h("th", { scope: "row" }, name), parts.map((key) => figure(result[key])));
  return h("details", { class: "more" }, h("summary", null, "Parts of the reward, before their weights"),
    h("div", { class: "scroll" }, h("table", { class: "parts" }, h("thead", null, head), h("tbody", null, rows.map(line)))),
    parts.filter((key) => key in EXPLAINED).map((key) => h("p", { class: "aside" }, `${EXPLAINED[key].label}: ${EXPLAINED[key].note}`)));
}

function unreadableNote(runs) {
  const of = (run) => (runs.length > 1 ? ` of ${run.name}` : "");
  const found = runs.flatMap((run) => Object.entries(run.unreadable).map(([what, count]) => plural(count, what) + of(run)));
  if (!found.length) return null;
  const why = ". A crash in the middle of a write leaves such lines.";
  return h("p", { class: "unreadable" }, "Left out, because unreadable: ", h("strong", null, found.join(", ")), why);
}

function configSection(run) {
  const text = (value) => (typeof value === "string" ? value || "\u2014" : JSON.stringify(value));
  const rows = Object.entries(run.config).map(([name, value]) => h("tr", null, h("th", { scope: "row" }, name), h("td", null, text(value))));
  const table = h("div", { class: "scroll" }, h("table", { class: "differences" }, h("tbody", null, rows)));
  return h("section", null, h("details", { class: "more" }, h("summary", null, `${plural(rows.length, "setting")} of config.toml`), table));
}

function doorsOf(run, index) {
  const door = (href, count, noun) => count > 0 && link("door", href, h("b", null, whole(count)), noun + (count === 1 ? "" : "s"));
  return [door(`#/rollouts/${index}`, run.rollouts, "rollout"),
    door(`#/rollouts/${index}?rule=any&order=most+moved+by+a+hint`, run.targets, "hinted message"), link("door", `#/tasks/${index}`, "tasks")];
}

async function runPage(page, run) {
  let curves = await ofRun(run, "curves");
  const head = h("div"), body = h("div");
  function draw() {
    const about = state.runs[run];
    const rows = Object.entries(about.evals).map(([name, result]) => ({ name, kind: kindOf(about, run), result }));
    put(head, h("h1", null, about.name), h("p", { class: "lead" }, about.sentence), unreadableNote([about]),
      h("p", { class: "doors" }, doorsOf(about, run)));
    const open = [...body.querySelectorAll("details")].map((one) => one.open);
    const focused = [...body.querySelectorAll("svg")].indexOf(document.activeElement);
    put(body, about.live && Object.keys(about.now).length > 0 && section("now", "Rollouts now", nowTable(about.now)),
      rows.length > 0 && section("result", "Measured on held-out tasks", resultTable(rows)), curveSections(run, curves),
      about.look.length > 0 && section("look", "Looked at first", lookTable(about.look)), configSection(about));
    [...body.querySelectorAll("details")].forEach((one, index) => { one.open = open[index] || false; });
    if (focused >= 0) body.querySelectorAll("svg")[focused]?.focus({ preventScroll: true });
  }
  draw();
  put(page, head, body);
  return { title: state.runs[run].name, update: async () => { curves = await ofRun(run, "curves"); draw(); } };
}
