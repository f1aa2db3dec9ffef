"use strict";

// Elements and figures. Everything from a run goes into the page as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";
const MINUS = "\u2212", TIMES = "\u00d7";

// Anything that may be a child: elements, text, lists of them; what is missing or false is left out.
const childrenOf = (given) => given.flat(5).filter((child) => child !== null && child !== undefined && child !== false && child !== "")
  .map((child) => (child instanceof Node ? child : visible(String(child))));
const put = (into, ...given) => into.replaceChildren(...childrenOf(given));

function fill(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") made.addEventListener(name, value);
    else if (name === "style") for (const [property, of] of Object.entries(value)) made.style.setProperty(property, of);
    else made.setAttribute(name, value === true ? "" : visible(String(value)));
  }
  made.append(...childrenOf(children));
  return made;
}
const h = (kind, attributes, ...children) => fill(document.createElement(kind), attributes, children);
const svg = (kind, attributes, ...children) => fill(document.createElementNS(SVG, kind), attributes, children);

// Control characters, and the marks that reorder text on screen, are made visible.
const UNSEEN = /[\x00-\x08\x0b-\x1f\x7f\u200e\u200f\u202a-\u202e\u2066-\u2069]/g;
function visible(text) {
  return text.replace(/\r\n/g, "\n").replace(UNSEEN, (mark) => {
    const code = mark.codePointAt(0);
    if (code < 32) return String.fromCodePoint(0x2400 + code);
    return code === 127 ? "\u2421" : `[U+${code.toString(16).toUpperCase().padStart(4, "0")}]`;
  });
}

// Words with code in them, as instructions have it: fences, `names`, and lines that are indented or of a console.
const CODE = /(```[^\n]*\n[\s\S]*?\n```|(?:^(?: {4}|>>> |\.\.\. ).*\n?)+)/m;
function prose(text) {
  const block = (code) => h("pre", { class: "code" }, code.replace(/^```[^\n]*\n|\n```$|\n$/g, ""));
  const named = (words) => words.split(/`([^`\n]+)`/).map((part, index) => (index % 2 ? h("code", null, part) : part));
  return h("div", { class: "text" }, text.split(CODE).map((part, index) => (index % 2 ? block(part) : named(index ? part.replace(/^\n/, "") : part))));
}

const whole = (value) => Math.round(value).toLocaleString("en-US").replace("-", MINUS);
function number(value) {
  if (!Number.isFinite(value)) return "\u2014";
  const size = Math.abs(value);
  if (size >= 1000 || Number.isInteger(value)) return whole(value);
  if (size < 1e-4) return value.toExponential(1).replace(/-/g, MINUS);
  return value.toFixed(size >= 10 ? 1 : size >= 0.1 ? 2 : size >= 0.001 ? 3 : 5).replace("-", MINUS);
}
const points = (value) => (Number.isFinite(value) ? value.toFixed(2).replace("-", MINUS) : "\u2014");
const signed = (value) => (value > 0 ? "+" : "") + points(value);
const plural = (count, noun) => `${whole(count)} ${noun}${count === 1 ? "" : "s"}`;
const spaced = (name) => name.replaceAll("_", " ");
const capital = (text) => text[0].toUpperCase() + text.slice(1);
const share = (value) => `${(100 * value).toFixed(1)}%`;
function chance(value) {
  if (value > 0 && value < 0.01) return "<1%";
  return value > 0.99 && value < 1 ? ">99%" : `${(100 * value).toFixed(0)}%`;
}
function ago(seconds) {
  if (seconds < 90) return `${Math.max(0, Math.round(seconds))} s ago`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min ago`;
  return seconds < 172800 ? `${Math.round(seconds / 3600)} h ago` : `${Math.round(seconds / 86400)} days ago`;
}
function stepName(source) {
  return source.startsWith("step_") ? `step ${Number(source.slice(5))}` : spaced(source.replace("eval-", "eval "));
}

const root = document.documentElement;
const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches);
function themeButton(button) {
  const name = () => {
    button.textContent = isDark() ? "light" : "dark";
    button.setAttribute("aria-label", `switch to ${button.textContent} colours`);
  };
  try {
    const kept = localStorage.getItem("offbook-theme");
    if (kept) root.dataset.theme = kept;
  } catch { /* storage is off for this file */ }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", name);
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    try { localStorage.setItem("offbook-theme", root.dataset.theme); } catch { /* as above */ }
    name();
  });
  name();
}

const span = (kind, ...inside) => h("span", { class: kind || null }, ...inside);
const link = (kind, href, ...inside) => h("a", { class: kind || null, href }, ...inside);
// What a monitor found, by the kind of its flag.
const FLAGS = {
  history: "history searched", cache: "leftover cache read", bytecode: "leftover bytecode read", copy: "installed copy read",
  leak: "task leaks its solution", attempt: "looked for the answer", oracle: "hidden tests looked for", download: "fetched from outside",
  tests: "tests weakened", configuration: "test configuration changed", startup: "code placed before the tests", exit: "process ended early",
  probe: "asks whether it is tested", frames: "looks into its caller", equality: "object equals everything", runner: "test runner replaced",
  loader: "hidden code loaded", hard_coded: "answers hard-coded", forged: "pass forged", saw: "looked at its grader",
  perturbed: "wrong on other inputs", daemon: "process left behind", unreadable: "code does not parse", unjudged: "monitor did not finish",
};
const flagName = (kind) => FLAGS[kind] || spaced(kind.replace("model/", "judge model: "));
const flagChip = (kind) => chip(`\u2691 ${flagName(kind)}`, "flag");
const resultMark = (solved) => (solved ? span("result solved", "\u2713 solved") : span("result", "\u25cb not solved"));
// options: [[value, text]]
const choice = (label, options, change, chosen, name) => h("label", null, span("unseen", label),
  h("select", { name, change }, options.map(([value, text]) => h("option", { value, selected: value === chosen }, text))));
const swatch = (kind) => h("span", { class: `swatch ${kind}` });
const chip = (text, kind) => h("span", { class: `chip ${kind || ""}` }, text);
const empty = (...sentence) => h("p", { class: "empty" }, ...sentence);
const NUM_COLOURS = 6;
const runClass = (index) => `run-${index % NUM_COLOURS}` + (index >= NUM_COLOURS ? ` dash-${Math.floor(index / NUM_COLOURS) % 3}` : "");
