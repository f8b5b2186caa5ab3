// Where the boxes of a graph stand: layer by layer along the edges; large graphs first with their modules as single boxes.

const BOXES = 160;                              // that a graph shows before anything is opened
const GAPX = 22, GAPY = 34;

// items: [{module, ...}] in running order -> boxes [{key, title, items}]: single items, and closed modules
function boxes(items, open) {
  const out = new Map();
  const depth = items.length <= BOXES ? 99 : fittingDepth(items);
  items.forEach((item, i) => {
    const path = item.module ? item.module.split(".") : [];
    let key = null;
    if (items.length > BOXES) {
      for (let d = Math.min(depth, path.length); d <= path.length; d++) {
        const k = path.slice(0, d).join(".");
        if (d > 0 && !open.has(k)) { key = k; break; }
      }
      if (path.length === 0 || depth === 0) {
        const k = `${Math.floor(i / 40) * 40} … ${Math.min(items.length, Math.floor(i / 40) * 40 + 40) - 1}`;
        key = open.has(k) ? null : k;
      }
    }
    const id = key === null ? "#" + i : key;
    if (!out.has(id)) out.set(id, {key, title: key === null ? "" : key, items: []});
    out.get(id).items.push(i);
  });
  return [...out.values()].map(b => b.items.length === 1 ? {...b, key: null} : b);
}
function fittingDepth(items) {
  const deepest = most(items, x => x.module ? x.module.split(".").length : 0);
  let best = 0;
  for (let d = 1; d <= deepest; d++) {
    const n = new Set(items.map(x => x.module.split(".").slice(0, d).join("."))).size;
    if (n <= BOXES) best = d; else break;
  }
  return best;
}

// boxes with w, h; edges [{a, b}] between boxes -> x, y of each (its upper left corner)
function layered(nodes, edges) {
  const n = nodes.length, before = nodes.map(() => []), behind = nodes.map(() => []), layer = new Array(n).fill(0);
  for (const {a, b} of edges) if (a < b) { before[b].push(a); behind[a].push(b); }
  for (let i = 0; i < n; i++) layer[i] = before[i].length ? 1 + most(before[i], p => layer[p]) : 0;
  for (let i = n - 1; i >= 0; i--) {            // what waits for nothing stands close to what needs it
    if (!before[i].length && behind[i].length) layer[i] = Math.max(0, Math.min(...behind[i].map(b => layer[b])) - 1);
  }
  const rows = [];
  layer.forEach((l, i) => (rows[l] = rows[l] || []).push(i));
  const x = new Array(n).fill(0);
  const place = row => {                        // neighbours side by side around where they would like to be
    let right = -Infinity;
    for (const i of row) { x[i] = Math.max(x[i], right + GAPX); right = x[i] + nodes[i].w; }
    const shift = sum(row, i => (nodes[i].wish ?? x[i]) - x[i]) / row.length;
    for (const i of row) x[i] += shift;
  };
  for (const row of rows) if (row) { let at = 0; for (const i of row) { x[i] = at; at += nodes[i].w + GAPX; } for (const i of row) x[i] -= (at - GAPX) / 2; }
  for (let turn = 0; turn < 6; turn++) {
    const down = turn % 2 === 0, near = down ? before : behind;
    for (const row of down ? rows : rows.slice().reverse()) {
      if (!row) continue;
      for (const i of row) {
        const mids = near[i].map(k => x[k] + nodes[k].w / 2);
        nodes[i].wish = mids.length ? sum(mids, m => m) / mids.length - nodes[i].w / 2 : x[i];
      }
      row.sort((a, b) => nodes[a].wish - nodes[b].wish);
      for (const i of row) x[i] = nodes[i].wish;
      place(row);
    }
  }
  let y = 0;
  for (const row of rows) {
    if (!row) continue;
    const tall = most(row, i => nodes[i].h);
    for (const i of row) { nodes[i].x = x[i]; nodes[i].y = y + (tall - nodes[i].h) / 2; }
    y += tall + GAPY;
  }
}
