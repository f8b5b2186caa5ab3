// How it was compiled and measured; and the page, from top to bottom.

function coverageRows() {
  if (DATA.device === "cpu") return null;
  if (!DATA.coverage.length)
    return h(
      "p",
      {},
      h("b", {}, "CUDA graphs: off. "),
      h("span", {class: "muted"}, 'mode="reduce-overhead" records what programs launch and replays it.'),
    );
  return [
    h("h3", {}, "CUDA graphs"),
    h(
      "table",
      {class: "plain"},
      DATA.coverage.map(c =>
        h(
          "tr",
          {},
          h("td", {}, c.graph),
          h(
            "td",
            {},
            h("div", {class: "track wide"}, h("i", {class: "ours", style: {width: (c.total ? (c.held / c.total) * 100 : 0) + "%"}})),
          ),
          h("td", {}, h("b", {}, `${c.held} of ${c.total}`), ` in ${plural(c.pieces, "graph")}`),
          h(
            "td",
            {class: "muted"},
            c.calls,
            c.left.length ? h("div", {}, "left out: " + [...new Set(c.left.map(([name, why]) => `${name}: ${why}`))].join("; ")) : null,
          ),
        ),
      ),
    ),
  ];
}
function compileCard() {
  const stages = Object.entries(DATA.stages),
    ours = sum(stages, s => s[1]),
    rest = Math.max(DATA.first - ours, 0);
  const parts = [["Dynamo, AOTAutograd, the step itself", rest], ...stages.sort((a, b) => b[1] - a[1])].filter(p => p[1] > 0),
    total = sum(parts, p => p[1]) || 1;
  return card(
    "compiling",
    "Compiling",
    h(
      "p",
      {class: "muted"},
      `The first call took ${time(DATA.first)}; ${plural(DATA.built, "kernel")}, of which ${DATA.cached} were there already.`,
    ),
    h(
      "div",
      {class: "stack"},
      parts.map(([name, s], i) =>
        h("i", {
          style: {"flex-grow": s / total, background: i ? `hsl(${190 + i * 23} ${colour("sat")} ${colour("lum")})` : colour("eager")},
          title: `${name}: ${time(s)}`,
        }),
      ),
    ),
    h(
      "div",
      {class: "keys"},
      parts.map(([name, s], i) =>
        h(
          "span",
          {class: "key"},
          h("i", {class: "dot", style: {background: i ? `hsl(${190 + i * 23} ${colour("sat")} ${colour("lum")})` : colour("eager")}}),
          `${name} ${time(s)}`,
        ),
      ),
    ),
    coverageRows(),
  );
}
function howCard() {
  const p = DATA.peaks,
    row = (k, v) => h("tr", {}, h("td", {class: "muted"}, k), h("td", {}, v));
  return card(
    "how",
    "How it was measured",
    h(
      "table",
      {class: "plain"},
      row("machine", `${p.device} (${DATA.device})`),
      row("copy", `${size(bandwidth())}/s in the largest, measured ${p.measured}`),
      p.others > 0.1 && row("", `while other work took ${percent(p.others)} of the cores: these figures are too low`),
      row(
        "products",
        Object.entries(p.matmul)
          .map(([k, v]) => `${k} ${count(v)}FLOP/s`)
          .join(", "),
      ),
      row("shortest kernel", time(p.launch)),
      Object.entries(DATA.about).map(([k, v]) => row(k, v)),
      row("profiling", `took ${time(DATA.took)} besides compiling`),
    ),
    h(
      "ul",
      {class: "muted"},
      h(
        "li",
        {},
        "limit: the longer of what its bytes take in a copy of that size, each memory once, and what its FLOPs take at the rate of a large ",
        "product; wasted: time beyond it.",
      ),
      Object.entries(RULES).map(([k, v]) => h("li", {}, h("b", {}, k), ": " + v)),
      h("li", {}, "overhead: the device does nothing, or only starts kernels, in more than a quarter of the step."),
    ),
  );
}
function page() {
  const app = document.getElementById("app");
  const figures = [roofline(), copies()].filter(Boolean);
  const body = [
    headCard(),
    tiles(),
    kernelsCard(),
    fusionCard(),
    figures.length ? card("limits", "Against the machine's limits", h("div", {class: "figures"}, figures)) : null,
    timelineCard(),
    linesCard(),
    edgesCard(),
    opaqueCard(),
    compileCard(),
    howCard(),
  ];
  const dark = () =>
    (document.documentElement.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  app.append(
    h(
      "header",
      {class: "top"},
      h("span", {class: "brand"}, logo(), "tokamak"),
      h("b", {class: "title", title: DATA.title}, DATA.title ? base(DATA.title) : "profile"),
      h(
        "nav",
        {},
        CARDS.map(([id, title]) => h("a", {href: "#" + id}, title)),
      ),
      h("span", {class: "muted machine"}, DATA.peaks.device),
      h(
        "button",
        {class: "small", title: "light or dark", "aria-label": "light or dark", onclick: () => setTheme(dark() ? "light" : "dark")},
        "◐",
      ),
    ),
    h("main", {}, body),
    drawer(),
  );
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => setTheme(document.documentElement.dataset.theme || ""));
}
function logo() {
  return svg(
    "svg",
    {viewBox: "0 0 24 24", class: "logo", "aria-hidden": "true"},
    svg("ellipse", {cx: 12, cy: 12, rx: 10, ry: 5.5}),
    svg("ellipse", {cx: 12, cy: 11, rx: 3.6, ry: 1.7}),
    svg("path", {d: "M2 12c0 3 4.5 6.5 10 6.5S22 15 22 12"}),
  );
}
page();
