"use strict";

// Tasks: what was asked, what was deleted, which tests judge, and how often each was solved.

const TASK_ORDERS = {
  "least solved first": (a, b) => a.rate - b.rate,
  "most solved first": (a, b) => (b.rate <= 1) - (a.rate <= 1) || b.rate - a.rate,
  "most rollouts first": (a, b) => b.rollouts - a.rollouts,
  "by name": (a, b) => a.id.localeCompare(b.id),
};
const UNTRIED = 2; // sorts behind every share
const NOT_RECORDED = "This run folder does not record its tasks: the instruction is what the first rollout was asked, and there is no more.";

function rateBar(task) {
  if (!task.rollouts) return span("rate none", "not tried");
  const solved = task.solved / task.rollouts;
  const meter = h("span", { class: "meter", style: { "--share": solved.toFixed(3) } });
  return span("rate", meter, h("b", null, chance(solved)), span("", `${task.solved} of ${task.rollouts}`));
}

async function tasksPage(page, run, opened) {
  let data = await ofRun(run, "tasks");
  const wanted = { text: "", difficulty: "", order: "least solved first" };
  const body = h("div", { class: "task-list" }), count = h("p", { class: "count", role: "status" });
  const isWanted = (task) => `${task.id} ${task.origin}`.toLowerCase().includes(wanted.text.toLowerCase())
    && (!wanted.difficulty || task.difficulty === wanted.difficulty);
  function draw() {
    const all = data.tasks.map((task) => ({ ...task, rate: task.rollouts ? task.solved / task.rollouts : UNTRIED }));
    const rows = all.filter(isWanted).sort(TASK_ORDERS[wanted.order]);
    count.textContent = rows.length === all.length ? plural(rows.length, "task") : `${rows.length} of ${plural(all.length, "task")}`;
    put(body, rows.length ? rows.map((task) => taskItem(run, task)) : empty(all.length ? "No task is like that." : "No task was tried yet."));
  }
  const change = (name) => (event) => { wanted[name] = event.target.value; draw(); };
  const levels = [...new Set(data.tasks.map((task) => task.difficulty))].filter(Boolean).sort();
  const search = h("input", { type: "search", placeholder: "task or repository", "aria-label": "Search tasks", input: change("text") });
  put(page,
    h("div", { class: "list-head" }, h("h1", { class: "small" }, "Tasks"), count),
    h("form", { class: "filters", submit: (event) => event.preventDefault() }, search,
      levels.length > 1 && choice("Difficulty", [["", "any difficulty"], ...levels.map((level) => [level, level])], change("difficulty")),
      choice("Order", Object.keys(TASK_ORDERS).map((name) => [name, name]), change("order"))),
    !data.recorded && h("p", { class: "aside not-recorded" }, NOT_RECORDED),
    body);
  draw();
  const item = opened && [...body.children].find((one) => one.dataset.task === opened);
  if (item) {
    item.open = true;
    item.scrollIntoView({ block: "center" });
  }
  const move = (by) => () => {
    const rows = [...body.querySelectorAll(".task-item > summary")];
    const here = rows.findIndex((row) => row.parentElement.contains(document.activeElement));
    rows[Math.max(0, Math.min(rows.length - 1, here + by))]?.focus(); // Enter opens what has the focus
  };
  return {
    title: "Tasks",
    keys: { "/": () => search.focus(), ArrowDown: move(1), ArrowUp: move(-1), j: move(1), k: move(-1) },
    update: async () => {
      if (body.querySelector("details[open]")) return; // it is being read
      data = await ofRun(run, "tasks");
      draw();
    },
  };
}

function taskItem(run, task) {
  const about = [task.difficulty, task.split].filter(Boolean).join(", ");
  const item = h("details", { class: "task-item", "data-task": task.id },
    h("summary", null, span("task", task.id), span("usage", about), rateBar(task)));
  item.addEventListener("toggle", async () => {
    if (!item.open || item.children.length > 1) return;
    const inside = h("div", { class: "inside" }, h("p", { class: "aside" }, "Reading \u2026"));
    item.append(inside);
    try {
      put(inside, taskBody(run, task, await ofRun(run, "task", { id: task.id })));
    } catch (error) {
      put(inside, empty(error.message));
    }
  });
  return item;
}

function taskBody(run, task, full) {
  const deleted = full.deleted;
  const size = deleted && `${plural(deleted.functions.length, "function")}, ${plural(deleted.lines, "line")} in ${plural(deleted.files, "file")}`;
  const steps = task.steps.map(([source, solved, count]) => link("pill", `#/rollouts/${run}?${new URLSearchParams({ task: task.id, source })}`,
    `${stepName(source)} `, h("b", null, `${solved}/${count}`)));
  return [
    factList({
      repository: full.origin || "",
      difficulty: full.difficulty || "",
      deleted: size || "",
      level: deleted ? deleted.level : "",
      "turns, mean": task.turns === null ? "" : number(task.turns),
    }),
    h("h4", null, "Instruction"), prose(full.instruction || "none"),
    full.patch && [h("h4", null, "Deleted code, as the patch that brings it back"), diffBox(full.patch.trimEnd().split("\n"), "Deleted code"),
      full.patch_left_out > 0 && h("p", { class: "aside" }, `${plural(full.patch_left_out, "character")} not recorded here`)],
    full.fail_to_pass && [h("h4", null, "Tests"),
      testList("must pass afterwards", full.fail_to_pass, full.num_fail_to_pass),
      testList("must still pass", full.pass_to_pass, full.num_pass_to_pass)],
    steps.length > 0 && [h("h4", null, "Rollouts"), h("p", { class: "pills" }, steps)],
  ];
}

function testList(name, list, count = list.length) {
  if (!list.length) return null;
  const more = count > list.length ? `\n${whole(count - list.length)} more, not recorded here` : "";
  return h("details", { class: "fold" },
    h("summary", null, span("", name), span("size", plural(count, "test"))), h("div", { class: "text code" }, list.join("\n"), more));
}
