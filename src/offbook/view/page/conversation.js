"use strict";

// A rollout's page. Its outline is laid out at once; words are asked for when their message comes near the screen.

const LONG_LINES = 8, LONG_CHARACTERS = 600; // longer tool output starts folded
const BLOCK_LINES = 120; // a long text is laid out in blocks, so that those off screen cost nothing
const CALL = /<tool_call>([\s\S]*?)<\/tool_call>/;
const INVALID = new Set(["unknown_tool", "malformed"]);
const ENDED = {
  finish: "called finish", answer: "answered without a call", turns: "out of turns", tokens: "out of tokens",
  context: "out of context", wall: "out of time", cost: "out of money", crash: "crashed",
};

function textBlocks(text, kind) {
  const lines = text.split("\n");
  return h("div", { class: kind }, inBlocks(lines, (part) => part.join("\n")));
}

function inBlocks(lines, inside) {
  if (lines.length <= 2 * BLOCK_LINES) return inside(lines);
  const blocks = [];
  for (let first = 0; first < lines.length; first += BLOCK_LINES) {
    const part = lines.slice(first, first + BLOCK_LINES);
    blocks.push(h("div", { class: "block-part", style: { "--lines": part.length } }, inside(part)));
  }
  return blocks;
}

const diffKind = (line) => (/^(\+\+\+|---|diff |index )/.test(line) ? "meta" : { "+": "added", "-": "removed", "@": "hunk" }[line[0]] || "same");
const diffBox = (lines, label) => h("div", { class: "diff", tabindex: 0, role: "region", "aria-label": label },
  inBlocks(lines, (part) => part.map((line) => h("span", { class: diffKind(line) }, `${line}\n`))));

function callView(call) {
  const rows = Object.entries(call.arguments).map(([name, value]) => {
    const text = typeof value === "string" ? value : JSON.stringify(value);
    return h("div", null, h("dt", null, name), h("dd", { class: text.includes("\n") || text.length > 80 ? "block" : null }, text));
  });
  return h("div", { class: "call" }, h("code", { class: "tool-name" }, call.name), h("dl", null, rows));
}

// The model's words, with well-formed calls laid out; anything else stands as it was written.
function spoken(words) {
  const parts = words.text.split(new RegExp(CALL, "g"));
  const read = parts.length === 2 * words.calls.length + 1 && !words.calls.some((call) => call.error);
  if (!read) return [textBlocks(words.text, "text code")];
  const laid = [];
  for (let index = 0; index < parts.length; index += 2) {
    if (parts[index].trim()) laid.push(h("div", { class: "text" }, parts[index].trim()));
    if (words.calls[index / 2]) laid.push(callView(words.calls[index / 2]));
  }
  return laid.length ? laid : [h("p", { class: "aside" }, "an empty message")];
}

function quoted(outline, words) {
  const kind = outline.role === "tool" ? "text code" : "text";
  const short = outline.lines <= (outline.role === "system" ? 2 : LONG_LINES) && outline.characters <= LONG_CHARACTERS;
  if (outline.role === "user" && (short || outline.characters < 4000)) return [prose(words.text)];
  if (short) return [textBlocks(words.text, kind)];
  const size = outline.lines > 1 ? plural(outline.lines, "line") : plural(outline.characters, "character");
  const fold = h("details", { class: "fold" },
    h("summary", null, h("span", { class: "first-line" }, outline.first.slice(0, 160)), h("span", { class: "size" }, size)));
  fold.addEventListener("toggle", () => { if (fold.open && fold.children.length === 1) fold.append(textBlocks(words.text, kind)); });
  return [fold];
}

function messageBody(rollout, item, words) {
  const hints = item.hints, body = [];
  for (const hint of hints) body.push(targetView(hint, rollout.scale));
  if (!hints.some(isScored)) body.push(...(item.outline.role === "assistant" ? spoken(words) : quoted(item.outline, words)));
  return body;
}

function messageItem(rollout, outline, index, hints) {
  const marks = [h("a", { class: "role", href: address(rollout, outline) }, h("span", { class: "index" }, outline.message), outline.role)];
  if (hints.length) marks.push(chip("target", "target-chip"));
  if (outline.summary) marks.push(chip("summary"));
  if (outline.status && outline.status !== "ok") marks.push(chip(spaced(outline.status), INVALID.has(outline.status) ? "invalid" : ""));
  const isHereToo = (one) => one.segment === outline.segment && one.message === outline.message;
  marks.push(...rollout.flag_list.filter(isHereToo).map((flag) => flagChip(flag.kind)));
  const content = h("div", { class: "content" });
  const folded = outline.role === "tool" || outline.role === "system";
  const rows = hints.length ? 12 : folded && outline.lines > LONG_LINES ? 1 : Math.min(60, Math.max(outline.lines, outline.characters / 90));
  const element = h("li", {
    class: `message ${outline.role}${hints.length ? " target" : ""}`,
    id: `m-${outline.segment}-${outline.message}`,
    tabindex: -1,
    style: { "--rows": Math.ceil(rows) },
  }, h("div", { class: "gutter" }, marks, span("size", plural(outline.tokens, "token"))), content);
  return { outline, index, hints, element, content };
}

function address(rollout, at) {
  const start = `#/rollout/${rollout.run}/${encodeURIComponent(rollout.source)}/${rollout.number}`;
  return at ? `${start}/${at.segment}.${at.message}` : start;
}

function hintItem(hint) {
  return h("li", { class: "hint" }, h("div", { class: "gutter" }, h("span", { class: "role" }, "hint")),
    h("div", { class: "content" }, h("p", { class: "hint-text" }, hint.hint.text), h("p", { class: "aside" }, "inserted here; only the teacher sees this")));
}

// Fills the messages that come near the screen, a chunk at a time.
function lazyConversation(rollout, first) {
  const byPlace = new Map();
  for (const hint of rollout.hints) {
    const key = `${hint.target.segment}.${hint.target.message}`;
    byPlace.set(key, [...(byPlace.get(key) || []), hint]);
  }
  const items = rollout.outline.map((outline, index) => messageItem(rollout, outline, index, byPlace.get(`${outline.segment}.${outline.message}`) || []));
  const list = h("ol", { class: "conversation" });
  for (const item of items) {
    const { segment, message } = item.outline;
    if (message === 0 && segment > 0) list.append(h("li", { class: "window" }, `context window ${segment + 1}, after a summary`));
    list.append(...item.hints.map(hintItem), item.element);
  }
  const asked = new Map();
  function load(chunk) {
    if (!asked.has(chunk)) asked.set(chunk, loadNow(chunk));
    return asked.get(chunk);
  }
  async function loadNow(chunk) {
    const start = chunk * CHUNK;
    const { messages } = await ofRun(rollout.run, "messages", { source: rollout.source, number: rollout.number, first: start, count: CHUNK });
    messages.forEach((words, offset) => put(items[start + offset].content, ...messageBody(rollout, items[start + offset], words)));
    for (const item of items.slice(start, start + CHUNK)) item.element.classList.add("filled");
  }
  const watcher = new IntersectionObserver((entries) => {
    const chunks = new Set();
    for (const entry of entries) if (entry.isIntersecting) chunks.add(Math.floor(Number(entry.target.dataset.index) / CHUNK));
    for (const chunk of chunks) load(chunk).catch((error) => failed(chunk, error));
  }, { rootMargin: "1200px 0px" });
  function failed(chunk, error) {
    asked.delete(chunk); // it is tried again when it comes back to the screen
    for (const item of items.slice(chunk * CHUNK, (chunk + 1) * CHUNK)) put(item.content, h("p", { class: "aside" }, error.message));
  }
  for (const item of items) {
    item.element.dataset.index = item.index;
    watcher.observe(item.element);
  }
  return { list, ready: load(Math.floor(first / CHUNK)) };
}

function diffView(rollout) {
  const lines = rollout.diff ? rollout.diff.replace(/\n$/, "").split("\n") : [];
  const head = (...more) => h("h2", { id: "diff" }, "What the agent changed ", ...more);
  if (!lines.length) return h("section", null, head(), empty("The workspace was not changed."));
  const count = (of) => lines.filter((line) => diffKind(line) === of).length;
  return h("section", null, head(h("span", { class: "size" }, `+${count("added")} ${MINUS}${count("removed")}`)),
    diffBox(lines, "Diff"),
    rollout.diff_left_out > 0 && h("p", { class: "aside" }, `${plural(rollout.diff_left_out, "character")} not shown`));
}

function rewardTable(rollout) {
  const row = (name, ...cells) => h("tr", null, h("th", { scope: "row" }, name), cells.map((cell) => h("td", null, cell)));
  const rows = Object.entries(rollout.parts).map(([name, value]) => {
    const weight = rollout.weights[name] ?? 1;
    return row(spaced(name), points(value), `${TIMES} ${number(weight)}`, points(weight * value));
  });
  const foot = [row("total", "", "", points(rollout.reward))];
  if (Number.isFinite(rollout.advantage)) foot.push(row("advantage in its group", "", "", signed(rollout.advantage)));
  return h("table", { class: "reward" }, h("tbody", null, rows), h("tfoot", null, foot));
}

function factList(facts) {
  const known = Object.entries(facts).filter(([, value]) => value !== null && value !== "");
  return h("dl", { class: "facts" }, known.map(([name, value]) => h("div", null, h("dt", null, name), h("dd", null, value))));
}

function rolloutFacts(rollout) {
  const usage = rollout.usage, [oldest, newest] = rollout.versions;
  const behind = rollout.source.startsWith("step_") && newest !== undefined ? Number(rollout.source.slice(5)) - 1 - oldest : 0;
  return factList({
    result: resultMark(rollout.solved),
    reward: points(rollout.reward),
    ended: ENDED[rollout.stop] || rollout.stop,
    turns: whole(usage.turns),
    calls: `${usage.calls}${usage.invalid_calls ? `, ${usage.invalid_calls} invalid` : ""}`,
    sampled: plural(usage.sampled_tokens, "token"),
    read: plural(usage.prompt_tokens, "token"),
    took: usage.seconds ? `${usage.seconds.toFixed(1)} s` : "",
    cost: usage.cost ? usage.cost.toFixed(4) : "",
    policy: newest === undefined ? "" : `version ${oldest === newest ? newest : `${oldest} to ${newest}`}`,
    staleness: behind > 0 ? plural(behind, "step") : "",
    tools: rollout.tools.join(", "),
  });
}

function findings(rollout) {
  const found = [...rollout.flag_list.map((one) => [one, true]), ...rollout.events.map((one) => [one, false])];
  if (!found.length) return null;
  return h("section", null, h("h2", null, "What was noticed"), h("ul", { class: "findings" }, found.map(([one, isFlag]) => h("li", null,
    isFlag && flagChip("monitor"), h("strong", null, isFlag ? flagName(one.kind) : spaced(one.kind)), " ",
    one.message >= 0 ? h("a", { href: address(rollout, one) }, `message ${one.message}`) : "whole rollout", ` ${one.text.slice(0, 600)}`))));
}

// Why a rollout ended without the agent's doing: the last line of what was raised, and the rest folded.
function crashNote(rollout) {
  const crash = rollout.events.findLast((event) => event.kind === "crash");
  if (!crash) return null;
  const reason = crash.text.trim().split("\n").at(-1);
  return h("details", { class: "unreadable" }, h("summary", null, "It crashed: ", h("strong", null, reason.slice(0, 300))), textBlocks(crash.text, "text code"));
}

async function rolloutPage(page, run, source, text, place) {
  const rollout = { ...(await ofRun(run, "rollout", { source, number: text })), run };
  rollout.scale = Math.max(0, ...rollout.hints.filter(isScored).map((hint) => hint.divergence.reduce((a, b) => Math.max(a, b), 0)));
  const wanted = place ? rollout.outline.findIndex((one) => `${one.segment}.${one.message}` === place) : -1;
  const { list, ready } = lazyConversation(rollout, Math.max(0, wanted));
  const neighbour = (id, by, text) => {
    const number = rollout.number + by, there = number >= 0 && number < rollout.count;
    return h("a", { id, href: there ? address({ ...rollout, number }) : null, "aria-disabled": there ? null : "true" }, text);
  };
  const groupAddress = `#/group/${run}/${encodeURIComponent(source)}/${encodeURIComponent(rollout.group)}`;
  const targets = [...new Set(rollout.hints.map((hint) => `${hint.target.segment}.${hint.target.message}`))];
  const left = Object.entries(rollout.left_out).filter(([, count]) => count).map(([what, count]) => plural(count, what));
  const jump = h("div", { class: "jump" },
    h("span", null, plural(rollout.outline.length, "message")),
    targets.length > 0 && h("span", null, "targets ", targets.map((at) => h("a", { class: "pill", href: `${address(rollout)}/${at}` }, at.split(".")[1]))),
    h("button", { type: "button", id: "unfold", click: () => unfold(list) }, "open all output"),
    h("button", { type: "button", click: () => document.getElementById("diff").scrollIntoView() }, "diff"));
  put(page, 
    h("nav", { class: "crumbs", "aria-label": "Where this is" },
      h("a", { href: `#/rollouts/${run}` }, "rollouts"), h("a", { href: `#/rollouts/${run}?${new URLSearchParams({ source })}` }, stepName(source)),
      h("a", { href: groupAddress }, "group"),
      span("steps", neighbour("before", -1, "\u2190 previous"), `rollout ${rollout.number + 1} of ${rollout.count}`, neighbour("after", 1, "next \u2192"))),
    h("h1", { class: "small" }, rollout.task),
    rolloutFacts(rollout), crashNote(rollout),
    left.length ? h("p", { class: "unreadable" }, "Left out: ", h("strong", null, left.join(", "))) : "",
    jump, rollout.hints.some(isScored) ? scaleKey(rollout.scale) : "",
    rollout.outline.length ? list : empty("This rollout has no message: it ended before the first one."),
    diffView(rollout), h("section", null, h("h2", null, "Reward"), rewardTable(rollout)), findings(rollout) || "");
  await ready;
  if (wanted >= 0) goTo(rollout.outline[wanted]);
  return {
    title: `${rollout.task}, ${stepName(source)}`,
    keys: {
      j: () => go("after"), k: () => go("before"), n: () => nextTarget(1), p: () => nextTarget(-1),
      e: () => unfold(list), g: () => { location.hash = groupAddress; },
    },
  };
}

function unfold(list) {
  const folds = [...list.querySelectorAll(".fold")], open = !folds.every((fold) => fold.open);
  for (const fold of folds) fold.open = open;
  document.getElementById("unfold").textContent = open ? "close all output" : "open all output";
}
const go = (id) => document.getElementById(id)?.getAttribute("href") && document.getElementById(id).click();
function goTo(at) {
  const found = document.getElementById(`m-${at.segment}-${at.message}`);
  const before = found?.previousElementSibling;
  (before?.classList.contains("hint") ? before : found)?.scrollIntoView({ block: "start" });
  (found?.querySelector(".tok.on") || found)?.focus({ preventScroll: true });
}
function nextTarget(by) {
  const all = [...document.querySelectorAll(".message.target")];
  if (!all.length) return;
  const here = all.findIndex((one) => one === document.activeElement || one.contains(document.activeElement));
  const to = all[(here + by + all.length) % all.length];
  (to.previousElementSibling || to).scrollIntoView({ block: "start" });
  (to.querySelector(".tok.on") || to).focus({ preventScroll: true });
}
