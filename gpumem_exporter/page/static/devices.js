// A strip for each device: the memory of its jobs, each in the job's color, with its idle cache hatched.

import { $, arrange, h, setAttribute, setHidden, setText, Views } from "./dom.js";
import { bytes, gpuName, percent, safe } from "./format.js";
import { hueOf } from "./hues.js";
import { deviceHref } from "./route.js";

/** A bar whose parts have widths in proportion to their bytes, and names where there is space. */
export class Bar {
  constructor() {
    this.parts = new Views(() => new Part());
    this.element = h("span", { class: "bar", "aria-hidden": "true" });
  }

  /** `parts`: `{key, bytes, className, hue, name, title, idle}`; `idle` is the hatched end of a part. */
  update(parts) {
    arrange(this.element, this.parts.update(parts.filter((part) => part.bytes > 0), ({ key }) => key).map(({ element }) => element));
  }
}

class Part {
  constructor() {
    this.idle = h("i", {});
    this.name = h("b", {});
    this.element = h("span", {}, this.name, this.idle);
  }

  update({ bytes: size, className, hue = null, title, name = "", idle = 0 }) {
    setText(this.name, name);
    setAttribute(this.element, "class", className);
    setAttribute(this.element, "data-hue", hue);
    setAttribute(this.element, "data-bytes", size);
    setAttribute(this.element, "title", title);
    const [grow, share] = [String(size / 2 ** 20), `${idle > 0 ? (100 * idle) / size : 0}%`];
    if (this.grow !== grow) this.element.style.flexGrow = this.grow = grow;
    if (this.share !== share) this.idle.style.width = this.share = share;
  }
}

/** Return the parts of a device's strip: its jobs, what no job has, and what is free. */
export function stripOf({ memory, jobs }, jobName, words) {
  if (memory === null) return [];
  const known = jobs.filter((job) => job.used_bytes !== null);
  const parts = known.map(({ job, used_bytes: used, idle_cache_bytes: idle }) => ({
    key: job,
    bytes: used,
    idle: idle ?? 0,
    className: "job",
    hue: hueOf(job),
    name: jobName(job),
    title: `${jobName(job)}: ${bytes(used)}${idle ? `, idle cache ${bytes(idle)}` : ""}`,
  }));
  const rest = parts.reduce((left, part) => left - part.bytes, memory.total_bytes - memory.free_bytes);
  parts.push({ key: " rest", bytes: Math.max(0, rest), className: "rest", title: `${words.not_torch?.label ?? ""}: ${bytes(rest)}` });
  parts.push({ key: " free", bytes: memory.free_bytes, className: "free", title: `${words.free?.label ?? ""}: ${bytes(memory.free_bytes)}` });
  return parts;
}

class Device {
  constructor() {
    this.name = h("span", { class: "name" });
    this.bar = new Bar();
    this.free = h("span", { class: "number" });
    this.total = h("span", { class: "total faint" });
    this.more = h("span", { class: "more faint" });
    this.link = h("a", {}, this.name, this.bar.element, this.free, this.total, this.more);
    this.element = h("li", {}, this.link);
  }

  update(device) {
    const { memory, up, error } = device;
    setAttribute(this.link, "href", deviceHref(device));
    setText(this.name, device.gpu ?? device.uuid);
    setAttribute(this.element, "data-up", up);
    this.bar.update(stripOf(device, view.jobName, view.words));
    const shown = memory !== null;
    setText(this.free, shown ? bytes(memory.free_bytes) : "");
    setText(this.total, shown ? `free of ${bytes(memory.total_bytes)}` : up ? "memory unknown" : "does not answer");
    setText(this.more, (device.utilization_ratio ?? null) === null ? "" : `${percent(device.utilization_ratio)} busy`);
    const used = shown ? `${bytes(memory.used_bytes)} of ${bytes(memory.total_bytes)} used` : safe(error);
    setAttribute(this.link, "aria-label", `${gpuName(device)}: ${used}, ${this.free.textContent} ${this.total.textContent}`);
    setAttribute(this.link, "title", `${safe(device.name)}${error ? `: ${safe(error)}` : ""}`);
  }
}

const views = new Views(() => new Device());
let view = null;

export function showDevices({ devices, jobs, node, words }) {
  const names = new Map(jobs.map(({ id, name }) => [id, safe(name)]));
  view = { words, jobName: (id) => names.get(id) ?? id };
  arrange($("devices"), views.update(devices, ({ uuid }) => uuid).map(({ element }) => element));
  setHidden($("devices"), devices.length === 0);
  const none = $("no-devices");
  setHidden(none, devices.length > 0);
  if (devices.length > 0) return;
  const why = node.driver.up ? "The driver lists no devices." : `The driver does not answer: ${safe(node.driver.error) || "unknown reason"}.`;
  if (none.dataset.why === why) return;
  none.dataset.why = why;
  const next = node.driver.up
    ? "Check the devices of the container: docker run --gpus all, or the NVIDIA runtime class on Kubernetes."
    : "The exporter tries again by itself. Run nvidia-smi on the node; in a container, start it with --gpus all.";
  none.replaceChildren(h("p", { class: "error" }, why), h("p", {}, next), h("p", { class: "faint" }, "Jobs that report are shown below, without the driver's values."));
}
