"use strict";

// The page is complete without this file; it adds the theme button, values under the pointer, and arrow keys.

const root = document.documentElement;
const dark = () => getComputedStyle(root).colorScheme === "dark" || (!root.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);

function themeButton(button) {
  const name = () => { button.textContent = dark() ? "light" : "dark"; button.setAttribute("aria-label", `switch to ${button.textContent} colours`); };
  try { const kept = localStorage.getItem("offbook-theme"); if (kept) root.dataset.theme = kept; } catch { /* storage is off for this file */ }
  button.hidden = false;
  name();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", name);
  button.addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    try { localStorage.setItem("offbook-theme", root.dataset.theme); } catch { /* as above */ }
    name();
  });
}

function element(kind, className, text) {
  const made = document.createElement(kind);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function hoverChart(svg) {
  const stops = JSON.parse(svg.dataset.hover);
  const names = JSON.parse(svg.dataset.names);
  const classes = JSON.parse(svg.dataset.classes);
  const cross = svg.querySelector(".cross");
  const tip = element("div", "tip");
  tip.setAttribute("role", "status");
  tip.hidden = true;
  svg.parentElement.append(tip);
  let at = -1;

  function show(index) {
    at = Math.max(0, Math.min(stops.length - 1, index));
    const [x, label, readings] = stops[at];
    cross.setAttribute("x1", x);
    cross.setAttribute("x2", x);
    cross.style.visibility = "visible";
    tip.replaceChildren(element("b", "", label), ...readings.map(([run, text]) => {
      const row = element("div");
      const name = element("span");
      name.append(element("span", `swatch ${classes[run]}`), names[run]);
      row.append(name, element("span", "", text));
      return row;
    }));
    tip.hidden = false;
    const scale = svg.clientWidth / svg.viewBox.baseVal.width;
    const left = x * scale + 12;
    tip.style.left = `${left + tip.offsetWidth > svg.clientWidth ? Math.max(0, x * scale - 12 - tip.offsetWidth) : left}px`;
  }
  function hide() { cross.style.visibility = "hidden"; tip.hidden = true; at = -1; }

  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const x = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
    let nearest = 0;
    stops.forEach((stop, index) => { if (Math.abs(stop[0] - x) < Math.abs(stops[nearest][0] - x)) nearest = index; });
    show(nearest);
  });
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("blur", hide);
  svg.addEventListener("keydown", (event) => {
    if (event.key === "Escape") return hide();
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!move) return;
    event.preventDefault();
    show(at < 0 ? (move > 0 ? 0 : stops.length - 1) : at + move);
  });
}

function tokenStrip(strip) {
  const tokens = [...strip.querySelectorAll(".tok")];
  const readout = strip.nextElementSibling;
  const rest = readout.textContent;
  let at = -1;

  function show(index) {
    tokens[at]?.classList.remove("on");
    at = index;
    tokens[at]?.classList.add("on");
    readout.textContent = at < 0 ? rest : tokens[at].title;
  }

  strip.addEventListener("pointerover", (event) => { const token = event.target.closest(".tok"); if (token) show(tokens.indexOf(token)); });
  strip.addEventListener("pointerleave", () => show(-1));
  strip.addEventListener("blur", () => show(-1));
  strip.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!move) return;
    event.preventDefault();
    show(Math.max(0, Math.min(tokens.length - 1, at + move)));
  });
}

function openAll(button) {
  const rollouts = [...document.querySelectorAll(".rollout")];
  const name = () => { button.textContent = rollouts.every((rollout) => rollout.open) ? "close all" : "open all"; };
  button.hidden = false;
  button.addEventListener("click", () => {
    const open = !rollouts.every((rollout) => rollout.open);
    for (const rollout of rollouts) rollout.open = open;
  });
  for (const rollout of rollouts) rollout.addEventListener("toggle", name);
}

document.querySelectorAll("#theme").forEach(themeButton);
document.querySelectorAll("svg[data-hover]").forEach(hoverChart);
document.querySelectorAll(".strip").forEach(tokenStrip);
document.querySelectorAll("#open-all").forEach(openAll);
