"use strict";

// Runs side by side, and the first screen where there are several: what came out, the measurements, a hint at work, curves.

const MAX_DIFFERENCES = 10; // settings shown unfolded
const LEFT_OUT = "offbook-left"; // runs that were unticked, for as long as the tab lives
const isConfigured = (run) => Object.keys(run.config).length > 0; // what was measured before training has no settings
const kindOf = (run, index) => (run.name === "before" ? "before" : runClass(index));

const settingOf = (run, name) => (name in run.config ? JSON.stringify(run.config[name]) : "\u2014");
function differing(runs) {
  const differs = (name) => new Set(runs.map((run) => settingOf(run, name))).size > 1;
  return [...new Set(runs.flatMap((run) => Object.keys(run.config)))].filter(differs);
}
// One setting that differs is said in the head, and all of them stand in a table at the end.
function onlyDifference(runs) {
  const [name, ...others] = differing(runs);
  return name && !others.length ? ` They differ in ${name}: ${runs.map((run) => `${settingOf(run, name)} in ${run.name}`).join(", ")}.` : "";
}

function differences(runs) {
  if (runs.length < 2) return null;
  const names = differing(runs);
  if (!names.length) return section("differs", "What differs", empty("Their settings are the same."));
  const head = h("tr", null, h("th", { scope: "col" }, "setting"), runs.map((run) => h("th", { scope: "col" }, swatch(run.kind), run.name)));
  const rows = names.map((name) => h("tr", null, h("th", { scope: "row" }, name), runs.map((run) => h("td", null, settingOf(run, name)))));
  const table = h("div", { class: "scroll" }, h("table", { class: "differences" }, h("thead", null, head), h("tbody", null, rows)));
  if (names.length <= MAX_DIFFERENCES) return section("differs", "What differs", table);
  const label = `${plural(names.length, "setting")} tell the runs apart`;
  return section("differs", "What differs", h("details", { class: "more" }, h("summary", null, label), table));
}

function doorRows(chosen) {
  const row = (run) => h("p", { class: "doors" }, link("whose", `#/run/${run.index}`, swatch(run.kind), run.name), doorsOf(run, run.index));
  return section("closer", "Look closer", chosen.map(row));
}

// A hint at work: the message, the hint, and what the hint did to each token.
function exampleSection(run, found) {
  if (!found?.hint) return null;
  const { hint, source, group } = found, scale = hint.divergence.reduce((a, b) => Math.max(a, b), 0);
  const place = address({ ...found, run: run.index }, hint.target);
  return section("example", "What a hint does: an example",
    h("p", { class: "lead" }, "In this message the agent broke a rule. The hint is put right before it, and the same model reads on: which tokens would it still have written?",
      !found.clear && " No hint of this run took much probability from a faulty token that was likely before; this is the best there is."),
    h("ol", { class: "conversation" }, hintItem(hint),
      h("li", { class: "message assistant target" }, h("div", { class: "gutter" }, span("role", "assistant"), chip("target", "target-chip")),
        h("div", { class: "content" }, targetView(hint, scale)))),
    scaleKey(scale),
    h("p", { class: "aside" }, `${run.name}, ${stepName(source)}: `, link("", place, "the whole rollout"), ", ",
      link("", `#/group/${run.index}/${encodeURIComponent(source)}/${encodeURIComponent(group)}`, "the group of its task"), ", ",
      link("", `#/rollouts/${run.index}?rule=any&order=most+moved+by+a+hint`, "all that were hinted"), "."));
}

function comparison(chosen, curves) {
  const rows = chosen.flatMap((run) => Object.entries(run.evals)
    .map(([what, result]) => ({ name: what === "final" || what === run.name ? run.name : `${run.name}, ${what}`, kind: run.kind, result })));
  rows.sort((a, b) => (b.kind === "before") - (a.kind === "before"));
  const hintsOf = (run) => {
    const stack = stackOf(curves[run.index], "targets/", `Hints by rule, ${run.name}`);
    return stack.panel && stackRow(run.index, stack, "rule", "rule that was broken");
  };
  return {
    measured: rows.length ? measuredSection(rows)
      : section("result", "Measured", empty("None of these runs was measured yet: ", h("code", null, "offbook eval RUN"), " does.")),
    more: [
      chosen.some((run) => run.trains) && h("section", { id: "curves" }, curvesHead("Training", chosen.some((run) => curves[run.index].thinned), chosen),
        panelsOf(chosen, curves), chosen.map(hintsOf)),
      doorRows(chosen),
      differences(chosen.filter(isConfigured)),
      held?.next && section("next", held.next.heading, h("ol", { class: "next" },
        held.next.commands.map(([command, what]) => h("li", null, h("code", null, command), span("aside", what))))),
    ],
  };
}

async function comparePage(page) {
  const left = new Set(held ? [] : JSON.parse(sessionStorage.getItem(LEFT_OUT) || "[]"));
  const head = h("div"), measured = h("div"), shown = h("div"), more = h("div"), several = state.runs.length > 1;
  let curves = [];
  const read = async () => { curves = await Promise.all(state.runs.map((_, run) => ofRun(run, "curves"))); };
  const all = () => state.runs.map((run, index) => ({ ...run, index, kind: kindOf(run, index) }));
  function draw() {
    const chosen = all().filter((run) => !left.has(run.name)), made = comparison(chosen, curves);
    put(head, several && state.outcome && h("p", { class: "outcome" }, state.outcome),
      several && h("p", { class: "lead" }, state.sentence, onlyDifference(chosen.filter(isConfigured))), silentNotes(chosen), unreadableNote(chosen));
    put(measured, made.measured);
    put(more, made.more);
  }
  const toggle = (name) => (event) => {
    if (event.target.checked) left.delete(name); else left.add(name);
    if (!held) sessionStorage.setItem(LEFT_OUT, JSON.stringify([...left]));
    draw();
  };
  const tick = (run) => h("label", null,
    h("input", { type: "checkbox", checked: !left.has(run.name), change: toggle(run.name) }), swatch(run.kind), run.name);
  const choose = h("fieldset", { class: "choose" }, h("legend", { class: "unseen" }, "Runs to compare"), all().map(tick));
  const alone = empty("One run is open. Give several to see them side by side: ", h("code", null, "offbook view RUN OTHER"), ".");
  const hinted = all().find((run) => run.targets > 0);
  await read();
  put(shown, hinted && exampleSection(hinted, await ofRun(hinted.index, "example")));
  put(page, h("h1", null, held?.title || "Compare"), head, measured, shown, several ? choose : alone, more);
  draw();
  return { title: held?.title || "Compare", update: async () => { await read(); draw(); } };
}
