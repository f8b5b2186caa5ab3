// A card of the page; what stands above all others: how fast, bound by what, and both sides in numbers.

const CARDS = [];
const SHORT = {
  kernels: "Kernels",
  fusion: "Fusion",
  limits: "Limits",
  timeline: "Timeline",
  lines: "Lines",
  edges: "Not fused",
  torch: "Torch",
  compiling: "Compiling",
  how: "How",
};
function card(id, title, ...children) {
  CARDS.push([id, SHORT[id] || title]);
  return h("section", {class: "card", id}, h("h2", {}, title), ...children);
}

function headCard() {
  const gain = DATA.eager.step / DATA.compiled.step,
    slower = gain < 1;
  const all = [...new Set([...Object.keys(DATA.eager.phases), ...Object.keys(DATA.compiled.phases)])];
  const top = Math.max(DATA.eager.step, DATA.compiled.step);
  const bar = (name, side) => {
    const device = DATA.device !== "cpu",
      shown = sum(all, p => side.phases[p] || 0),
      known = (device ? Math.max(shown, side.step) : shown) || side.step,
      rest = device ? known - shown : 0;
    return h(
      "div",
      {class: "hero-row"},
      h("span", {class: "hero-name"}, name),
      h(
        "div",
        {class: "hero-track"},
        h(
          "div",
          {class: "hero-bar " + (name === "eager" ? "theirs" : "ours"), style: {width: (side.step / top) * 100 + "%"}},
          all.map(p =>
            h(
              "i",
              {
                class: "phase p-" + p,
                style: {"flex-grow": (side.phases[p] || 0) / known},
                title: `${p || "other"}: ${time(side.phases[p] || 0)}${device ? " on the device" : ""}`,
              },
              (((side.phases[p] || 0) / known) * side.step) / top > 0.13 && h("span", {}, p || "other"),
            ),
          ),
          rest > 0 &&
            h(
              "i",
              {class: "phase p-idle", style: {"flex-grow": rest / known}, title: `idle: ${time(rest)}`},
              ((rest / known) * side.step) / top > 0.08 && h("span", {}, "idle"),
            ),
        ),
      ),
      h("b", {class: "num"}, time(side.step)),
      h(
        "span",
        {class: "muted num small spread", title: "half of the steps lie between these"},
        side.middle[1] ? `${time(side.middle[0])} – ${time(side.middle[1])}` : "",
      ),
    );
  };
  return h(
    "section",
    {class: "card hero", id: "summary"},
    h(
      "div",
      {class: "verdict"},
      h("div", {class: "big " + (slower ? "bad" : "")}, digits(slower ? 1 / gain : gain) + "×"),
      h(
        "div",
        {},
        h("div", {class: "verdict-text"}, slower ? "slower than eager" : "as fast as eager"),
        h(
          "div",
          {class: "bound"},
          h("span", {class: "pill b-" + DATA.bound}, "bound by " + DATA.bound),
          " ",
          h("span", {class: "muted"}, DATA.why),
        ),
        DATA.next && h("div", {}, h("b", {}, "next: "), DATA.next),
        DATA.step && h("div", {class: "muted small"}, DATA.step),
      ),
    ),
    h(
      "div",
      {class: "hero-bars"},
      bar("eager", DATA.eager),
      bar("compiled", DATA.compiled),
      h(
        "div",
        {class: "muted small"},
        "Seconds of a step, medians of steps taken in turn; the range holds half of them. ",
        DATA.device === "cpu" ? "" : "Parts of a bar: the device's time in each phase, and idle.",
      ),
    ),
  );
}
function tiles() {
  const e = DATA.eager,
    c = DATA.compiled,
    device = DATA.device !== "cpu";
  const stages = sum(Object.values(DATA.stages), s => s);
  return h(
    "div",
    {class: "tiles"},
    tile({
      title: device ? "Device busy" : "In kernels and operators",
      tag: "measured",
      eager: e.busy,
      compiled: c.busy,
      text: time,
      note:
        `${device ? "idle" : "the rest, the host"}: ${percent(Math.max(0, 1 - e.busy / e.step))} in eager, ` +
        `${percent(Math.max(0, 1 - c.busy / c.step))} compiled` +
        (device ? "" : "; eager's: its part of steps under torch's profiler (estimate)"),
    }),
    tile({
      title: device ? "Kernels" : "Kernels and calls",
      tag: device ? "measured" : "counted",
      eager: e.kernels,
      compiled: c.kernels,
      text: v => v.toLocaleString("en"),
      note: `${plural(DATA.opaque, "call")} of torch, ${plural(DATA.graphs, "graph")}`,
    }),
    tile({
      title: "Bytes read and written",
      tag: "counted",
      eager: e.bytes,
      compiled: c.bytes,
      text: size,
      mark: {name: "fewest possible", value: DATA.fewest},
    }),
    tile({
      title: "Peak memory",
      tag: "measured",
      eager: e.peak,
      compiled: c.peak,
      text: size,
      mark: {name: "predicted", value: DATA.predicted, tag: "estimate"},
      note: c.memory.pools ? `recordings of CUDA graphs keep ${size(c.memory.pools)} besides` : null,
    }),
    tile({
      title: "First call",
      tag: "measured",
      compiled: DATA.first,
      text: time,
      note: `${time(stages)} of it in the compiler's stages, ${plural(DATA.built, "kernel")} of which ${DATA.cached} known before`,
    }),
  );
}
