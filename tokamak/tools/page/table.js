// A table that sorts by any column and holds any number of rows: only those in sight are elements.

function table({columns, rows, sort, descending = true, height = 38, shown = 12, filter, pick, picked, label}) {
  let order = rows.slice(),
    by = sort,
    down = descending,
    words = "";
  const grid = columns.map(c => c.width || "minmax(70px, 1fr)").join(" ");
  const least = sum(columns, c => c.least || 76);
  const head = h("div", {class: "tr th", role: "row", style: {"grid-template-columns": grid}});
  const space = h("div", {class: "tspace"});
  const body = h("div", {class: "tbody", tabindex: 0, role: "rowgroup", onscroll: draw, onkeydown: keys}, space);
  const inner = h("div", {class: "tinner", role: "table", "aria-label": label || "", style: {"min-width": least + "px"}}, head, body);
  const note = h("span", {class: "muted"});
  const search =
    filter &&
    h("input", {
      class: "search",
      type: "search",
      placeholder: "filter: name, module, line, class …",
      "aria-label": "filter",
      oninput: e => {
        words = e.target.value.toLowerCase();
        arrange();
      },
    });
  const root = h("div", {class: "table"}, filter && h("div", {class: "bar"}, search, note), h("div", {class: "tscroll"}, inner));

  for (const c of columns) {
    head.append(
      h(
        "button",
        {
          class: "cell " + (c.number ? "num" : ""),
          role: "columnheader",
          title: c.title || "",
          onclick: () => {
            if (by === c.key) down = !down;
            else {
              by = c.key;
              down = !!c.number;
            }
            arrange();
          },
        },
        c.name,
      ),
    );
  }

  function arrange() {
    const c = columns.find(c => c.key === by),
      value = c.value;
    order = words ? rows.filter(r => words.split(/\s+/).every(w => filter(r).includes(w))) : rows.slice();
    order.sort((a, b) => {
      const x = value(a),
        y = value(b);
      return (x < y ? -1 : x > y ? 1 : 0) * (down ? -1 : 1);
    });
    [...head.children].forEach((e, i) => {
      e.classList.toggle("sorted", columns[i].key === by);
      e.setAttribute("aria-sort", columns[i].key === by ? (down ? "descending" : "ascending") : "none");
      e.dataset.arrow = columns[i].key === by ? (down ? "↓" : "↑") : "";
    });
    note.textContent =
      order.length === rows.length ? plural(rows.length, "row") : `${order.length.toLocaleString("en")} of ${plural(rows.length, "row")}`;
    space.style.height = order.length * height + "px";
    body.style.height = Math.min(shown, Math.max(order.length, 1)) * height + "px";
    body.scrollTop = 0;
    draw();
  }
  function draw() {
    const first = Math.max(0, Math.floor(body.scrollTop / height) - 4),
      last = Math.min(order.length, first + shown + 10);
    space.replaceChildren(
      ...order.slice(first, last).map((r, i) =>
        h(
          "div",
          {
            class: "tr row" + (picked && picked(r) ? " picked" : "") + (pick ? " can" : ""),
            role: "row",
            style: {"grid-template-columns": grid, top: (first + i) * height + "px", height: height + "px"},
            onclick: pick && (() => pick(r)),
          },
          columns.map(c =>
            h("div", {class: "cell " + (c.number ? "num " : "") + (c.class || ""), role: "cell"}, c.cell ? c.cell(r) : c.value(r)),
          ),
        ),
      ),
    );
  }
  function keys(e) {
    if (!pick || !["ArrowDown", "ArrowUp"].includes(e.key)) return;
    e.preventDefault();
    const i = order.findIndex(r => picked && picked(r)),
      next = Math.max(0, Math.min(order.length - 1, i + (e.key === "ArrowDown" ? 1 : -1)));
    pick(order[next]);
    if (next * height < body.scrollTop) body.scrollTop = next * height;
    if ((next + 1) * height > body.scrollTop + body.clientHeight) body.scrollTop = (next + 1) * height - body.clientHeight;
  }
  arrange();
  return {root, redraw: draw};
}
