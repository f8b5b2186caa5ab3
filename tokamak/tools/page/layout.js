// Where the boxes of a graph stand: layer by layer along the edges; large graphs first with their modules as single boxes.

const BOXES = 160; // up to which a graph shows everything
const CLOSED = 60; // modules that a larger one shows at most
const GAPX = 22,
  GAPY = 34;

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
        if (d > 0 && !open.has(k)) {
          key = k;
          break;
        }
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
  return [...out.values()].map(b => (b.items.length === 1 ? {...b, key: null} : b));
}
function fittingDepth(items) {
  const deepest = most(items, x => (x.module ? x.module.split(".").length : 0));
  let best = 0;
  for (let d = 1; d <= deepest; d++) {
    const n = new Set(items.map(x => x.module.split(".").slice(0, d).join("."))).size;
    if (n <= CLOSED) best = d;
    else break;
  }
  return best;
}

// boxes with w, h; edges [{a, b}] between boxes -> x, y of each (its upper left corner)
function layered(nodes, edges) {
  const home = nodes.map((_, i) => i),
    root = i => {
      while (home[i] !== i) i = home[i] = home[home[i]];
      return i;
    };
  for (const {a, b} of edges) home[root(a)] = root(b);
  const parts = new Map();
  nodes.forEach((_, i) => {
    const r = root(i);
    if (!parts.has(r)) parts.set(r, []);
    parts.get(r).push(i);
  });
  const found = [...parts.values()],
    blocks = found.filter(p => p.length > 1).map(p => component(nodes, p, edges));
  const single = found.filter(p => p.length === 1).map(p => p[0]);
  if (single.length)
    blocks.push(
      raster(
        nodes,
        single,
        most(blocks, b => b.w),
      ),
    );
  shelves(nodes, blocks);
}
function raster(nodes, members, wide) {
  // boxes that nothing joins, in rows of equal length
  const w = nodes[members[0]].w + GAPX,
    tall = most(members, i => nodes[i].h) + GAPX;
  const across = Math.max(
    1,
    Math.min(members.length, Math.max(Math.floor(wide / w), Math.ceil(Math.sqrt((members.length * tall * 1.3) / w)))),
  );
  members.forEach((i, k) => {
    nodes[i].x = (k % across) * w;
    nodes[i].y = Math.floor(k / across) * tall;
  });
  return {members, w: across * w - GAPX, h: Math.ceil(members.length / across) * tall - GAPX};
}
function shelves(nodes, blocks) {
  // side by side while there is room, in the order in which they run
  const wide = Math.max(
    most(blocks, b => b.w),
    Math.sqrt(sum(blocks, b => b.w * b.h)) * 1.1,
  );
  let x = 0,
    y = 0,
    tall = 0;
  for (const b of blocks) {
    if (x > 0 && x + b.w > wide) {
      x = 0;
      y += tall + 2 * GAPY;
      tall = 0;
    }
    for (const i of b.members) {
      nodes[i].x += x;
      nodes[i].y += y;
    }
    x += b.w + 2 * GAPX;
    tall = Math.max(tall, b.h);
  }
}
function component(nodes, members, edges) {
  const inside = new Set(members),
    before = new Map(),
    behind = new Map(),
    layer = new Map(),
    x = new Map();
  for (const i of members) {
    before.set(i, []);
    behind.set(i, []);
  }
  for (const {a, b} of edges)
    if (a < b && inside.has(a)) {
      before.get(b).push(a);
      behind.get(a).push(b);
    }
  for (const i of members) layer.set(i, before.get(i).length ? 1 + most(before.get(i), p => layer.get(p)) : 0);
  for (const i of members.slice().reverse()) {
    // what waits for nothing stands close to what needs it
    if (!before.get(i).length && behind.get(i).length) layer.set(i, Math.max(0, Math.min(...behind.get(i).map(b => layer.get(b))) - 1));
  }
  const rows = [];
  for (const i of members) (rows[layer.get(i)] = rows[layer.get(i)] || []).push(i);
  const full = rows.filter(Boolean);
  for (const row of full) row.forEach((i, k) => x.set(i, (k - row.length / 2) * (nodes[i].w + GAPX)));
  const middle = i => x.get(i) + nodes[i].w / 2;
  const near = {down: i => before.get(i), up: i => behind.get(i), both: i => [...before.get(i), ...behind.get(i)]};
  for (const way of ["down", "up", "down", "up", "both", "both", "both"]) {
    for (const row of way === "up" ? full.slice().reverse() : full) {
      const wishes = row.map(i => {
        let weight = 0,
          at = 0;
        for (const k of near[way](i)) {
          const f = 1 / Math.abs(layer.get(k) - layer.get(i));
          weight += f;
          at += f * middle(k);
        }
        return weight ? at / weight - nodes[i].w / 2 : x.get(i);
      });
      const order = row.map((_, k) => k);
      if (way !== "both") order.sort((p, q) => wishes[p] - wishes[q]);
      const moved = order.map(k => row[k]);
      apart(
        nodes,
        moved,
        order.map(k => wishes[k]),
      ).forEach((v, k) => x.set(moved[k], v));
      moved.forEach((i, k) => {
        row[k] = i;
      });
    }
  }
  const left = Math.min(...members.map(i => x.get(i)));
  let y = 0;
  for (const row of full) {
    const tall = most(row, i => nodes[i].h);
    for (const i of row) {
      nodes[i].x = x.get(i) - left;
      nodes[i].y = y + (tall - nodes[i].h) / 2;
    }
    y += tall + GAPY;
  }
  return {members, w: most(members, i => nodes[i].x + nodes[i].w), h: y - GAPY};
}
// the places nearest to `wishes` (least squares) at which the boxes of a row, in this order, stand apart: neighbours too close are moved as one
function apart(nodes, row, wishes) {
  const offset = [];
  row.reduce((at, i) => {
    offset.push(at);
    return at + nodes[i].w + GAPX;
  }, 0);
  const groups = [];
  wishes.forEach((w, k) => {
    groups.push({total: w - offset[k], count: 1});
    while (groups.length > 1) {
      const b = groups[groups.length - 1],
        a = groups[groups.length - 2];
      if (a.total / a.count <= b.total / b.count) break;
      groups.splice(-2, 2, {total: a.total + b.total, count: a.count + b.count});
    }
  });
  return groups.flatMap(g => new Array(g.count).fill(g.total / g.count)).map((v, k) => v + offset[k]);
}
