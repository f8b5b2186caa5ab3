// Tables: kernels by wasted time, the user's lines, what was not fused, what torch runs.

function kernelsCard() {
  if (!DATA.rows.length) return null;
  const total = sum(DATA.rows, r => r.seconds),
    lost = sum(DATA.rows, r => r.wasted),
    top = most(DATA.rows, r => r.seconds, 1e-12);
  const wide = innerWidth < 640 ? 196 : 250;
  const bar = r =>
    h(
      "div",
      {class: "split", title: `${time(r.seconds)}: its limit ${time(r.limit)}, wasted ${time(r.wasted)}`},
      h("i", {class: "k-" + r.kind, style: {width: (Math.min(r.limit, r.seconds) / top) * 100 + "%"}}),
      h("i", {class: "waste k-" + r.kind, style: {width: (r.wasted / top) * 100 + "%"}}),
    );
  const line = r => {
    const s = r.source.split("  ");
    return base(s[0]) + (s[1] ? " " + s.slice(1).join(" ").trim() : "");
  };
  const rows = DATA.rows.map((r, i) => ({
    ...r,
    i,
    text: [r.name, r.module, r.source, r.kind, r.phase, r.schedule, r.opaque ? "torch" : ""].join(" ").toLowerCase(),
    node: rowNode(r),
  }));
  const number = (key, name, text, extra) => ({key, name, number: true, value: r => r[key], cell: r => text(r[key], r), ...extra});
  const columns = [
    {
      key: "name",
      name: "kernel",
      width: `minmax(${wide}px, 3fr)`,
      least: wide,
      value: r => r.name,
      cell: r =>
        h(
          "div",
          {class: "two"},
          h("div", {}, h("span", {class: "dot k-" + r.kind}), r.name, r.opaque && h("span", {class: "tag"}, "torch")),
          h("div", {class: "muted"}, [r.phase, r.module, line(r)].filter(Boolean).join(" · ")),
        ),
    },
    number("wasted", "wasted", time, {title: "time beyond the limit: what could be gained at most (an estimate)"}),
    number("seconds", "time", time, {title: "a step, all calls together (measured)"}),
    {
      key: "bar",
      name: "limit | wasted",
      width: "minmax(110px, 1.2fr)",
      least: 110,
      number: true,
      value: r => r.seconds,
      cell: bar,
      title: "solid: what it could take at this machine's peaks; pale: beyond",
    },
    number("fraction", "% of limit", percent, {title: "of the time that its bytes or FLOPs allow at this machine's measured peaks"}),
    {key: "kind", name: "class", width: "84px", value: r => r.kind},
    number("calls", "calls", v => v.toLocaleString("en"), {width: "56px", least: 56}),
    number(
      "bytes",
      "bytes",
      (v, r) => [size(v), r.fewest && v > 1.005 * r.fewest ? h("span", {class: "muted"}, ` ${digits(v / r.fewest)}×`) : null],
      {title: "read and written (counted); behind it, times the fewest possible", width: "minmax(92px, 1fr)", least: 92},
    ),
    number("flops", "FLOPs", v => (v ? count(v) : "–"), {title: "counted"}),
    ...(DATA.rows.some(r => r.registers !== null)
      ? [
          {
            key: "registers",
            name: "registers",
            number: true,
            value: r => r.registers ?? -1,
            title: "a thread, and bytes of stack spilled",
            cell: r => (r.registers === null ? "–" : [r.registers, r.spilled ? h("b", {class: "badtext"}, ` +${r.spilled} B`) : null]),
          },
        ]
      : []),
  ];
  const picked = r => Selection.now && r.positions.some(([g, p]) => Selection.now.drawing.name === g && Selection.now.node.position === p);
  const made = table({
    columns,
    rows,
    sort: "wasted",
    height: 46,
    shown: Math.min(12, rows.length),
    filter: r => r.text,
    pick: r => r.node && Selection.set(picked(r) ? null : r.node, "table"),
    picked,
    label: "kernels",
  });
  Selection.watch(made.redraw);
  return card(
    "kernels",
    "Where the time goes",
    h(
      "p",
      {class: "muted"},
      h("b", {}, `${time(lost)} of ${time(total)}`),
      " is time beyond what bytes or FLOPs take at this machine's measured peaks. ",
      "A row is a kernel or a call of torch, equal ones of several layers together. ",
      h(
        "span",
        {class: "keys inline"},
        ["memory", "arithmetic", "latency", "launch"].map(k =>
          h("span", {class: "key", title: RULES[k]}, h("i", {class: "dot k-" + k}), KINDS[k]),
        ),
      ),
    ),
    made.root,
    DATA.others.length
      ? h(
          "p",
          {class: "muted small"},
          `Beyond these, ${time(sum(DATA.others, o => o.seconds))} on the device: ` +
            DATA.others
              .slice(0, 6)
              .map(o => `${time(o.seconds)} ${o.name} ×${digits(o.calls)}`)
              .join("; "),
        )
      : null,
  );
}
const RULES = {
  launch: "it takes at most twice the shortest kernel there is",
  memory: "bytes are the longer limit, and it reaches at least half of it",
  arithmetic: "FLOPs are the longer limit, and it reaches at least half of it",
  latency: "it reaches half of neither",
};
function linesCard() {
  if (!DATA.lines.length) return null;
  const rows = DATA.lines.map(l => ({...l, place: base(l.source.file) + ":" + l.source.line})),
    top = most(rows, r => r.seconds, 1e-12);
  return card(
    "lines",
    "Your lines",
    h(
      "p",
      {class: "muted"},
      "The time of the kernels and calls that compute a line, forward and backward. One that computes several lines counts whole in each.",
    ),
    table({
      columns: [
        {
          key: "place",
          name: "line",
          width: "minmax(150px, 1fr)",
          least: 150,
          value: r => r.place,
          class: "mono",
          cell: r => h("span", {title: r.source.file}, r.place),
        },
        {
          key: "code",
          name: "",
          width: "minmax(220px, 4fr)",
          least: 220,
          value: r => r.source.code,
          class: "mono",
          cell: r => painted(r.source.code.trim(), "py"),
        },
        {key: "seconds", name: "time", number: true, value: r => r.seconds, cell: r => time(r.seconds)},
        {
          key: "bar",
          name: "",
          width: "minmax(80px, 1.4fr)",
          value: r => r.seconds,
          cell: r => h("div", {class: "split"}, h("i", {class: "ours", style: {width: (r.seconds / top) * 100 + "%"}})),
        },
        {key: "wasted", name: "wasted", number: true, value: r => r.wasted, cell: r => time(r.wasted)},
        {key: "count", name: "kernels", number: true, value: r => r.count},
      ],
      rows,
      sort: "seconds",
      height: 30,
      shown: Math.min(10, rows.length),
      label: "lines",
    }).root,
  );
}
function edgesCard() {
  if (!DATA.edges.length) return null;
  const rows = DATA.edges.map(({edge, seconds}, i) => ({...edge, seconds, i})),
    where = s => (s ? base(s.file) + ":" + s.line : "");
  const find = r => {
    const g = DATA.drawings.findIndex(d => d.name === r.graph),
      d = DATA.drawings[g];
    const link = d && d.links.find(l => l.reason === r.reason && r.producer.startsWith(l.value));
    return link ? at(g, link.made) : null;
  };
  const totals = new Map();
  for (const r of rows) {
    const t = totals.get(r.code) || {n: 0, seconds: 0, bytes: 0, reason: r.reason.split(" (")[0]};
    t.n++;
    t.seconds += r.seconds;
    t.bytes += r.bytes;
    totals.set(r.code, t);
  }
  return card(
    "edges",
    "What was not fused, and why",
    h(
      "p",
      {class: "muted"},
      "Values that one kernel writes and another reads, though it was asked whether both could be one: ",
      h("b", {}, `${time(sum(rows, r => r.seconds))} at copy speed`),
      h("span", {class: "tag"}, "estimate"),
      " of what joining them would save at most.",
    ),
    h(
      "div",
      {class: "chips"},
      [...totals]
        .sort((a, b) => b[1].seconds - a[1].seconds)
        .map(([code, t]) =>
          h("span", {class: "chip", title: t.reason}, h("b", {}, code), ` ${t.n} · ${size(t.bytes)} · ${time(t.seconds)}`),
        ),
    ),
    table({
      columns: [
        {
          key: "seconds",
          name: "cost",
          number: true,
          width: "80px",
          value: r => r.seconds,
          cell: r => time(r.seconds),
          title: "what its bytes take at copy speed (an estimate)",
        },
        {key: "bytes", name: "bytes", number: true, width: "84px", value: r => r.bytes, cell: r => size(r.bytes)},
        {
          key: "producer",
          name: "made by",
          width: "minmax(160px, 2fr)",
          least: 160,
          value: r => r.producer,
          cell: r => h("div", {class: "two"}, h("div", {}, r.producer), h("div", {class: "muted"}, where(r.made))),
        },
        {
          key: "consumer",
          name: "read by",
          width: "minmax(160px, 2fr)",
          least: 160,
          value: r => r.consumer,
          cell: r => h("div", {class: "two"}, h("div", {}, r.consumer), h("div", {class: "muted"}, where(r.used))),
        },
        {
          key: "code",
          name: "why not one kernel",
          width: "minmax(220px, 3fr)",
          least: 220,
          value: r => r.code,
          cell: r =>
            h(
              "div",
              {class: "two", title: r.reason},
              h("div", {}, h("b", {}, r.code), " ", h("span", {class: "muted"}, r.kind)),
              h("div", {class: "muted"}, r.reason),
            ),
        },
      ],
      rows,
      sort: "seconds",
      height: 46,
      shown: Math.min(8, rows.length),
      filter: r => [r.producer, r.consumer, r.code, r.reason, r.kind].join(" ").toLowerCase(),
      pick: r => {
        const x = find(r);
        if (x) Selection.set(x, "edges");
      },
      label: "edges",
    }).root,
  );
}
function opaqueCard() {
  const calls = DATA.rows.filter(r => r.opaque),
    by = new Map();
  for (const r of calls) {
    const k = r.name + "\u0000" + r.opaque,
      t = by.get(k) || {name: r.name, reason: r.opaque, seconds: 0, calls: 0, node: rowNode(r)};
    t.seconds += r.seconds;
    t.calls += r.calls;
    by.set(k, t);
  }
  if (!by.size && !DATA.advice.length && !DATA.notes.length) return null;
  const seen = new Map();
  for (const a of DATA.advice) {
    const k = JSON.stringify(a);
    seen.set(k, {...a, times: (seen.get(k)?.times || 0) + 1});
  }
  return card(
    "torch",
    "Breaks, new captures, calls of torch",
    [...seen.values()].map(a =>
      h(
        "div",
        {class: "advice"},
        h(
          "div",
          {},
          h("b", {class: "warntext"}, a.what),
          " ",
          h("span", {class: "mono"}, a.place),
          a.times > 1 ? ` · ${a.times} times` : "",
        ),
        h("div", {class: "muted"}, a.reason),
        h("div", {}, h("b", {}, "mend: "), a.mend),
      ),
    ),
    DATA.notes.map(n => h("div", {class: "advice"}, h("span", {class: "warntext"}, n))),
    !DATA.advice.length && h("p", {class: "muted"}, "No graph breaks, nothing captured again."),
    by.size
      ? table({
          columns: [
            {key: "name", name: "call of torch", width: "minmax(180px, 1.4fr)", least: 180, value: r => r.name},
            {key: "seconds", name: "time", number: true, value: r => r.seconds, cell: r => time(r.seconds)},
            {key: "calls", name: "calls", number: true, width: "64px", value: r => r.calls},
            {
              key: "reason",
              name: "why no kernel of it",
              width: "minmax(260px, 4fr)",
              least: 260,
              value: r => r.reason,
              cell: r => h("span", {title: r.reason}, r.reason),
            },
          ],
          rows: [...by.values()],
          sort: "seconds",
          height: 32,
          shown: Math.min(8, by.size),
          pick: r => r.node && Selection.set(r.node, "torch"),
          label: "calls of torch",
        }).root
      : null,
  );
}
