"use strict";
// Draws the charts of report.html with uPlot: averages the runs of a side, smooths them, and reads values under the cursor.
//
// Names from logs reach the page as text (`textContent`), never as HTML.

const HEIGHT = 230, FONT = '12px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif';
const TICKS = Array.from({length: 13}, (_, power) => [1, 2, 5].map(digit => digit * 10 ** power)).flat();  // whole steps and seconds
const byId = id => document.getElementById(id);
const data = JSON.parse(byId("data").textContent);
const {elements} = byId("controls");
const runs = data.sides.flatMap(({name, runs}, side) => Array.from({length: runs}, (_, i) => ({side, label: `${name} ${i + 1}`})));
const boxes = [...document.querySelectorAll("#controls [name=run]")];  // of the runs
const placeOf = new Map(data.steps.map((step, place) => [step, place]));  // in `data.steps`, for `seconds`
const timed = data.sides.map(side => side.seconds.some(seconds => seconds !== null));
const element = (name, properties = {}, ...children) => {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
};
const probe = document.body.appendChild(element("span", {hidden: true}));
const colour = name => {  // as the style sheet has it now, in light or dark
  probe.className = name;
  return getComputedStyle(probe).color;
};
const faint = name => colour(name).replace("rgb(", "rgba(").replace(")", ", .2)");
const mode = name => elements[name]?.value;  // of a choice in the controls, which the page may lack
const digits = value => String(Number(value.toPrecision(4)));

// ---- values

/** Mean of the values of the last `width` steps, where there is a value. */
function smoothed(values, steps, width) {
  return values.map((value, i) => {
    if (value === null) return null;
    const known = [value];  // not a running sum: after a spike it would be off
    for (let k = i - 1; k >= 0 && steps[k] > steps[i] - width; k--) if (values[k] !== null) known.push(values[k]);
    return mean(known);
  });
}

/** Points of these sides on the horizontal axis, ordered: {x, step, i: its place, side: whose, if the sides differ in x}. */
function pointsOf({steps}, sides) {
  if (mode("axis") === "step") return steps.map((step, i) => ({x: step, step, i}));
  const all = sides.flatMap(side => steps.map((step, i) => ({x: data.sides[side].seconds[placeOf.get(step)], step, i, side})));
  return all.filter(({x}) => x !== null).sort((a, b) => a.x - b.x);
}

/** Runs of a side that logged the chart's metric: {run, parts: values of each}. */
function runsOf(chart, side) {
  return chart.runs.map((parts, run) => ({parts, run}))
    .filter(({parts, run}) => runs[run].side === side && parts.some(values => values.some(value => value !== null)));
}

/** Highest sum of a run's parts: the stacks of both sides have this scale. */
function highestSum({runs, steps}) {
  return Math.max(...runs.flatMap(parts => steps.map((_, i) => parts.reduce((sum, values) => sum + values[i], 0))));
}

/** `combine` of the runs' values at each step, over those that are known: of all runs, or at least one. */
function over(columns, length, all, combine) {
  return Array.from({length}, (_, i) => {
    const known = columns.map(values => values[i]).filter(value => value !== null);
    return known.length && (known.length === columns.length || !all) ? combine(known) : null;
  });
}
const mean = values => values.reduce((sum, value) => sum + value, 0) / values.length;
const lowest = values => Math.min(...values), highest = values => Math.max(...values);

// ---- plots

// A plot is a canvas: of a chart of lines there is one, of a stack one per side. Its `curves` are uPlot's series.
class Plot {
  constructor(chart, side, parent) {
    Object.assign(this, {chart, side});
    const name = side === undefined ? chart.title : `${chart.title}: ${data.sides[side].name}`;
    this.box = element("div", {className: "plot", tabIndex: 0, role: "group", ariaLabel: `${name}. Arrow keys move through the values.`});
    this.readout = element("p", {className: "readout"});
    parent.append(...side === undefined ? [] : [element("b", {textContent: data.sides[side].name})], this.box, this.readout);
    this.curves = side === undefined ? this.lines() : this.areas();
    this.u = new uPlot(this.options(), null, this.box);
    new ResizeObserver(() => this.u.setSize({width: this.box.clientWidth, height: HEIGHT})).observe(this.box);
    this.box.addEventListener("keydown", event => this.key(event));
    this.box.addEventListener("focus", () => this.readout.ariaLive = "polite");
    this.box.addEventListener("blur", () => { this.readout.ariaLive = "off"; this.u.setCursor({left: -10, top: -10}, true, true); });
  }

  /** Of each side its mean, lowest and highest run; then all runs. */
  lines() {
    const curves = data.sides.flatMap(({name}, side) => [
      {side, label: name, look: `side${side}`, width: 2}, {side, width: 0}, {side, width: 0},
    ]);
    return [...curves, ...runs.map(({side, label}) => ({side, label, look: `side${side}`, width: 1.25}))];
  }

  /** The sum of all parts first: areas reach down to zero, and a later one covers an earlier one. */
  areas() {
    return this.chart.parts.map((label, part) => ({label, part, side: this.side, look: `part${part}`})).reverse();
  }

  options() {
    const stacked = this.side !== undefined, axis = {stroke: () => colour("ink"), font: FONT, labelFont: FONT};
    const paint = ({look}) => look ? colour(look) : "transparent", top = stacked ? highestSum(this.chart) : 0;
    const rules = {stroke: () => colour("grid"), width: 1}, lines = {grid: rules, ticks: rules};
    const series = this.curves.map(curve => ({
      spanGaps: true, stroke: () => paint(curve), ...stacked ? {width: 0, fill: () => paint(curve)} : {width: curve.width},
      points: curve.look && !stacked ? {fill: () => colour("card")} : {show: false}, ...curve.side && !stacked ? {dash: [7, 3]} : {},
    }));
    return {
      width: this.box.clientWidth, height: HEIGHT, legend: {show: false}, series: [{}, ...series],
      bands: stacked ? [] : data.sides.map((_, side) => ({series: [3 * side + 3, 3 * side + 2], fill: () => faint(`side${side}`)})),
      scales: {x: {time: false}, y: stacked ? {range: () => [0, 1.05 * top]} : {}},
      axes: [
        {...axis, ...lines, incrs: TICKS, labelSize: 18, size: 32, label: () => mode("axis") === "step" ? "step" : "seconds after the first step"},
        {...axis, ...lines, size: (_, values) => 14 + 7 * Math.max(3, ...(values ?? []).map(text => text.length))},
      ],
      cursor: {
        // Any distance; without `prox`, uPlot takes the neighbour in the list, not on the axis.
        y: false, sync: {key: "report"}, hover: {skip: [null], prox: 1e9}, points: {fill: (_, curve) => paint(this.curves[curve - 1])},
      },
      hooks: {
        drawClear: [({ctx}) => { ctx.fillStyle = colour("card"); ctx.fillRect(0, 0, ctx.canvas.width, ctx.canvas.height); }],
        setCursor: [() => this.read()],
      },
    };
  }

  /** Compute all curves anew. `shown` gets those that readout and table have: {label, look, curve, values, low, high}. */
  update(reset) {
    const {chart, curves, u} = this, sides = this.side === undefined ? [...data.sides.keys()] : [this.side];
    const points = pointsOf(chart, sides), length = chart.steps.length;
    const placed = (side, values) => points.map(point => point.side === side || point.side === undefined ? values[point.i] : null);
    const none = points.map(() => null), columns = curves.map(() => none), each = mode("seeds") === "runs";
    Object.assign(this, {points, shown: []});
    const show = (curve, values, more = {}) => this.shown.push({...curves[curve], curve: curve + 1, values, ...more});
    for (const side of sides) {
      const on = runsOf(chart, side).filter(({run}) => boxes[run].checked)
        .map(({run, parts}) => ({run, parts: parts.map(values => smoothed(values, chart.steps, Number(mode("smooth"))))}));
      if (!on.length) continue;
      if (this.side !== undefined) {
        let below = Array(length).fill(0);
        for (let curve = curves.length - 1; curve >= 0; curve--) {
          const values = over(on.map(({parts}) => parts[curves[curve].part]), length, false, mean);
          below = below.map((sum, i) => values[i] === null ? null : sum + values[i]);
          columns[curve] = placed(side, below);
          show(curve, placed(side, values));
        }
      } else if (each) {
        for (const {run, parts: [values]} of on) {
          const curve = 3 * data.sides.length + run;
          show(curve, columns[curve] = placed(side, values));
        }
      } else {
        const values = [mean, lowest, highest].map(of => placed(side, over(on.map(({parts}) => parts[0]), length, true, of)));
        columns.splice(3 * side, 3, ...values);
        show(3 * side, values[0], on.length > 1 ? {low: values[1], high: values[2]} : {});
      }
    }
    u.batch(() => {
      const {min, max} = u.scales.x;
      u.setData([points.map(({x}) => x), ...columns], reset);
      if (!reset) u.setScale("x", {min, max});
    });
    this.read();
  }

  /** Show the values under the cursor, or else the last ones; in brackets the step of a value, if it is another one. */
  read() {
    const {idx, idxs} = this.u.cursor, hovered = typeof idx === "number", {shown = [], points = []} = this;
    const point = points[hovered ? idx : points.length - 1], seconds = mode("axis") === "seconds";
    const at = point && shown.length ? `${seconds ? `${Math.round(point.x)} s, ` : ""}step ${point.step}` : "no values";
    const items = shown.map(({label, look, curve, values, low, high}) => {
      const i = hovered ? idxs[curve] : values.findLastIndex(value => value !== null);
      if ((values[i] ?? null) === null) return "";
      const range = low ? ` ${digits(low[i])} to ${digits(high[i])}` : "", own = points[i].step === point.step ? "" : ` (step ${points[i].step})`;
      return element("span", {}, element("i", {className: look}), ` ${label} `, element("b", {textContent: digits(values[i])}),
        element("span", {className: "range", textContent: range + own}));
    });
    this.readout.replaceChildren(element("b", {textContent: hovered ? at : `last: ${at}`}), ...items);
  }

  key(event) {
    const {u} = this, xs = [...new Set(u.data[0])], end = xs.length - 1, far = Math.ceil(xs.length / 20);
    const idx = typeof u.cursor.idx === "number" ? xs.indexOf(u.data[0][u.cursor.idx]) : xs.length;
    const to = {ArrowLeft: idx - 1, ArrowRight: idx + 1, PageUp: idx - far, PageDown: idx + far, Home: 0, End: end}[event.key];
    if (event.key === "Escape") for (const plot of plots) plot.update(true);
    if (to === undefined || !xs.length) return;
    event.preventDefault();
    u.setCursor({left: u.valToPos(xs[Math.max(0, Math.min(end, to))], "x"), top: HEIGHT / 3}, true, true);
  }
}

/** Fill a chart's table, if it is open, with what is drawn. */
function fill(table, own) {
  if (!table.closest("details").open) return;
  const rows = new Map();
  const columns = own.flatMap(({shown, points, side}) => shown.flatMap(({label, values, low, high}) => {
    const name = side === undefined ? label : `${data.sides[side].name}, ${label}`;
    const parts = low ? [["mean", values], ["lowest", low], ["highest", high]] : [["", values]];
    return parts.map(([part, numbers]) => ({name: part ? `${name}, ${part}` : name, points, numbers}));
  }));
  columns.forEach(({points, numbers}, column) => points.forEach(({step}, i) => {
    if (numbers[i] === null) return;
    if (!rows.has(step)) rows.set(step, []);
    rows.get(step)[column] = digits(numbers[i]);
  }));
  const cells = (kind, texts) => element("tr", {}, ...texts.map(textContent => element(kind, {textContent})));
  const lines = [...rows].sort(([a], [b]) => a - b).map(([step, texts]) => cells("td", [step, ...columns.map((_, i) => texts[i] ?? "")]));
  table.replaceChildren(element("thead", {}, cells("th", ["step", ...columns.map(({name}) => name)])), element("tbody", {}, ...lines));
}

// ---- page

const figures = [...document.querySelectorAll("#charts > section")].map((section, place) => {
  const chart = data.charts[place], parent = section.querySelector(".plots");
  const own = (chart.stacked ? [...data.sides.keys()].filter(side => runsOf(chart, side).length) : [undefined]).map(side => new Plot(chart, side, parent));
  const table = section.querySelector("table");
  table.closest("details").addEventListener("toggle", () => fill(table, own));
  return {own, table};
});
const plots = figures.flatMap(({own}) => own);

function update(reset) {
  const width = Number(mode("smooth"));
  elements.over.value = width === 1 ? "off" : `${width} steps`;
  for (const plot of plots) plot.update(reset);
  for (const {own, table} of figures) fill(table, own);
}
byId("controls").addEventListener("input", ({target}) => update(target.name === "axis"));
const redraw = () => plots.forEach(({u}) => u.redraw(false));
byId("theme").addEventListener("change", redraw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
for (const input of elements.axis) input.disabled = input.value === "seconds" && !timed.includes(true);
update(true);
