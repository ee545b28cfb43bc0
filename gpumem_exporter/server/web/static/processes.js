// The processes: one row per process and device. Rows are reused; only changed cells are written.

const FRESH_SECONDS = 5;
const SORT_SECONDS = 5;

const AMOUNTS = [
  ["used_bytes", "Used"],
  ["allocated_bytes", "Allocated"],
  ["idle_cache_bytes", "Idle cache"],
  ["reclaimable_bytes", "Reclaimable"],
  ["fragmented_bytes", "Fragmented"],
  ["non_torch_bytes", "Non-torch"],
];
const NAMES = [
  ["workload", "Workload"],
  ["rank", "Rank"],
  ["gpu", "GPU"],
  ["pid", "Pid"],
  ["user", "User"],
  ["pod", "Pod"],
];
const ORDERS = [...NAMES, ...AMOUNTS, ["last_report_unix_seconds", "Last report"]];
const DESCENDS = new Set([...AMOUNTS.map(([key]) => key), "last_report_unix_seconds"]);

function podOf(row) {
  return row.k8s_pod ? (row.k8s_namespace ? `${row.k8s_namespace}/${row.k8s_pod}` : row.k8s_pod) : "";
}

/** Return the target of a row's job: the processes of its workload and user, because a rank that clears alone makes the others wait. */
function jobTarget({ workload, user, pid }) {
  return workload ? { workload, ...(user && { user }) } : { pid };
}

/** Return the name of a row's job, with its number of ranks. */
function jobName(data, rows) {
  const ofJob = rows.filter((row) => data.workload && row.clears && row.workload === data.workload && row.user === data.user);
  return jobInWords(ofJob) || processName(data.workload, data.rank, data.pid);
}

class ProcessRow {
  constructor(key) {
    this.key = key;
    this.data = null;
    this.shown = true;
    this.sortKey = undefined;
    this.cells = new Map();
    this.element = h("tr", { role: "row" });
    for (const [name, title] of NAMES) {
      this.cell(name, title, name === "workload" ? { role: "rowheader", tag: "th", scope: "row" } : {});
    }
    for (const [name, title] of AMOUNTS) this.cell(name, title, { class: "amount" });
    this.nccl = h("span", { class: "detail" });
    this.cells.get("non_torch_bytes").element.after(this.nccl);
    this.cell("last", "Last report", {});
    const last = h("td", { role: "cell", class: "row-act" });
    this.button = h("button", { type: "button", class: "act small", "aria-describedby": "access" }, "Clear…");
    this.button.addEventListener("click", () => {
      clearing.open(jobTarget(this.data), jobName(this.data, app.view.rows));
    });
    last.append(this.button);
    this.element.append(last);
  }

  cell(name, title, { tag = "td", role = "cell", ...more }) {
    const value = h("span", { class: "value" });
    this.element.append(h(tag, { role, "data-title": title, "data-column": name, ...more }, value));
    this.cells.set(name, new Text(value));
  }

  update(data, nowUnix) {
    const before = this.data;
    this.data = data;
    if (before === null || NAMES.some(([name]) => before[name] !== data[name]) || before.command !== data.command) {
      this.name(data);
    }
    for (const [name] of AMOUNTS) {
      if (before !== null && before[name] === data[name]) continue;
      const cell = this.cells.get(name);
      const unknown = data[name] === null;
      cell.set(unknown ? "–" : bytes(data[name]));
      if (unknown !== (before?.[name] === null)) cell.element.title = unknown ? "unknown" : "";
    }
    this.showNccl(data);
    this.element.toggleAttribute("data-unmapped", data.unmapped_bytes > 0);
    this.cells.get("last").set(unmapped(data) + lastReport(data, nowUnix));
    if (before?.state !== data.state) this.element.dataset.state = data.state;
    if (before?.clears !== data.clears) this.button.hidden = !data.clears;
  }

  /** Show the part of non-torch that NCCL has, if there is one. */
  showNccl({ nccl_bytes: nccl, non_torch_bytes: all }) {
    setText(this.nccl, nccl ? `NCCL ${bytes(nccl)}` : "");
    setAttribute(this.nccl, "title", nccl && all !== null ? `CUDA context and other: ${bytes(all - nccl)}` : "");
  }

  name(data) {
    const text = { ...data, workload: data.workload || data.command || "(unnamed)", gpu: data.gpu ?? "–" };
    for (const [name] of NAMES) this.cells.get(name).set(safe(String(text[name] ?? "")));
    this.cells.get("workload").element.title = data.command ?? "";
    this.button.setAttribute("aria-label", `Clear ${processName(data.workload, null, data.workload ? null : data.pid)}…`);
    const words = [data.workload, data.command, data.user, data.pod, data.pid, `gpu ${data.gpu}`, data.rank && `rank ${data.rank}`];
    this.words = words.filter((word) => word !== null && word !== "").join(" ").toLowerCase();
  }

  /** Show the row if it has all of these words; return whether it has. */
  filter(wanted) {
    const shown = wanted.every((word) => this.words.includes(word));
    if (this.shown !== shown) this.element.hidden = !shown;
    this.shown = shown;
    return shown;
  }
}

function unmapped(data) {
  return data.unmapped_bytes ? `${bytes(data.unmapped_bytes)} unmapped (sleeping), ` : "";
}

function lastReport(data, nowUnix) {
  if (data.state === "unreported") return "no reporter";
  const age = nowUnix - data.last_report_unix_seconds;
  if (data.state === "silent") return `silent for ${duration(age)}`;
  return age < FRESH_SECONDS ? "now" : `${duration(age)} ago`;
}

class Processes {
  constructor() {
    this.rows = new Map();
    this.order = { column: "used_bytes", descending: true };
    this.wanted = [];
    this.updates = 0;
    this.sorted = -Infinity;
    this.headings = new Map();
    for (const [column, title] of ORDERS) this.heading(column, title);
    $("head").append(h("th", { role: "columnheader", scope: "col" }, h("span", { class: "unseen" }, "Clear")));
    $("filter").addEventListener("input", () => {
      this.wanted = $("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
      this.show();
    });
  }

  heading(column, title) {
    const button = h("button", { type: "button" }, title);
    const heading = h("th", { role: "columnheader", scope: "col", class: DESCENDS.has(column) && column.endsWith("_bytes") ? "amount" : null }, button);
    button.addEventListener("click", () => {
      const { column: before, descending } = this.order;
      this.order = { column, descending: before === column ? !descending : DESCENDS.has(column) };
      this.sort(true);
    });
    this.headings.set(column, heading);
    $("head").append(heading);
  }

  update(view) {
    this.updates += 1;
    let added = false;
    for (const data of view.rows) {
      const key = `${data.pid} ${data.uuid}`;
      let row = this.rows.get(key);
      if (row === undefined) {
        row = new ProcessRow(key);
        this.rows.set(key, row);
        added = true;
      }
      row.updates = this.updates;
      row.update(data, view.moment.unix_seconds);
    }
    for (const [key, row] of this.rows) {
      if (row.updates === this.updates) continue;
      row.element.remove();
      this.rows.delete(key);
    }
    this.sort(added);
    this.show();
  }

  /** Rows stay in place for some seconds, and while they have the pointer or the focus, unless they must move. */
  sort(must) {
    for (const [column, heading] of this.headings) {
      const sorted = column === this.order.column ? (this.order.descending ? "descending" : "ascending") : "none";
      setAttribute(heading, "aria-sort", sorted);
    }
    const body = $("rows");
    const now = performance.now() / 1000;
    const inUse = () => body.contains(document.activeElement) || body.matches(":hover");
    if (!must && (now - this.sorted < SORT_SECONDS || inUse())) return;
    this.sorted = now;
    const { column, descending } = this.order;
    let moved = must;
    for (const row of this.rows.values()) {
      const sortKey = sortable(column, row.data[column]);
      if (row.sortKey !== sortKey) moved = true;
      row.sortKey = sortKey;
    }
    if (!moved) return;
    const rows = [...this.rows.values()].sort((a, b) => compare(a, b, descending));
    arrange(body, rows.map((row) => row.element));
  }

  show() {
    let shown = 0;
    for (const row of this.rows.values()) {
      if (row.filter(this.wanted)) shown += 1;
    }
    const all = this.rows.size;
    setText($("count"), this.wanted.length > 0 ? `${shown} of ${all} rows` : `${all} rows`);
    setText($("no-processes"), all === 0 ? "No process is known." : "No process matches the filter.");
    setHidden($("no-processes"), shown > 0);
    setHidden($("table"), all === 0);
  }
}

/** Return a value as precise as the shown text, so that no row moves for an invisible difference. */
function sortable(column, value) {
  return column.endsWith("_bytes") && value !== null ? roundedBytes(value) : (value ?? "");
}

/** Unknown values come last in both orders. */
function compare(a, b, descending) {
  const x = a.sortKey;
  const y = b.sortKey;
  if (x !== y) {
    if (x === "") return 1;
    if (y === "") return -1;
    const number = typeof x === "number" && typeof y === "number";
    const order = number ? x - y : COLLATOR.compare(String(x), String(y));
    if (order !== 0) return descending ? -order : order;
  }
  return a.key < b.key ? -1 : 1;
}

const COLLATOR = new Intl.Collator("en", { numeric: true });
