"use strict";

// Runs side by side: what differs in their settings, what was measured, their curves on shared axes.

const MAX_DIFFERENCES = 10; // settings shown unfolded
const LEFT_OUT = "offbook-left"; // runs that were unticked, for as long as the tab lives

function differences(runs) {
  if (runs.length < 2) return null;
  const text = (run, name) => (name in run.config ? JSON.stringify(run.config[name]) : "\u2014");
  const differs = (name) => new Set(runs.map((run) => text(run, name))).size > 1;
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.config)))].filter(differs);
  if (!names.length) return section("differs", "What differs", empty("Their settings are the same."));
  const head = h("tr", null, h("th", { scope: "col" }, "setting"), runs.map((run) => h("th", { scope: "col" }, swatch(run.kind), run.name)));
  const rows = names.map((name) => h("tr", null, h("th", { scope: "row" }, name), runs.map((run) => h("td", null, text(run, name)))));
  const table = h("div", { class: "scroll" }, h("table", { class: "differences" }, h("thead", null, head), h("tbody", null, rows)));
  if (names.length <= MAX_DIFFERENCES) return section("differs", "What differs", table);
  const label = `${plural(names.length, "setting")} tell the runs apart`;
  return section("differs", "What differs", h("details", { class: "more" }, h("summary", null, label), table));
}

function comparison(chosen, curves) {
  const { shown, rest } = panelsOf([...new Set(chosen.flatMap((run) => Object.keys(curves[run.index].series)))]);
  const draw = (panel) => linePanel(panel, chosen.map((run) => lineOf(curves[run.index], panel.key, run.name, run.kind)));
  const rows = chosen.flatMap((run) => Object.entries(run.evals)
    .map(([what, result]) => ({ name: what === "final" ? run.name : `${run.name}, ${what}`, kind: run.kind, result })));
  return [
    unreadableNote(chosen),
    differences(chosen),
    section("result", "Measured on held-out tasks",
      rows.length ? resultTable(rows) : empty("None of these runs was measured yet: ", h("code", null, "offbook eval RUN"), " does.")),
    section("curves", "Curves",
      shown.length ? h("div", { class: "panels" }, shown.map(draw)) : empty("No step is recorded yet."),
      foldedPanels(rest, draw, plural(rest.length, "other number"))),
  ];
}

async function comparePage(page) {
  const left = new Set(held ? [] : JSON.parse(sessionStorage.getItem(LEFT_OUT) || "[]"));
  const body = h("div");
  let curves = [];
  const read = async () => { curves = await Promise.all(state.runs.map((_, run) => ofRun(run, "curves"))); };
  function draw() {
    const all = state.runs.map((run, index) => ({ ...run, index, kind: runClass(index) }));
    put(body, comparison(all.filter((run) => !left.has(run.name)), curves));
  }
  const toggle = (name) => (event) => {
    if (event.target.checked) left.delete(name); else left.add(name);
    if (!held) sessionStorage.setItem(LEFT_OUT, JSON.stringify([...left]));
    draw();
  };
  const tick = (run, index) => h("label", null,
    h("input", { type: "checkbox", checked: !left.has(run.name), change: toggle(run.name) }), swatch(runClass(index)), run.name);
  const choose = h("fieldset", { class: "choose" }, h("legend", { class: "unseen" }, "Runs to compare"), state.runs.map(tick));
  const alone = empty("One run is open. Give several to see them side by side: ", h("code", null, "offbook view RUN OTHER"), ".");
  await read();
  put(page, h("h1", { class: "small" }, "Compare"), state.runs.length > 1 ? choose : alone, body);
  draw();
  return { title: "Compare", update: async () => { await read(); draw(); } };
}
