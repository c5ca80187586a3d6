// Puts what `page.py` knows into the page. Texts of runs go into text nodes, and never into HTML.

const page = JSON.parse(document.getElementById("data").textContent);
const MORE = 20, SHORT = 32;  // letters of a cell that is never broken into lines
const find = (selector, inside = document) => inside.querySelector(selector);

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
  const cellNode = (cell) => make("td", cell.length <= SHORT ? { class: "short" } : {}, cell), body = make("tbody", {});
  const fill = () => body.replaceChildren(...rows.map((row) => make("tr", {}, ...row.map(cellNode))));
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

function showFindings() {
  const items = page.findings.map(({ where, observation, advice, metric }) => {
    const link = page.curves[metric] ? make("a", { href: `#${encodeURIComponent(metric)}` }, "its curve") : "";
    return make("li", {}, where && `${where}: `, `${observation}. `, `Try: ${advice}. `, link);
  });
  find("#findings ul").append(...items);
  const nothing = "Nothing is out of the ordinary, by the limits of docs/read_your_run.md; most need 10 iterations.";
  find("#findings").append(make("p", {}, items.length ? "" : nothing));
}

function sampleNode(sample) {
  const signed = sample.advantage === null ? "" : `advantage ${sample.advantage.toFixed(2)}`;
  const run = page.num_runs > 1 ? `run ${sample.run}` : "";
  const verdict = sample.is_correct ? "correct" : "wrong";
  const facts = [run, `iteration ${sample.iteration}`, sample.problem_id, `reward ${sample.reward ?? "none"}`, verdict, signed];
  const strength = 0.1 + 0.35 * Math.min(Math.abs(sample.advantage) / 2, 1);
  const style = `background: rgba(var(--${sample.advantage > 0 ? "up" : "down"}), ${strength})`;
  const mark = sample.advantage ? { style, title: `advantage ${sample.advantage.toFixed(3)}` } : {};
  const texts = [...sample.rendered, ["answer", sample.answer ?? ""]];
  const images = sample.images.map((src) => make("img", { src, alt: "a picture of the prompt" }));
  const list = texts.flatMap(([who, text]) => [make("dt", {}, who), make("dd", {}, who === "policy" ? make("mark", mark, text) : text)]);
  const title = [...facts, `${sample.num_tokens} tokens`, sample.finish_reason].filter(Boolean).join(" · ");
  return make("article", {}, make("h3", {}, title), ...images, make("dl", {}, ...list));
}

function showSamples() {
  const form = find("form"), more = find("#more");
  let shown = MORE;
  const update = () => {
    const { run, text, problem_id, iteration, low, high } = Object.fromEntries(new FormData(form));
    const has = (inside, part) => inside.toLowerCase().includes(part.toLowerCase());
    const chosen = page.samples.filter((sample) => has(sample.rendered.map(([, each]) => each).join(""), text)
      && (!run || sample.run === run) && has(sample.problem_id ?? "", problem_id) && (!iteration || sample.iteration === Number(iteration))
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

async function start() {
  find("#about").textContent = page.about;
  find("#verdict").textContent = page.verdict;
  for (const name of ["results", "paired", "settings"]) if (page[name]) find(`#${name}`).append(table(page[name]));
  find("#paired span").textContent = page.paired?.baseline;
  for (const node of document.querySelectorAll(page.num_runs > 1 ? ".one" : ".many")) node.remove();
  showFindings();
  showLegend();
  showSamples();
  showCharts();
  for (const section of document.querySelectorAll("section")) {
    const found = page[section.id];
    const isThere = found === undefined ? find("figure", section) : section.id === "findings" || found && found.length !== 0;
    if (isThere) find("nav").append(make("a", { href: `#${section.id}` }, find("h2", section).textContent));
    else section.remove();
  }
  await loadPlotly();
  if (charts.size) await isSeen;
  await drawStale();
  document.body.dataset.drawn = "yes";
}

start();
