"use strict";

// Addresses, keys, and the watch over a run that is going on.

const page = document.getElementById("page");
const TABS = [["run", "Run", "1"], ["rollouts", "Rollouts", "2"], ["tasks", "Tasks", "3"], ["compare", "Compare", "4"]];
const LIVE_TAB = ["decisions", "Decisions", "5"];
const tabs = () => (state.runs.some((run) => run.decisions) ? [...TABS, LIVE_TAB] : TABS);
const KEYS = [
  ["1 2 3 4", "run, rollouts, tasks, compare; 5: decisions, of a live cycle"],
  ["/", "search"],
  ["\u2191 \u2193 or j k", "in the lists of rollouts and tasks: up and down; Enter opens"],
  ["j k", "in a rollout: next and previous rollout"],
  ["n p", "next and previous target"],
  ["\u2190 \u2192", "along the tokens of a target, or a curve"],
  ["e", "open or close all tool output"],
  ["g", "the rollout's group"],
  ["u", "back"],
  ["t", "light or dark"],
  ["?", "this"],
];
let current = { title: "", keys: {} };
let shownRun = 0;
let turn = 0;

function route() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const parts = path.split("/").map((part) => { try { return decodeURIComponent(part); } catch { return part; } });
  const home = state.runs[0]?.decisions ? "decisions" : state.runs.length > 1 ? "compare" : "run";
  return [parts[0] || home, parts.slice(1), query || ""];
}

// By number or, as `offbook audit` does, by name.
const runAt = (text) => (state.runs[text] ? Number(text) : state.runs.findIndex((run) => run.name === text));
const PAGES = { run: runPage, rollouts: listPage, rollout: rolloutPage, group: groupPage, tasks: tasksPage, compare: comparePage, decisions: decisionsPage };

async function show() {
  const mine = (turn += 1);
  const [name, parts, query] = route();
  const run = runAt(parts[0] || "0");
  if (name !== "compare" && state.runs[run]) shownRun = run;
  drawTop(name);
  const fresh = h("div", { class: `page-${name}` });
  page.setAttribute("aria-busy", "true");
  put(page, fresh);
  scrollTo(0, 0);
  try {
    if (!Object.hasOwn(PAGES, name) || (name !== "compare" && !state.runs[run])) throw new Missing("There is no such page.");
    const made = name === "rollouts" ? await listPage(fresh, run, query) : await PAGES[name](fresh, run, ...parts.slice(1));
    if (mine !== turn) return;
    current = { keys: {}, ...made };
  } catch (error) {
    if (mine !== turn) return;
    current = { title: "Not here", keys: {} };
    put(fresh, empty(error instanceof Missing ? error.message : `The page failed: ${error.message}`));
    if (!(error instanceof Missing)) console.error(error);
  }
  page.removeAttribute("aria-busy");
  page.dataset.shown = location.hash;
  document.title = `${current.title} \u00b7 offbook`;
}

const tabAddress = (tab) => (tab === "compare" ? "#/compare" : `#/${tab}/${shownRun}`);

function drawTop(name) {
  const here = { rollout: "rollouts", group: "rollouts" }[name] || name;
  const tab = ([of, text]) => h("a", { href: tabAddress(of), "aria-current": of === here ? "page" : null }, text);
  put(document.getElementById("tabs"), tabs().map(tab));
  const select = document.getElementById("run");
  select.parentElement.hidden = state.runs.length < 2;
  put(select, state.runs.map((run, index) => h("option", { value: index, selected: index === shownRun }, run.name)));
  drawLive();
}

function drawLive() {
  const run = state.runs[shownRun], live = document.getElementById("live");
  if (!run) return;
  live.classList.toggle("on", run.live && !held);
  const done = run.trains ? `step ${run.steps}${run.wanted ? ` of ${run.wanted}` : ""}` : plural(run.rollouts, "rollout");
  live.textContent = held ? "saved copy" : `${run.live ? "live, " : ""}${done}`;
  live.title = held ? "This page is a file" : `last written ${ago(Date.now() / 1000 - run.changed_at)}`;
}

async function watch() {
  try {
    if (!document.hidden && (await refreshRuns())) await current.update?.();
    document.body.classList.remove("silent");
    drawLive();
  } catch {
    document.body.classList.add("silent");
    document.getElementById("live").textContent = "the viewer does not answer";
  }
  setTimeout(watch, POLL_MS);
}

function help() {
  const dialog = document.getElementById("help");
  const keys = (text) => text.split(" ").map((one) => (one === "or" ? " or " : h("kbd", null, one)));
  const rows = KEYS.map(([text, what]) => h("div", null, h("dt", null, keys(text)), h("dd", null, what)));
  put(dialog, h("h2", null, "Keys"), h("dl", null, rows), h("form", { method: "dialog" }, h("button", null, "close")));
  if (!dialog.open) dialog.showModal();
}

document.addEventListener("keydown", (event) => {
  if (event.altKey || event.ctrlKey || event.metaKey || event.target.closest("input, select, textarea, dialog")) return;
  if (event.key.startsWith("Arrow") && event.target.closest(".diff")) return; // those scroll it
  const every = { "?": help, t: () => document.getElementById("theme").click(), u: () => history.back() };
  for (const [tab, , key] of tabs()) every[key] = () => { location.hash = tabAddress(tab); };
  const act = current.keys[event.key] || every[event.key];
  if (act) { event.preventDefault(); act(); }
});
document.getElementById("keys").addEventListener("click", help);
document.getElementById("run").addEventListener("change", (event) => {
  const [name] = route(), to = event.target.value;
  location.hash = `#/${["run", "rollouts", "tasks", "decisions"].includes(name) ? name : name === "compare" ? "run" : "rollouts"}/${to}`;
});
addEventListener("hashchange", show);
document.querySelector(".skip").addEventListener("click", (event) => { event.preventDefault(); page.focus(); });
themeButton(document.getElementById("theme"));
(async () => {
  try {
    await refreshRuns();
    await show();
    if (!held) setTimeout(watch, POLL_MS);
  } catch (error) { put(page, empty(error.message)); }
})();
