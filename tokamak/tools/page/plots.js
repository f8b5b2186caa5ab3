// Plots as SVG: bars of both sides, the roofline, the curve of copies, memory over a step.

function scaleLog(a, b, from, to) {
  const la = Math.log10(a),
    lb = Math.log10(b);
  return Object.assign(v => from + ((Math.log10(v) - la) / (lb - la)) * (to - from), {ticks: decades(a, b)});
}
function decades(a, b) {
  const out = [],
    every = Math.ceil((Math.log10(b) - Math.log10(a)) / 7);
  for (let d = Math.ceil(Math.log10(a) - 1e-9); d <= Math.log10(b) + 1e-9; d += every) out.push(10 ** d);
  return out;
}
function binary(a, b, many = 6) {
  // powers of two between two sizes
  const out = [],
    low = Math.ceil(Math.log2(a)),
    high = Math.floor(Math.log2(b)),
    every = Math.max(1, Math.ceil((high - low + 1) / many));
  for (let d = low; d <= high; d += every) out.push(2 ** d);
  return out;
}
function axes(w, t, pad, x, y, nameX, nameY, textX, textY) {
  return [
    ...x.ticks.map(v =>
      svg(
        "g",
        {},
        svg("line", {x1: x(v), x2: x(v), y1: pad.top, y2: t - pad.bottom, class: "grid"}),
        svg("text", {x: x(v), y: t - pad.bottom + 16, class: "tick", "text-anchor": "middle"}, textX(v)),
      ),
    ),
    ...y.ticks.map(v =>
      svg(
        "g",
        {},
        svg("line", {x1: pad.left, x2: w - pad.right, y1: y(v), y2: y(v), class: "grid"}),
        svg("text", {x: pad.left - 7, y: y(v) + 4, class: "tick", "text-anchor": "end"}, textY(v)),
      ),
    ),
    svg("text", {x: (pad.left + w - pad.right) / 2, y: t - 4, class: "axis", "text-anchor": "middle"}, nameX),
    svg("text", {x: 12, y: pad.top - 10, class: "axis"}, nameY),
  ];
}
const PAD = {left: 62, right: 16, top: 30, bottom: 44};
const MOST = 1500; // marks of a plot: those that take longest

function timed() {
  // equal kernels as one mark
  return DATA.rows
    .filter(r => r.seconds > 0)
    .sort((a, b) => b.seconds - a.seconds)
    .slice(0, MOST);
}
const rowNode = r => (r.positions.length ? NODES.get(r.positions[0][0] + ":" + r.positions[0][1]) : null);
function marks(rows, x, y) {
  const top = most(rows, r => r.seconds, 1e-12);
  return rows
    .slice()
    .reverse()
    .map(r => {
      const node = rowNode(r);
      const dot = svg("circle", {
        cx: x(r),
        cy: y(r),
        r: 3.5 + 9 * Math.sqrt(r.seconds / top),
        class: "mark k-" + r.kind + (r.opaque ? " torch" : ""),
        tabindex: node ? 0 : null,
        role: "button",
        "aria-label": r.name,
        onpointermove: e =>
          Tip.show(
            e,
            r.name + (r.calls > 1 ? ` × ${r.calls}` : ""),
            [r.phase, r.module].filter(Boolean).join(" · "),
            `${time(r.seconds)}, ${percent(r.fraction)} of its limit`,
            `${size(r.bytes)}, ${count(r.flops)} FLOPs: ${digits(r.flops / Math.max(r.bytes, 1))} a byte`,
          ),
        onpointerleave: () => Tip.hide(),
        onclick: () => node && Selection.set(node, "plot"),
        onkeydown: e => {
          if (e.key === "Enter" && node) Selection.set(node, "plot");
        },
      });
      if (node)
        Selection.watch(s =>
          dot.classList.toggle("picked", !!s && s.node.structure === node.node.structure && s.drawing.phase === node.drawing.phase),
        );
      return dot;
    });
}

function roofline() {
  const w = 600,
    t = 360,
    rows = timed().filter(r => r.flops > 0 && r.bytes > 0);
  if (!rows.length) return null;
  const used = new Set(rows.map(r => (DATA.peaks.matmul[r.dtype] ? r.dtype : "float32")));
  const rates = Object.entries(DATA.peaks.matmul).filter(([name]) => used.has(name)),
    peak = most(rates, r => r[1]),
    band = bandwidth();
  const ai = r => r.flops / r.bytes,
    speed = r => r.flops / r.seconds;
  const low = Math.min(0.05, ...rows.map(ai)) / 1.5,
    high = Math.max((peak / band) * 8, ...rows.map(ai)) * 1.5;
  const slow = Math.min(band * low, ...rows.map(speed)) / 1.5;
  const x = scaleLog(low, high, PAD.left, w - PAD.right),
    y = scaleLog(slow, peak * 2.5, t - PAD.bottom, PAD.top);
  const roofs = rates.map(([name, rate], i) => {
    const knee = rate / band;
    return svg(
      "g",
      {},
      svg("line", {x1: x(knee), y1: y(rate), x2: w - PAD.right, y2: y(rate), class: "roof"}),
      svg("text", {x: w - PAD.right - 4, y: y(rate) - 5, class: "roofname", "text-anchor": "end"}, `${name} ${count(rate)}FLOP/s`),
    );
  });
  const drawn = svg(
    "svg",
    {viewBox: `0 0 ${w} ${t}`, class: "plot", role: "img", "aria-label": "roofline"},
    axes(
      w,
      t,
      PAD,
      x,
      y,
      "FLOPs per byte read or written",
      "FLOP/s",
      v => digits(v),
      v => count(v),
    ),
    svg("line", {x1: x(low), y1: y(band * low), x2: x(peak / band), y2: y(peak), class: "roof"}),
    svg(
      "text",
      {
        x: x(low) + 8,
        y: y(band * low * 1.0),
        class: "roofname",
        transform: `rotate(${slope(x, y, low, band)} ${x(low) + 8} ${y(band * low)}) translate(10 -7)`,
      },
      `copy ${size(band)}/s`,
    ),
    roofs,
    marks(
      rows,
      r => x(ai(r)),
      r => y(speed(r)),
    ),
  );
  const left = timed().length - rows.length,
    above = rows.filter(r => speed(r) > 1.1 * (DATA.peaks.matmul[r.dtype] || DATA.peaks.matmul.float32)).length;
  return figure(
    "Roofline",
    drawn,
    `A mark is a kernel or call of torch, its area its time; roofs are what this machine was measured to do. ` +
      "FLOPs and bytes are counted, times measured." +
      (left ? ` ${plural(left, "row")} without arithmetic: see the copies.` : "") +
      (above
        ? ` ${above} above the flat roof of its type: the machine was busy when its peaks were measured, ` +
          "so percentages are too high; tokamak doctor --measure takes them again."
        : ""),
  );
}
function slope(x, y, low, band) {
  return (Math.atan2(y(band * low * 10) - y(band * low), x(low * 10) - x(low)) * 180) / Math.PI;
}
function copies() {
  const w = 600,
    t = 360,
    rows = timed().filter(r => r.fewest > 0),
    curve = DATA.peaks.copy.map(([n, s]) => [n, n / s]);
  if (!rows.length) return null;
  const each = r => r.fewest / r.calls,
    speed = r => r.fewest / r.seconds;
  const x = scaleLog(
    Math.min(curve[0][0], ...rows.map(each)) / 1.5,
    Math.max(curve[curve.length - 1][0], ...rows.map(each)) * 1.5,
    PAD.left,
    w - PAD.right,
  );
  const y = scaleLog(
    Math.min(...curve.map(c => c[1]), ...rows.map(speed)) / 1.5,
    Math.max(...curve.map(c => c[1]), ...rows.map(speed)) * 1.8,
    t - PAD.bottom,
    PAD.top,
  );
  const line = curve.map(([n, b]) => `${x(n)},${y(b)}`).join(" ");
  const [lowX, highX] = [Math.min(curve[0][0], ...rows.map(each)), Math.max(curve[curve.length - 1][0], ...rows.map(each))];
  x.ticks = binary(lowX, highX * 1.4, 7);
  y.ticks = binary(
    Math.min(...curve.map(c => c[1]), ...rows.map(speed)) / 1.5,
    Math.max(...curve.map(c => c[1]), ...rows.map(speed)) * 1.8,
    7,
  );
  return figure(
    "Bytes a second, by bytes moved",
    svg(
      "svg",
      {viewBox: `0 0 ${w} ${t}`, class: "plot", role: "img", "aria-label": "copy curve"},
      axes(w, t, PAD, x, y, "bytes of one call, each memory once", "bytes/s", size, v => size(v) + "/s"),
      svg("polyline", {points: line, class: "roof"}),
      svg(
        "text",
        {
          x: x(curve[Math.floor(curve.length / 2)][0]),
          y: y(curve[Math.floor(curve.length / 2)][1]) - 9,
          class: "roofname",
          "text-anchor": "middle",
        },
        "copies of that size",
      ),
      marks(
        rows,
        r => x(each(r)),
        r => y(speed(r)),
      ),
    ),
    "The line is the fastest copy of so many bytes on this machine: what a kernel without arithmetic can reach. " +
      "Above it, data came from caches that the copy does not find it in.",
  );
}
function figure(title, drawing, text) {
  return h("figure", {}, h("figcaption", {class: "strong"}, title), drawing, h("p", {class: "muted small"}, text));
}

// -- both sides as bars --------------------------------------------------------------------------------------------------------
function tile({title, tag, eager, compiled, text, mark, note}) {
  const top = Math.max(eager ?? 0, compiled ?? 0, mark ? mark.value : 0, 1e-12);
  const bar = (name, v, kind) =>
    v === null || v === undefined
      ? null
      : h(
          "div",
          {class: "hbar"},
          h("span", {class: "muted"}, name),
          h(
            "div",
            {class: "track"},
            h("i", {class: kind, style: {width: Math.max((v / top) * 100, 0.5) + "%"}}),
            mark && kind === "ours" && h("b", {style: {left: (mark.value / top) * 100 + "%"}, title: `${mark.name}: ${text(mark.value)}`}),
          ),
          h("span", {class: "num strong"}, text(v)),
        );
  const gain = eager && compiled ? eager / compiled : null;
  return h(
    "div",
    {class: "tile"},
    h("div", {class: "tiletitle"}, h("span", {}, title), h("span", {class: "tag", title: TAGS[tag]}, tag)),
    gain &&
      h(
        "div",
        {class: "gain " + (gain > 1.02 ? "up" : gain < 0.98 ? "downs" : "")},
        Math.abs(gain - 1) < 0.005 ? "the same" : gain >= 1 ? `${digits(gain)}× less` : `${digits(1 / gain)}× more`,
      ),
    bar("eager", eager, "theirs"),
    bar("compiled", compiled, "ours"),
    mark &&
      h(
        "div",
        {class: "muted small"},
        h("b", {class: "tickmark"}),
        `${mark.name} ${text(mark.value)}`,
        mark.tag && h("span", {class: "tag"}, mark.tag),
      ),
    note && h("div", {class: "muted small"}, note),
  );
}
const TAGS = {
  measured: "measured in this run, on this machine",
  counted: "counted from the programs: exact for what they ask memory for",
  estimate: "an estimate, from what was counted and measured",
};

function foretold() {
  // (share of the step, bytes): each program's steps spread over the phase that it ran in
  const curve = DATA.compiled.memory.curve,
    end = curve.length ? curve[curve.length - 1][0] : 0,
    phase = new Map(DATA.drawings.map(d => [d.name, d.phase]));
  const times = new Map(DATA.compiled.memory.phases.map(p => [p.name, [p.start / end, (p.start + p.seconds) / end]])),
    runs = new Map();
  const home = x => (phase.get(x.graph) === "inference" ? "forward" : phase.get(x.graph));
  for (const x of DATA.held) runs.set(home(x), (runs.get(home(x)) || 0) + 1);
  const seen = new Map();
  return DATA.held.map((x, i) => {
    const p = home(x),
      n = seen.get(p) || 0,
      [a, b] = (end > 0 && times.get(p)) || [i / DATA.held.length, (i + 1) / DATA.held.length];
    seen.set(p, n + 1);
    return [Math.min(1, end > 0 && times.get(p) ? a + ((b - a) * n) / runs.get(p) : a), x.bytes];
  });
}
// -- memory over a step ----------------------------------------------------------------------------------------------------------
function memoryPlot() {
  const w = 1200,
    t = 240,
    pad = {left: 70, right: 16, top: 26, bottom: 40};
  const lines = [
    ["eager", DATA.eager.memory.curve, "theirs"],
    ["compiled", DATA.compiled.memory.curve, "ours"],
  ].filter(l => l[1].length > 1);
  const held = foretold();
  if (!lines.length && !held.length) return null;
  const top =
    Math.max(
      most(lines, l => most(l[1], p => p[1])),
      DATA.predicted,
      DATA.eager.peak,
      DATA.compiled.peak,
      1,
    ) * 1.08;
  const x = v => pad.left + v * (w - pad.left - pad.right),
    y = v => t - pad.bottom - (v / top) * (t - pad.top - pad.bottom);
  const unit = 2 ** Math.floor(Math.log2(top)) / 4;
  x.ticks = [0, 0.25, 0.5, 0.75, 1];
  y.ticks = [];
  for (let v = 0; v <= top; v += top / unit > 6 ? 2 * unit : unit) y.ticks.push(v);
  const steps = (points, end) =>
    points.map(([s, b], i) => `${i ? `H${x(s / end)}` : `M${x(s / end)}`}${i ? "" : `,${y(b)}`}V${y(b)}`).join("") + `H${x(1)}`;
  const areas = lines.map(([name, curve, kind]) => {
    const end = Math.max(curve[curve.length - 1][0], 1e-12),
      d = steps(curve, end);
    return [svg("path", {d: d + `V${y(0)}H${x(0)}Z`, class: "area " + kind}), svg("path", {d, class: "curve " + kind})];
  });
  const guess = held.length ? svg("path", {d: steps(held, 1), class: "curve guess"}) : null;
  const legend = [
    ["eager", "theirs", DATA.eager.peak],
    ["compiled", "ours", DATA.compiled.peak],
    ["predicted from the programs (estimate)", "guess", DATA.predicted],
  ];
  return h(
    "div",
    {},
    h(
      "div",
      {class: "keys"},
      legend.map(([name, kind, peak]) => h("span", {class: "key"}, h("i", {class: "swatch " + kind}), `${name}: at most ${size(peak)}`)),
    ),
    h(
      "div",
      {class: "hscroll"},
      svg(
        "svg",
        {viewBox: `0 0 ${w} ${t}`, class: "plot wideplot", role: "img", "aria-label": "memory over a step"},
        axes(
          w,
          t,
          pad,
          x,
          y,
          "share of the step",
          "bytes beyond what stood before the step",
          v => percent(v),
          v => size(v),
        ),
        areas,
        guess,
      ),
    ),
    h(
      "p",
      {class: "muted small"},
      "Measured by torch's profiler over one step of each side, stretched to the same width. The prediction goes by the programs' steps, ",
      "spread over their phase, and is without what ",
      "torch's calls take for themselves.",
    ),
  );
}
