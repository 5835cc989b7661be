"use strict";

// ---- theme -----------------------------------------------------------------------------------
(() => {
  const root = document.documentElement, button = document.getElementById("theme");
  let stored = null;
  try { stored = localStorage.getItem("quasidiag-theme"); } catch { /* pages on disk may have none */ }
  const apply = (theme) => {
    root.dataset.theme = theme;
    button.textContent = theme === "dark" ? "Light" : "Dark";
    button.setAttribute("aria-label", `Switch to the ${theme === "dark" ? "light" : "dark"} theme`);
  };
  apply(stored || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
  button.addEventListener("click", () => {
    apply(root.dataset.theme === "dark" ? "light" : "dark");
    try { localStorage.setItem("quasidiag-theme", root.dataset.theme); } catch { /* as above */ }
  });
})();

// ---- small helpers ---------------------------------------------------------------------------
const SVG = "http://www.w3.org/2000/svg";
const DASHES = { tanh: "7 3", relu: "2 3", inverted: "7 3" };
const STEP_NAMES = { best: "best step", second: "second best" };
const KNOWN = ["SGD", "AdaGrad", "DOP", "QDOP", "DMCNat", "QDMCNat", "DNat", "QDNat"];

function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}
function draw(parent, tag, attributes = {}, text = null) {
  const node = document.createElementNS(SVG, tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== null) node.textContent = text;
  parent.append(node);
  return node;
}
const colour = (algorithm) => `var(--${KNOWN.includes(algorithm) ? algorithm : "other"})`;
const pen = document.createElement("canvas").getContext("2d");
const textWidth = (text) => {
  pen.font = `11px ${getComputedStyle(document.documentElement).getPropertyValue("--sans")}`;
  return pen.measureText(text).width;
};

function format(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e5)) return value.toExponential(2);
  return String(Number(value.toPrecision(4)));
}
function tickText(value) {
  const size = Math.abs(value);
  if (size === 0 || (size >= 0.01 && size < 1e4)) return String(Number(value.toPrecision(6)));
  const [digits, power] = value.toExponential(0).split("e");
  const raised = String(Number(power)).replace(/[-\d]/g, (c) => "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"["-0123456789".indexOf(c)]);
  return digits === "1" ? `10${raised}` : `${digits}·10${raised}`;
}

// ---- scales ----------------------------------------------------------------------------------
function linearTicks(low, high, count) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough);
  const ticks = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high * (1 + 1e-9) + 1e-12; k++) ticks.push(k * step);
  return ticks;
}
function logTicks(low, high) {
  const decades = Math.log10(high / low), every = Math.max(1, Math.ceil(decades / 7));
  const digits = decades < 1.2 ? [1, 2, 3, 5, 7] : decades < 2.5 ? [1, 2, 5] : [1];
  const ticks = [];
  for (let p = Math.floor(Math.log10(low)); p <= Math.ceil(Math.log10(high)); p++) {
    if (digits.length === 1 && p % every) continue;
    for (const d of digits) {
      const value = d * 10 ** p;
      if (value >= low * 0.999 && value <= high * 1.001) ticks.push(value);
    }
  }
  return ticks.length > 1 ? ticks : linearTicks(low, high, 4).filter((t) => t > 0);
}
function scale(low, high, start, end, log) {
  const at = log ? Math.log : (v) => v, a = at(low), b = at(high);
  const to = (v) => start + ((at(v) - a) / (b - a)) * (end - start);
  to.back = (pixel) => {
    const v = a + ((pixel - start) / (end - start)) * (b - a);
    return log ? Math.exp(v) : v;
  };
  return to;
}

// ---- one experiment's chart ------------------------------------------------------------------
class Chart {
  constructor(figure) {
    this.data = JSON.parse(figure.querySelector("script").textContent);
    this.figure = figure;
    this.x = "epoch";
    this.xlog = false;
    this.ylog = true;
    this.quantity = this.data.quantities[0];
    this.on = {
      algorithm: new Set(this.data.algorithms),
      variant: new Set(this.data.variants.includes("inverted") ? this.data.variants : this.data.variants.slice(0, 1)),
      step: new Set(this.data.steps.slice(0, 1)),
    };
    this.cursor = null;
    this.controls();
    const panels = make("div", { class: "panels" });
    this.panels = [["train", "Training"], ["valid", "Validation"]].map(([side, title]) => {
      const holder = make("div", { class: "panel" }), heading = make("h4");
      const svg = draw(holder, "svg", { tabindex: 0, role: "application" });
      holder.prepend(heading);
      panels.append(holder);
      const panel = { side, title, holder, heading, svg };
      svg.addEventListener("pointermove", (event) => this.point(panel, event));
      svg.addEventListener("pointerdown", (event) => this.point(panel, event));
      svg.addEventListener("pointerleave", () => this.leave());
      svg.addEventListener("keydown", (event) => this.key(panel, event));
      svg.addEventListener("blur", () => this.leave());
      return panel;
    });
    this.live = make("div", { class: "hidden", "aria-live": "polite" });
    this.tip = make("div", { class: "tip", role: "presentation" });
    this.tip.hidden = true;
    figure.append(panels, this.live, this.tip);
    new ResizeObserver(() => this.render()).observe(panels);
    this.render();
  }

  // -- controls
  controls() {
    const bar = make("div", { class: "controls" });
    const { quantities, algorithms, variants, steps } = this.data;
    if (quantities.length > 1) {
      bar.append(this.choice("Quantity", quantities.map((q) => [q.label, q]), "quantity"));
    }
    bar.append(this.choice("Against", [["Epoch", "epoch"], ["Time", "seconds"]], "x"));
    bar.append(this.choice("Vertical", [["Linear", false], ["Log", true]], "ylog"));
    bar.append(this.choice("Horizontal", [["Linear", false], ["Log", true]], "xlog"));
    const toggles = make("div", { class: "controls" });
    toggles.append(this.chips("algorithm", "Algorithms", algorithms, (n) => n));
    if (variants.length > 1) {
      const title = variants.includes("inverted") ? "Pixels" : "Activations";
      toggles.append(this.chips("variant", title, variants, (n) => this.variantName(n)));
    }
    if (steps.length > 1) toggles.append(this.chips("step", "Step size", steps, (n) => STEP_NAMES[n] || n));
    this.figure.append(bar, toggles);
  }
  choice(title, options, field) {
    const group = make("div", { class: "group", role: "group", "aria-label": title });
    const row = make("span", { class: "choice" });
    const mark = () => buttons.forEach((b, k) => b.setAttribute("aria-pressed", options[k][1] === this[field]));
    const buttons = options.map(([label, value]) => {
      const button = make("button", { type: "button", "data-field": field, "data-value": value.key || value }, label);
      button.addEventListener("click", () => { this[field] = value; this.cursor = null; mark(); this.render(); });
      return button;
    });
    mark();
    row.append(...buttons);
    group.append(make("span", { class: "name" }, title), row);
    return group;
  }
  chips(kind, title, names, show) {
    const group = make("div", { class: "group", role: "group", "aria-label": title });
    group.append(make("span", { class: "name" }, title));
    const set = this.on[kind];
    const buttons = names.map((name) => {
      const hint = "Click to show or hide; shift-click to show it alone";
      const chip = make("button", { type: "button", class: "chip", "data-kind": kind, "data-name": name, title: hint });
      const key = draw(chip, "svg", { viewBox: "0 0 22 8", "aria-hidden": "true" });
      const stroke = kind === "algorithm" ? colour(name) : "currentColor";
      draw(key, "line", {
        x1: 1, x2: 21, y1: 4, y2: 4, style: `stroke:${stroke}`,
        "stroke-width": name.startsWith("QD") ? 3 : 1.8,
        "stroke-dasharray": kind === "variant" ? DASHES[name] || "none" : "none",
        opacity: name === "second" ? 0.5 : 1,
      });
      chip.append(show(name));
      chip.addEventListener("click", (event) => {
        if (event.shiftKey) {
          const alone = set.size === 1 && set.has(name);
          set.clear();
          (alone ? names : [name]).forEach((n) => set.add(n));
        } else if (!set.delete(name)) set.add(name);
        mark();
        this.render();
      });
      const stress = (value) => () => { this.stress = value; this.emphasise(); };
      chip.addEventListener("pointerenter", stress({ kind, name }));
      chip.addEventListener("pointerleave", stress(null));
      return chip;
    });
    const mark = () => buttons.forEach((b, k) => b.setAttribute("aria-pressed", set.has(names[k])));
    mark();
    group.append(...buttons);
    return group;
  }

  // -- data
  visible() {
    return this.data.curves.filter((c) => ["algorithm", "variant", "step"].every((k) => this.on[k].has(c[k])));
  }
  values(curve, side, row = "mean") {
    const factor = this.quantity.scale || 1, column = curve[`${side}_${this.quantity.key}`][row];
    return column && column.map((v) => (v === null ? null : v * factor));
  }
  variantName(name) {
    return (this.data.names[name] || name).replace("pixels ", "");
  }
  name(curve) {
    const parts = [curve.algorithm];
    if (this.on.variant.size > 1) parts.push(this.variantName(curve.variant));
    if (this.on.step.size > 1) parts.push(STEP_NAMES[curve.step]);
    return parts.join(" ");
  }

  // -- drawing
  render() {
    this.tip.hidden = true;
    const curves = this.visible();
    for (const panel of this.panels) this.renderPanel(panel, curves);
    if (this.cursor !== null) this.moveCursor(this.active, this.cursor);
    this.emphasise();
  }
  renderPanel(panel, curves) {
    const { svg, side, title, heading } = panel;
    const width = Math.max(260, panel.holder.clientWidth), height = 330;
    const longest = Math.max(0, ...curves.map((c) => textWidth(this.name(c))));
    const labelled = curves.length <= 16 && longest < 0.4 * width;
    const box = { left: 48, right: width - (labelled ? 12 + longest : 10), top: 10, bottom: height - 34 };
    svg.replaceChildren();
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.setAttribute("height", height);
    svg.setAttribute("aria-label",
      `${this.figure.dataset.title}: ${title.toLowerCase()} ${this.quantity.label.toLowerCase()}, ` +
      `${curves.length} curves. Arrow keys read the values.`);
    heading.replaceChildren(`${title} `, make("span", {}, `${this.quantity.label.toLowerCase()}, ${this.quantity.unit}`));
    panel.lines = [];
    const series = curves.map((curve) => ({
      curve, xs: curve[this.x], ys: this.values(curve, side),
      low: this.values(curve, side, "low"), high: this.values(curve, side, "high"),
    }));
    const xsAll = series.flatMap((s) => s.xs.filter((x) => x !== null && (!this.xlog || x > 0)));
    // The untrained network's value would flatten everything else on a linear axis.
    const trained = series.flatMap((s) => s.ys.filter((y, k) => y !== null && (s.xs[k] > 0 || s.ys.length < 2)));
    if (!xsAll.length || !trained.length) {
      draw(svg, "text", { x: width / 2, y: height / 2, "text-anchor": "middle" },
        curves.length ? "no values" : "nothing selected");
      panel.x = null;
      return;
    }
    const positive = trained.every((y) => y > 0), log = this.ylog && positive;
    let low = Math.min(...trained), high = Math.max(...trained);
    if (log) {
      const pad = (high / low) ** 0.04 || 1;
      low /= Math.max(pad, 1.02); high *= Math.max(pad, 1.02);
    } else {
      if (positive && low < 0.4 * high) low = 0;
      const pad = 0.04 * (high - low || Math.abs(high) || 1);
      low -= low === 0 ? 0 : pad; high += pad;
    }
    let x0 = this.xlog ? Math.min(...xsAll) : 0, x1 = Math.max(...xsAll);
    if (x1 <= x0) x1 = x0 ? 2 * x0 : 1;
    const x = scale(x0, x1, box.left, box.right, this.xlog), y = scale(low, high, box.bottom, box.top, log);
    Object.assign(panel, { x, y, box, x0, x1, log });
    this.axes(svg, panel, low, high);
    if (this.ylog && !log) {
      draw(svg, "text", { x: box.right, y: box.top + 8, "text-anchor": "end" }, "linear: not all values are positive");
    }
    const clip = `clip-${this.figure.dataset.name}-${side}`;
    const rect = draw(draw(draw(svg, "defs"), "clipPath", { id: clip }), "rect",
      { x: box.left, y: box.top, width: box.right - box.left, height: box.bottom - box.top });
    rect.setAttribute("rx", 0);
    const plot = draw(svg, "g", { "clip-path": `url(#${clip})` });
    const ok = (xv, yv) => xv !== null && yv !== null && (!this.xlog || xv > 0) && (!log || yv > 0);
    for (const s of series) {
      const group = draw(plot, "g", { "data-curve": `${s.curve.algorithm}|${s.curve.variant}|${s.curve.step}` });
      const tint = colour(s.curve.algorithm);
      if (s.low && s.high) {
        const there = [], back = [];
        s.xs.forEach((xv, k) => {
          if (!ok(xv, s.low[k])) return;
          there.push(`${x(xv).toFixed(1)},${y(s.high[k]).toFixed(1)}`);
          back.unshift(`${x(xv).toFixed(1)},${y(s.low[k]).toFixed(1)}`);
        });
        if (there.length > 1) draw(group, "path", { class: "band", d: `M${there.concat(back).join("L")}Z`, style: `fill:${tint}` });
      }
      const points = s.xs.map((xv, k) => (ok(xv, s.ys[k]) ? [x(xv), y(s.ys[k])] : null)).filter(Boolean);
      draw(group, "path", {
        class: `curve${s.curve.algorithm.startsWith("QD") ? " strong" : ""}`,
        d: points.length ? `M${points.map((p) => p.map((v) => v.toFixed(1)).join(",")).join("L")}` : "M0,0",
        style: `stroke:${tint}`, "stroke-dasharray": DASHES[s.curve.variant] || "none",
        opacity: s.curve.step === "second" ? 0.55 : 1,
      });
      if (points.length && points.length <= 6) {
        points.forEach((p) => draw(group, "circle", { cx: p[0], cy: p[1], r: 2.2, style: `fill:${tint}` }));
      }
      panel.lines.push({ ...s, group, end: points.at(-1) });
    }
    if (labelled) this.labels(svg, panel);
    panel.overlay = draw(svg, "g");
  }
  axes(svg, panel, low, high) {
    const { x, y, box, x0, x1, log } = panel;
    for (const tick of log ? logTicks(low, high) : linearTicks(low, high, 5)) {
      const py = y(tick);
      draw(svg, "line", { class: "grid-line", x1: box.left, x2: box.right, y1: py, y2: py });
      draw(svg, "text", { x: box.left - 6, y: py + 4, "text-anchor": "end" }, tickText(tick));
    }
    let ticks = this.xlog ? logTicks(x0, x1) : linearTicks(x0, x1, 5);
    if (this.x === "epoch") ticks = ticks.filter(Number.isInteger);
    for (const tick of ticks) {
      draw(svg, "line", { class: "axis", x1: x(tick), x2: x(tick), y1: box.bottom, y2: box.bottom + 4 });
      draw(svg, "text", { x: x(tick), y: box.bottom + 16, "text-anchor": "middle" }, tickText(tick));
    }
    draw(svg, "line", { class: "axis", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom });
    const middle = (box.left + box.right) / 2;
    draw(svg, "text", { x: middle, y: box.bottom + 31, "text-anchor": "middle" }, this.x === "epoch" ? "epoch" : "seconds of updates");
  }
  labels(svg, panel) {
    const { box } = panel, gap = 12.5;
    const items = panel.lines.filter((l) => l.end)
      .map((l) => ({ line: l, want: Math.min(box.bottom, Math.max(box.top, l.end[1])) }))
      .sort((a, b) => a.want - b.want);
    items.forEach((item, k) => { item.at = k ? Math.max(item.want, items[k - 1].at + gap) : item.want; });
    for (let k = items.length - 1, floor = box.bottom; k >= 0; k--, floor -= gap) {
      if (items[k].at > floor) items[k].at = floor; else floor = items[k].at;
    }
    for (const { line, want, at } of items) {
      const group = draw(svg, "g");
      const style = `stroke:${colour(line.curve.algorithm)}`;
      draw(group, "path", { class: "leader", d: `M${line.end[0]},${want}L${box.right + 6},${at}`, style });
      draw(group, "text", { class: "label", x: box.right + 9, y: at + 3.5 }, this.name(line.curve));
      line.tag = group;
    }
  }

  // -- reading values
  nearest(line, at) {
    let found = -1;
    line.xs.forEach((xv, k) => { if (xv !== null && xv <= at * (1 + 1e-9) + 1e-12) found = k; });
    return found;
  }
  stops() {
    const all = this.visible().flatMap((c) => c[this.x]).filter((v) => v !== null && (!this.xlog || v > 0));
    return [...new Set(all)].sort((a, b) => a - b);
  }
  point(panel, event) {
    if (!panel.x) return;
    const bounds = panel.svg.getBoundingClientRect(), px = event.clientX - bounds.left, py = event.clientY - bounds.top;
    if (px < panel.box.left - 4 || px > panel.box.right + 4) return this.leave();
    const want = panel.x.back(px);
    const at = this.stops().reduce((a, b) => (Math.abs(b - want) < Math.abs(a - want) ? b : a));
    this.moveCursor(panel, this.x === "epoch" ? at : Math.min(panel.x1, Math.max(panel.x0, want)), py);
  }
  key(panel, event) {
    const stops = this.stops();
    if (!stops.length || !panel.x) return;
    let k = this.cursor === null ? -1 : stops.findLastIndex((s) => s <= this.cursor);
    if (event.key === "ArrowRight") k = Math.min(stops.length - 1, k + 1);
    else if (event.key === "ArrowLeft") k = Math.max(0, k - 1);
    else if (event.key === "Home") k = 0;
    else if (event.key === "End") k = stops.length - 1;
    else if (event.key === "Escape") return this.leave();
    else return;
    event.preventDefault();
    this.moveCursor(panel, stops[k]);
    this.live.textContent = this.tip.textContent;
  }
  moveCursor(active, at, py = null) {
    this.cursor = at;
    this.active = active;
    for (const panel of this.panels) {
      if (!panel.x) continue;
      panel.overlay.replaceChildren();
      const px = panel.x(at), { box } = panel;
      if (!Number.isFinite(px)) continue;
      draw(panel.overlay, "line", { class: "cursor", x1: px, x2: px, y1: box.top, y2: box.bottom });
      for (const line of panel.lines) {
        const k = this.nearest(line, at), value = k < 0 ? null : line.ys[k];
        line.now = k < 0 ? null : { value, low: line.low && line.low[k], high: line.high && line.high[k] };
        if (value === null || (panel.log && value <= 0)) continue;
        const cy = panel.y(value);
        if (cy < box.top - 1 || cy > box.bottom + 1) continue;
        draw(panel.overlay, "circle", { class: "dot", cx: panel.x(line.xs[k]), cy, r: 3.2, style: `fill:${colour(line.curve.algorithm)}` });
      }
    }
    this.showTip(active, at, py);
  }
  showTip(panel, at, py) {
    const rows = panel.lines.filter((l) => l.now && l.now.value !== null).sort((a, b) => b.now.value - a.now.value);
    const distance = (l) => Math.abs(panel.y(l.now.value) - py);
    const closest = py === null || !rows.length ? null : rows.reduce((a, b) => (distance(b) < distance(a) ? b : a));
    const near = closest && distance(closest) < 24 ? closest : null;
    const table = make("table");
    for (const line of rows) {
      const spread = line.now.low === undefined || line.now.low === null ? "" : `${format(line.now.low)} … ${format(line.now.high)}`;
      const swatch = make("span", { class: "swatch", style: `--c:${colour(line.curve.algorithm)}` });
      const value = make("td", { class: "num" }, `${format(line.now.value)} `);
      const row = make("tr", line === near ? { class: "near" } : {}, make("td", {}, swatch, `${this.name(line.curve)} `), value,
        make("td", { class: "num spread" }, spread));
      table.append(row);
    }
    const where = this.x === "epoch" ? `Epoch ${at}` : `After ${format(at)} s`;
    this.tip.replaceChildren(make("p", { class: "head" }, `${where}, ${panel.title.toLowerCase()} `), table);
    this.tip.hidden = !rows.length;
    const bounds = this.figure.getBoundingClientRect(), own = panel.svg.getBoundingClientRect();
    const left = own.left - bounds.left + panel.x(at), room = bounds.width - this.tip.offsetWidth;
    const beside = left + 16 > room ? left - this.tip.offsetWidth - 16 : left + 16;
    this.tip.style.left = `${Math.max(0, Math.min(room, beside))}px`;
    this.tip.style.top = `${own.top - bounds.top + 14}px`;
    this.near = near && { kind: "curve", curve: near.curve };
    this.emphasise();
  }
  leave() {
    this.cursor = null;
    this.near = null;
    this.tip.hidden = true;
    for (const panel of this.panels) if (panel.overlay) panel.overlay.replaceChildren();
    this.emphasise();
  }
  emphasise() {
    const wanted = this.stress
      ? (c) => c[this.stress.kind] === this.stress.name
      : this.near ? (c) => c === this.near.curve : () => true;
    const any = this.visible().some(wanted);
    for (const panel of this.panels) {
      for (const line of panel.lines || []) {
        const dim = any && !wanted(line.curve);
        line.group.classList.toggle("dim", dim);
        if (line.tag) line.tag.classList.toggle("dim", dim);
      }
    }
  }
}

document.querySelectorAll("figure.chart").forEach((figure) => { figure.chart = new Chart(figure); });
document.documentElement.dataset.ready = "true";
