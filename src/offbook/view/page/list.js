"use strict";

// The list of rollouts: filters, an order, and rows that exist only while they are on screen.

const ORDERS = {
  "in order": null,
  "reward, highest first": (a, b) => b.reward - a.reward,
  "reward, lowest first": (a, b) => a.reward - b.reward,
  "most moved by a hint": (a, b) => b.peak - a.peak,
  "most tokens": (a, b) => b.sampled_tokens + b.prompt_tokens - a.sampled_tokens - a.prompt_tokens,
  "most invalid calls": (a, b) => b.invalid_calls - a.invalid_calls,
};
const RESULTS = [["", "any result"], ["solved", "solved"], ["not", "not solved"]];
const MAX_RULES = 2; // named in a row without a flag
const HEADS = ["step, rollout", "task", "result", "reward", "took", "hints and flags"];

function matches(row, wanted) {
  if (wanted.result && (wanted.result === "solved") !== row.solved) return false;
  if (wanted.rule && (wanted.rule === "any" ? !row.rules.length : !row.rules.includes(wanted.rule))) return false;
  if (wanted.flag && (wanted.flag === "any" ? !row.flags.length : !row.flags.includes(wanted.flag))) return false;
  if (wanted.stop && row.stop !== wanted.stop) return false;
  if (wanted.source && row.source !== wanted.source) return false;
  if (wanted.task && row.task !== wanted.task) return false;
  return !wanted.text || `${row.id} ${row.task}`.toLowerCase().includes(wanted.text.toLowerCase());
}

function rowElement(run, row) {
  const rules = [...new Set(row.rules)], invalid = row.invalid_calls ? `, ${row.invalid_calls} invalid` : "";
  const named = rules.slice(0, row.flags.length ? 1 : MAX_RULES);
  const usage = `${plural(row.turns, "turn")}, ${plural(row.sampled_tokens, "token")}${invalid}`;
  return h("a", { class: isHere(run, row) ? "row" : "row away", href: address({ ...row, run }), role: "option", tabindex: -1 },
    h("span", { class: "when" }, `${stepName(row.source)}, ${row.number + 1}`),
    h("span", { class: "task" }, row.task),
    resultMark(row.solved),
    h("span", { class: "earned" }, points(row.reward)),
    h("span", { class: "usage" }, usage),
    span("marks", row.flags.map(flagChip), named.map((rule) => chip(spaced(rule), "hinted")),
      rules.length > named.length && span("usage", `+${rules.length - named.length}`)));
}

// A list whose rows are made when they come near the screen. All rows have one height.
function virtualList(count, make, open) {
  const spacer = h("div", { class: "spacer" });
  const box = h("div", { class: "rows", role: "listbox", tabindex: 0, "aria-label": "Rollouts; the arrow keys move, Enter opens" }, spacer);
  const made = new Map();
  let current = -1;
  const height = () => (matchMedia("(max-width: 680px)").matches ? 92 : 42);
  function draw() {
    const tall = height(), first = Math.max(0, Math.floor(box.scrollTop / tall) - 12), last = Math.min(count, first + Math.ceil(box.clientHeight / tall) + 24);
    spacer.style.setProperty("height", `${count * tall}px`);
    for (const [index, row] of made) if (index < first || index >= last) { row.remove(); made.delete(index); }
    for (let index = first; index < last; index += 1) {
      if (!made.has(index)) {
        const row = make(index);
        row.id = `row-${index}`;
        row.setAttribute("aria-posinset", index + 1);
        row.setAttribute("aria-setsize", count);
        made.set(index, row);
        spacer.append(row);
      }
      made.get(index).style.setProperty("top", `${index * tall}px`);
      made.get(index).style.setProperty("height", `${tall}px`);
      made.get(index).classList.toggle("on", index === current);
    }
  }
  function select(index) {
    if (!count) return;
    current = Math.max(0, Math.min(count - 1, index));
    const tall = height(), top = current * tall;
    if (top < box.scrollTop) box.scrollTop = top;
    if (top + tall > box.scrollTop + box.clientHeight) box.scrollTop = top + tall - box.clientHeight;
    draw();
    box.setAttribute("aria-activedescendant", `row-${current}`);
  }
  let waiting = false;
  box.addEventListener("scroll", () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => { waiting = false; draw(); });
  }, { passive: true });
  box.addEventListener("keydown", (event) => {
    const page = Math.floor(box.clientHeight / height());
    const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -count, End: count, j: 1, k: -1 };
    const to = event.key in moves ? current + moves[event.key] : undefined;
    if (to !== undefined) { event.preventDefault(); event.stopPropagation(); select(to); }
    if (event.key === "Enter" && current >= 0) { event.preventDefault(); open(current); }
  });
  new ResizeObserver(draw).observe(box);
  return { box, draw, select };
}

async function listPage(page, run, query) {
  const wanted = Object.fromEntries(new URLSearchParams(query || ""));
  let rows = await rolloutList(run);
  const count = h("p", { class: "count", role: "status" });
  const holder = h("div", { class: "list-holder" });
  const values = (name) => [...new Set(rows.flatMap((row) => row[name]))].sort();
  const choose = (name, label, options) => choice(label, options, (event) => set(name, event.target.value), wanted[name] || "", name);
  const named = (any, list, text) => [["", any], ...list.map((one) => [one, text(one)])];
  const search = h("input", {
    type: "search", placeholder: "task or id", "aria-label": "Search tasks and ids", value: wanted.text || "",
    input: (event) => set("text", event.target.value),
  });
  function set(name, value) {
    if (value) wanted[name] = value; else delete wanted[name];
    history.replaceState(null, "", `#/rollouts/${run}${Object.keys(wanted).length ? `?${new URLSearchParams(wanted)}` : ""}`);
    draw();
  }
  let shown = [];
  function draw() {
    shown = rows.filter((row) => matches(row, wanted));
    const order = ORDERS[wanted.order];
    if (order) shown = [...shown].sort(order);
    const every = plural(rows.length, "rollout");
    count.textContent = shown.length === rows.length ? every : `${whole(shown.length)} of ${every}`;
    const open = (index) => { location.hash = address({ ...shown[index], run }); };
    const list = virtualList(shown.length, (index) => rowElement(run, shown[index]), open);
    const all = h("button", { type: "button", click: () => { location.hash = `#/rollouts/${run}`; } }, "show all");
    const nothing = rows.length ? empty("No rollout is like that. ", all) : empty("No rollout is stored yet.");
    put(holder, shown.length ? list.box : nothing);
    list.draw();
    return list;
  }
  const filters = h("form", { class: "filters", submit: (event) => event.preventDefault() });
  function drawFilters() {
    const rules = values("rules"), flags = values("flags");
    put(filters, search, choose("result", "Result", RESULTS),
      choose("source", "Step", named("all steps", [...new Set(rows.map((row) => row.source))], stepName)),
      rules.length > 0 && choose("rule", "Hint", [["", "hinted or not"], ["any", "hinted"], ...rules.map((rule) => [rule, `hinted: ${spaced(rule)}`])]),
      flags.length > 0 && choose("flag", "Flag", [["", "flagged or not"], ["any", "flagged"], ...flags.map((flag) => [flag, `flagged: ${flagName(flag)}`])]),
      choose("stop", "End", named("any end", values("stop"), (stop) => ENDED[stop] || stop)),
      choose("order", "Order", Object.keys(ORDERS).map((name, index) => [index ? name : "", name])),
      wanted.task && h("button", { type: "button", click: () => { set("task", ""); drawFilters(); } }, `task ${wanted.task} ${TIMES}`));
  }
  drawFilters();
  const here = rows.filter((row) => isHere(run, row)).length;
  const note = here < rows.length && h("p", { class: "aside not-recorded" },
    `${plural(here, "rollout")} can be opened in this file; of the others, shown fainter, it has this line only.`);
  put(page, h("div", { class: "list-head" }, h("h1", { class: "small" }, "Rollouts"), count), note, filters,
    h("div", { class: "row head", "aria-hidden": "true" }, HEADS.map((name) => span("", name))), holder);
  const list = draw();
  list.select(0);
  list.box.focus({ preventScroll: true });
  return {
    title: "Rollouts",
    keys: { "/": () => search.focus() },
    update: async () => {
      const at = holder.firstElementChild?.scrollTop || 0, had = holder.contains(document.activeElement);
      rows = await rolloutList(run);
      if (!filters.contains(document.activeElement)) drawFilters();
      const { box } = draw();
      box.scrollTop = at;
      if (had) box.focus({ preventScroll: true });
    },
  };
}
