"use strict";
// Draws the pictures, each when it comes into sight: a page of many runs has more than a browser draws in a second.

const AHEAD = "500px";
const charts = new Map(), stale = new Set(), inSight = new Set();  // charts: where each is drawn -> what gives its traces and layout

let firstSeen;
const isSeen = new Promise((resolve) => { firstSeen = resolve; });
const watcher = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) isIntersecting ? inSight.add(target) : inSight.delete(target);
  firstSeen();
  drawStale();
}, { rootMargin: AHEAD });

function draw(plot) {
  stale.delete(plot);
  Plotly.react(plot, ...charts.get(plot)(), { displayModeBar: false, responsive: true });
}

async function drawStale() {  // one at a time, so that the page answers meanwhile
  const next = () => [...inSight].find((plot) => stale.has(plot));
  for (let plot = next(); window.Plotly && plot; plot = next()) {
    draw(plot);
    await new Promise((done) => setTimeout(done));
  }
}

// On paper all of them are drawn, as wide as they have room there, in the colours of the day. A browser does not wait for
// what is drawn later.
function drawForPaper() {
  document.documentElement.classList.add("paper");
  for (const [plot, toDraw] of charts) {
    const [traces, layout] = toDraw(), width = plot.clientWidth;
    if (window.Plotly && width) Plotly.newPlot(plot, traces, { ...layout, width }, { staticPlot: true });
  }
}

function backToScreen() {
  document.documentElement.classList.remove("paper");
  for (const plot of charts.keys()) window.Plotly?.purge(plot);
  redraw();
}

addEventListener("beforeprint", drawForPaper);
addEventListener("afterprint", backToScreen);

function redraw() {
  for (const plot of charts.keys()) stale.add(plot);
  return drawStale();
}

function addChart(section, title, toDraw, { id = section, wide = false, rows = 0, legend = "", anchors = [] } = {}) {
  const plot = make("div", { role: "img", "aria-label": title, style: `height: ${Math.max(240, 90 + 26 * rows)}px` });
  find(`#${section} .charts`).append(make("figure", { id, class: wide ? "wide" : "" }, ...anchors, make("figcaption", {}, title), legend, plot));
  charts.set(plot, toDraw);
  stale.add(plot);
  watcher.observe(plot);
  return plot;
}

function layout(xTitle, yTitle, more = {}) {
  const axis = (text, own) => ({ gridcolor: css("--rule"), zeroline: false, automargin: true, title: { text, standoff: 6 }, ...own });
  const font = { family: "system-ui, sans-serif", size: 12, color: css("--muted") };
  const hoverlabel = { bgcolor: css("--paper"), bordercolor: css("--rule"), font: { color: css("--ink") }, namelength: 60 };
  const shared = { margin: { l: 10, r: 10, t: 8, b: 10 }, paper_bgcolor: "transparent", plot_bgcolor: "transparent", showlegend: false };
  return { ...shared, hoverlabel, font, hovermode: "closest", ...more, xaxis: axis(xTitle, more.xaxis), yaxis: axis(yTitle, more.yaxis) };
}

// Of one run its curves, of several runs one curve of each.
function curves({ curves: named, unit, from_zero }) {
  const traces = [], isOne = page.num_runs === 1, shown = Object.keys(named).filter((metric) => page.curves[metric]);
  for (const [place, metric] of shown.entries()) for (const line of page.curves[metric].filter((each) => !hidden.has(each.group))) {
    const name = isOne ? plain(named[metric] || metric) : nameOf(line.group);
    const color = css(colorName(isOne ? place : line.group)), stroke = { color, dash: dash(line.group) };
    const trace = ({ x, y }, more) => {
      traces.push({ type: "scatter", name, x, y, mode: x.length > 1 ? "lines" : "markers", marker: { color }, ...more });
    };
    if (line.low) {
      const around = { x: [...line.x, ...[...line.x].reverse()], y: [...line.high, ...[...line.low].reverse()] };
      const edge = { width: line.x.length > 1 ? 0 : 3, color };
      trace(around, { fill: "toself", fillcolor: color, opacity: 0.15, mode: "lines", line: edge, hoverinfo: "skip" });
    }
    for (const run of line.runs) trace(run, { name: isOne ? name : `${name}, run ${plain(run.run)}`, opacity: 0.35, line: { ...stroke, width: 0.8 } });
    if (line.x) trace(line, { line: { ...stroke, width: 2 }, mode: line.x.length < 30 ? "lines+markers" : "lines" });
  }
  const exponentformat = unit.startsWith("nats") ? "power" : "B";  // "300n" nats are not read as nanonats
  const tickformat = unit.startsWith("share") ? ".3~%" : "";
  const yaxis = { rangemode: from_zero ? "tozero" : "normal", tickformat, exponentformat };
  return [traces, layout("completed iterations", unit, { yaxis })];
}

// Parts of a whole: over the iterations of a run, or their means for each configuration.
function stack({ unit, parts: { x, y } }) {
  const names = page.groups.map(plain), parts = Object.entries(y);
  const traces = parts.map(([name, values], i) => {
    const place = x ? { x, y: values } : { x: values, y: names, orientation: "h" };
    return { type: "bar", name, marker: { color: css(`--c${i}`) }, ...place };
  });
  if (x) return [traces, layout("iteration", unit, { barmode: "stack" })];
  return [traces, layout(`${unit}, mean`, "", { barmode: "stack", yaxis: rowsOfGroups([...page.groups.keys()]) })];
}

// Differences with their intervals.
function differences() {
  const shown = page.paired.points, y = shown.map(({ group }) => nameOf(group)), x = shown.map((each) => each.difference);
  const error_x = {
    type: "data", symmetric: false, thickness: 3, width: 0,
    array: shown.map(({ difference, ends }) => (ends ? ends[1] - difference : 0)),
    arrayminus: shown.map(({ difference, ends }) => (ends ? difference - ends[0] : 0)),
  };
  const traces = [{ type: "scatter", mode: "markers", x, y, error_x, marker: { color: css("--c0"), size: 10 } }];
  const zero = { type: "line", x0: 0, x1: 0, y0: 0, y1: 1, yref: "paper", line: { color: css("--muted"), width: 1 } };
  const yaxis = rowsOfGroups(shown.map(({ group }) => group));
  return [traces, layout("difference of pass@1", "", { shapes: [zero], yaxis, xaxis: { tickformat: "+.3~f" } })];
}

// A number that was searched, on a logarithmic axis where it spans more than a factor of 20.
function points({ x, y, runs }) {
  const trace = { type: "scatter", mode: "markers", x, y, text: runs.map((run) => `run ${plain(run)}`), marker: { color: css("--c0"), size: 8, opacity: 0.7 } };
  const isWide = Math.min(...x) > 0 && Math.max(...x) > 20 * Math.min(...x);
  const more = { xaxis: { type: isWide ? "log" : "linear", exponentformat: "e" }, yaxis: { tickformat: ".3~%" } };
  return [[trace], layout("", "final pass@1", more)];
}

// Held-out problems, one below the other, and how often each was solved: in the evaluations of a run, or by configurations.
function problems() {
  const { columns, problems: names, share } = page.problems, isOne = page.num_runs === 1;
  const scale = [[0, css("--paper")], [1, css("--c0")]], bar = { thickness: 10, outlinewidth: 0, tickformat: ".0%" };
  const trace = { type: "heatmap", z: share, zmin: 0, zmax: 1, colorscale: scale, colorbar: bar, hoverongaps: false };
  trace.customdata = names.map((name) => columns.map((column) => `${plain(name)}<br>${isOne ? "iteration " : ""}${plain(column)}`));
  const hovertemplate = "%{customdata}: %{z:.0%}<extra></extra>";
  const few = (all, letters) => {
    return all.length <= 25 ? { tickvals: [...all.keys()], ticktext: all.map((each) => shortened(each, letters)) } : { tickvals: [] };
  };
  const frame = { showgrid: false, showline: true, mirror: true, linecolor: css("--rule") };  // where nothing is solved, all is white
  const yaxis = { ...few(names), ...frame }, byColumn = isOne ? { type: "category" } : { ...few(columns, NARROW), autotickangles: [0, 90] };
  if (isOne) trace.x = columns;
  const more = { xaxis: { ...byColumn, ...frame }, yaxis, plot_bgcolor: css("--rest") };
  return [[{ ...trace, hovertemplate }], layout(isOne ? "completed iterations" : "", "", more)];
}

function showCharts() {
  const rows = page.num_runs > 1 ? page.groups.length : 0;
  for (const figure of page.figures.sort((a, b) => !!b.stacked - !!a.stacked)) {  // those that are wide first
    const { section, title, parts } = figure, shown = Object.entries(figure.curves).filter(([metric]) => page.curves[metric]);
    if (figure.stacked && parts) {
      addChart(section, title, () => stack(figure), { id: title, wide: true, rows, legend: key(Object.keys(parts.y)) });
    } else if (!figure.stacked && shown.length) {
      const legend = page.num_runs === 1 && Object.keys(figure.curves).length > 1 ? key(shown.map(([, name]) => name)) : "";
      const anchors = shown.map(([metric]) => make("a", { id: metric }));
      addChart(section, title, () => curves(figure), { id: title, legend, anchors });
    }
  }
  if (page.paired) addChart("paired", "Differences with 95% intervals", differences, { id: "forest", wide: true, rows });
  for (const each of page.searched) addChart("searched", each.key, () => points(each), { id: each.key });
  if (page.problems) {
    const { length } = page.problems.problems;
    const forNames = page.num_runs > 1 ? 7 : 0;  // they stand upright where there are many
    addChart("problems", "Share of right answers", problems, { id: "solved", wide: true, rows: Math.min(length, 25) / 2 + forNames });
  }
  const select = find("#all select");
  select.append(...Object.keys(page.curves).map((metric) => make("option", {}, metric)));
  if (!select.value) return;
  const chosen = () => curves({ curves: { [select.value]: "" }, unit: "", from_zero: true });
  const plot = addChart("all", "", chosen, { id: "chosen", wide: true });
  select.addEventListener("change", () => { stale.add(plot); drawStale(); });
}

async function loadPlotly() {
  const letters = atob(find("#plotly").textContent), packed = new Uint8Array(letters.length);
  for (let i = 0; i < letters.length; i++) packed[i] = letters.charCodeAt(i);
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  document.head.append(make("script", {}, await new Response(stream).text()));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
}
