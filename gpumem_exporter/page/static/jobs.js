// The jobs, one row each; the ranks of a job on demand. Rows are reused, and only changed cells are written.

import { clearButton } from "./actions.js";
import { $, arrange, h, isInUse, refill, setAttribute, setHidden, setText, Views } from "./dom.js";
import { bytes, count, dayAndTime, duration, failsIn, gpuList, integer, processName, safe, UNKNOWN } from "./format.js";
import { hueOf } from "./hues.js";
import { go, jobHref, onRoute, param } from "./route.js";

const SORT_SECONDS = 60; // without a click, rows move at most once a minute
const ENDED_SECONDS = 60; // a job that starts meanwhile has its place
const COLUMNS = [
  ["job", "name"],
  ["devices", "gpus"],
  ["state", "state"],
  ["used", "used_bytes"],
  ["allocated", "allocated_bytes"],
  ["idle_cache", "idle_cache_bytes"],
  ["growth", "growth_bytes_per_hour"],
  ["since", "since_unix_seconds"],
];
const SIZES = ["used", "allocated", "idle_cache"];
const RIGHT = new Set([...SIZES, "growth", "since"]);
const RANK_LIMIT = 64;
const COLLATOR = new Intl.Collator("en", { numeric: true });

/** Return for how long a job has done nothing; null if it is not inactive. */
export function inactivity({ inactive_since_unix_seconds: since }, now) {
  return since === null ? null : `inactive ${duration(now - since)}`;
}

/** `≥ 1.5 GiB` if a sum lacks the part of a process. */
export function sumOf(job, key) {
  const name = `${key}_bytes`;
  return `${job[name] !== null && job.incomplete?.includes(name) ? "≥ " : ""}${bytes(job[name])}`;
}

function timeOrDash(unixSeconds) {
  return unixSeconds === null || unixSeconds === undefined ? UNKNOWN : dayAndTime(unixSeconds, false);
}

class JobRow {
  constructor() {
    this.cells = Object.fromEntries(COLUMNS.map(([key]) => [key, h("td", { role: "cell", "data-column": key, class: RIGHT.has(key) ? "number" : null })]));
    this.fold = h("button", { type: "button", class: "fold", "aria-expanded": "false" });
    this.fold.addEventListener("click", () => this.toggle());
    this.link = h("a", { class: "name" });
    this.owner = h("span", { class: "owner faint" });
    this.name = h("th", { role: "rowheader", scope: "row", "data-column": "job" }, h("div", {}, this.link, this.owner, this.fold));
    this.clear = clearButton(() => this.job, "Clear…");
    const { job: _, ...cells } = this.cells;
    this.row = h("tr", { role: "row", class: "job" }, this.name, ...Object.values(cells), h("td", { role: "cell", "data-column": "clear" }, this.clear));
    this.element = h("tbody", { role: "rowgroup" }, this.row);
    this.ranks = new Views(() => new RankRow());
    this.open = false;
    this.endedAt = null;
  }

  get ended() {
    return this.endedAt !== null;
  }

  toggle() {
    this.open = !this.open;
    setAttribute(this.fold, "aria-expanded", this.open);
    this.showRanks();
  }

  update(job) {
    this.job = job;
    this.endedAt = null;
    setAttribute(this.element, "data-ended", null);
    setText(this.link, safe(job.name));
    setAttribute(this.link, "href", jobHref(job.id));
    setAttribute(this.link, "data-hue", hueOf(job.id));
    setAttribute(this.link, "title", job.command === null ? null : safe(job.command));
    setText(this.owner, [job.owner, job.engine?.label].filter(Boolean).map(safe).join(" · "));
    const { devices, state, growth, since } = this.cells;
    setText(devices, gpuList(job.gpus));
    const more = job.step ? `, step ${integer(job.step)}` : job.state === "sleeping" && job.unmapped_bytes ? ` (${bytes(job.unmapped_bytes)})` : "";
    setText(state, inactivity(job, now) ?? job.state + more);
    setAttribute(state, "title", job.state === "sleeping" ? latest.words.unmapped?.help : null);
    setAttribute(state, "data-state", job.state);
    for (const key of SIZES) setText(this.cells[key], sumOf(job, key));
    setText(growth, job.growth_bytes_per_hour === null ? "" : `+${bytes(job.growth_bytes_per_hour)}/h`);
    setAttribute(growth, "data-fails", job.full_in_seconds !== null);
    setAttribute(growth, "title", job.full_in_seconds === null ? null : failsIn(job.full_in_seconds));
    setText(since, timeOrDash(job.since_unix_seconds));
    setText(this.fold, count(job.process_count, job.ranks.length > 0 ? "rank" : "process", job.ranks.length > 0 ? "ranks" : "processes"));
    setAttribute(this.fold, "aria-label", `${safe(job.name)}: ${this.fold.textContent}`);
    setHidden(this.fold, job.process_count < 2 && !this.open);
    setHidden(this.clear, job.clear === null);
    setAttribute(this.clear, "aria-label", `Clear ${safe(job.name)}…`);
    this.showRanks();
  }

  /** Keep the place of a job that has ended for some time, so that no row below it moves. */
  end() {
    this.endedAt = performance.now() / 1000;
    setAttribute(this.element, "data-ended", true);
    setText(this.cells.state, "ended");
    setAttribute(this.cells.state, "data-state", "ended");
    setHidden(this.clear, true);
  }

  showRanks() {
    if (!this.open && this.element.children.length === 1) return;
    const shown = this.open ? this.job.processes.slice(0, RANK_LIMIT) : [];
    const rows = this.ranks.update(shown.flatMap((process) => process.devices.map((device) => ({ process, device }))), ({ process, device }) => `${process.pid} ${device.uuid}`);
    const left = this.open ? this.job.processes.length - shown.length : 0;
    this.more ??= h("tr", { role: "row", class: "rank" }, h("td", { role: "cell", colspan: COLUMNS.length + 1 }, h("a", {})));
    setText(this.more.querySelector("a"), `${left} more on the job's page`);
    setAttribute(this.more.querySelector("a"), "href", jobHref(this.job.id));
    arrange(this.element, [this.row, ...rows.map(({ element }) => element), ...(left > 0 ? [this.more] : [])]);
  }

  /** The text that the filter searches. */
  get words() {
    const { job } = this;
    const of = job.processes.flatMap(({ pid, rank }) => [pid, rank && `rank ${rank}`]);
    return [job.name, job.command, job.owner, job.engine?.label ?? null, job.state, ...job.gpus.map((gpu) => `gpu ${gpu}`), ...of].filter((word) => word !== null && word !== "").join(" ").toLowerCase();
  }
}

class RankRow {
  constructor() {
    this.cells = Object.fromEntries(COLUMNS.map(([key]) => [key, h("td", { role: "cell", "data-column": key, class: RIGHT.has(key) ? "number" : null })]));
    this.element = h("tr", { role: "row", class: "rank" }, ...Object.values(this.cells), h("td", { role: "cell", "data-column": "clear" }));
  }

  update({ process, device }) {
    const { cells } = this;
    setText(cells.job, processName(process));
    setText(cells.devices, device.gpu ?? UNKNOWN);
    setText(cells.state, process.orphan ? "orphan" : process.state === "reporting" ? "" : process.state === "silent" ? `silent for ${duration(now - process.last_report_unix_seconds)}` : "no reporter");
    for (const key of SIZES) setText(cells[key], bytes(device[`${key}_bytes`]));
    setText(cells.since, timeOrDash(process.started_unix_seconds));
  }
}

let known = new Map(); // the rows by job id, in their order
const headings = new Map();
let now = 0;
let sortedAt = -Infinity;

function order() {
  const [, minus, key] = /^(-?)(\w*)$/.exec(param("sort")) ?? [];
  const column = COLUMNS.find(([name]) => name === key);
  return column ? { key: column[0], field: column[1], descending: minus === "-" } : { key: "used", field: "used_bytes", descending: true };
}

/** Show the jobs. `mustSort`: the viewer has changed the order or returned to the list. */
export function showJobs(view, mustSort = false) {
  now = view.now;
  latest = view;
  showHeadings(view.words);
  const ids = new Set(view.jobs.map(({ id }) => id));
  for (const [id, row] of known) if (!ids.has(id) && !row.ended) row.end();
  let added = false;
  for (const job of view.jobs) {
    let row = known.get(job.id);
    if (row === undefined) {
      row = new JobRow();
      insert(job.id, row);
      added = true;
    }
    row.update(job);
  }
  const due = performance.now() / 1000 - sortedAt >= SORT_SECONDS && !isInUse($("jobs"));
  if (mustSort || due) sort();
  else if (added) place();
  filter();
  const total = view.jobs.length;
  setText($("no-jobs"), total === 0 ? "No process uses a device, and none reports." : "No job matches the filter.");
  showRights(view);
}

let latest = null;

/** Give a new job the place of a job that has ended, so that no row moves; the last place if the pointer may be on that job. */
function insert(id, row) {
  const rows = [...known];
  const place = isInUse($("jobs")) ? -1 : rows.findIndex(([, each]) => each.ended);
  rows.splice(place < 0 ? rows.length : place, place < 0 ? 0 : 1, [id, row]);
  known = new Map(rows);
}

function sort() {
  sortedAt = performance.now() / 1000;
  const { field, descending } = order();
  const valueOf = ({ job }) => (field === "gpus" ? job.gpus.join(" ") : job[field]);
  const rows = [...known].filter(([, row]) => !row.ended || sortedAt - row.endedAt < ENDED_SECONDS).sort(([, a], [, b]) => compare(valueOf(a), valueOf(b), descending) || COLLATOR.compare(a.job.name, b.job.name));
  known = new Map(rows);
  place();
}

function place() {
  arrange($("jobs"), [$("jobs").tHead, ...[...known.values()].map(({ element }) => element)], { glide: true });
}

/** Unknown values come last in both orders. */
function compare(x, y, descending) {
  if (x === null || y === null) return (x === null) - (y === null);
  const order = typeof x === "number" ? x - y : COLLATOR.compare(x, y);
  return descending ? -order : order;
}

function filter() {
  const wanted = param("q").toLowerCase().split(/\s+/).filter(Boolean);
  let shown = 0;
  for (const row of known.values()) {
    const hidden = wanted.length > 0 && !wanted.every((word) => row.words.includes(word));
    setHidden(row.element, hidden);
    if (!hidden && !row.ended) shown += 1;
  }
  const total = latest.jobs.length;
  setText($("jobs-count"), wanted.length > 0 ? `${shown} of ${total}` : String(total));
  setHidden($("no-jobs"), shown > 0);
  if (document.activeElement !== $("filter") && $("filter").value !== param("q")) $("filter").value = param("q");
}

function showHeadings(words) {
  const { key: sorted, descending } = order();
  for (const [key] of COLUMNS) {
    let heading = headings.get(key);
    if (heading === undefined) {
      const button = h("button", { type: "button" });
      heading = h("th", { role: "columnheader", scope: "col", "data-column": key, class: RIGHT.has(key) ? "number" : null }, button);
      button.addEventListener("click", () => {
        const { key: before, descending: down } = order();
        const next = before === key ? !down : RIGHT.has(key);
        go({ sort: key === "used" && next ? null : `${next ? "-" : ""}${key}` }, { replace: true });
      });
      headings.set(key, heading);
      $("jobs-head").append(heading);
    }
    setText(heading.firstChild, words[key]?.label ?? key);
    setAttribute(heading.firstChild, "title", words[key]?.help);
    setAttribute(heading, "aria-sort", key === sorted ? (descending ? "descending" : "ascending") : "none");
  }
  refill($("sort"), COLUMNS.map(([key]) => [key, words[key]?.label ?? key]), (all) => all.map(([key, label]) => h("option", { value: key }, `by ${label}`)));
  $("sort").value = sorted;
  if (headings.size === $("jobs-head").children.length) $("jobs-head").append(h("td", { role: "cell" }));
}

/** Say what the viewer may clear, if not everything. */
function showRights({ node, happened }) {
  const { caller } = happened;
  const own = caller?.rights === "own" ? `You can clear your own ${count(caller.processes, "process", "processes")} (uid ${caller.uid}).` : "";
  const none = caller?.rights === "none" && caller.reason ? `You may not clear: ${caller.reason}.` : "";
  setText($("rights"), node.allowed_actions.includes("empty_cache") ? own || none : "Clearing is disabled: --action.allow does not include empty_cache.");
}

// A narrow screen shows no headings, and this choice instead.
$("sort").addEventListener("change", () => {
  const key = $("sort").value;
  go({ sort: key === "used" ? null : `${RIGHT.has(key) ? "-" : ""}${key}` }, { replace: true });
});
$("filter").addEventListener("input", () => go({ q: $("filter").value }, { replace: true }));
let shownSort = param("sort");
onRoute(() => {
  const changed = shownSort !== param("sort");
  shownSort = param("sort");
  if (changed && latest !== null) showJobs(latest, true);
});
