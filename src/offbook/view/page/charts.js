"use strict";

// Curves as SVG: one panel per number, one line per run. The axes are those of the figures in evals/figure.py.

const WIDTH = 360, HEIGHT = 208, LEFT = 42, TOP = 10, BOTTOM = 30;

function niceTicks(low, high, count = 4, onlyWhole = false) {
  if (high - low <= Math.max(1e-12, 1e-9 * Math.abs(low))) {
    const room = Math.abs(low) > 1e-9 ? 0.5 * Math.abs(low) : 0.5;
    [low, high] = [low - room, high + room];
  }
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  let step = power * [1, 2, 2.5, 5, 10].find((factor) => factor * power >= rough * 0.999);
  if (onlyWhole) step = Math.max(1, Math.ceil(step));
  const ticks = [];
  for (let at = Math.floor(low / step + 1e-9); at <= Math.ceil(high / step - 1e-9); at += 1) ticks.push(Number((at * step).toPrecision(12)));
  return ticks;
}

function spread(wanted, gap, low, high) {
  const order = wanted.map((_, index) => index).sort((a, b) => wanted[a] - wanted[b]), placed = [...wanted];
  let floor = low, ceiling = high;
  for (const index of order) { floor = placed[index] = Math.max(wanted[index], floor); floor += gap; }
  for (const index of order.reverse()) { placed[index] = Math.min(placed[index], ceiling); ceiling = placed[index] - gap; }
  return placed;
}

function tickText(tick) {
  if (Math.abs(tick) >= 1000) return whole(tick);
  const text = Math.abs(tick) >= 1e-4 || !tick ? String(tick) : Number(tick.toPrecision(3)).toExponential();
  return text.replaceAll("-", MINUS);
}

function frameOf(steps, low, high, right, percent, onlyWhole) {
  const ticks = niceTicks(low, high, 4, onlyWhole), bottom = ticks[0], top = ticks.at(-1);
  const first = steps.reduce((a, b) => Math.min(a, b)), last = steps.reduce((a, b) => Math.max(a, b)), end = WIDTH - right;
  const x = (step) => LEFT + (last > first ? (step - first) / (last - first) : 0.5) * (end - LEFT);
  const y = (value) => HEIGHT - BOTTOM - ((value - bottom) / (top - bottom)) * (HEIGHT - BOTTOM - TOP);
  const named = (tick) => (percent ? `${Number((100 * tick).toPrecision(6))}%` : tickText(tick));
  const grid = ticks.flatMap((tick) => [
    svg("line", { x1: LEFT, x2: end, y1: y(tick), y2: y(tick), class: tick ? "grid" : "grid zero" }),
    svg("text", { x: LEFT - 7, y: y(tick) + 3.5, class: "tick", "text-anchor": "end" }, named(tick)),
  ]);
  for (const step of niceTicks(first, last, 5, true).filter((tick) => tick >= first && tick <= last)) {
    grid.push(svg("text", { x: x(step), y: HEIGHT - BOTTOM + 17, class: "tick", "text-anchor": "middle" }, step));
  }
  grid.push(svg("text", { x: end + 13, y: HEIGHT - BOTTOM + 17, class: "tick" }, "step"));
  return { x, y, end, grid, path: (line) => "M" + line.map(([step, value]) => `${x(step).toFixed(1)},${y(value).toFixed(1)}`).join("L") };
}

const shortName = (name) => (name.length <= 10 ? name : `${name.slice(0, 3)}\u2026${name.slice(-6)}`);

// panel: {label, aside, note, percent, fromZero}; lines: [{name, kind, points, smooth, skipped}]
function linePanel(panel, lines) {
  const drawn = lines.filter((line) => line.points.length);
  if (!drawn.length) return null;
  const values = drawn.flatMap((line) => line.points.map((point) => point[1]));
  let low = values.reduce((a, b) => Math.min(a, b)), high = values.reduce((a, b) => Math.max(a, b));
  if (panel.fromZero) { low = Math.min(0, low); if (high <= low) high = low + 1; }
  const named = lines.length > 1;
  const frame = frameOf(drawn.flatMap((line) => line.points.map((point) => point[0])), low, high, named ? 70 : 46, panel.percent);
  const groups = drawn.map((line) => {
    const last = line.smooth.at(-1), moved = line.smooth.some((point, index) => point[1] !== line.points[index][1]);
    return svg("g", { class: line.kind },
      moved && svg("path", { d: frame.path(line.points), class: "raw" }),
      svg("path", { d: frame.path(line.smooth), class: "line" }),
      svg("circle", { cx: frame.x(last[0]), cy: frame.y(last[1]), r: 2.6, class: "end" }));
  });
  const ends = spread(drawn.map((line) => frame.y(line.smooth.at(-1)[1])), 13, TOP, HEIGHT - BOTTOM - 4);
  const shown = (value) => (panel.percent ? share(value) : number(value));
  const labels = drawn.map((line, index) => svg("text", { x: frame.end + 8, y: ends[index] + 3.8, class: `name ${line.kind}` },
    named ? shortName(line.name) : shown(line.smooth.at(-1)[1])));
  const skipped = lines.reduce((sum, line) => sum + line.skipped, 0);
  const left = skipped && `${plural(skipped, "value")} that are not finite numbers are not drawn`, note = [panel.note, left].filter(Boolean).join(" ");
  return figure(panel, [...frame.grid, ...groups, ...labels], frame, drawn, shown, note);
}

// layers: [{name, kind, points}] over the same steps, one on top of the other
function stackPanel(panel, layers) {
  const steps = [...new Set(layers.flatMap((layer) => layer.points.map((point) => point[0])))].sort((a, b) => a - b);
  if (!steps.length) return null;
  const columns = layers.map((layer) => new Map(layer.points));
  const highest = Math.max(...steps.map((step) => columns.reduce((sum, of) => sum + (of.get(step) || 0), 0)));
  const gaps = steps.slice(1).map((step, index) => step - steps[index]), pitch = gaps.length ? Math.min(...gaps) : 1;
  const frame = frameOf([steps[0] - pitch / 2, steps.at(-1) + pitch / 2], 0, highest || 1, 46, false, highest >= 1);
  const width = Math.min(14, 0.82 * (frame.x(steps[0] + pitch) - frame.x(steps[0])));
  const tops = new Map();
  const bars = layers.map((layer, index) => {
    let boxes = "";
    for (const step of steps) {
      const value = columns[index].get(step) || 0, below = tops.get(step) || 0;
      if (!(value > 0)) continue;
      tops.set(step, below + value);
      const left = (frame.x(step) - width / 2).toFixed(1), foot = frame.y(below).toFixed(1), head = frame.y(below + value).toFixed(1);
      boxes += `M${left},${foot}V${head}h${width.toFixed(1)}V${foot}z`;
    }
    return svg("path", { d: boxes, class: `bar ${layer.kind}${width > 6 ? " parted" : ""}` });
  });
  return figure(panel, [...frame.grid, ...bars], frame, layers, number, "");
}

function figure(panel, drawing, frame, lines, shown, note) {
  const stops = new Map();
  for (const line of lines) for (const [step, value] of line.points) {
    if (!stops.has(step)) stops.set(step, []);
    stops.get(step).push([line, shown(value)]);
  }
  const spoken = lines.map((line) => `${line.name}: ${shown(line.points[0]?.[1] ?? 0)} to ${shown(line.points.at(-1)?.[1] ?? 0)}`).join("; ");
  const cross = svg("line", { x1: 0, x2: 0, y1: TOP, y2: HEIGHT - BOTTOM, class: "cross" });
  const chart = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", tabindex: 0, "aria-label": `${panel.label} by step. ${spoken}` }, drawing, cross);
  const tip = h("div", { class: "tip", role: "status", hidden: true });
  hoverable(chart, cross, tip, [...stops].sort((a, b) => a[0] - b[0]).map(([step, readings]) => ({ x: frame.x(step), step, readings })));
  return h("figure", { class: "panel" },
    h("figcaption", null, h("strong", { title: panel.key || panel.label }, panel.label), h("span", null, panel.aside || "")), chart, tip,
    note && h("p", { class: "skipped" }, note));
}

function hoverable(chart, cross, tip, stops) {
  let at = -1;
  function show(index) {
    at = Math.max(0, Math.min(stops.length - 1, index));
    const { x, step, readings } = stops[at];
    cross.setAttribute("x1", x);
    cross.setAttribute("x2", x);
    cross.style.visibility = "visible";
    const row = ([line, text]) => h("div", null, span("", swatch(line.kind), line.name), span("", text));
    put(tip, h("b", null, `step ${step}`), readings.map(row));
    tip.hidden = false;
    const scale = chart.clientWidth / WIDTH, left = x * scale + 12;
    tip.style.left = `${left + tip.offsetWidth > chart.clientWidth ? Math.max(0, x * scale - 12 - tip.offsetWidth) : left}px`;
  }
  function hide() { cross.style.visibility = "hidden"; tip.hidden = true; at = -1; }
  chart.addEventListener("pointermove", (event) => {
    const box = chart.getBoundingClientRect(), x = ((event.clientX - box.left) / box.width) * WIDTH;
    show(stops.reduce((best, stop, index) => (Math.abs(stop.x - x) < Math.abs(stops[best].x - x) ? index : best), 0));
  });
  chart.addEventListener("pointerleave", hide);
  chart.addEventListener("blur", hide);
  chart.addEventListener("keydown", (event) => {
    if (event.key === "Escape") { hide(); return; }
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!move) return;
    event.preventDefault();
    show(at < 0 ? (move > 0 ? 0 : stops.length - 1) : at + move);
  });
}
