"use strict";

// The rollouts of one task in one step, side by side.

function advantageBar(value, most) {
  if (value === null || value === undefined) return span("usage", "alone in its group");
  const way = value > 0 ? "up" : value < 0 ? "down" : "", width = most > 0 ? Math.abs(value) / most : 0;
  return span("advantage", h("b", null, signed(value)), h("span", { class: `lean ${way}`, style: { "--share": width.toFixed(3) } }));
}

// One message of the agent: the call that it made, and how it went.
function beatItem(beat, open) {
  const invalid = INVALID.has(beat.status);
  return h("li", { class: `beat ${invalid ? "invalid" : beat.status || "said"}` },
    link("", `${open}/${beat.segment}.${beat.message}`,
      span("tool-name", beat.name || "an empty message"), beat.calls > 1 && ` +${beat.calls - 1}`, " ", span("brief", beat.brief)),
    beat.status && beat.status !== "ok" && chip(spaced(beat.status), invalid ? "invalid" : ""),
    beat.target && chip("target", "target-chip"));
}

function memberCard(run, member, most) {
  const open = address({ ...member, run });
  const fact = (name, value, kind) => h("div", { class: kind }, h("dt", null, name), h("dd", null, value));
  const parts = Object.entries(member.parts);
  const shown = parts.length > 1 ? parts : []; // one part alone is the reward
  return h("article", { class: "member" },
    h("header", null, link("member-name", open, `rollout ${member.number + 1}`), resultMark(member.solved)),
    h("dl", { class: "earned-list" },
      fact("advantage", advantageBar(member.advantage, most)),
      fact("reward", points(member.reward)),
      shown.map(([name, value]) => fact(spaced(name), `${points(value)} ${TIMES} ${number(member.weights[name] ?? 1)}`, "part"))),
    h("ol", { class: "beats" }, member.beats.map((beat) => beatItem(beat, open))),
    h("footer", null, `${ENDED[member.stop] || member.stop}; ${plural(member.turns, "turn")}, ${plural(member.sampled_tokens, "token")}`,
      member.flags.map(flagChip)));
}

async function groupPage(page, run, source, name) {
  const group = await ofRun(run, "group", { source, group: name });
  const most = Math.max(0, ...group.members.map((member) => Math.abs(member.advantage ?? 0)));
  const solved = group.members.filter((member) => member.solved).length;
  const equal = group.members.length > 1 && most === 0;
  const order = [...group.members].sort((a, b) => b.reward - a.reward || a.number - b.number);
  put(page,
    h("nav", { class: "crumbs", "aria-label": "Where this is" },
      link("", `#/rollouts/${run}`, "rollouts"),
      link("", `#/rollouts/${run}?${new URLSearchParams({ source })}`, stepName(source)),
      link("", `#/tasks/${run}/${encodeURIComponent(group.task)}`, "task")),
    h("h1", { class: "small" }, group.task),
    h("p", { class: "lead" }, `${solved} of ${plural(group.members.length, "rollout")} solved it. `,
      equal ? "All earned the same, so this group teaches nothing: every advantage is 0." : "Advantage is the reward less the group's mean."),
    h("details", { class: "fold task-text" },
      h("summary", null, span("first-line", group.instruction.trim().split("\n")[0].slice(0, 200)), span("size", "instruction")),
      prose(group.instruction)),
    group.unreadable > 0 && h("p", { class: "unreadable" }, "Left out, because unreadable: ", h("strong", null, plural(group.unreadable, "rollout"))),
    h("div", { class: "members" }, order.map((member) => memberCard(run, member, most))));
  return { title: `${group.task}, ${stepName(source)}` };
}
