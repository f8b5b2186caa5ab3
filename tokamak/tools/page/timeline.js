// One step of each side on a common time axis, on a canvas: zoomed and moved as a graph is.

const LANES = [
  ["eager", "phase", "eager"],
  ["eager", "host", "host"],
  ["eager", "operator", "operators"],
  ["eager", "kernel", "device"],
  ["compiled", "phase", "compiled"],
  ["compiled", "host", "host"],
  ["compiled", "kernel", DATA.device === "cpu" ? "kernels, calls" : "device"],
];
const LANE = 30,
  LEFT = 92,
  AXIS = 26;

function timelineCard() {
  const lanes = LANES.map(([side, lane, name]) => ({side, lane, name, items: DATA[side].timeline.filter(s => s.lane === lane)})).filter(
    l => l.items.length,
  );
  if (!lanes.length) return null;
  for (const l of lanes) for (const s of l.items) s.node = s.position >= 0 ? NODES.get(s.graph + ":" + s.position) : null;
  const end = most(lanes, l => most(l.items, s => s.start + s.seconds)) || 1e-9;
  let from = 0,
    to = end * 1.01,
    active = false,
    drag = null,
    moved = 0,
    waiting = null;
  const canvas = h("canvas", {tabindex: 0, role: "img", "aria-label": "timeline", style: {height: AXIS + lanes.length * LANE + 8 + "px"}});
  const width = () => canvas.clientWidth - LEFT - 8;
  const x = t => LEFT + ((t - from) / (to - from)) * width();
  const back = px => from + ((px - LEFT) / width()) * (to - from);
  const paint = () => {
    if (!waiting)
      waiting = requestAnimationFrame(() => {
        waiting = null;
        draw();
      });
  };
  function fill(s) {
    if (s.lane === "phase") return colour("phase-" + s.name) || colour("quiet");
    if (s.node) return s.lane === "host" ? colour("line") : s.node.node.reason ? colour("quiet") : kindColour(s.node.node.kind);
    return colour(s.lane === "operator" || s.lane === "kernel" ? "eager" : "quiet");
  }
  const label = s => (s.lane === "host" ? "" : s.node ? shortName(s.node.node) : s.name);
  function draw() {
    const r = devicePixelRatio || 1,
      w = canvas.clientWidth,
      t = canvas.clientHeight,
      c = canvas.getContext("2d");
    if (!w) return;
    if (canvas.width !== Math.round(w * r)) {
      canvas.width = Math.round(w * r);
      canvas.height = Math.round(t * r);
    }
    c.setTransform(r, 0, 0, r, 0, 0);
    c.clearRect(0, 0, w, t);
    ticks(c, w, t);
    lanes.forEach((l, i) => {
      const y = AXIS + i * LANE;
      c.font = (l.lane === "phase" ? "600 " : "") + "12px " + FONT;
      c.fillStyle = colour(l.lane === "phase" ? "ink" : "muted");
      c.textBaseline = "middle";
      c.fillText(l.name, 4, y + LANE / 2);
      c.save();
      c.beginPath();
      c.rect(LEFT, y, w - LEFT, LANE);
      c.clip();
      let last = -1;
      for (const s of l.items) {
        const a = x(s.start),
          b = x(s.start + s.seconds);
        if (b < LEFT || a > w || b < last + 0.4) continue;
        last = b;
        const picked =
          Selection.now &&
          s.node &&
          s.node.node.structure === Selection.now.node.structure &&
          s.node.drawing.phase === Selection.now.drawing.phase;
        c.globalAlpha = l.lane === "phase" ? 0.55 : !Selection.now || picked || !s.node ? 0.9 : 0.35;
        c.fillStyle = fill(s);
        const gap = b - a > 3 ? 0.5 : 0;
        c.beginPath();
        c.roundRect(a + gap, y + 3, Math.max(b - a - 2 * gap, 0.7), LANE - 6, Math.min(4, (b - a) / 2));
        c.fill();
        if (picked) {
          c.globalAlpha = 1;
          c.lineWidth = 2;
          c.strokeStyle = colour("ink");
          c.stroke();
        }
        if (b - a > 34 && label(s)) {
          c.globalAlpha = 1;
          c.fillStyle = l.lane === "phase" ? colour("ink") : colour("onfill");
          c.font = "11.5px " + FONT;
          c.fillText(clipped(c, label(s), Math.round(Math.min(b, w) - Math.max(a, LEFT) - 10)), Math.max(a, LEFT) + 5, y + LANE / 2 + 0.5);
        }
      }
      c.restore();
      c.globalAlpha = 1;
    });
  }
  function ticks(c, w, t) {
    const rough = (to - from) / Math.max(3, width() / 110),
      unit = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map(m => m * unit).find(s => s >= rough);
    c.strokeStyle = colour("rule");
    c.fillStyle = colour("muted");
    c.font = "11px " + FONT;
    c.textBaseline = "middle";
    c.lineWidth = 1;
    for (let v = Math.ceil(from / step) * step; v <= to; v += step) {
      c.beginPath();
      c.moveTo(x(v), AXIS - 6);
      c.lineTo(x(v), t);
      c.stroke();
      c.fillText(time(Math.abs(v) < step / 10 ? 0 : v), x(v) + 3, AXIS / 2 - 2);
    }
  }
  function find(e) {
    const r = canvas.getBoundingClientRect(),
      l = lanes[Math.floor((e.clientY - r.top - AXIS) / LANE)],
      px = e.clientX - r.left;
    if (!l || px < LEFT) return null;
    const v = back(px),
      slack = (2 / width()) * (to - from);
    return (
      l.items.find(s => v >= s.start && v <= s.start + s.seconds) ||
      l.items.find(s => v >= s.start - slack && v <= s.start + s.seconds + slack)
    );
  }
  function zoom(f, px) {
    const v = back(px),
      span = Math.max(end * 1e-5, Math.min(end * 1.01, (to - from) / f));
    from = Math.max(-end * 0.01, Math.min(v - ((px - LEFT) / width()) * span, end * 1.01 - span));
    to = from + span;
    paint();
  }
  const touches = new Map();
  canvas.addEventListener(
    "wheel",
    e => {
      if (!active && !e.ctrlKey) return;
      e.preventDefault();
      zoom(Math.exp(-e.deltaY * 0.0018), e.clientX - canvas.getBoundingClientRect().left);
    },
    {passive: false},
  );
  canvas.addEventListener("focus", () => {
    active = true;
    canvas.classList.add("active");
  });
  canvas.addEventListener("blur", () => {
    active = false;
    canvas.classList.remove("active");
  });
  canvas.addEventListener("pointerdown", e => {
    touches.set(e.pointerId, e.clientX);
    drag = e.clientX;
    moved = 0;
    canvas.setPointerCapture(e.pointerId);
  });
  canvas.addEventListener("pointerup", e => {
    touches.delete(e.pointerId);
    drag = null;
    const s = find(e);
    if (moved < 5 && s && s.node) Selection.set(s.node, "timeline");
  });
  canvas.addEventListener("pointercancel", e => {
    touches.delete(e.pointerId);
    drag = null;
  });
  canvas.addEventListener("pointerleave", () => Tip.hide());
  canvas.addEventListener("pointermove", e => {
    if (touches.size === 2) {
      const [other] = [...touches].filter(([id]) => id !== e.pointerId).map(([, v]) => v),
        was = Math.abs(touches.get(e.pointerId) - other);
      zoom(Math.abs(e.clientX - other) / Math.max(was, 4), (e.clientX + other) / 2 - canvas.getBoundingClientRect().left);
    } else if (drag !== null) {
      const shift = ((e.clientX - drag) / width()) * (to - from),
        span = to - from;
      moved += Math.abs(e.clientX - drag);
      drag = e.clientX;
      from = Math.max(-end * 0.01, Math.min(from - shift, end * 1.01 - span));
      to = from + span;
      paint();
    } else {
      const s = find(e);
      canvas.style.cursor = s && s.node ? "pointer" : "grab";
      if (s)
        Tip.show(
          e,
          s.node && s.lane !== "host" ? s.node.node.name : s.name,
          `${time(s.seconds)}, from ${time(s.start)}`,
          s.node ? [s.node.drawing.phase, s.node.node.module].filter(Boolean).join(" · ") : "",
        );
      else Tip.hide();
    }
    if (touches.has(e.pointerId)) touches.set(e.pointerId, e.clientX);
  });
  canvas.addEventListener("keydown", e => {
    const span = to - from,
      go = {ArrowLeft: -0.15, ArrowRight: 0.15}[e.key];
    if (go) {
      from = Math.max(-end * 0.01, Math.min(from + go * span, end * 1.01 - span));
      to = from + span;
      paint();
    } else if (e.key === "+" || e.key === "=") zoom(1.5, LEFT + width() / 2);
    else if (e.key === "-") zoom(1 / 1.5, LEFT + width() / 2);
    else if (e.key === "0") {
      from = 0;
      to = end * 1.01;
      paint();
    } else return;
    e.preventDefault();
  });
  new ResizeObserver(paint).observe(canvas);
  repaints.push(paint);
  Selection.watch(paint);
  const fit = h(
    "button",
    {
      class: "small",
      onclick: () => {
        from = 0;
        to = end * 1.01;
        paint();
      },
    },
    "fit",
  );
  return card(
    "timeline",
    "Timeline",
    h(
      "div",
      {class: "bar"},
      h(
        "span",
        {class: "muted"},
        DATA.device === "cpu"
          ? "One step of each: the compiled one by the host's clock; eager's operators under torch's profiler, which slows them."
          : "One step of each under torch's profiler, which slows the host: gaps are longer than in a step by itself.",
      ),
      h("span", {class: "grow"}),
      fit,
    ),
    canvas,
    h("h3", {}, "Memory"),
    memoryPlot(),
  );
}
