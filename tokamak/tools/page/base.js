// What every part of the page uses: the data, elements, numbers as text, colours, the selection.

const DATA = JSON.parse(document.getElementById("data").textContent);

// -- elements: text is always text, never markup ---------------------------------------------------------------------
function h(tag, props, ...children) {
  const svg = tag.startsWith("svg:");
  const e = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag.slice(4)) : document.createElement(tag);
  for (const [k, v] of Object.entries(props || {})) {
    if (v === null || v === undefined || v === false) continue;
    if (k.startsWith("on")) e.addEventListener(k.slice(2), v);
    else if (k === "style" && typeof v === "object") for (const [p, s] of Object.entries(v)) e.style.setProperty(p, s);
    else if (k === "class") e.setAttribute("class", v);
    else e.setAttribute(k, v === true ? "" : v);
  }
  for (const c of children.flat(Infinity)) if (c !== null && c !== undefined && c !== false) e.append(c instanceof Node ? c : String(c));
  return e;
}
const svg = (tag, props, ...children) => h("svg:" + tag, props, ...children);

// -- numbers -----------------------------------------------------------------------------------------------------------
function digits(x, n = 3) {
  if (x === 0) return "0";
  const text = Number(x.toPrecision(n));
  return Math.abs(text) >= 1000 ? Math.round(text).toLocaleString("en") : String(text);
}
function time(s) {
  if (s === null || s === undefined) return "–";
  const a = Math.abs(s);
  if (a >= 1) return digits(s) + " s";
  if (a >= 1e-3) return digits(s * 1e3) + " ms";
  return digits(s * 1e6) + " µs";
}
function size(b) {
  for (const unit of ["B", "KiB", "MiB", "GiB", "TiB"]) {
    if (Math.abs(b) < 1000 || unit === "TiB") return (unit === "B" ? Math.round(b) : digits(b)) + " " + unit;
    b /= 1024;
  }
}
function count(x) {
  for (const unit of ["", "k", "M", "G", "T", "P"]) {
    if (Math.abs(x) < 1000 || unit === "P") return digits(x) + unit;
    x /= 1000;
  }
}
const percent = x => (x >= 0.0995 || x === 0 ? Math.round(x * 100) : digits(x * 100, 2)) + "%";
const plural = (n, what) => n.toLocaleString("en") + " " + what + (n === 1 ? "" : "s");
const base = path => path.split("/").pop();
const sum = (xs, f) => xs.reduce((t, x) => t + f(x), 0);
const most = (xs, f, least = 0) => xs.reduce((t, x) => Math.max(t, f(x)), least);

// -- the machine's limits, as the profiler judges by them ---------------------------------------------------------------
function memorySeconds(bytes) {
  const copy = DATA.peaks.copy;
  if (bytes <= copy[0][0]) return bytes ? copy[0][1] : 0;
  for (let i = 1; i < copy.length; i++) {
    const [a, s] = copy[i - 1],
      [b, t] = copy[i];
    if (bytes <= b) return s * (t / s) ** (Math.log(bytes / a) / Math.log(b / a));
  }
  const [n, s] = copy[copy.length - 1];
  return (bytes * s) / n;
}
const bandwidth = () => {
  const [n, s] = DATA.peaks.copy[DATA.peaks.copy.length - 1];
  return n / s;
};

// -- what refers to what --------------------------------------------------------------------------------------------------
const NODES = new Map(); // "graph:position" -> {g, n, node, drawing}
DATA.drawings.forEach((drawing, g) =>
  drawing.nodes.forEach((node, n) => NODES.set(drawing.name + ":" + node.position, {g, n, node, drawing})),
);
const at = (g, n) => NODES.get(DATA.drawings[g].name + ":" + DATA.drawings[g].nodes[n].position);
const EQUAL = new Map(); // structure and phase -> nodes
for (const x of NODES.values()) {
  const key = x.drawing.phase + x.node.structure;
  if (!EQUAL.has(key)) EQUAL.set(key, []);
  EQUAL.get(key).push(x);
}
const equals = x => EQUAL.get(x.drawing.phase + x.node.structure);
const STEP = DATA.compiled.step;
const KINDS = {
  memory: "bound by memory",
  arithmetic: "bound by arithmetic",
  latency: "bound by latency",
  launch: "as short as starting it",
  "": "not timed",
};
const fraction = node => (node.seconds ? Math.min(1, node.limit / node.seconds) : null);
const wasted = node => (node.seconds ? Math.max(0, node.seconds - node.limit) : 0);
function sourceText(i) {
  const s = DATA.sources[i];
  return s ? base(s.file) + ":" + s.line : "";
}
function shortName(node) {
  if (node.reason) return node.name.replace(/\.default$/, "");
  return node.name
    .replace(/^(\w+?)_fused_/, "$1 ")
    .replace(/_(\d+)$/, "")
    .replaceAll("_", " ");
}

// -- one selection for the whole page ---------------------------------------------------------------------------------------
const Selection = {
  now: null,
  listeners: [],
  set(x, from) {
    if (x === this.now) return;
    this.now = x;
    for (const f of this.listeners) f(x, from);
  },
  watch(f) {
    this.listeners.push(f);
  },
};

// -- a note that follows the pointer ----------------------------------------------------------------------------------------
const Tip = {
  box: null,
  show(event, ...lines) {
    if (!this.box) document.body.append((this.box = h("div", {class: "tip", role: "tooltip"})));
    this.box.replaceChildren(...lines.filter(Boolean).map((l, i) => h("div", {class: i ? "" : "strong"}, l)));
    this.box.style.display = "block";
    const w = this.box.offsetWidth,
      t = this.box.offsetHeight;
    this.box.style.left = Math.max(4, Math.min(event.clientX + 14, innerWidth - w - 8)) + "px";
    this.box.style.top = (event.clientY + t + 24 > innerHeight ? event.clientY - t - 10 : event.clientY + 14) + "px";
  },
  hide() {
    if (this.box) this.box.style.display = "none";
  },
};
function nodeTip(event, x) {
  const n = x.node;
  Tip.show(
    event,
    n.name,
    [x.drawing.phase, n.module].filter(Boolean).join(" · "),
    n.seconds === null ? "not timed" : `${time(n.seconds)}, ${percent(fraction(n))} of its limit (${KINDS[n.kind]})`,
    `${size(n.bytes)}, ${count(n.flops)} FLOPs`,
    n.reason,
  );
}

// -- colours and themes ------------------------------------------------------------------------------------------------------
let styles = null;
const colour = name => (styles || (styles = getComputedStyle(document.documentElement))).getPropertyValue("--" + name).trim();
const kindColour = kind => colour(kind || "quiet");
const repaints = [];
function setTheme(name) {
  document.documentElement.dataset.theme = name;
  styles = null;
  for (const f of repaints) f();
}
const HUES = 12;
const groupColour = i => `hsl(${(((i * 360) / HUES) * 5 + 200) % 360} ${colour("sat")} ${colour("lum")})`;
