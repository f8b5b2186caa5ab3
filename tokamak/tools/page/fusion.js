// The fusion graph: what eager runs beside what runs now, each showing where the other's parts went.

function fusionCard() {
  const order = DATA.drawings.map((d, g) => g).filter(g => DATA.drawings[g].operations.length);
  if (!order.length) return null;
  let g = order.reduce((best, k) => (DATA.drawings[k].nodes.length > DATA.drawings[best].nodes.length ? k : best), order[0]);
  const tabs = h("div", {class: "tabs", role: "tablist"});
  const worst = () => most(DATA.drawings[g].nodes, n => n.seconds || 0, 1e-12);
  const made = () => DATA.drawings[g],
    maker = [];
  const chosen = () => (Selection.now && Selection.now.g === g ? Selection.now.n : -1);

  const before = new Board("what eager runs", {
    look(o) {
      const home = maker[o.i],
        on = chosen();
      return {
        first: o.op.op.replace(/\.(default|Tensor|int|Scalar|dim_IntList|self)$/, ""),
        stripe: home.length ? hue(home[0]) : colour("rule"),
        alpha: on < 0 || home.includes(on) ? 1 : 0.3,
        strong: on >= 0 && home.includes(on),
      };
    },
    module: (b, items) => ({
      first: tail(b.title),
      second: plural(items.length, "operation"),
      stripe: colour("quiet"),
      alpha: chosen() < 0 || items.some(o => maker[o.i].includes(chosen())) ? 1 : 0.3,
    }),
    edge(all) {
      const fused = all.every(e => e.fused),
        on = chosen();
      const near = on < 0 || all.some(e => e.kernel === on);
      return {
        colour: fused ? colour("good") : colour("line"),
        width: fused ? 1.8 : 1.2,
        alpha: near ? 0.9 : 0.15,
        dash: fused ? [5, 4] : null,
      };
    },
    tip(e, o, box, items) {
      if (!o) return Tip.show(e, box.title, plural(items.length, "operation"), "click to open");
      Tip.show(
        e,
        o.op.op,
        [o.op.module, sourceText(o.op.source)].filter(Boolean).join(" · "),
        size(o.op.bytes) + " read and written (counted)",
        maker[o.i].length ? "now in " + maker[o.i].map(n => made().nodes[n].name).join(", ") : "needs no kernel of its own",
      );
    },
    edgeTip: (e, all) => Tip.show(e, all.every(x => x.fused) ? "within one kernel now: never written to memory" : "passes through memory"),
    pick: o => {
      if (maker[o.i].length) Selection.set(at(g, maker[o.i][0]), "graph");
    },
    pickEdge() {},
  });
  const after = new Board("what runs now", {
    look(o) {
      const n = o.node,
        on = chosen();
      return {
        first: shortName(n),
        second: n.seconds === null ? size(n.bytes) : `${time(n.seconds)} · ${percent(fraction(n))} of limit`,
        stripe: hue(o.i),
        heat: (n.seconds || 0) / worst(),
        alpha: on < 0 || near(o.i, on) ? 1 : 0.35,
        strong: o.i === on,
        dash: n.reason ? [5, 3] : null,
        line: n.reason ? colour("muted") : colour("rule"),
      };
    },
    module: (b, items) => ({
      first: tail(b.title),
      second: `${plural(items.length, "kernel")} · ${time(sum(items, o => o.node.seconds || 0))}`,
      stripe: colour("quiet"),
      heat:
        sum(items, o => o.node.seconds || 0) /
        Math.max(
          sum(made().nodes, n => n.seconds || 0),
          1e-12,
        ),
      alpha: chosen() < 0 || items.some(o => near(o.i, chosen())) ? 1 : 0.35,
    }),
    edge(all, over) {
      const cost = sum(all, e => e.link.bytes),
        refused = all.some(e => e.link.code && e.link.code !== "opaque"),
        on = chosen();
      return {
        colour: refused ? colour("warn") : colour("line"),
        width: (over ? 2 : 1) + Math.min(5, Math.log2(1 + cost / 65536) / 2),
        alpha: on < 0 || all.some(e => e.a === on || e.b === on) ? 0.75 : 0.12,
      };
    },
    tip(e, o, box, items) {
      if (!o) return Tip.show(e, box.title, plural(items.length, "kernel"), "click to open");
      nodeTip(e, at(g, o.i));
    },
    edgeTip(e, all) {
      Tip.show(
        e,
        all.length === 1 ? all[0].link.value : plural(all.length, "value"),
        `${size(sum(all, x => x.link.bytes))} through memory (counted)`,
        ...[...new Set(all.map(x => (x.link.reason ? `${x.link.kind}: ${x.link.reason}` : "")))].filter(Boolean),
      );
    },
    pick: o => Selection.set(chosen() === o.i ? null : at(g, o.i), "graph"),
    pickEdge: all => Selection.set(at(g, all[0].a), "graph"),
  });
  const hue = i => (made().nodes[i].reason ? colour("quiet") : groupColour(i));
  const near = (i, on) => i === on || made().links.some(l => (l.made === on && l.used === i) || (l.used === on && l.made === i));

  function show(next) {
    g = next;
    const d = made();
    maker.length = 0;
    d.operations.forEach(() => maker.push([]));
    d.nodes.forEach((n, k) => n.operations.forEach(o => maker[o].push(k)));
    before.show(
      `eager: ${plural(d.operations.length, "operation")}`,
      d.operations.map((op, i) => ({op, i, module: op.module, h: 30})),
      d.operations.flatMap((op, i) =>
        op.reads.map(r => {
          const kernel = maker[i].find(k => maker[r].includes(k));
          return {a: r, b: i, fused: kernel !== undefined, kernel};
        }),
      ),
    );
    const torch = d.nodes.filter(n => n.reason).length;
    after.show(
      d.eager
        ? `torch runs it: ${d.eager}`
        : `now: ${plural(d.nodes.length - torch, "kernel")}` + (torch ? `, ${plural(torch, "call")} of torch` : ""),
      d.nodes.map((node, i) => ({node, i, module: node.module})),
      d.links.map(link => ({a: link.made, b: link.used, link})),
    );
    tabs.replaceChildren(
      ...order.map(k =>
        h(
          "button",
          {role: "tab", class: k === g ? "on" : "", "aria-selected": k === g ? "true" : "false", onclick: () => show(k)},
          DATA.drawings[k].phase,
          h("span", {class: "muted"}, ` ${DATA.drawings[k].operations.length} → ${DATA.drawings[k].nodes.length}`),
        ),
      ),
    );
  }
  const boards = h("div", {class: "boards"}, before.root, after.root);
  Selection.watch((x, from) => {
    if (x && x.g !== g) show(x.g);
    if (x) {
      if (from === "graph") requestAnimationFrame(() => boards.scrollIntoView({block: "start"}));
      after.reveal(x.n);
      const op = maker.findIndex(m => m.includes(x.n));
      if (op >= 0) before.reveal(op);
    }
    before.paint();
    after.paint();
  });
  show(g);
  const key = (style, text) => h("span", {class: "key"}, h("i", {class: style}), text);
  return card(
    "fusion",
    "What was fused",
    h(
      "p",
      {class: "muted"},
      "Left, the operations that eager runs; right, what runs now. A colour is a kernel: select one to see its ",
      "operations. Drag to move; click into a graph, then the wheel zooms (or two fingers).",
    ),
    tabs,
    boards,
    h(
      "div",
      {class: "keys"},
      key("dash good", "stays in registers now"),
      key("solid thin", "passes through memory"),
      key("solid warn", "could not be fused: hover for the reason"),
      key("box dash", "a call of torch"),
      key("box heat", "share of the longest kernel's time"),
    ),
  );
}
// the last parts of a module's path, which tell it from its neighbours
function tail(path) {
  const parts = path.split(".");
  let text = parts.pop();
  while (parts.length && text.length + parts[parts.length - 1].length < 21) text = parts.pop() + "." + text;
  return parts.length ? "…" + text : text;
}
