"use strict";  // Texts of runs go into text nodes, and never into HTML.

const page = JSON.parse(document.getElementById("data").textContent);
const COLORS = 6, DASHES = ["solid", "dash", "dot"], MORE = 20;
const PHASES = ["generate", "train", "sync", "eval", "checkpoint"].map((name) => [name, `train/time/${name}_s`]);
const MEMORY = ["gpu_memory", "gpu_memory_reserved", "gpu_memory_card"].map((name) => [name, `train/perf/${name}_gb`]);
const hidden = new Set(), charts = [];
const find = (selector, inside = document) => inside.querySelector(selector);
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const colorName = (group) => (group < COLORS * DASHES.length ? `--c${group % COLORS}` : "--rest");
const dash = (group) => DASHES[Math.floor(group / COLORS)] ?? "solid";
const plain = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;");  // Plotly reads tags and entities in names

function make(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") node.addEventListener(name, value);
    else node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

function compare(a, b, sign) {  // cells without a value stay at the end
  if (!a || !b) return !a - !b;
  const isText = Number.isNaN(parseFloat(a)) || Number.isNaN(parseFloat(b));
  return sign * (isText ? a.localeCompare(b) : parseFloat(a) - parseFloat(b));
}

function table({ columns, rows }) {
  const body = make("tbody", {}), fill = () => body.replaceChildren(...rows.map((row) => make("tr", {}, ...row.map((cell) => make("td", {}, cell)))));
  const heads = columns.map((name, column) => make("th", { scope: "col" }, make("button", { click: () => sort(column) }, name)));
  function sort(column) {
    const order = heads[column].getAttribute("aria-sort") === "ascending" ? "descending" : "ascending";
    heads.forEach((head) => head.removeAttribute("aria-sort"));
    heads[column].setAttribute("aria-sort", order);
    rows.sort((a, b) => compare(a[column], b[column], order === "ascending" ? 1 : -1));
    fill();
  }
  fill();
  return make("div", { class: "scroll", tabindex: 0 }, make("table", {}, make("thead", {}, make("tr", {}, ...heads)), body));
}

function addChart(section, title, draw, { id = section, wide = false, rows = 0 } = {}) {
  const plot = make("div", { role: "img", "aria-label": title, style: `height: ${Math.max(240, 110 + 26 * rows)}px` });
  find(`#${section} .charts`).append(make("figure", { id, class: wide ? "wide" : "" }, make("figcaption", {}, title), plot));
  charts.push(() => plot.offsetParent && Plotly.react(plot, ...draw(), { displayModeBar: false, responsive: true }));
}

function layout(xTitle, yTitle, more = {}) {
  const axis = (text, own) => ({ gridcolor: css("--rule"), zeroline: false, automargin: true, title: { text, standoff: 6 }, ...own });
  const font = { family: "system-ui, sans-serif", size: 12, color: css("--muted") };
  const label = { bgcolor: css("--paper"), bordercolor: css("--rule"), font: { color: css("--ink") }, namelength: 60 };
  const shared = { margin: { l: 10, r: 10, t: 8, b: 10 }, paper_bgcolor: "transparent", plot_bgcolor: "transparent", showlegend: false, hoverlabel: label };
  return { ...shared, font, hovermode: "closest", ...more, xaxis: axis(xTitle, more.xaxis), yaxis: axis(yTitle, more.yaxis) };
}

function curves(key, unit) {
  const traces = [];
  for (const line of page.curves[key].filter((each) => !hidden.has(each.group))) {
    const name = plain(page.groups[line.group].name), color = css(colorName(line.group)), stroke = { color, dash: dash(line.group) };
    const trace = ({ x, y }, more) => traces.push({ type: "scatter", name, x, y, mode: x.length > 1 ? "lines" : "markers", marker: { color }, ...more });
    if (line.low) {
      const around = { x: [...line.x, ...[...line.x].reverse()], y: [...line.high, ...[...line.low].reverse()] };
      trace(around, { fill: "toself", fillcolor: color, opacity: 0.15, mode: "lines", line: { width: line.x.length > 1 ? 0 : 3, color }, hoverinfo: "skip" });
    }
    for (const run of line.runs) trace(run, { name: `${name}, run ${plain(run.run)}`, opacity: 0.35, line: { ...stroke, width: 0.8 } });
    if (line.x) trace(line, { line: { ...stroke, width: 2 }, mode: line.x.length < 30 ? "lines+markers" : "lines" });
  }
  const yaxis = { rangemode: /reward|pass@|lr$/.test(key) ? "normal" : "tozero", tickformat: unit.startsWith("share") ? ".3~%" : "" };
  return [traces, layout("completed iterations", unit, { yaxis })];
}

// Parts of a whole: over the iterations of a run, or their means for each configuration. With `below`, each includes the one before.
function stacked(parts, unit, below) {
  const isOne = page.num_runs === 1, names = page.groups.map((group) => plain(group.name));
  const points = (key) => page.curves[key].map((line) => line.runs[0] && (isOne ? line.runs[0] : { x: line.x ?? line.runs[0].x, y: line.y ?? line.runs[0].y }));
  const mean = (key, group) => {
    const at = page.curves[key].findIndex((line) => line.group === group), every = page.curves["train/time/iteration_s"]?.find((line) => line.group === group);
    if (at < 0) return 0;
    const { y } = points(key)[at], all = below || !every ? y.length : (every.y ?? every.runs[0].y).length;
    return y.reduce((sum, value) => sum + value, 0) / all;
  };
  const values = (key) => (isOne ? points(key)[0].y : names.map((_, group) => mean(key, group)));
  const found = parts.filter(([, key]) => page.curves[key]);
  const traces = found.map(([name, key], i) => {
    const under = below && i ? values(found[i - 1][1]) : [], width = values(key).map((value, at) => Math.max(value - (under[at] ?? 0), 0));
    const place = isOne ? { x: points(key)[0].x.map((x) => x + 1), y: width } : { x: width, y: names, orientation: "h" };
    return { type: "bar", name, marker: { color: css(`--c${i}`) }, ...place };
  });
  const more = { showlegend: true, legend: { orientation: "h", y: 1.02, yanchor: "bottom", traceorder: "normal" }, barmode: "stack" };
  return [traces, isOne ? layout("iteration", unit, more) : layout(`${unit}, mean`, "", { ...more, yaxis: { autorange: "reversed", type: "category" } })];
}

function showCharts() {
  const rows = page.num_runs > 1 ? page.groups.length : 0, has = (parts) => parts.some(([, key]) => page.curves[key]);
  if (has(PHASES)) addChart("speed", "Time per iteration", () => stacked(PHASES, "seconds", false), { id: "phases", wide: true, rows });
  if (has(MEMORY)) addChart("speed", "Memory in use on the trainer's GPU", () => stacked(MEMORY, "GB", true), { id: "memory", wide: true, rows });
  else find("#speed").append(make("p", {}, "Memory is recorded on a GPU."));
  for (const [section, list] of Object.entries(page.charts)) {
    const some = Object.entries(list).filter(([key]) => page.curves[key]);
    const isZero = ([key]) => page.curves[key].every(({ runs }) => runs.every(({ y }) => y.every((value) => !value)));
    for (const [key, [title, unit]] of some.filter((each) => !isZero(each))) addChart(section, title, () => curves(key, unit), { id: key });
    const zeros = some.filter(isZero).map(([, [title]]) => title.toLowerCase());
    if (zeros.length) find(`#${section}`).append(make("p", {}, `0 throughout: ${zeros.join(", ")}.`));
  }
  const select = find("#all select");
  select.append(...Object.keys(page.curves).map((key) => make("option", {}, key)));
  if (select.value) addChart("all", "", () => curves(select.value, ""), { id: "chosen", wide: true });
  for (const [node, event] of [[select, "change"], [find("#all details"), "toggle"]]) node.addEventListener(event, () => charts.at(-1)());
}

function showLegend() {
  if (page.groups.length < 2) return;
  find(".legend").append(...page.groups.map((group, number) => {
    const style = `border-top-style: ${{ dash: "dashed", dot: "dotted" }[dash(number)] ?? "solid"}; border-color: var(${colorName(number)})`;
    const toggle = (event) => {
      if (!hidden.delete(number)) hidden.add(number);
      event.currentTarget.setAttribute("aria-pressed", !hidden.has(number));
      drawAll();
    };
    return make("button", { type: "button", "aria-pressed": true, click: toggle }, make("i", { style }), group.name);
  }));
}

function showFindings() {
  const items = page.findings.map(({ run, text, advice, metric }) => {
    const link = page.curves[metric] ? make("a", { href: `#${encodeURIComponent(metric)}` }, "its curve") : "";
    return make("li", {}, page.num_runs > 1 ? `run ${run}: ${text}. ` : `${text}. `, `Try ${advice}. `, link);
  });
  if (items.length) find("#findings ul").append(...items);
  else find("#findings").append(make("p", {}, "Nothing is out of the ordinary, by the limits of docs/read_your_run.md."));
}

function sampleNode(sample) {
  const signed = sample.advantage === null ? "" : `advantage ${sample.advantage.toFixed(2)}`, run = page.num_runs > 1 ? `run ${sample.run}` : "";
  const facts = [run, `iteration ${sample.iteration}`, sample.problem_id, `reward ${sample.reward}`, sample.is_correct ? "correct" : "wrong", signed];
  const wrote = sample.pieces.map(([text, advantage]) => {
    const strength = 0.1 + 0.35 * Math.min(Math.abs(advantage) / 2, 1), style = `background: rgba(var(--${advantage > 0 ? "up" : "down"}), ${strength})`;
    return make("mark", advantage ? { style, title: `advantage ${advantage.toFixed(3)}` } : {}, text);
  });
  const rows = [["prompt", [sample.prompt]], ["wrote", wrote], ["answer", [sample.answer ?? ""]]];
  const list = rows.flatMap(([name, texts]) => [make("dt", {}, name), make("dd", {}, ...texts)]);
  const title = [...facts, `${sample.num_tokens} tokens`, sample.finish_reason].filter(Boolean).join(" · ");
  return make("article", {}, make("h3", {}, title), make("dl", {}, ...list));
}

function showSamples() {
  const form = find("form"), more = find("#more");
  let shown = MORE;
  const update = () => {
    const { text, problem_id, iteration, low, high } = Object.fromEntries(new FormData(form)), has = (inside, part) => inside.toLowerCase().includes(part.toLowerCase());
    const chosen = page.samples.filter((sample) => has([sample.prompt, ...sample.pieces.map(([piece]) => piece)].join(""), text)
      && has(sample.problem_id ?? "", problem_id) && (!iteration || sample.iteration === Number(iteration))
      && (!low || sample.reward >= Number(low)) && (!high || sample.reward <= Number(high)));
    find("#samples [role=status]").textContent = `${chosen.length} of ${page.samples.length} completions`;
    find("#samples > div").replaceChildren(...chosen.slice(0, shown).map(sampleNode));
    more.hidden = chosen.length <= shown;
  };
  form.addEventListener("input", () => { shown = MORE; update(); });
  form.addEventListener("submit", (event) => event.preventDefault());
  more.addEventListener("click", () => { shown += MORE; update(); });
  update();
}

async function drawAll() {  // one at a time, so that the page answers meanwhile
  for (const draw of charts) {
    draw();
    await new Promise((next) => setTimeout(next));
  }
  document.body.dataset.drawn = "yes";
}

async function start() {
  find("#about").textContent = page.about;
  find("#verdict").textContent = page.verdict;
  find("#damaged ul").append(...page.damaged.map((text) => make("li", {}, text)));
  for (const name of ["results", "paired", "settings"]) if (page[name]) find(`#${name}`).append(table(page[name]));
  find("#paired span").textContent = page.paired?.baseline;
  if (page.settings?.left_out.length) find("#settings").append(make("p", {}, `These differ too: ${page.settings.left_out.join(", ")}.`));
  showFindings();
  showLegend();
  showSamples();
  showCharts();
  for (const section of document.querySelectorAll("section")) {
    const found = page[section.id], isThere = found === undefined ? find("figure", section) : section.id === "findings" || found && found.length !== 0;
    if (isThere) find("nav").append(make("a", { href: `#${section.id}` }, find("h2", section).textContent));
    else section.remove();
  }
  const packed = Uint8Array.from(atob(find("#plotly").textContent), (letter) => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  document.head.append(make("script", {}, await new Response(stream).text()));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  await drawAll();
}

start();
