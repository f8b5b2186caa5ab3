// The drawer of the selected kernel: its lines; its operations and IR; its schedule and generated code.

function drawer() {
  const panel = h("aside", {class: "drawer", hidden: true, "aria-label": "the selected kernel"});
  let tab = 0;
  const close = () => Selection.set(null, "drawer");
  addEventListener("keydown", e => {
    if (e.key === "Escape") close();
  });
  Selection.watch(x => {
    panel.hidden = !x;
    document.body.classList.toggle("drawn", !!x);
    if (!x) return;
    const n = x.node,
      same = equals(x),
      i = same.indexOf(x);
    const step = (d, text) =>
      h(
        "button",
        {
          class: "small",
          "aria-label": d < 0 ? "the one before" : "the next",
          onclick: () => Selection.set(same[(i + d + same.length) % same.length], "drawer"),
        },
        text,
      );
    const panes = [
      ["Your lines", linesPane(x)],
      ["Operations and IR", irPane(x)],
      ["Schedule and code", codePane(x)],
    ];
    const tabs = h(
      "div",
      {class: "tabs narrow"},
      panes.map(([name], k) => h("button", {class: k === tab ? "on" : "", onclick: () => pick(k)}, name)),
    );
    const boxes = panes.map(([name, body], k) => h("section", {class: "pane" + (k === tab ? " on" : "")}, h("h4", {}, name), body));
    const pick = k => {
      tab = k;
      [...tabs.children].forEach((b, j) => b.classList.toggle("on", j === k));
      boxes.forEach((b, j) => b.classList.toggle("on", j === k));
    };
    panel.replaceChildren(
      h(
        "header",
        {},
        h("span", {class: "dot k-" + n.kind}),
        h("b", {class: "name"}, n.name),
        same.length > 1 && h("span", {class: "muted"}, step(-1, "‹"), ` ${i + 1} of ${same.length} that compute the same `, step(1, "›")),
        h("span", {class: "grow"}),
        h("button", {class: "small", "aria-label": "close", onclick: close}, "✕"),
      ),
      facts(x),
      tabs,
      h("div", {class: "panes"}, boxes),
    );
  });
  return panel;
}
function facts(x) {
  const n = x.node,
    f = fraction(n);
  const fact = (name, value, tag) =>
    value === "" || value === null
      ? null
      : h("span", {class: "fact", title: TAGS[tag] || ""}, h("span", {class: "muted"}, name), h("b", {}, value));
  return h(
    "div",
    {class: "facts"},
    fact("graph", `${x.drawing.name}${n.module ? " · " + n.module : ""}`),
    fact("time", n.seconds === null ? "not timed" : `${time(n.seconds)} (${percent(n.seconds / STEP)} of the step)`, "measured"),
    n.seconds !== null && fact("limit", `${time(n.limit)}: reaches ${percent(f)}`, "estimate"),
    fact("class", n.seconds === null ? "" : KINDS[n.kind], "estimate"),
    fact(
      "bytes",
      size(n.bytes) + (n.bytes > n.fewest * 1.005 ? ` (${digits(n.bytes / n.fewest)}× the fewest)` : " (the fewest)"),
      "counted",
    ),
    fact("FLOPs", count(n.flops), "counted"),
    fact("programs", n.programs),
    n.registers !== null &&
      fact("registers", `${n.registers} a thread` + (n.spilled ? `, ${n.spilled} bytes spilled` : ", none spilled"), "measured"),
    n.shared !== null && fact("shared", size(n.shared)),
    n.reason ? fact("run by torch", n.reason) : fact("built", n.how + (n.compile_seconds ? ` in ${time(n.compile_seconds)}` : "")),
  );
}
function linesPane(x) {
  const files = new Map();
  for (const i of x.node.sources) {
    const s = DATA.sources[i];
    if (!files.has(s.file)) files.set(s.file, new Set());
    files.get(s.file).add(s.line);
  }
  const parts = [...files].map(([file, lines]) => {
    const known = Object.entries(DATA.files[file] || {})
      .map(([n, text]) => [Number(n), text])
      .filter(([n]) => [...lines].some(l => Math.abs(l - n) <= 3))
      .sort((a, b) => a[0] - b[0]);
    let last = null;
    const indent = Math.min(...known.filter(([, text]) => text.trim()).map(([, text]) => text.search(/\S/)));
    const parts = file.split("/"),
      short = parts.length > 4 ? "…/" + parts.slice(-3).join("/") : file;
    return h(
      "div",
      {},
      h("div", {class: "file", title: file}, short),
      h(
        "pre",
        {class: "code"},
        known.map(([n, text]) => {
          const gap = last !== null && n > last + 1 ? h("div", {class: "gap"}, "⋯") : null;
          last = n;
          return [gap, h("div", {class: lines.has(n) ? "line hot" : "line"}, h("i", {}, n), painted(text.slice(indent), "py"))];
        }),
      ),
    );
  });
  return [parts.length ? parts : h("p", {class: "muted"}, "No line of the program is known for it."), h("h5", {}, "Memory"), accesses(x)];
}
function accesses(x) {
  const links = x.drawing.links,
    i = x.n;
  const other = (name, written) =>
    links.filter(l => l.value === name && (written ? l.made === i : l.used === i)).map(l => (written ? l.used : l.made));
  const row = (a, written) =>
    h(
      "tr",
      {},
      h("td", {}, written ? "writes" : "reads"),
      h("td", {}, a[0]),
      h("td", {class: "mono"}, a[1]),
      h("td", {class: "num"}, size(a[3])),
      h(
        "td",
        {},
        other(a[0], written)
          .slice(0, 6)
          .map(k =>
            h(
              "button",
              {class: "link", title: x.drawing.nodes[k].name, onclick: () => Selection.set(at(x.g, k), "drawer")},
              (written ? "→ " : "← ") + shortName(x.drawing.nodes[k]),
            ),
          ),
      ),
    );
  return h(
    "div",
    {class: "hscroll"},
    h(
      "table",
      {class: "plain"},
      x.node.reads.map(a => row(a, false)),
      x.node.writes.map(a => row(a, true)),
    ),
  );
}
function irPane(x) {
  const n = x.node,
    text = DATA.texts[n.text];
  const ops = n.operations.map(i => x.drawing.operations[i]);
  return [
    h(
      "table",
      {class: "plain"},
      ops.map(o =>
        h(
          "tr",
          {},
          h("td", {class: "op"}, o.op),
          h("td", {class: "muted"}, sourceText(o.source)),
          h("td", {class: "num muted"}, size(o.bytes)),
        ),
      ),
    ),
    ops.length
      ? h(
          "p",
          {class: "muted small"},
          `${plural(ops.length, "operation")} that eager runs one by one, with the bytes that these read and write (counted).`,
        )
      : null,
    text ? [h("h5", {}, "IR"), shared(x, text), code(text.ir, "ir")] : null,
  ];
}
function codePane(x) {
  const n = x.node,
    text = DATA.texts[n.text];
  if (!text) return h("p", {class: "muted"}, n.reason ? `torch runs it: ${n.reason}` : "no code was kept");
  return [
    h("p", {class: "schedule mono"}, n.schedule),
    h("h5", {}, "Generated code"),
    shared(x, text),
    code(text.code, text.code.startsWith("#") ? "py" : "c"),
  ];
}
function shared(x, text) {
  return text.of === `${x.drawing.name}: ${x.node.name}`
    ? null
    : h("p", {class: "muted small"}, `The same text as that of ${text.of}, whose names stand in it.`);
}
function code(text, language) {
  return h(
    "div",
    {class: "codebox"},
    h(
      "button",
      {
        class: "small copy",
        onclick: e => {
          if (navigator.clipboard) navigator.clipboard.writeText(text);
          e.target.textContent = "copied";
        },
      },
      "copy",
    ),
    h(
      "pre",
      {class: "code"},
      text.split("\n").map(l => h("div", {class: "line"}, painted(l, language))),
    ),
  );
}
// a language as (comment)|(string)|(word)|(number)
const language = (comment, text, words) =>
  new RegExp(`(${comment}.*$)|(${text})|\\b(${words.replaceAll(" ", "|")})\\b|\\b(\\d[\\w.]*)\\b`, "g");
const QUOTED = String.raw`"(?:[^"\\]|\\.)*"`;
const WORDS = {
  c: language(
    "//",
    QUOTED,
    "for if else while return const static void float double int long unsigned char struct int64_t uint8_t restrict inline",
  ),
  py: language(
    "#",
    QUOTED + String.raw`|'(?:[^'\\]|\\.)*'`,
    "def for in if else elif while return import from as class with not and or is None True False lambda yield self",
  ),
  ir: language(
    "#",
    QUOTED,
    "graph input constant number size hint for return write call result scatter f32 f64 bf16 f16 i64 i32 i8 u8 bool",
  ),
};
function painted(line, language) {
  const out = [],
    rule = WORDS[language];
  let at = 0;
  for (const m of line.matchAll(rule)) {
    if (m.index > at) out.push(line.slice(at, m.index));
    out.push(h("span", {class: m[1] ? "c" : m[2] ? "s" : m[3] ? "k" : "n"}, m[0]));
    at = m.index + m[0].length;
  }
  out.push(line.slice(at) || (line ? "" : "\u200b"));
  return out;
}
