"use strict";

// What a live cycle decided, the newest first, each with the numbers it was decided by.

const DECIDED = {
  start: "began", train: "trained", refuse: "refused", deploy: "deployed",
  roll_back: "rolled back", forget: "deleted",
};
const short = (value) => (value === null ? "\u2013" : typeof value === "number" ? number(value) : String(value));
const isPlain = (value) => value === null || typeof value !== "object" || (Array.isArray(value) && value.every((one) => typeof one !== "object"));

// Rows of like objects are a table, as what a gate compared; other objects are a list of names and values.
function shownNumbers(value) {
  const entries = Object.entries(value), rows = entries.filter(([, one]) => one && typeof one === "object" && !Array.isArray(one));
  const columns = rows.length ? Object.keys(rows[0][1]) : [];
  const alike = rows.length > 1 && rows.length === entries.length
    && rows.every(([, row]) => Object.keys(row).join() === columns.join() && Object.values(row).every(isPlain));
  if (alike) {
    const cell = (one) => h("td", null, Array.isArray(one) ? one.map(short).join(" to ") : short(one));
    const line = ([name, row]) => h("tr", { class: row.worse ? "worse" : null }, h("th", { scope: "row" }, name), columns.map((key) => cell(row[key])));
    return h("table", { class: "numbers" }, h("thead", null, h("tr", null, h("th"), columns.map((key) => h("th", { scope: "col" }, key)))), h("tbody", null, rows.map(line)));
  }
  const item = ([name, one]) => h("div", null, h("dt", null, name), h("dd", null, isPlain(one) ? (Array.isArray(one) ? one.map(short).join(", ") : short(one)) : shownNumbers(one)));
  return h("dl", { class: "numbers" }, entries.map(item));
}

function decisionItem(one) {
  const when = new Date(one.at * 1000).toISOString().slice(0, 16).replace("T", " ");
  const holds = `serving ${one.deployed}`;
  const what = `${DECIDED[one.kind] || one.kind}${one.version === null ? "" : ` ${one.version}`}`;
  return h("details", { class: `decision ${one.kind}` },
    h("summary", null, h("time", null, when), h("b", null, ` ${what} `), visible(one.why), span("aside", ` \u00b7 ${holds}`)),
    Object.keys(one.numbers).length ? shownNumbers(one.numbers) : h("p", { class: "aside" }, "No numbers belong to it."));
}

async function decisionsPage(page, run) {
  const body = h("div", { class: "decision-list" }), count = h("p", { class: "count", role: "status" });
  async function draw() {
    const { decisions } = await ofRun(run, "decisions");
    count.textContent = plural(decisions.length, "decision");
    put(body, decisions.length ? decisions.map(decisionItem).reverse() : empty("Nothing was decided here: this is no folder of offbook live."));
  }
  put(page, h("div", { class: "list-head" }, h("h1", { class: "small" }, "Decisions"), count), body);
  await draw();
  return { title: "Decisions", update: async () => { if (!body.querySelector("details[open]")) await draw(); } };
}
