// SPDX-License-Identifier: Apache-2.0
// The page's panels; their charts are uPlot's. See lab/pages/html_page.py and lab/report/data.py.
const data = JSON.parse(document.getElementById("data").textContent);
const $ = id => document.getElementById(id);
const HEIGHT = 220, FONT = "11px system-ui, sans-serif";
const given = data.sections.find(section => section.title === "Chosen");
const sections = data.sections.filter(section => section !== given);
const span = Math.max(1, ...data.runs.map(run => run.last)) - Math.min(...data.runs.map(run => run.first)) + 1;
const widest = Math.max(2, Math.floor(span / 2));
const state = {};
let panels = [], waiting = false, zoom = null;
const read = new Map();

function make(tag, className, text) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  return node;
}
function button(className, text, act, title) {
  const node = make("button", className, text);
  node.type = "button";
  if (title) node.title = title;
  node.addEventListener("click", act);
  return node;
}
function draw(tag, attributes, parent) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (parent) parent.append(node);
  return node;
}
function number(value, digits = 4) {
  if (Number.isNaN(value)) return "NaN";
  if (!Number.isFinite(value)) return value > 0 ? "\u221e" : "-\u221e";
  if (value === 0) return "0";
  const size = Math.abs(value), short = Number(value.toPrecision(digits));
  return size >= 1e6 || size < 1e-3 ? short.toExponential().replace("e+", "e") : String(short);
}
// So many that marks of an axis differ which are `apart` from each other.
function digits(value, apart) {
  return Math.min(15, Math.max(1, 2 + Math.floor(Math.log10(Math.abs(value))) - Math.floor(Math.log10(apart))));
}
function short(value, digits = 3) {
  for (const [size, unit] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]])
    if (Math.abs(value) >= size) return number(value / (unit === "k" ? 1e3 : size), digits) + unit;
  return number(value, digits);
}

// ---- numbers -----------------------------------------------------------------------------------------------------

function points(metric, run) {
  const key = metric + " " + run;
  if (read.has(key)) return read.get(key);
  const column = data.series[run][metric], steps = data.runs[run].x.step;
  const value = given => given === null ? NaN : Number(given);
  let out = null;
  if (column) {
    const bad = new Set(column.bad || []);
    out = column.v.map((one, k) => {
      const at = typeof column.i === "number" ? column.i + k : column.i[k], v = value(one);
      const low = column.lo ? value(column.lo[k]) : v, high = column.hi ? value(column.hi[k]) : v;
      return { at, step: steps[at], v, low, high, bad: bad.has(k) };
    });
  }
  read.set(key, out);
  return out;
}
function smoothed(given, window) {
  if (window <= 1) return given.map(point => Number.isFinite(point.v) ? point : { ...point, v: NaN });
  let start = 0;
  return given.map((point, k) => {
    while (given[start].step <= point.step - window) start++;
    if (start === k && Number.isFinite(point.v)) return point;
    let sum = 0, count = 0;
    for (let j = start; j <= k; j++) if (Number.isFinite(given[j].v)) { sum += given[j].v; count++; }
    const v = count ? sum / count : NaN;
    return { ...point, v, low: v, high: v };
  });
}
function shown(metric) {
  const runs = [];
  data.runs.forEach((run, r) => {
    if (!state.off.has(r) && data.series[r][metric] && run.x[state.x]) runs.push(r);
  });
  return runs;
}
// x of seeds together, by step: what a step adds is the mean over the seeds that reach it. While all go on that is the
// mean of their x, and it grows from step to step also where some have ended.
function shared(runs) {
  const steps = [...new Set(runs.flatMap(run => run.x.step))].sort((a, b) => a - b);
  if (state.x === "step") return new Map(steps.map(step => [step, step]));
  const next = runs.map(() => 0);
  let x = 0;
  return new Map(steps.map(step => {
    let more = 0, going = 0;
    runs.forEach(({ x: { step: own, [state.x]: places } }, k) => {
      if (step < own[0] || step > own[own.length - 1]) return;
      going++;
      if (own[next[k]] !== step) return;
      more += places[next[k]] - (next[k] ? places[next[k] - 1] : 0);
      next[k]++;
    });
    return [step, x += more / going];
  }));
}
// In a chart a line has one value at an x: steps that add nothing to it, as without tokens, stand a hair apart.
function spread(points) {
  const least = 1e-9 * (points.length && points[points.length - 1].x || 1);
  points.forEach((point, k) => { if (k) point.x = Math.max(point.x, points[k - 1].x + least); });
  return points;
}
// The lines of a panel: of each group the mean over its seeds, or of each run its own.
function lines(metric, window) {
  const out = [];
  data.groups.forEach((group, g) => {
    const seeds = shown(metric).filter(r => data.runs[r].group === g).map(r => {
      const run = data.runs[r], xs = run.x[state.x];
      return { run, rare: data.series[r][metric].rare,
        points: smoothed(points(metric, r), window).map(point => ({ ...point, x: xs[point.at] })) };
    });
    if (!seeds.length) return;
    const look = { colour: group.colour, dash: group.dash };
    if (state.band === "runs" || seeds.length === 1) {
      for (const { run, rare, points } of seeds)
        out.push({ ...look, group: g, name: seeds.length === 1 ? group.name : run.name, most: 1, rare,
          points: spread(points.map(point => ({ ...point, std: 0, seeds: Number.isFinite(point.v) ? 1 : 0 }))) });
      return;
    }
    const at = new Map(), together = shared(seeds.map(seed => seed.run));
    for (const seed of seeds) for (const point of seed.points) {
      if (!at.has(point.step)) at.set(point.step, []);
      at.get(point.step).push(point);
    }
    const met = [...at].map(([step, all]) => {
      const finite = all.filter(point => Number.isFinite(point.v)), n = finite.length;
      const x = together.get(step), v = finite.reduce((sum, point) => sum + point.v, 0) / n;
      if (!n) return { step, x, v: NaN, low: NaN, high: NaN, std: 0, seeds: 0 };
      const std = n > 1 ? Math.sqrt(finite.reduce((sum, point) => sum + (point.v - v) ** 2, 0) / (n - 1)) : 0;
      return { step, x, v, std, seeds: n, low: Math.min(...finite.map(point => point.low)),
        high: Math.max(...finite.map(point => point.high)) };
    }).sort((a, b) => a.step - b.step);
    const rare = seeds.every(seed => seed.rare);
    out.push({ ...look, group: g, name: group.name, most: seeds.length, rare, points: spread(met) });
  });
  return out;
}
function edges(line, point) {
  if (state.band === "none") return [point.v, point.v];
  if (line.most > 1 && state.band === "std") return [point.v - point.std, point.v + point.std];
  return [point.low, point.high];
}

// ---- charts ------------------------------------------------------------------------------------------------------

// The same for all panels: from the first to the last x of the groups, or of the runs.
function domain(all) {
  let low = Infinity, high = -Infinity;
  data.groups.forEach((_, g) => {
    const known = data.runs.filter((run, r) => run.group === g && !state.off.has(r) && run.x[state.x]);
    if (!known.length) return;
    for (const runs of state.band === "runs" ? known.map(run => [run]) : [known]) {
      const places = [...shared(runs).values()];
      low = Math.min(low, places[0]);
      high = Math.max(high, places[places.length - 1]);
    }
  });
  for (const { points } of all) if (points.length) {
    low = Math.min(low, points[0].x);
    high = Math.max(high, points[points.length - 1].x);
  }
  if (low > high) return [0, 1];
  return low === high ? [low - 0.5, high + 0.5] : [low, high];
}
function isLog(metric) { return state.log !== state.flip.has(data.metrics[metric]); }
// What stands beside a line's name under the cursor.
function said(line, point, step) {
  return number(point.v, 5) + (point.seeds > 1 ? " \u00b1 " + number(point.std, 2) : "")
    + (line.most > 1 ? " (" + point.seeds + (point.seeds === 1 ? " seed)" : " seeds)") : "")
    + (line.most === 1 && point.low < point.high ? " (" + number(point.low) + " to " + number(point.high) + ")" : "")
    + (point.step === step ? "" : " at step " + number(point.step, 7));
}
function paint(panel) {
  panel.dirty = false;
  if (panel.chart) panel.chart.destroy();
  const { metric, plot, note } = panel, log = isLog(metric), all = lines(metric, state.smooth);
  const good = point => Number.isFinite(point.v) && (!log || point.v > 0);
  const bad = shown(metric).flatMap(r => points(metric, r).filter(point => point.bad)
    .map(point => ({ x: data.runs[r].x[state.x][point.at], colour: data.groups[data.runs[r].group].colour })));
  const known = all.flatMap(line => line.points).filter(point => Number.isFinite(point.v));
  const hidden = known.filter(point => !good(point)).length, notes = missing(metric);
  if (hidden) notes.push(hidden + " values are not above 0: not on this axis");
  if (hidden === known.length) notes.push("nothing to draw");
  if (bad.length) notes.push(bad.length + " not finite (\u00d7)");
  note.textContent = notes.join("; ");
  panel.logButton.setAttribute("aria-pressed", String(log));

  const axis = data.axes.find(axis => axis.name === state.x), steps = new Map(), tables = [], bands = [];
  const step = (chart, x) => x === null ? "" : axis.name === "step" ? number(x, 7)
    : short(x) + " " + axis.unit + ", step " + number(steps.get(x), 7);
  const series = [{ label: axis.name === "step" ? "step" : "at", value: step }];
  // A series, which the legend leaves out unless `look` says else. Where there is no value that can be drawn, a gap.
  function add(line, points, value, look) {
    tables.push([points.map(point => point.x), points.map((point, k) => good(point) ? value(point, k) : null)]);
    return series.push({ class: "unnamed", stroke: line.colour, points: { show: false }, ...look }) - 1;
  }
  const before = state.smooth > 1 ? lines(metric, 1) : [];
  for (const line of all) {
    const own = line.points, at = new Map(own.map(point => [point.x, point]));
    if (own.some(point => good(point) && edges(line, point)[0] < edges(line, point)[1])) {
      const edge = which => add(line, own, point => edges(line, point)[which], { width: 0 });
      bands.push({ series: [edge(1), edge(0)], fill: line.colour + "2e" });
    }
    for (const raw of before.filter(raw => raw.name === line.name))
      add(raw, raw.points, point => point.v, { stroke: raw.colour + "4d", width: 1 });
    // A stretch where some seeds of the group have ended is dashed finely.
    const fewer = k => own[k] && good(own[k]) && own[k].seeds < line.most;
    const dash = line.dash.split(" ").filter(Boolean).map(Number), part = (_, k) => [k - 1, k, k + 1].some(fewer);
    add(line, own, (point, k) => fewer(k) ? null : point.v, { width: 1.8, dash });
    if (own.some(part))
      add(line, own, (point, k) => part(point, k) ? point.v : null, { width: 1.8, dash: [1.5, 2.5] });
    // Points: of what is logged now and then, as validation, and of a value between gaps.
    const alone = (_, k) => ![k - 1, k + 1].some(k => own[k] && good(own[k]));
    const dots = new Set(own.filter((_, k) => line.rare || own.length <= 2 || alone(_, k)).map(point => point.x));
    const name = add(line, own, point => point.v, { class: "named", label: line.name, paths: () => null,
      value: ({ data: [x], cursor }, v, _, k) => v == null ? "" : said(line, at.get(x[k]), steps.get(x[cursor.idx])),
      points: { show: true, size: 6, width: 0, fill: line.colour,
        filter: ({ data }) => data[0].flatMap((x, k) => dots.has(x) && data[name][k] != null ? [k] : []) } });
    for (const point of own) steps.set(point.x, point.step);
  }
  const width = Math.max(200, plot.clientWidth), reach = domain(all);
  const look = { stroke: () => getComputedStyle(document.body).color, font: FONT, labelFont: FONT,
    grid: { stroke: "#8884", width: 1 }, ticks: { show: false } };
  const whole = Array.from({ length: 30 }, (_, k) => [1, 2, 5][k % 3] * 10 ** Math.floor(k / 3));
  const texts = text => (chart, places, which, space, apart) => places.map(place => place === null ? null
    : text(place, which === 1 && log ? 4 : digits(place, apart)));
  const room = (chart, texts) => Math.max(52, 14 + 6 * Math.max(...(texts || []).map(text => (text || "").length)));
  plot.setAttribute("role", "img");
  plot.setAttribute("aria-label", panel.title);
  panel.chart = new uPlot({
    width, height: HEIGHT, series, bands, padding: [10, 12, 0, 0],
    scales: { x: { time: false, range: () => zoom || reach }, y: { distr: log ? 3 : 1 } },
    axes: [{ ...look, label: axis.label, labelSize: 14, labelGap: 0, size: 22,
      ...axis.name === "step" ? { incrs: whole, values: texts(number) } : { values: texts(short) } },
      { ...look, size: room, values: texts(number) }],
    cursor: { y: false, points: { size: 7 }, sync: { key: "panels" },
      hover: { prox: () => Math.max(8, width / 40), skip: [null, undefined] },
      bind: { dblclick: (chart, node, act) => event => { zoom = null; address(); act(event); } } },
    hooks: {
      // What is said of the lines stands on the side where the cursor is not.
      setCursor: [chart => chart.root.classList.toggle("aside", 2 * chart.cursor.left < chart.over.clientWidth)],
      setSelect: [({ data: [x], posToVal, select: { left, width } }) => {
        if (!width || !x.length) return;
        zoom = [left, left + width].map(at => Number(posToVal(at, "x").toPrecision(7)));
        address();
      }],
      draw: [chart => { for (const mark of bad) cross(chart, mark); }],
    },
  }, all.length ? uPlot.join(tables) : [[], ...tables], plot);
}
function cross({ ctx, bbox, valToPos }, { x, colour }) {
  const at = valToPos(x, "x", true), size = 3 * uPlot.pxRatio, top = bbox.top + size;
  if (at < bbox.left || at > bbox.left + bbox.width) return;
  ctx.beginPath();
  for (const way of [1, -1]) {
    ctx.moveTo(at - size, top - way * size);
    ctx.lineTo(at + size, top + way * size);
  }
  ctx.strokeStyle = colour;
  ctx.lineWidth = 1.5 * uPlot.pxRatio;
  ctx.stroke();
}
function missing(metric) {
  const without = [], noAxis = [];
  data.groups.forEach((group, g) => {
    const members = data.runs.map((run, r) => r).filter(r => data.runs[r].group === g && !state.off.has(r));
    const lack = members.filter(r => !data.series[r][metric]);
    const none = members.filter(r => data.series[r][metric] && !data.runs[r].x[state.x]);
    for (const [found, names] of [[lack, without], [none, noAxis]])
      if (found.length && found.length === members.length) names.push(group.name);
      else names.push(...found.map(r => data.runs[r].name));
  });
  const out = [];
  if (without.length) out.push("not logged by " + without.join(", "));
  if (noAxis.length) out.push("no " + state.x + " logged by " + noAxis.join(", "));
  return out;
}

// ---- page --------------------------------------------------------------------------------------------------------

function panelOf(title, metric, chosen) {
  const figure = make("figure", "panel"), caption = make("figcaption"), text = make("div");
  const name = data.metrics[metric], plot = make("div", "plot"), note = make("p", "note");
  text.append(make("strong", "", title));
  if (title !== name) text.append(make("code", "", name));
  const flip = () => { if (!state.flip.delete(name)) state.flip.add(name); apply(); };
  const logButton = button("log", "log", flip, "logarithmic axis");
  caption.append(text, logButton);
  if (chosen) caption.append(button("remove", "\u00d7", () => choose(metric, false), "remove"));
  figure.append(caption, plot, note);
  return { metric, title, figure, plot, note, logButton, dirty: true };
}
function build() {
  for (const { chart } of panels) if (chart) chart.destroy();
  panels = [];
  const target = $("sections"), chosen = { title: "Chosen", main: state.chosen.length,
    panels: state.chosen.map(metric => ({ metric, title: titleOf(metric) })) };
  target.replaceChildren();
  for (const section of [chosen, ...sections]) {
    if (!section.panels.length) continue;
    const head = make("h2", "", section.title), grid = make("div", "grid"), rest = section.panels.length - section.main;
    const open = state.more.has(section.title);
    if (rest > 0) head.append(button("more", open ? "fewer" : rest + " more", () => {
      if (!state.more.delete(section.title)) state.more.add(section.title);
      build();
      apply();
    }));
    section.panels.slice(0, open ? undefined : section.main).forEach(panel => {
      const made = panelOf(panel.title, panel.metric, section === chosen);
      panels.push(made);
      grid.append(made.figure);
    });
    target.append(head, ...section.note ? [make("p", "note", section.note)] : [], grid);
  }
}
function titleOf(metric) {
  const known = data.sections.flatMap(section => section.panels).find(panel => panel.metric === metric);
  return known ? known.title : data.metrics[metric];
}
function choose(metric, on) {
  state.chosen = state.chosen.filter(one => one !== metric);
  if (on) state.chosen.push(metric);
  build();
  apply();
}
function isOff(g) { return data.runs.every((run, r) => run.group !== g || state.off.has(r)); }
function turn(chosen, on) {
  data.runs.forEach((run, r) => { if (chosen(run, r)) state.off[on ? "delete" : "add"](r); });
  apply();
}
function repaint() {
  waiting = false;
  for (const panel of panels) {
    if (!panel.dirty) continue;
    const box = panel.figure.getBoundingClientRect();
    if (box.bottom > -300 && box.top < window.innerHeight + 300) paint(panel);
  }
}
function soon() { if (!waiting) { waiting = true; requestAnimationFrame(repaint); } }
function apply() {
  $("x").value = state.x;
  $("band").value = state.band;
  $("log").checked = state.log;
  $("smooth").value = String(Math.round(100 * Math.log(state.smooth) / Math.log(widest)));
  $("window").textContent = state.smooth === 1 ? "off" : state.smooth + " steps";
  document.querySelectorAll("#legend button[data-group]").forEach(node =>
    node.setAttribute("aria-pressed", String(!isOff(Number(node.dataset.group)))));
  document.querySelectorAll("#runs input").forEach((box, r) => { box.checked = !state.off.has(r); });
  document.querySelectorAll("#list input").forEach(box => { box.checked = state.chosen.includes(Number(box.value)); });
  address();
  for (const panel of panels) panel.dirty = true;
  soon();
}
function address() {
  const hash = new URLSearchParams();
  if (state.x !== data.axes[0].name) hash.set("x", state.x);
  if (state.smooth !== data.smooth) hash.set("smooth", state.smooth);
  if (state.band !== "std") hash.set("band", state.band);
  if (state.log) hash.set("log", "1");
  if (zoom) ["from", "to"].forEach((name, k) => hash.set(name, zoom[k]));
  data.runs.forEach((run, r) => { if (state.off.has(r)) hash.append("off", run.name); });
  for (const name of state.flip) hash.append("flip", name);
  for (const name of state.more) hash.append("more", name);
  const names = state.chosen.map(metric => data.metrics[metric]);
  if (names.join("\n") !== first.join("\n"))
    for (const name of names.length ? names : [""]) hash.append("metric", name);
  if (location.hash.slice(1) !== String(hash)) history.replaceState(null, "", "#" + hash);
}
const first = given ? given.panels.map(panel => data.metrics[panel.metric]) : [];
function restore() {
  const hash = new URLSearchParams(location.hash.slice(1));
  state.x = data.axes.some(axis => axis.name === hash.get("x")) ? hash.get("x") : data.axes[0].name;
  state.smooth = Math.max(1, Math.floor(Number(hash.get("smooth"))) || data.smooth);
  state.band = ["std", "range", "none", "runs"].includes(hash.get("band")) ? hash.get("band") : "std";
  state.log = hash.get("log") === "1";
  const [from, to] = ["from", "to"].map(name => hash.has(name) ? Number(hash.get(name)) : NaN);
  zoom = from < to ? [from, to] : null;
  const off = hash.getAll("off");
  state.off = new Set(data.runs.map((run, r) => r).filter(r => off.includes(data.runs[r].name)));
  state.flip = new Set(hash.getAll("flip"));
  state.more = new Set(hash.getAll("more"));
  const names = hash.has("metric") ? hash.getAll("metric") : first;
  state.chosen = names.map(name => data.metrics.indexOf(name)).filter(metric => metric >= 0);
  build();
  apply();
}
for (const axis of data.axes) {
  const option = make("option", "", { step: "training step", tokens: "tokens", time: "training time" }[axis.name]);
  option.value = axis.name;
  $("x").append(option);
}
data.groups.forEach((group, g) => {
  const count = data.runs.filter(run => run.group === g).length;
  const node = button("", undefined, () => turn(run => run.group === g, isOff(g)),
    "click: on or off; double click: this one alone, or all");
  node.dataset.group = g;
  const swatch = draw("svg", { viewBox: "0 0 26 8" }, node);
  const look = { stroke: group.colour, "stroke-width": 3, "stroke-dasharray": group.dash };
  draw("line", { x1: 0, x2: 26, y1: 4, y2: 4, ...look }, swatch);
  node.append(make("span", "", group.name + (count > 1 ? " (" + count + " runs)" : "")));
  node.addEventListener("dblclick", () => {
    const alone = !isOff(g) && data.groups.every((other, o) => o === g || isOff(o));
    state.off.clear();
    turn(run => run.group !== g, alone);
  });
  $("legend").append(node);
});
$("picker").querySelector("summary").textContent = "All metrics (" + data.metrics.length + "): choose what to draw";
data.metrics.forEach((name, metric) => {
  const label = make("label"), box = make("input");
  box.type = "checkbox";
  box.value = metric;
  box.addEventListener("change", () => choose(metric, box.checked));
  label.append(box, name);
  $("list").append(label);
});
$("search").addEventListener("input", () => {
  const words = $("search").value.toLowerCase().split(/\s+/);
  document.querySelectorAll("#list label").forEach(label => {
    const text = label.textContent.toLowerCase();
    label.hidden = !words.every(word => text.includes(word));
    label.style.display = label.hidden ? "none" : "";
  });
});
const troubled = data.runs.filter(run => run.problems.length).length;
$("problems").textContent = [...data.left_out.map(text => "Left out: " + text),
  ...troubled ? ["Not all of " + (troubled === 1 ? "one run" : troubled + " runs") + " could be read as it should be: "
    + "see the list of runs below."] : []].join("\n");
$("runs").querySelector("summary").textContent = "Runs (" + data.runs.length + ")";
$("runs").open = troubled > 0;
data.runs.forEach((run, r) => {
  const row = make("tr"), box = make("input"), cell = make("td");
  box.type = "checkbox";
  box.addEventListener("change", () => turn((_, other) => other === r, box.checked));
  cell.append(box);
  row.append(cell, make("td", "", run.name), make("td", "", data.groups[run.group].name),
    make("td", "", run.first + " to " + run.last + " (" + run.steps + ")"),
    make("td", "", run.source + ": " + run.path), make("td", "problems", run.problems.join(" ")));
  $("runs").querySelector("tbody").append(row);
});
$("about").textContent = "A group's line is the mean over its seeds at each step; where some of them have no "
  + "value it is dotted. On tokens and training time a step takes the mean of what it took those that reach it. "
  + "The standard deviation is that of a sample (n - 1). Smoothing is the mean of the last "
  + "steps, of each seed before they meet; the values themselves stay faintly visible. "
  + "Drag over a chart to enlarge that stretch in all of them, double click to see all again. "
  + "Training time is the sum of the steps' own, without validation and checkpoints." + (data.width > 1
  ? " Long series are thinned out to the mean of " + data.width + " steps; their range is the band of a "
  + "single run and of \"mean and range\"." : "");
for (const name of ["x", "band"]) $(name).addEventListener("change", () => {
  state[name] = $(name).value;
  if (name === "x") zoom = null;
  apply();
});
$("log").addEventListener("change", () => { state.log = $("log").checked; state.flip.clear(); apply(); });
$("smooth").addEventListener("input", () => {
  state.smooth = Math.round(widest ** (Number($("smooth").value) / 100));
  apply();
});
window.addEventListener("hashchange", restore);
window.addEventListener("scroll", soon, { passive: true });
window.addEventListener("resize", () => { for (const panel of panels) panel.dirty = true; soon(); });
for (const query of ["(prefers-color-scheme: dark)", "print"])
  matchMedia(query).addEventListener("change", () => {
    for (const { chart } of panels) if (chart) chart.redraw(false);
  });
window.addEventListener("beforeprint", () => { for (const panel of panels) if (panel.dirty) paint(panel); });
restore();
