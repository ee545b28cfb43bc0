// The views of the page and the flame graph. d3-flame-graph draws it; names are only ever inserted as text.
"use strict";
(() => {
  const $ = (id) => document.getElementById(id);
  const data = JSON.parse($("data").textContent);
  const graph = $("graph");
  const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  const NUMBERS = new Intl.NumberFormat("en");
  // Control characters, and those that reverse the direction of the text that follows.
  const UNSAFE = /[\p{Cc}\p{Zl}\p{Zp}\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]/gu;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const differs = "grew" in data.views;
  let view = Object.keys(data.views)[0];
  let current = null; // the node of the keyboard
  let chart = null;
  let tree = null;
  let root = null; // the node of the tree

  function bytes(value) {
    let amount = Math.abs(value);
    let unit = 0;
    while (unit < UNITS.length - 1 && Math.round(amount) >= 1024) {
      amount /= 1024;
      unit += 1;
    }
    return `${value < 0 ? "−" : ""}${amount.toFixed(unit === 0 || amount >= 99.95 ? 0 : 1)} ${UNITS[unit]}`;
  }

  const growth = (value) => `${value > 0 ? "+" : ""}${bytes(value)}`;

  /** Return the names from the device to the innermost frame or the owner: text, file and line, class. */
  function pathOf([device, stack, owner], grouping) {
    const [names, more] = owner < 0 ? [[], ""] : [data.owners[owner].slice(0, -1), data.owners[owner].at(-1)];
    const ofOwner = names.map((name, i) => ({ name, place: i === names.length - 1 ? more : "", kind: "owner" }));
    const frames = stack < 0 ? [] : data.stacks[stack].map((frame) => frameOf(data.frames[frame])).reverse();
    const byStack = grouping === "stack" && frames.length > 0;
    if (!byStack && owner < 0) ofOwner.push({ name: data.no_owner, place: "", kind: "owner" });
    const path = byStack ? [...frames, ...ofOwner.slice(-1)] : [...ofOwner, ...frames];
    return data.devices.length > 1 ? [{ name: data.devices[device], place: "", kind: "device" }, ...path] : path;
  }

  function frameOf([name, file, line, torch]) {
    return { name, place: line ? `${file}:${line}` : file, kind: torch ? "torch" : "user" };
  }

  function treeOf(rows, grouping) {
    const root = nodeOf({ name: "everything", place: "", kind: "root" });
    for (const row of rows) {
      let node = root;
      add(node, row);
      for (const each of pathOf(row, grouping)) {
        const key = `${each.name}\n${each.place}\n${each.kind}`;
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

  function nodeOf({ name, place, kind }) {
    return { name: name.replace(UNSAFE, "\ufffd"), place: place.replace(UNSAFE, "\ufffd"), kind, value: 0, blocks: 0, change: 0, children: [], byKey: new Map() };
  }

  function add(node, [, , , size, blocks, change]) {
    node.value += size;
    node.blocks += blocks;
    node.change += change;
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

  /** Return the text on a bar: of a module only the last part of its path, as the bar above has the rest. */
  function labelOf({ data: { name, kind }, parent }) {
    return kind === "owner" && name.startsWith(`${parent.data.name}.`) ? name.slice(parent.data.name.length + 1) : name;
  }

  function draw() {
    tree = treeOf(data.views[view], $("grouping").value);
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
      .getName(labelOf)
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
  $("views")?.addEventListener("click", ({ target }) => {
    if (!target.value) return;
    view = target.value;
    for (const button of $("views").children) button.setAttribute("aria-pressed", button === target);
    for (const tables of document.querySelectorAll("div[data-view]")) tables.hidden = tables.dataset.view !== view;
    draw();
  });
  let width = graph.clientWidth;
  new ResizeObserver(() => {
    if (graph.clientWidth === width) return;
    width = graph.clientWidth;
    draw();
  }).observe(graph);
  dark.addEventListener("change", () => chart.update());
  if (data.stacks.length === 0) $("grouping").value = "owner";
  draw();
})();
