// Names, colours and legends of what the pictures show.

const COLORS = 6, DASHES = ["solid", "dash", "dot"];
const hidden = new Set();  // groups

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const colorName = (group) => (group < COLORS * DASHES.length ? `--c${group % COLORS}` : "--rest");
const dash = (group) => DASHES[Math.floor(group / COLORS)] ?? "solid";
const plain = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;");  // Plotly reads tags and entities in names
const nameOf = (group) => plain(page.groups[group]);

// What stands beside a picture of names: whole, or their two ends where they would leave no room for the picture.
const NARROW = 24;  // letters
function shortened(text, letters = innerWidth < 700 ? NARROW : 60) {
  return plain(text.length > letters ? `${text.slice(0, letters / 2 - 1)}\u2026${text.slice(-letters / 2)}` : text);
}

function rowsOfGroups(groups) {  // an axis with a row for each, the first on top
  const ticktext = groups.map((group) => shortened(page.groups[group]));
  return { autorange: "reversed", type: "category", tickmode: "array", tickvals: groups.map(nameOf), ticktext };
}

function key(names) {  // what the colours of a picture stand for
  const sample = (i) => make("i", { style: `border-color: var(--c${i})` });
  return make("div", { class: "legend" }, ...names.map((name, i) => make("span", {}, sample(i), name)));
}

function showLegend() {
  if (page.groups.length < 2) return;
  find("#learning .legend").append(...page.groups.map((group, number) => {
    const line = { dash: "dashed", dot: "dotted" }[dash(number)] ?? "solid";
    const toggle = (event) => {
      if (!hidden.delete(number)) hidden.add(number);
      event.currentTarget.setAttribute("aria-pressed", !hidden.has(number));
      redraw();
    };
    const sample = make("i", { style: `border-top-style: ${line}; border-color: var(${colorName(number)})` });
    return make("button", { type: "button", "aria-pressed": true, click: toggle }, sample, group);
  }));
}
