// A graph on a canvas: drawn only where it is seen, moved and zoomed by pointer, wheel, fingers and keys.

class Board {
  // model(): {items: [{module, draw(ctx, box), ...}], edges: [{a, b, ...}]} of single items; hooks: tip(event, thing), pick(thing), look(edge)
  constructor(title, hooks) {
    this.hooks = hooks;
    this.open = new Set();
    this.view = {x: 0, y: 0, k: 1};
    this.active = false;
    this.canvas = h("canvas", {tabindex: 0, role: "img", "aria-label": title});
    const button = (text, label, f) => h("button", {class: "small", title: label, "aria-label": label, onclick: f}, text);
    this.title = h("span", {class: "strong"});
    this.hint = h("span", {class: "muted wide"});
    this.closer = button("close modules", "close all modules", () => {
      this.open.clear();
      this.arrange();
    });
    this.root = h(
      "div",
      {class: "board"},
      h(
        "div",
        {class: "bar"},
        this.title,
        this.hint,
        h("span", {class: "grow"}),
        this.closer,
        button("−", "smaller", () => this.zoom(1 / 1.4)),
        button("+", "larger", () => this.zoom(1.4)),
        button("fit", "all of it", () => this.fit()),
      ),
      this.canvas,
    );
    this.pointers = new Map();
    this.listen();
    new ResizeObserver(() => this.resize()).observe(this.canvas);
    repaints.push(() => this.paint());
  }
  show(title, items, edges) {
    this.title.textContent = title;
    this.items = items;
    this.edges = edges;
    this.open.clear();
    this.arrange();
  }
  arrange(keep) {
    this.boxes = boxes(this.items, this.open);
    const home = new Array(this.items.length);
    this.boxes.forEach((b, i) => {
      b.w = 190;
      b.h = b.key === null ? this.items[b.items[0]].h || 44 : 56;
      b.items.forEach(k => {
        home[k] = i;
      });
    });
    const drawn = new Map();
    for (const e of this.edges) {
      const a = home[e.a],
        b = home[e.b];
      if (a === b) continue;
      const key = a + ">" + b;
      if (!drawn.has(key)) drawn.set(key, {a, b, all: []});
      drawn.get(key).all.push(e);
    }
    this.lines = [...drawn.values()];
    this.home = home;
    layered(this.boxes, this.lines);
    this.closer.hidden = !this.open.size;
    this.hint.textContent = this.boxes.some(b => b.key !== null) ? "a module opens by a click" : "";
    if (!keep) this.fit(true);
    else this.paint();
  }
  extent() {
    const xs = this.boxes.map(b => b.x),
      ys = this.boxes.map(b => b.y);
    if (!xs.length) return {x: 0, y: 0, w: 1, h: 1};
    const x = Math.min(...xs),
      y = Math.min(...ys);
    return {x, y, w: most(this.boxes, b => b.x + b.w - x), h: most(this.boxes, b => b.y + b.h - y)};
  }
  fit(readable) {
    const e = this.extent(),
      w = this.canvas.clientWidth || 600,
      t = this.canvas.clientHeight || 400,
      pad = 24;
    let k = Math.min((w - pad) / e.w, (t - pad) / e.h, 1.1);
    let y = t / 2 - (e.y + e.h / 2) * k;
    let x = w / 2 - (e.x + e.w / 2) * k;
    if (readable && k < 0.85) {
      // a long graph begins at its top, at a size that can be read
      k = 0.85;
      y = pad / 2 - e.y * k;
      const top = this.boxes.filter(b => b.y * k + y < t);
      x = e.w * k > w ? pad / 2 - leftmost(top, e, (w - pad) / k) * k : w / 2 - (e.x + e.w / 2) * k;
    }
    this.view = {k, x, y};
    this.paint();
  }
  center(i) {
    const b = this.boxes[this.home[i]],
      w = this.canvas.clientWidth,
      t = this.canvas.clientHeight;
    const x = (b.x + b.w / 2) * this.view.k + this.view.x,
      y = (b.y + b.h / 2) * this.view.k + this.view.y;
    if (x > 60 && x < w - 60 && y > 20 && y < t * 0.6) return this.paint();
    if (this.view.k < 0.4) this.view.k = 0.8;
    this.view.x = w / 2 - (b.x + b.w / 2) * this.view.k;
    this.view.y = t * 0.3 - (b.y + b.h / 2) * this.view.k;
    this.paint();
  }
  reveal(i) {
    // opens the modules that hide an item
    const b = this.boxes[this.home[i]];
    if (b.key === null) return this.center(i);
    this.open.add(b.key);
    this.arrange(true);
    this.reveal(i);
  }
  zoom(f, x = this.canvas.clientWidth / 2, y = this.canvas.clientHeight / 2) {
    const k = Math.max(0.02, Math.min(4, this.view.k * f));
    this.view = {k, x: x - ((x - this.view.x) * k) / this.view.k, y: y - ((y - this.view.y) * k) / this.view.k};
    this.paint();
  }
  resize() {
    const r = devicePixelRatio || 1,
      w = this.canvas.clientWidth,
      t = this.canvas.clientHeight;
    if (!w || (this.canvas.width === Math.round(w * r) && this.canvas.height === Math.round(t * r))) return;
    const first = !this.sized;
    this.sized = true;
    this.canvas.width = Math.round(w * r);
    this.canvas.height = Math.round(t * r);
    if (first) this.fit(true);
    else this.paint();
  }
  paint() {
    if (this.waiting || !this.boxes) return;
    this.waiting = requestAnimationFrame(() => {
      this.waiting = null;
      this.draw();
    });
  }
  draw() {
    const c = this.canvas.getContext("2d"),
      r = devicePixelRatio || 1,
      {x, y, k} = this.view;
    const w = this.canvas.width / r,
      t = this.canvas.height / r;
    c.setTransform(r, 0, 0, r, 0, 0);
    c.clearRect(0, 0, w, t);
    c.setTransform(r * k, 0, 0, r * k, r * x, r * y);
    const left = -x / k,
      top = -y / k,
      right = (w - x) / k,
      bottom = (t - y) / k;
    const seen = b => b.x < right && b.x + b.w > left && b.y < bottom && b.y + b.h > top;
    for (const l of this.lines) {
      const a = this.boxes[l.a],
        b = this.boxes[l.b];
      if (
        Math.max(a.x + a.w, b.x + b.w) < left ||
        Math.min(a.x, b.x) > right ||
        Math.max(a.y, b.y) + 60 < top ||
        Math.min(a.y, b.y) > bottom
      )
        continue;
      const style = this.hooks.edge(l.all, l === this.over);
      this.path(c, a, b);
      c.strokeStyle = style.colour;
      c.lineWidth = style.width;
      c.globalAlpha = style.alpha;
      c.setLineDash(style.dash || []);
      c.stroke();
      c.setLineDash([]);
      if (k > 0.3) this.arrow(c, b, style.colour, l);
    }
    c.globalAlpha = 1;
    for (const b of this.boxes) if (seen(b)) this.box(c, b, k);
    this.drawn = this.boxes.length;
  }
  ends(a, b) {
    return [a.x + a.w / 2, a.y + a.h, b.x + b.w / 2, b.y];
  }
  path(c, a, b) {
    const [x1, y1, x2, y2] = this.ends(a, b),
      bend = Math.max(18, Math.min(90, Math.abs(y2 - y1) / 2));
    c.beginPath();
    c.moveTo(x1, y1);
    c.bezierCurveTo(x1, y1 + bend, x2, y2 - bend, x2, y2);
  }
  arrow(c, b, fill) {
    const x = b.x + b.w / 2;
    c.fillStyle = fill;
    c.beginPath();
    c.moveTo(x, b.y);
    c.lineTo(x - 4, b.y - 7);
    c.lineTo(x + 4, b.y - 7);
    c.fill();
  }
  box(c, b, k) {
    const single = b.key === null,
      look = single
        ? this.hooks.look(this.items[b.items[0]], b.items[0])
        : this.hooks.module(
            b,
            b.items.map(i => this.items[i]),
          );
    c.globalAlpha = look.alpha ?? 1;
    c.beginPath();
    c.roundRect(b.x, b.y, b.w, b.h, single ? 7 : 11);
    c.fillStyle = look.fill || colour("card");
    c.fill();
    c.save();
    c.clip();
    if (look.heat) {
      c.fillStyle = look.stripe;
      c.globalAlpha = 0.2 * (look.alpha ?? 1);
      c.fillRect(b.x, b.y, b.w * look.heat, b.h);
      c.globalAlpha = look.alpha ?? 1;
    }
    c.fillStyle = look.stripe;
    c.fillRect(b.x, b.y, 6, b.h);
    c.restore();
    c.lineWidth = look.strong ? 2.5 : 1;
    c.strokeStyle = look.strong ? colour("ink") : look.line || colour("rule");
    c.setLineDash(look.dash || []);
    c.beginPath();
    c.roundRect(b.x, b.y, b.w, b.h, single ? 7 : 11);
    c.stroke();
    c.setLineDash([]);
    if (!single) {
      c.beginPath();
      c.roundRect(b.x + 4, b.y + 4, b.w, b.h, 11);
      c.globalAlpha = 0.35;
      c.stroke();
      c.globalAlpha = look.alpha ?? 1;
    }
    if (k < 0.28) return;
    c.textBaseline = "alphabetic";
    c.fillStyle = colour("ink");
    const put = (text, y, font, fill, across = b.w - 24) => {
      c.font = font;
      c.fillStyle = fill;
      c.fillText(clipped(c, text, across), b.x + 15, b.y + y);
    };
    const mid = b.h / 2;
    if (look.second) {
      put(look.first, mid - 3, "600 12.5px " + FONT, colour("ink"));
      put(look.second, mid + 14, "11.5px " + FONT, colour("muted"));
    } else put(look.first, mid + 4, "12.5px " + FONT, colour("ink"));
    c.globalAlpha = 1;
  }
  find(event) {
    const r = this.canvas.getBoundingClientRect(),
      {x, y, k} = this.view;
    const px = (event.clientX - r.left - x) / k,
      py = (event.clientY - r.top - y) / k;
    const box = this.boxes.find(b => px >= b.x && px <= b.x + b.w && py >= b.y && py <= b.y + b.h);
    if (box) return {box};
    const c = this.canvas.getContext("2d");
    c.save();
    c.setTransform(1, 0, 0, 1, 0, 0);
    c.lineWidth = 9 / k;
    const line = this.lines.find(l => {
      this.path(c, this.boxes[l.a], this.boxes[l.b]);
      return c.isPointInStroke(px, py);
    });
    c.restore();
    return {line};
  }
  listen() {
    const c = this.canvas;
    c.addEventListener(
      "wheel",
      e => {
        if (!this.active && !e.ctrlKey) return;
        e.preventDefault();
        const r = c.getBoundingClientRect();
        this.zoom(Math.exp(-e.deltaY * (e.ctrlKey ? 0.01 : 0.0016)), e.clientX - r.left, e.clientY - r.top);
      },
      {passive: false},
    );
    c.addEventListener("focus", () => {
      this.active = true;
      c.classList.add("active");
    });
    c.addEventListener("blur", () => {
      this.active = false;
      c.classList.remove("active");
    });
    c.addEventListener("pointerdown", e => {
      this.pointers.set(e.pointerId, {x: e.clientX, y: e.clientY});
      this.moved = 0;
      c.setPointerCapture(e.pointerId);
    });
    c.addEventListener("pointermove", e => this.move(e));
    for (const end of ["pointerup", "pointercancel"])
      c.addEventListener(end, e => {
        this.pointers.delete(e.pointerId);
        if (end === "pointerup" && this.moved < 6) this.click(e);
      });
    c.addEventListener("pointerleave", () => {
      Tip.hide();
      if (this.over) {
        this.over = null;
        this.paint();
      }
    });
    c.addEventListener("keydown", e => {
      const step = {ArrowLeft: [60, 0], ArrowRight: [-60, 0], ArrowUp: [0, 60], ArrowDown: [0, -60]}[e.key];
      if (step) {
        this.view.x += step[0];
        this.view.y += step[1];
        this.paint();
      } else if (e.key === "+" || e.key === "=") this.zoom(1.4);
      else if (e.key === "-") this.zoom(1 / 1.4);
      else if (e.key === "0") this.fit();
      else return;
      e.preventDefault();
    });
  }
  move(e) {
    const before = this.pointers.get(e.pointerId);
    if (!before) {
      const found = this.find(e);
      this.canvas.style.cursor = found.box || found.line ? "pointer" : "grab";
      if (this.over !== (found.line || null)) {
        this.over = found.line || null;
        this.paint();
      }
      if (found.box)
        this.hooks.tip(
          e,
          found.box.key === null ? this.items[found.box.items[0]] : null,
          found.box,
          found.box.items.map(i => this.items[i]),
        );
      else if (found.line) this.hooks.edgeTip(e, found.line.all);
      else Tip.hide();
      return;
    }
    const others = [...this.pointers].filter(([id]) => id !== e.pointerId).map(([, p]) => p);
    this.moved += Math.abs(e.clientX - before.x) + Math.abs(e.clientY - before.y);
    if (others.length) {
      const o = others[0],
        far = p => Math.hypot(p.x - o.x, p.y - o.y),
        r = this.canvas.getBoundingClientRect();
      this.zoom(
        far({x: e.clientX, y: e.clientY}) / Math.max(far(before), 1),
        (e.clientX + o.x) / 2 - r.left,
        (e.clientY + o.y) / 2 - r.top,
      );
    } else {
      this.view.x += e.clientX - before.x;
      this.view.y += e.clientY - before.y;
      this.paint();
    }
    this.pointers.set(e.pointerId, {x: e.clientX, y: e.clientY});
  }
  click(e) {
    Tip.hide();
    const {box, line} = this.find(e);
    if (box && box.key !== null) {
      this.open.add(box.key);
      this.arrange(true);
    } else if (box) this.hooks.pick(this.items[box.items[0]]);
    else if (line) this.hooks.pickEdge(line.all);
  }
}
// Where a window of width `across` begins that shows the middle of `boxes`, of a graph with `extent` that is wider: it shows nothing beside the graph
// and cuts no box at its left, if there is such a place before the middle box.
function leftmost(boxes, extent, across) {
  const middles = boxes.map(b => b.x + b.w / 2).sort((a, b) => a - b),
    middle = middles[middles.length >> 1],
    wanted = Math.max(extent.x, Math.min(middle - across / 2, extent.x + extent.w - across));
  const near = boxes
    .map(b => b.x)
    .filter(x => x <= middle && x > middle - across)
    .filter(x => !boxes.some(b => b.x < x && b.x + b.w > x))
    .sort((a, b) => Math.abs(a - wanted) - Math.abs(b - wanted));
  return near.length ? near[0] : wanted;
}
const FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif";
const widths = new Map();
function clipped(c, text, across) {
  const key = c.font + text + across;
  let found = widths.get(key);
  if (found === undefined) {
    found = text;
    if (c.measureText(text).width > across) {
      let low = 0,
        high = text.length;
      while (low < high) {
        const m = (low + high + 1) >> 1;
        if (c.measureText(text.slice(0, m) + "…").width <= across) low = m;
        else high = m - 1;
      }
      found = text.slice(0, low) + "…";
    }
    if (widths.size > 50000) widths.clear();
    widths.set(key, found);
  }
  return found;
}
