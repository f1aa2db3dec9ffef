"use strict";

// The signature view: a target's tokens, coloured by how far the hint moved the model at each of them.

const MAX_TOKENS = 1500; // drawn at first; a message that is longer has a button for the rest
const MOVED = 0.1; // from this change of probability on, the figures stand under the token
const heat = (divergence, scale) => (scale > 0 ? Math.sqrt(Math.min(1, Math.max(0, divergence) / scale)) : 0);
const probability = (logprob) => Math.exp(Math.min(0, logprob));
const isWhole = (values, count) => values?.length === count && values.every(Number.isFinite);
const isScored = (hint) => hint.pieces?.length > 0 && ["student", "teacher", "divergence"].every((side) => isWhole(hint[side], hint.pieces.length));
const AGREED = "Student and teacher agree here, so the other likely tokens were not recorded.";
const NO_OTHERS = "This run did not record the other likely tokens.";
const MARKS = { " ": "\u00b7", "\t": "\u21e5", "\n": "\u23ce" };

// A page that scrolls under a pointer at rest is not pointed at.
const pointer = { x: -1, y: -1 };
document.addEventListener("pointermove", (event) => { pointer.x = event.clientX; pointer.y = event.clientY; }, { passive: true });

function glyphs(piece) {
  if (!piece) return [h("b", { class: "ws" }, "\u25cc")];
  return piece.split(/([ \t\n]+)/).filter(Boolean).map((part) =>
    (MARKS[part[0]] ? h("b", { class: "ws" }, [...part].map((mark) => MARKS[mark]).join("")) : part));
}

function effect(hint) {
  const sum = (side) => side.reduce((a, b) => a + b, 0), nats = sum(hint.student) - sum(hint.teacher);
  if (Math.abs(nats) < 0.05) return "With the hint in view, the same model is as likely to write this message.";
  const ratio = Math.exp(Math.min(Math.abs(nats), 14));
  const times = ratio > 1e6 ? "over a million times" : ratio >= 10 ? `${whole(Number(ratio.toPrecision(2)))} times` : `${ratio.toFixed(1)} times`;
  return `With the hint in view, the same model is ${times} ${nats > 0 ? "less" : "more"} likely to write this message.`;
}

function scaleKey(scale) {
  const shade = (value) => h("span", { class: "shade", style: { "--d": heat(value, scale) } }, number(value));
  const shades = [0, scale / 16, scale / 4, scale].map(shade);
  return h("ul", { class: "legend" },
    h("li", null, swatch("student"), "student: the model alone"),
    h("li", null, swatch("teacher"), "teacher: the same model with the hint"),
    scale > 0 && h("li", null, h("span", { class: "shades" }, shades), "divergence in nats, over the whole vocabulary"));
}

function tokenElement(hint, index, scale) {
  const student = probability(hint.student[index]), teacher = probability(hint.teacher[index]);
  const moved = Math.abs(student - teacher) >= MOVED;
  return h("span", {
    class: moved ? "tok moved" : "tok", role: "option", "data-at": index, tabindex: -1,
    "aria-label": `${hint.pieces[index] || "nothing"}: student ${chance(student)}, teacher ${chance(teacher)}`,
    style: { "--d": heat(hint.divergence[index], scale).toFixed(3), "--s": student.toFixed(3), "--t": teacher.toFixed(3) },
  }, h("span", { class: "glyph" }, glyphs(hint.pieces[index])), h("i"), moved && h("small", null, `${chance(student)}\u2192${chance(teacher)}`));
}

// One side's five most likely tokens, the sampled one marked; without them, the sampled token alone.
function alternatives(name, kind, top, piece, logprob) {
  const rows = top?.length ? top : [[piece, logprob]];
  const known = rows.some(([text]) => text === piece);
  const shown = known ? rows : [...rows, [piece, logprob]];
  return h("div", { class: `side ${kind}` }, h("h5", null, swatch(kind), name),
    h("ol", null, shown.map(([text, value], index) => {
      const likely = probability(value);
      return h("li", { class: text === piece ? "sampled" : null },
        h("code", null, glyphs(text)),
        h("span", { class: "likely", style: { "--share": likely.toFixed(4) } }),
        h("span", { class: "figure-small" }, chance(likely)),
        text === piece && h("span", { class: "note" }, !known && index === shown.length - 1 && top?.length ? "sampled, not in the first five" : "sampled"));
    })));
}

function inspect(panel, hint, index) {
  const has = hint.student_top?.[index]?.length || hint.teacher_top?.[index]?.length;
  put(panel, 
    h("p", { class: "at" }, h("code", null, glyphs(hint.pieces[index])), h("span", null, `token ${index + 1} of ${hint.pieces.length}`),
      h("span", null, "divergence ", h("b", null, number(hint.divergence[index])))),
    h("div", { class: "sides" },
      alternatives("student", "student", hint.student_top?.[index], hint.pieces[index], hint.student[index]),
      alternatives("teacher", "teacher", hint.teacher_top?.[index], hint.pieces[index], hint.teacher[index])),
    !has && h("p", { class: "note" }, hint.student_top?.length ? AGREED : NO_OTHERS),
    h("p", { class: "said" }, h("span", { class: "role" }, "hint"), hint.hint.text));
}

function targetView(hint, scale) {
  const why = h("p", { class: "why" }, h("strong", null, spaced(hint.target.rule)), " ", hint.target.evidence,
    hint.skipped ? h("span", { class: "untaught" }, `not taught: ${spaced(hint.skipped)}`) : "");
  if (!isScored(hint)) return h("div", { class: "signature" }, why, h("p", { class: "aside" }, "The teacher did not score this message."));
  const count = hint.pieces.length;
  const peak = hint.divergence.reduce((best, value, index) => (value > hint.divergence[best] ? index : best), 0);
  const panel = h("div", { class: "inspector", "aria-live": "polite" });
  const strip = h("div", { class: "strip", role: "listbox", "aria-label": "Tokens of the target message; the arrow keys move between them" });
  const tokens = [];
  let current = -1;
  function draw(last) {
    const part = document.createDocumentFragment();
    for (let index = tokens.length; index < last; index += 1) {
      tokens.push(tokenElement(hint, index, scale));
      part.append(tokens[index], ...(hint.pieces[index].endsWith("\n") ? [h("br")] : []));
    }
    strip.append(part);
  }
  function show(index, focus) {
    if (index === current || !tokens[index]) return;
    tokens[current]?.classList.remove("on");
    tokens[current]?.setAttribute("tabindex", -1);
    tokens[current]?.removeAttribute("aria-selected");
    current = index;
    tokens[index].classList.add("on");
    tokens[index].setAttribute("tabindex", 0);
    tokens[index].setAttribute("aria-selected", "true");
    inspect(panel, hint, index);
    if (focus) tokens[index].focus();
  }
  const at = (event) => { const token = event.target.closest(".tok"); return token ? Number(token.dataset.at) : -1; };
  strip.addEventListener("pointerover", (event) => {
    if (event.clientX !== pointer.x || event.clientY !== pointer.y) show(at(event));
  });
  strip.addEventListener("click", (event) => show(at(event), true));
  strip.addEventListener("focusin", (event) => show(at(event)));
  strip.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: current - 1, ArrowRight: current + 1, Home: 0, End: tokens.length - 1 };
    if (!(event.key in moves) || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    show(Math.max(0, Math.min(tokens.length - 1, moves[event.key])), true);
  });
  draw(Math.min(count, Math.max(MAX_TOKENS, peak + 50)));
  show(peak);
  const drawRest = (event) => { draw(count); event.target.remove(); };
  const rest = count > tokens.length && h("button", { type: "button", click: drawRest }, `${plural(count - tokens.length, "token")} more`);
  return h("div", { class: "signature" }, why,
    h("div", { class: "read" }, h("div", null, strip, rest, h("p", { class: "effect" }, effect(hint))), panel));
}
