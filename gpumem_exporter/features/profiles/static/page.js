// Draws the page from the JSON of a profile, of each of its moments, or of a difference: head, tables and flame graph
// (d3-flame-graph). Names come from another user's process: they are only ever inserted as text.
"use strict";
(() => {
  const $ = (id) => document.getElementById(id);
  const { words, documents } = JSON.parse($("data").textContent);
  const graph = $("graph");
  const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
  const CAUSES = { action: "requested", out_of_memory: "out-of-memory error" };
  const UNKNOWN = "-";
  const NUMBERS = new Intl.NumberFormat("en");
  // Control characters, and those that reverse the direction of the text that follows.
  const UNSAFE = /[\p{Cc}\p{Zl}\p{Zp}\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]/gu;
  // A path with more names is one name.
  const MOST_NAMES = 64;
  // The rows of a table. The flame graph has the others.
  const MOST_ROWS = 15;
  // The end of a path in which torch's folder is searched.
  const MOST_SEARCHED = 512;
  const TORCH = new RegExp(words.torch);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const differs = "before" in documents[0];
  // What the buttons of the page show: a document, and the bytes of a row or a group of it.
  const VIEWS = differs
    ? [
        { label: "What grew", data: documents[0], sizeOf: (row) => row.change_bytes },
        { label: "What shrank", data: documents[0], sizeOf: (row) => -row.change_bytes },
        { label: "Everything afterwards", data: documents[0], sizeOf: (row) => row.after_bytes },
      ]
    : documents.map((data) => ({ label: data.moment === "peak" ? "At the highest moment" : "At the end", data, sizeOf: (row) => row.bytes }));
  let view = VIEWS[0];
  // Rows share their frames: a number stands for a frame of an earlier stack.
  for (const { rows } of documents) {
    const frames = [];
    for (const row of rows) row.stack = row.stack.map((frame) => (typeof frame === "number" ? frames[frame] : frames[frames.push(frame) - 1]));
  }
  let current = null; // the node of the keyboard
  let chart = null;
  let tree = null;
  let root = null; // the node of the tree

  const clean = (text) => String(text).replace(UNSAFE, "\ufffd");

  function bytes(value) {
    if (value === null) return UNKNOWN;
    let amount = Math.abs(value);
    let unit = 0;
    while (unit < UNITS.length - 1 && Math.round(amount) >= 1024) {
      amount /= 1024;
      unit += 1;
    }
    return `${value < 0 ? "−" : ""}${amount.toFixed(unit === 0 || amount >= 99.95 ? 0 : 1)} ${UNITS[unit]}`;
  }

  const growth = (value) => `${value > 0 ? "+" : ""}${bytes(value)}`;
  const share = (part, all) => (part / all >= 0.005 ? `${((100 * part) / all).toFixed(0)} %` : "< 1 %");
  const kindNames = new Map(Object.entries(words.kinds));
  const kindOf = (kind) => kindNames.get(kind ?? "unseen") ?? kind;
  const sum = (groups, name) => groups.reduce((all, group) => all + group[name], 0);
  const time = ({ unix_seconds: seconds }) => `${new Date(1000 * seconds).toISOString().slice(0, 19).replace("T", " ")} UTC`;

  function duration(seconds) {
    if (seconds < 0.1) return `${(1000 * seconds).toFixed(1)} ms`;
    if (seconds < 120) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
    return seconds < 7200 ? `${(seconds / 60).toFixed(0)} min` : `${(seconds / 3600).toFixed(0)} h`;
  }

  /** Return an element; texts among its children and in its attributes come from anywhere. */
  function make(name, attributes, ...children) {
    const element = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) if (value) element.setAttribute(key, clean(value));
    element.append(...children.map((child) => (child instanceof Node ? child : clean(child))));
    return element;
  }

  function head() {
    const data = documents[0];
    const stored = differs ? data.after : data;
    const name = `${stored.workload || `pid ${stored.pid}`}${stored.rank ? ` rank ${stored.rank}` : ""}`;
    $("title").textContent = document.title = clean(`${differs ? "What changed in the memory" : "Memory"} of ${name}`);
    $("facts").replaceChildren(...(differs ? factsOfDifference(data) : [factsOfProfile(data)]).map((fact) => make("p", {}, fact)));
    $("notes").replaceChildren(...data.notes.map((note) => make("li", {}, note)));
    $("notes").hidden = data.notes.length === 0;
    if (!differs) $("devices").replaceChildren(devices(data));
    const buttons = VIEWS.map(({ label }) => make("button", { type: "button" }, label));
    $("views").replaceChildren(...buttons);
    $("views").hidden = buttons.length === 1;
  }

  function factsOfProfile(data) {
    const { pid, cause, recorded_seconds: recorded, step, pause_seconds: pause } = data;
    const facts = [`pid ${pid}`, time(data), CAUSES[cause] ?? cause, recorded ? `recorded for ${duration(recorded)}` : "without a recording"];
    if (step !== null) facts.push(`step ${step}`);
    if (pause) facts.push(`the process stood still for ${duration(pause)}`);
    return facts.join(" · ");
  }

  function factsOfDifference(data) {
    const [before, after] = [sum(data.kinds, "before_bytes"), sum(data.kinds, "after_bytes")];
    return [
      `Before: ${bytes(before)}, ${time(data.before)}, pid ${data.before.pid}`,
      `After: ${bytes(after)}, ${time(data.after)}, pid ${data.after.pid}`,
      `Change: ${growth(after - before)}${data.moment === "peak" ? ", at the highest moments" : ""}`,
    ];
  }

  /** Return a table. A cell is a text, an element, or a text with its class and title. */
  function table(heading, columns, rows, more = "") {
    const cells = rows.map((row) => row.map((cell) => (typeof cell === "string" || cell instanceof Node ? { text: cell } : cell)));
    const titles = columns.map((column, i) => make("th", { scope: "col", class: cells[0]?.[i].class }, column));
    const lines = cells.map((row) => make("tr", {}, ...row.map(({ text, ...attributes }) => make("td", attributes, text))));
    const whole = make("table", {}, make("thead", {}, make("tr", {}, ...titles)), make("tbody", {}, ...lines));
    const rest = more ? [make("p", { class: "faint" }, more)] : [];
    return make("section", {}, make("h2", {}, heading), make("div", { class: "scroll" }, whole), ...rest);
  }

  const number = (text, title = "") => ({ text, title, class: "number" });
  const size = (value) => number(bytes(value), value === null ? "" : `${NUMBERS.format(value)} bytes`);

  const nameOf = ({ gpu, uuid }) => (gpu === null ? uuid : `GPU ${gpu}`);

  function devices(data) {
    const columns = ["Device", "Allocated", "Highest", "Reserved", "Fragmented", "Segments", "Parts of reserved"];
    const rows = data.devices.map((device) => [
      nameOf(device),
      ...["allocated", "peak", "reserved", "fragmented"].map((name) => size(device[`${name}_bytes`])),
      number(device.segments === null ? UNKNOWN : NUMBERS.format(device.segments)),
      bar(device),
    ]);
    return table("Devices", columns, rows);
  }

  /** Return the reserved memory of a device as a bar: allocated, fragmented, and the rest. */
  function bar({ reserved_bytes: reserved, allocated_bytes: allocated, fragmented_bytes: fragmented }) {
    if (!reserved) return "";
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    svg.setAttribute("class", "bar");
    let left = 0;
    for (const [name, value] of [["allocated", allocated], ["fragmented", fragmented ?? 0]]) {
      const part = document.createElementNS(svg.namespaceURI, "rect");
      const width = (100 * value) / reserved;
      for (const [key, of] of [["class", name], ["x", `${left}%`], ["width", `${width}%`], ["height", "100%"]]) part.setAttribute(key, of);
      svg.append(part);
      left += width;
    }
    return { text: svg, title: "reserved: allocated, fragmented, other" };
  }

  /** Draw the tables of the view: the kinds of owners, the largest owners and the largest lines of code. */
  function drawTables() {
    const { kinds, owners, lines, more_lines: moreLines, all_owners: allOwners, all_lines: allLines } = view.data;
    const all = sum(kinds, differs ? "after_bytes" : "bytes");
    const sizes = differs ? ["Before", "After", "Change"] : ["Bytes", "Share", "Blocks"];
    const numbers = (group) =>
      differs
        ? [size(group.before_bytes), size(group.after_bytes), number(growth(group.change_bytes), `${NUMBERS.format(group.change_bytes)} bytes`)]
        : [size(group.bytes), number(share(group.bytes, all)), number(NUMBERS.format(group.blocks))];
    const line = (group) => ({ text: group.line ?? UNKNOWN, title: group.file ?? "" });
    const owner = (group) => group.owner ?? (group.kind || !group.line ? kindOf(group.kind) : `allocated by ${group.line}`);
    const shape = (group) => `${group.dtype ?? ""} ${group.shape ?? ""}`.trim();
    const parts = [kindsOf(kinds, all)];
    const changes = differs && view !== VIEWS[2];
    const [shownOwners, hiddenOwners] = largest(owners, allOwners);
    const [shownLines, hiddenLines] = largest(lines, allLines);
    if (shownOwners.length > 0) {
      const rows = shownOwners.map((group) => [owner(group), ...numbers(group), kindOf(group.kind), shape(group), line(group)]);
      const heading = changes ? "Owners that changed the most" : "Largest owners";
      parts.push(table(heading, ["Owner", ...sizes, "Kind", "Shape", "Allocated by"], rows, hiddenOwners));
    }
    if (shownLines.length > 0) {
      const rows = shownLines.map((group) => [line(group), ...numbers(group), group.called_from ?? UNKNOWN, group.kind ? owner(group) : UNKNOWN]);
      const heading = changes ? "Lines that changed the most" : "Lines that allocated the most";
      parts.push(table(heading, ["Line", ...sizes, "Called from", "Mostly for"], rows, hiddenLines));
      const without = all - sum(lines, "bytes") - moreLines.bytes;
      if (!differs && without > 0) parts.at(-1).append(make("p", { class: "faint" }, `${bytes(without)} were allocated while no lines were recorded.`));
    }
    $("tables").replaceChildren(...(shownOwners.length > 0 ? parts : [make("section", {}, "Nothing.")]));
  }

  /** Return the groups that a table shows, and a text about the others. `all` has the sums of each view. */
  function largest(groups, all) {
    const sized = groups.filter((group) => view.sizeOf(group) > 0);
    const shown = sized.sort((a, b) => view.sizeOf(b) - view.sizeOf(a)).slice(0, MOST_ROWS);
    const { count, bytes: size } = all[differs ? VIEWS.indexOf(view) : 0];
    const rest = size - shown.reduce((sum, group) => sum + view.sizeOf(group), 0);
    return [shown, count > shown.length ? `${NUMBERS.format(count - shown.length)} more: ${bytes(rest)}` : ""];
  }

  /** Return the sums of the kinds of owners. */
  function kindsOf(kinds, all) {
    const shown = kinds.filter((kind) => view.sizeOf(kind) > 0).sort((a, b) => view.sizeOf(b) - view.sizeOf(a));
    const items = shown.map((kind) => {
      const texts = differs ? [growth(kind.change_bytes)] : [`${bytes(kind.bytes)} `, make("small", {}, share(kind.bytes, all))];
      return make("div", {}, make("dt", {}, kindOf(kind.kind)), make("dd", {}, ...texts));
    });
    return make("section", {}, make("h2", {}, "What the memory is"), make("dl", { class: "kinds" }, ...items));
  }

  /** Return the names of a row, from the device to the innermost frame or the owner. */
  function pathOf(row, grouping) {
    const owners = row.kind === null ? [] : ownerOf(row);
    const frames = row.stack.map(frameOf).reverse();
    const byStack = grouping === "stack" && frames.length > 0;
    if (!byStack && owners.length === 0) owners.push(named(kindOf("unseen"), "owner"));
    // Behind a stack, the full name of the owner.
    const path = byStack ? [...frames, ...owners.slice(-1).map((each) => ({ ...each, label: each.name }))] : [...owners, ...frames];
    const { devices } = view.data;
    return devices.length > 1 ? [named(nameOf(devices.find(({ uuid }) => uuid === row.uuid)), "device"), ...path] : path;
  }

  /** Return what a bar shows: a name, of which the bar itself may show only a part, and more text. */
  const named = (name, kind, place = "", label = name) => ({ name, kind, place, label });

  function frameOf([name, place]) {
    return named(name, TORCH.test(place.slice(-MOST_SEARCHED)) ? "torch" : "user", place);
  }

  /** Return the names of an owner: `model`, `model.layers`, and so on; the bar of a module shows the end of its path. */
  function ownerOf({ kind, owner, dtype, shape }) {
    const found = [named(kindOf(kind), "owner")];
    let path = "";
    if (words.path_kinds.includes(kind) && owner) {
      const at = owner.lastIndexOf(" "); // `Adam.exp_avg model.layers.0.weight`
      if (at > 0) found.push(named(owner.slice(0, at), "owner"));
      path = owner.slice(at + 1);
    } else if (owner) found.push(named(owner, "owner"));
    const ends = path.split(".");
    let length = 0;
    if (ends.length > MOST_NAMES) found.push(named(path, "owner"));
    else if (path) for (const end of ends) found.push(named(path.slice(0, (length += end.length + 1) - 1), "owner", "", end));
    found.at(-1).place = `${dtype ?? ""} ${shape ?? ""}`.trim();
    return found;
  }

  function treeOf(rows, grouping) {
    const root = nodeOf(named("everything", "root"));
    for (const row of rows) {
      if (view.sizeOf(row) <= 0) continue;
      let node = root;
      add(node, row);
      for (const each of pathOf(row, grouping)) {
        const key = `${each.label}\n${each.place}\n${each.kind}`;
        let child = node.byKey.get(key);
        if (child === undefined) {
          child = nodeOf(each);
          node.byKey.set(key, child);
          node.children.push(child);
        }
        node = child;
        add(node, row);
      }
    }
    return root;
  }

  function nodeOf({ name, kind, place, label }) {
    return { name: clean(name), label: clean(label), place: clean(place), kind, value: 0, blocks: 0, change: 0, children: [], byKey: new Map() };
  }

  function add(node, row) {
    node.value += view.sizeOf(row);
    node.blocks += row.blocks ?? 0;
    node.change += row.change_bytes ?? 0;
  }

  /** Owners and files have colors of their own, torch is pale; a difference shows growth in red and shrinkage in blue. */
  function colorOf({ data: node, highlight }) {
    if (highlight) return dark.matches ? "#d9b02e" : "#ffd94d";
    if (differs) {
      const share = Math.min(1, Math.abs(node.change) / Math.max(node.value, 1));
      return d3.interpolateRgb(dark.matches ? "#3a424d" : "#e3e6ea", node.change > 0 ? "#e0574b" : "#4a90d0")(share);
    }
    if (node.kind === "root" || node.kind === "device") return dark.matches ? "#3a424d" : "#d5dae1";
    if (node.kind === "torch") return dark.matches ? "#343b45" : "#e6e9ee";
    let hash = 0;
    for (const character of node.place.replace(/:\d+$/, "")) hash = (hash * 31 + character.charCodeAt(0)) >>> 0;
    const hue = node.kind === "owner" ? 205 : 15 + (hash % 40);
    return dark.matches ? `hsl(${hue} 45% 36%)` : `hsl(${hue} 65% 80%)`;
  }

  function describe({ data: node }) {
    const share = tree.value > 0 ? `${((100 * node.value) / tree.value).toFixed(1)} %` : "";
    const change = differs ? `, ${growth(node.change)}` : `, ${NUMBERS.format(node.blocks)} ${node.blocks === 1 ? "block" : "blocks"}`;
    return `${bytes(node.value)}, ${share}${change}: ${node.name}${node.place ? ` (${node.place})` : ""}`;
  }

  function show(node) {
    $("details").textContent = describe(node);
  }

  /** Draw the frame of the keyboard's node; an update may have replaced its element. */
  function mark() {
    for (const frame of graph.querySelectorAll("g.frame")) frame.classList.toggle("current", frame.__data__ === current);
    graph.querySelector("g.current")?.scrollIntoView({ block: "nearest" });
  }

  function draw() {
    const { rows } = view.data;
    tree = treeOf(rows, $("grouping").value);
    const merged = rows.some(({ kind }) => kind === "merged");
    $("merged").textContent = merged ? `The smallest rows are merged into “${kindOf("merged")}”.` : "";
    graph.replaceChildren();
    $("details").textContent = `${bytes(tree.value)} in all. Point at a bar to see what it is.`;
    current = null;
    chart = flamegraph
      .default()
      .width(graph.clientWidth)
      .cellHeight(20)
      .inverted(true)
      .minFrameSize(2)
      .transitionDuration(0)
      .resetHeightOnZoom(true)
      .sort((a, b) => b.data.value - a.data.value)
      .getName((node) => node.data.label)
      .setLabelHandler(describe)
      .setColorMapper(colorOf)
      .setDetailsHandler(() => {})
      .onHover(show)
      .onClick((node) => {
        current = node;
        show(node);
        mark();
      });
    d3.select(graph).datum(tree).call(chart);
    root = d3.select(graph).datum();
    search();
  }

  function select(index) {
    view = VIEWS[index];
    [...$("views").children].forEach((button, i) => button.setAttribute("aria-pressed", i === index));
    drawTables();
    draw();
  }

  function search() {
    const term = $("search").value.trim().toLowerCase();
    let sum = 0;
    const visit = (node, inside) => {
      const { name, place } = node.data;
      node.highlight = term !== "" && (name.toLowerCase().includes(term) || place.toLowerCase().includes(term));
      if (node.highlight && !inside) sum += node.data.value;
      for (const child of node.children ?? []) visit(child, inside || node.highlight);
    };
    visit(root, false);
    $("found").textContent = term === "" ? "" : `${bytes(sum)}, ${tree.value > 0 ? ((100 * sum) / tree.value).toFixed(1) : 0} %`;
    chart.update();
    mark();
  }

  /** Return the neighbor of a node in a direction, among the nodes that are drawn. */
  function neighbor(node, key) {
    const drawn = (each) => each && each.x1 > each.x0 && !each.data.hide;
    if (key === "ArrowUp") return node.parent;
    if (key === "ArrowDown") return (node.children ?? []).find(drawn);
    const siblings = (node.parent?.children ?? []).filter(drawn);
    return siblings[siblings.indexOf(node) + (key === "ArrowRight" ? 1 : -1)];
  }

  graph.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key.startsWith("Arrow")) {
      current = current === null ? root : (neighbor(current, event.key) ?? current);
      show(current);
      mark();
    } else if (event.key === "Enter" && current) {
      chart.zoomTo(current);
    } else if (event.key === "Escape") {
      chart.resetZoom();
    } else return;
    event.preventDefault();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "/" || event.target.closest("input, select")) return;
    event.preventDefault();
    $("search").focus();
  });
  $("search").addEventListener("input", search);
  $("grouping").addEventListener("change", draw);
  $("reset").addEventListener("click", () => chart.resetZoom());
  $("views").addEventListener("click", ({ target }) => {
    const index = [...$("views").children].indexOf(target);
    if (index >= 0) select(index);
  });
  let width = graph.clientWidth;
  new ResizeObserver(() => {
    if (graph.clientWidth === width) return;
    width = graph.clientWidth;
    draw();
  }).observe(graph);
  dark.addEventListener("change", () => chart.update());
  if (documents.every(({ rows }) => rows.every(({ stack }) => stack.length === 0))) $("grouping").value = "owner";
  head();
  select(0);
})();
