"use strict";

// The page of one run. What it shares with the comparison of several: panels, the table of measurements, what was left out.

const PANELS = [
  { key: "solved", label: "Solved in training", aside: "higher is better", percent: true, fromZero: true },
  { key: "invalid_per_100", label: "Invalid calls per 100", aside: "lower is better", fromZero: true },
  { key: "reward", label: "Reward", aside: "higher is better" },
  { key: "ce/loss", label: "Loss", aside: "nats per token", fromZero: true },
  { key: "validation/loss", label: "Validation loss", aside: "nats per token", fromZero: true },
  { key: "hint/kl", label: "Divergence from teacher", aside: "nats per token", fromZero: true },
  { key: "rl/kl", label: "KL from the start", aside: "nats per token", fromZero: true },
  { key: "staleness", label: "Staleness", aside: "steps behind, mean", fromZero: true },
  { key: "staleness/max", label: "Staleness, oldest", aside: "steps behind", fromZero: true },
  { key: "staleness/too_old", label: "Rollouts too stale to train on", aside: "per step", fromZero: true },
  { key: "tokens", label: "Effort: tokens", aside: "sampled, per rollout", fromZero: true },
  { key: "turns", label: "Effort: turns", aside: "per rollout" },
  { key: "groups_with_gradient", label: "Groups with a gradient", aside: "share of all", percent: true, fromZero: true },
  { key: "hinted_targets", label: "Messages hinted", aside: "per step", fromZero: true },
  { key: "flagged", label: "Flagged rollouts", aside: "share of all", percent: true, fromZero: true },
];
// Folded away, each with a sentence: for debugging.
const EXPLAINED = {
  "rl/mismatch": { label: "Engine against trainer", aside: "nats per token", fromZero: true,
    note: "How far apart the engine that sampled a token and the trainer are on its probability. It comes of rounding; if it grows, something is wrong." },
  "reward/outcome_withheld": { label: "Outcome withheld", aside: "per rollout", fromZero: true,
    note: "What rollouts that a monitor found to be cheating would have earned by solving the task. It was not paid." },
};
const FRACTIONS = /^(solved|flagged|groups_with_gradient|no_call|no_edit|no_test_run|hint\/capped|stop\/.*|mtp\/kept_.*)$/;
const SAID_ELSEWHERE = /^(reward\/outcome|targets\/.*|flags\/.*)$/; // by `solved` and by the stacked bars
const OF_ROLLOUTS = /^(solved|invalid_per_100|reward.*|staleness.*|tokens|turns|flagged|groups_with_gradient|no_.*|stop\/.*|events\/.*)$/;
const samples = (run) => ["train", "live"].includes(run.verb); // of the others these numbers are the data's, not the model's
const ROOMS = {
  rl: "RL", hint: "Hints", ce: "Imitation", mtp: "Draft head", stop: "Ended", events: "Events", left_out: "Hints left out", slots: "Rollouts under way",
  lengths: "Tokens per rollout", deaths: "Processes lost", slowest: "Slowest rollout",
};
const WORDS = [[/_(\d+)$/, ", token $1"], [/_p50$/, ", median"], [/_p(\d+)$/, ", percentile $1"], [/_s$/, ", seconds"], [/_/g, " "]];

// A name for people, of any number in metrics.jsonl.
function nameOf(key) {
  const [room, ...rest] = key.split("/"), words = (text) => WORDS.reduce((so_far, [from, to]) => so_far.replace(from, to), text);
  return rest.length ? `${ROOMS[room] || capital(words(room))}: ${(room === "stop" && ENDED[rest[0]]) || words(rest.join(" "))}` : capital(words(room));
}

const MEASURES = [["solved", "solved", 1], ["invalid_per_100", "invalid calls per 100", -1], ["turns", "turns", 0], ["tokens", "tokens", 0]];
const PART = "reward/", OUTCOME = "reward/outcome"; // which `solved` says
const section = (id, heading, ...inside) => h("section", { id }, h("h2", null, heading), ...inside);

// Which curves are shown at once, which are folded away, and which are constant: every number of metrics.jsonl is in one of them.
function panelsOf(runs, curves) {
  const used = runs.filter((run) => run.trains).map((run) => [run, curves[run.index].series]);
  const isOf = (run, key) => samples(run) || !OF_ROLLOUTS.test(key);
  const keys = [...new Set(used.flatMap(([, series]) => Object.keys(series)))].filter((key) => !SAID_ELSEWHERE.test(key));
  const levels = (key) => [...new Set(used.filter(([, series]) => key in series).map(([, series]) => series[key].constant))];
  const part = (key) => ({ key, label: `Reward part: ${spaced(key.slice(PART.length))}`, aside: "before its weight" });
  const drafts = keys.filter((key) => key.startsWith("mtp/kept_"))
    .map((key) => ({ key, label: `Kept of draft token ${key.slice(9)}`, aside: "share of drafts", percent: true, fromZero: true }));
  const parts = keys.filter((key) => key.startsWith(PART) && !(key in EXPLAINED)).map(part);
  const shown = [...PANELS.slice(0, 3), ...parts, ...PANELS.slice(3), ...drafts]
    .filter(({ key }) => keys.includes(key) && used.some(([run, series]) => key in series && isOf(run, key)));
  const rest = keys.filter((key) => !shown.some((panel) => panel.key === key)).map((key) => {
    const label = used.some(([run, series]) => key in series && isOf(run, key)) ? nameOf(key) : `Recorded data: ${nameOf(key)}`;
    return { key, label, percent: FRACTIONS.test(key), ...EXPLAINED[key] };
  });
  const isConstant = ({ key }) => levels(key).length === 1 && levels(key)[0] !== null;
  const level = (panel) => `${panel.label} ${panel.percent ? share(levels(panel.key)[0]) : number(levels(panel.key)[0])}`;
  const constants = (panels) => panels.some(isConstant)
    && h("p", { class: "aside constant" }, `Constant, not drawn: ${panels.filter(isConstant).map(level).join("; ")}.`);
  const draw = (panel) => linePanel(panel, used.filter(([run]) => isOf(run, panel.key) || rest.includes(panel))
    .map(([run, series]) => ({ name: run.name, kind: run.kind, points: [], smooth: [], skipped: 0, ...series[panel.key] })));
  const moving = (panels) => panels.filter((panel) => !isConstant(panel));
  return [
    keys.length ? h("div", { class: "panels" }, moving(shown).map(draw)) : empty("No step is recorded yet. The curves appear after the first one."),
    constants(shown), foldedPanels(moving(rest), draw, `${plural(rest.length, "other number")} of metrics.jsonl`, constants(rest)),
  ];
}

// Panels that are drawn when they are unfolded.
function foldedPanels(panels, draw, label, note) {
  if (!panels.length && !note) return null;
  const more = h("details", { class: "more" }, h("summary", null, label));
  more.addEventListener("toggle", () => {
    if (more.open && more.children.length === 1) more.append(h("div", { class: "panels" }, panels.map(draw)), note || "");
  });
  return more;
}

// All numbers whose names begin with `prefix`, one on top of the other.
function stackOf(curves, prefix, label, name = spaced) {
  const keys = Object.keys(curves.series).filter((key) => key.startsWith(prefix));
  const layers = keys.map((key) => {
    const { points } = curves.series[key], rule = key.slice(prefix.length);
    return { rule, name: name(rule), points, total: points.reduce((sum, point) => sum + point[1], 0) };
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

const curvesHead = (heading, thinned, runs) => h("div", { class: "key" }, h("h2", null, heading),
  h("p", { class: "aside" }, `Faint: ${thinned ? "means of neighbouring steps" : "every step"}. Bold: a moving average.`,
    runs.every((run) => !run.trains || run.verb === "train") && " Rollouts on training tasks."));

// Of rollouts without training: one value each.
function numbersSection({ series }) {
  const rows = Object.entries(series).map(([key, { points }]) => h("tr", null, h("th", { scope: "row" }, nameOf(key)),
    h("td", null, FRACTIONS.test(key) ? share(points[0][1]) : number(points[0][1])),
    h("td", null, EXPLAINED[key]?.note)));
  return rows.length > 0 && section("numbers", "Numbers", h("div", { class: "scroll" }, h("table", { class: "differences" }, h("tbody", null, rows))));
}

function curveSections(index, curves) {
  const run = { ...state.runs[index], index, kind: kindOf(state.runs[index], index) };
  if (!run.trains && run.rollouts) return numbersSection(curves);
  const hints = stackOf(curves, "targets/", "Hints by rule"), flags = stackOf(curves, "flags/", "Monitor flags", flagName);
  const hinted = hints.panel ? stackRow(index, hints, "rule", "rule that was broken") : samples(run) && empty("No message was hinted in this run.");
  const flagged = flags.panel ? stackRow(index, flags, "flag", "what was found") : samples(run) && empty("No monitor found anything.");
  return [
    h("section", { id: "curves" }, curvesHead("Curves", curves.thinned, [run]), panelsOf([run], { [index]: curves })),
    run.steps > 0 && hinted && section("hints", "Hints", hinted),
    run.steps > 0 && flagged && section("monitors", "Monitors", flagged),
  ];
}

// What hints were found to do before they taught: of each look one line per rule.
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
  const places = [...new Set(rows.map((row) => row.result.on))], apart = places.length > 1;
  const line = ({ name, kind, result }) => h("tr", null, h("th", { scope: "row" }, swatch(kind), name, apart && result.on && span("on-tasks", result.on)),
    MEASURES.map(([key, , better]) => measureCell(key, better, result, most[key], kind, result !== before && result.on === before?.on && before)));
  const head = h("tr", null, h("td"), MEASURES.map(([, heading]) => h("th", { scope: "col" }, heading)));
  const counts = [...new Set(rows.map((row) => row.result.rollouts))].filter(Number.isFinite).map(whole).join(" or ");
  const over = [counts && `over ${counts} rollouts`, !apart && places[0] && `of ${places[0]}`].filter(Boolean).join(" ");
  const overlaps = new Set(rows.filter((row) => row.result.overlap).map((row) => (apart ? `${row.name}: ${row.result.overlap}` : row.result.overlap)));
  const note = [`Means${over && ` ${over}`}; the range is a 95% interval${before ? ", then the change from before" : ""}.`, ...overlaps].join(" ");
  return [h("div", { class: "scroll" }, h("table", { class: "result" }, h("thead", null, head), h("tbody", null, rows.map(line)))),
    h("p", { class: "aside" }, note), partTable(rows)];
}

// Which tasks these are is what each evaluation's file says; the heading says what all of them do.
function measuredSection(rows) {
  const headings = new Set(rows.map((row) => row.result.heading)), heading = headings.size === 1 ? [...headings][0] : "Measured";
  const isSampled = (row) => MEASURES.some(([key]) => Number.isFinite(row.result[key])), others = rows.filter((row) => !isSampled(row));
  return section("result", heading, others.length < rows.length && resultTable(rows.filter(isSampled)),
    others.length > 0 && h("p", { class: "aside" }, `Without rollouts, so not in a table here: ${others.map((row) => row.name).join(", ")}.`));
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

// Of runs whose last steps had nothing to learn from.
const silentNotes = (runs) => runs.filter((run) => run.no_signal.steps).map((run) => h("p", { class: "unreadable" },
  h("strong", null, `${runs.length > 1 ? `${run.name}: no` : "No"} signal in the last ${plural(run.no_signal.steps, "step")}: `), visible(run.no_signal.why)));

function configSection(run) {
  const text = (value) => (typeof value === "string" ? value || "\u2014" : JSON.stringify(value));
  const rows = Object.entries(run.config).map(([name, value]) => h("tr", null, h("th", { scope: "row" }, name), h("td", null, text(value))));
  const table = h("div", { class: "scroll" }, h("table", { class: "differences" }, h("tbody", null, rows)));
  return h("section", null, h("details", { class: "more" }, h("summary", null, `${plural(rows.length, "setting")} of config.toml`), table));
}

function doorsOf(run, index) {
  const door = (href, count, noun) => count > 0 && link("door", href, h("b", null, whole(count)), noun + (count === 1 ? "" : "s"));
  return [door(`#/rollouts/${index}`, run.rollouts, "rollout"),
    door(`#/rollouts/${index}?rule=any&order=most+moved+by+a+hint`, run.targets, "hinted message"),
    run.rollouts > 0 && link("door", `#/tasks/${index}`, "tasks")];
}

async function runPage(page, run) {
  let curves = await ofRun(run, "curves");
  const head = h("div"), body = h("div");
  function draw() {
    const about = state.runs[run];
    const rows = Object.entries(about.evals).map(([name, result]) => ({ name, kind: kindOf(about, run), result }));
    put(head, h("h1", null, about.name), h("p", { class: "lead" }, about.sentence), silentNotes([about]), unreadableNote([about]),
      h("p", { class: "doors" }, doorsOf(about, run)));
    const open = [...body.querySelectorAll("details")].map((one) => one.open);
    const focused = [...body.querySelectorAll("svg")].indexOf(document.activeElement);
    put(body, about.live && Object.keys(about.now).length > 0 && section("now", "Rollouts now", nowTable(about.now)),
      rows.length > 0 && measuredSection(rows), curveSections(run, curves),
      about.look.length > 0 && section("look", "Looked at first", lookTable(about.look)), configSection(about));
    [...body.querySelectorAll("details")].forEach((one, index) => { one.open = open[index] || false; });
    if (focused >= 0) body.querySelectorAll("svg")[focused]?.focus({ preventScroll: true });
  }
  draw();
  put(page, head, body);
  return { title: state.runs[run].name, update: async () => { curves = await ofRun(run, "curves"); draw(); } };
}
