// The processes of a job: a row for each process and device, and on demand its phases, components and settings.

import { Bar } from "./devices.js";
import { arrange, h, refill, setAttribute, setText, Views } from "./dom.js";
import { bytes, dayAndTime, duration, processName, safe, UNKNOWN } from "./format.js";

const COLUMNS = ["used", "allocated", "idle_cache"];

export class Processes {
  constructor() {
    this.head = h("tr", {});
    this.table = h("table", { class: "processes" }, h("thead", {}, this.head));
    this.views = new Views(() => new ProcessPart());
    this.element = h("section", {}, h("h3", {}, "Processes"), this.table);
  }

  update(job, words, now) {
    const titles = ["Process", words.devices?.label, ...COLUMNS.map((name) => words[name]?.label), "Last report"];
    refill(this.head, titles, (all) => all.map((title, i) => h("th", { scope: "col", class: i > 1 && i < titles.length - 1 ? "number" : null }, title ?? "")));
    const parts = job.processes.flatMap((process) => (process.devices.length > 0 ? process.devices : [{}]).map((device) => ({ process, device, now, titles, words })));
    const views = this.views.update(parts, ({ process, device }) => `${process.pid} ${device.uuid}`);
    if (views.length > 0 && !views.some(({ touched }) => touched)) views[0].set(true);
    arrange(this.table, [this.table.tHead, ...views.map(({ element }) => element)]);
  }
}

class ProcessPart {
  constructor() {
    this.fold = h("button", { type: "button", class: "fold", "aria-expanded": "false" });
    this.fold.addEventListener("click", () => this.set(this.fold.getAttribute("aria-expanded") === "false"));
    this.cells = [...Array(COLUMNS.length + 2).keys()].map((i) => h("td", { class: i > 0 && i <= COLUMNS.length ? "number" : null }));
    this.more = h("div", { class: "more" });
    this.row = h("tr", { class: "more", hidden: "" }, h("td", { colspan: this.cells.length + 1 }, this.more));
    this.element = h("tbody", {}, h("tr", {}, h("th", { scope: "row" }, this.fold), ...this.cells), this.row);
    this.touched = false;
  }

  set(open) {
    this.touched = true;
    setAttribute(this.fold, "aria-expanded", open);
    this.row.hidden = !open;
  }

  update({ process, device, now, titles, words }) {
    setText(this.fold, processName(process));
    const last = process.last_report_unix_seconds;
    const report = process.state === "unreported" ? "no reporter" : last === null ? UNKNOWN : `${duration(now - last)} ago`;
    const texts = [device.gpu ?? UNKNOWN, ...COLUMNS.map((name) => bytes(device[`${name}_bytes`])), process.state === "silent" ? `silent, ${report}` : report];
    for (const [i, text] of texts.entries()) {
      setText(this.cells[i], text);
      setAttribute(this.cells[i], "data-label", titles[i + 1]); // a phone has no row of titles
    }
    const details = [
      ["Phases, peak allocated", device.phase_peak_bytes, (name) => name],
      ["Components, allocated", device.component_bytes, (name) => words[name]?.label ?? name],
      ["Components, unmapped", device.component_unmapped_bytes, (name) => words[name]?.label ?? name],
      ["KV cache", device.kv_cache_bytes, (name) => words[`kv_${name}`]?.label ?? name],
    ];
    refill(this.more, [details, settingsOf(process, device, words)], ([groups, settings]) => [
      ...groups.filter(([, sizes]) => Object.values(sizes ?? {}).some((size) => size > 0)).map((group) => sizeBars(...group)),
      h("dl", { class: "settings" }, ...settings.map(([name, text]) => h("div", {}, h("dt", {}, name), h("dd", {}, text)))),
    ]);
  }
}

function settingsOf(process, device, words) {
  const known = [
    ...["reclaimable", "fragmented", "non_torch"].map((name) => [words[name]?.label, (device[`${name}_bytes`] ?? null) === null ? null : bytes(device[`${name}_bytes`])]),
    ["Allocator settings", process.allocator_settings === "" ? "default" : process.allocator_settings],
    ["Engine", process.engine ? [process.engine.label, process.engine.state].filter(Boolean).join(", ") : null],
    ["Torch", process.torch_version],
    ["Not allowed", process.denied_actions?.join(", ")],
    ["Command", process.command],
    ["Launcher", process.orphan && launcherOf(process.orphan)],
    ["Memory limit", device.memory_limit_bytes ? bytes(device.memory_limit_bytes) : null],
    ["NVML in it", process.nvml_interceptor ? `answered by ${process.nvml_interceptor}` : null],
    ["Reserved, peak", device.reserved_peak_bytes ? bytes(device.reserved_peak_bytes) : null],
    ["NCCL", device.nccl_bytes ? bytes(device.nccl_bytes) : null],
    ["Allocation retries", device.alloc_retries ? String(device.alloc_retries) : null],
    ["Out of memory", device.ooms ? String(device.ooms) : null],
    ["Container", process.k8s_container],
  ];
  return known.filter(([, text]) => text).map(([name, text]) => [name, safe(text)]);
}

function launcherOf({ launcher, launcher_pid: pid, ended_unix_seconds: ended }) {
  return pid === null ? "ended before the exporter saw it" : `${launcher ?? "hidden"}, pid ${pid}, ended ${dayAndTime(ended)}`;
}

function sizeBars(title, sizes, labelOf) {
  const entries = Object.entries(sizes).sort(([, a], [, b]) => b - a);
  const most = entries[0][1];
  const row = ([name, size]) => {
    const bar = new Bar();
    bar.update([{ key: name, bytes: size, className: "allocated" }, { key: " rest", bytes: most - size, className: "free" }]);
    return h("li", {}, h("span", {}, safe(labelOf(name))), bar.element, h("span", { class: "number" }, bytes(size)));
  };
  return h("div", { class: "sizes" }, h("h4", {}, title), h("ul", {}, ...entries.map(row)));
}
