// The page of a job or of a device: its memory, its timeline, where its memory is, its events.

import { clearButton, engineVerb, openEngine } from "./actions.js";
import { Bar, stripOf } from "./devices.js";
import { $, arrange, h, refill, setAttribute, setHidden, setText, Views } from "./dom.js";
import { EventList, happened, jobFinder, typeFilter } from "./events.js";
import { bytes, dayAndTime, duration, failsIn, gpuList, gpuName, integer, percent, safe, UNKNOWN } from "./format.js";
import { hueOf } from "./hues.js";
import { inactivity, sumOf } from "./jobs.js";
import { OomView } from "./oom.js";
import { Processes } from "./processes.js";
import { ProfileList } from "./profiles.js";
import { jobHref, param } from "./route.js";
import { Timeline } from "./timeline.js";

const OF_JOB = ["allocated", "reclaimable", "fragmented", "non_torch"];
const OF_DEVICE = { allocated: ["torch_allocated"], reclaimable: ["torch_reclaimable"], fragmented: ["torch_fragmented"], non_torch: ["non_torch", "other_processes", "driver_reserved", "unattributed"], free: ["free"] };
const STATES = { used: "allocated", evictable: "idle_cache", free: "free" }; // of a key-value cache
const COLORS = { weights: 0, parameters: 0, kv_cache: 1, optimizer_state: 1, cuda_graphs: 2, gradients: 2, runtime: 3, other: 5 }; // and the order

class Detail {
  build() {
    this.back = h("a", { href: "?", class: "button back" }, "‹ Jobs");
    this.title = h("h2", { id: "detail-title", tabindex: "-1" });
    this.owner = h("p", { class: "faint" });
    this.clear = clearButton(() => this.job, "Clear…");
    this.engine = h("button", { type: "button", class: "act" });
    this.engine.addEventListener("click", () => openEngine(this.job.name, this.job.engine_memory));
    this.keeps = h("p", { class: "keeps" });
    this.facts = h("dl", { class: "facts" });
    this.bar = new Bar();
    this.strip = new Bar();
    this.parts = h("dl", { class: "parts" });
    this.exact = h("dl", { class: "parts" });
    this.every = h("details", {}, h("summary", {}, "To the byte"), this.exact);
    this.named = [new NamedParts("Components"), new NamedParts("")];
    this.timeline = new Timeline();
    this.processes = new Processes();
    this.profiles = new ProfileList();
    this.jobs = h("ul", { class: "jobs-of-device" });
    this.jobViews = new Views(() => new JobOfDevice());
    this.oom = new OomView();
    this.filter = typeFilter();
    this.events = h("ol", { class: "events" });
    this.list = new EventList(this.events);
    $("detail").append(
      h("div", { class: "head" }, this.back, this.title, this.owner, this.keeps, this.engine, this.clear),
      this.facts,
      this.oom.element,
      (this.users = h("section", {}, h("h3", {}, "Jobs"), this.strip.element, this.jobs)),
      this.timeline.element,
      (this.memory = h("section", {}, h("h3", {}, "Memory"), this.bar.element, this.parts, ...this.named.map(({ element }) => element), this.every)),
      this.processes.element,
      this.profiles.element,
      h("section", {}, h("div", { class: "title" }, h("h3", {}, "Events and actions"), this.filter), this.events),
    );
  }

  show(target, view) {
    if (target === null) {
      this.shown = null;
      return;
    }
    if (!this.title) this.build();
    const id = `${target.kind} ${target.id}`;
    if (this.shown !== id) {
      this.shown = id;
      this.title.focus({ preventScroll: true });
    }
    this.job = target.job ?? null;
    if (target.kind === "job") this.profiles.update(target.id, target.job, view.node);
    else setHidden(this.profiles.element, true);
    this.filter.value = param("type");
    if (target.kind === "job") this.showJob(target.id, target.job, view);
    else this.showDevice(target.id, target.device, view);
    const types = param("type") ? `&type=${encodeURIComponent(param("type"))}` : "";
    const subject = target.kind === "job" ? `job=${encodeURIComponent(target.id)}` : `device=${encodeURIComponent(target.device?.uuid ?? target.id)}`;
    happened.about(`&${subject}${types}`);
    const jobOf = jobFinder(view.jobs);
    this.list.noneText = target.job?.reporting_count === 0 ? "No events. The exporter records the starts and ends of processes that report." : "No events.";
    this.list.update(happened.events, happened.refusal, jobOf, happened.known);
    this.oom.update(param("event"), subject, { ...view, jobOf });
    this.timeline.update({
      query: subject,
      label: this.title.textContent,
      top: target.device?.memory?.total_bytes ?? null,
      marks: happened.events.flatMap(marksOf),
      around: this.oom.unixSeconds,
      words: view.words,
      now: view.now,
    });
  }

  showJob(id, job, { words, now, devices }) {
    const known = job !== null;
    setText(this.title, known ? safe(job.name) : nameIn(id));
    setAttribute(this.title, "data-hue", hueOf(id));
    setText(this.owner, known ? safe(job.owner) : "This job does not run. Its history and its events remain.");
    setHidden(this.clear, !job?.clear);
    setHidden(this.engine, !job?.engine_memory);
    if (job?.engine_memory) setText(this.engine, `${engineVerb(job.engine_memory)}…`);
    // The rest of the cache of a job that clears at a step has another size each second.
    const atStep = job?.clear?.mode === "step" && !job.clear.at_least;
    setText(this.keeps, atStep ? `Stays free ${bytes(job.clear.stays_free_bytes)}; the next step reserves the rest of the cache again.` : (job?.clear?.sentence ?? ""));
    setHidden(this.keeps, !job?.clear);
    for (const element of [this.facts, this.memory, this.processes.element]) setHidden(element, !known);
    setHidden(this.users, true);
    if (!known) return;
    const { engine } = job;
    const sizes = Object.fromEntries(OF_JOB.map((name) => [name, job[`${name}_bytes`]]));
    const memoryIsKnown = Object.values(sizes).some((size) => size !== null);
    setHidden(this.memory, !memoryIsKnown);
    facts(this.facts, [
      [words.state, inactivity(job, now) ?? (engine?.idle_seconds >= 60 ? `${job.state} for ${duration(engine.idle_seconds)}` : job.state)],
      [words.engine, safe(engine?.label) || UNKNOWN],
      [words.devices, gpuList(job.gpus)],
      [words.used, sumOf(job, "used")],
      [words.idle_cache, sumOf(job, "idle_cache")],
      [words.growth, job.growth_bytes_per_hour === null ? UNKNOWN : `+${bytes(job.growth_bytes_per_hour)}/h${job.full_in_seconds === null ? "" : `, ${failsIn(job.full_in_seconds)}`}`],
      [words.step, job.step === null ? UNKNOWN : `${integer(job.step)}${job.step_seconds === null ? "" : `, ${job.step_seconds.toFixed(1)} s each`}`],
      [words.since, job.since_unix_seconds === null ? UNKNOWN : `${dayAndTime(job.since_unix_seconds)}, ${duration(now - job.since_unix_seconds)}`],
    ]);
    const least = OF_JOB.some((name) => job.incomplete?.includes(`${name}_bytes`));
    if (memoryIsKnown) this.showMemory(sizes, job.idle_cache_bytes, least, words);
    exactly(this.exact, [...Object.entries(sizes), ["unmapped", job.unmapped_bytes || null]].map(([name, size]) => [words[name], size]), least);
    this.showNamed(job, words);
    this.processes.update(job, words, now, devices);
  }

  /** Show where the memory is in five words, from the bytes of each category; null is unknown. `least`: a process is missing in the sums. */
  showMemory({ allocated, reclaimable, fragmented, non_torch: outside, free }, idle, least, words) {
    const cache = sum([reclaimable, fragmented]);
    const all = Object.entries({ allocated, idle_cache: idle, other_cache: cache === null ? null : cache - (idle ?? 0), not_torch: outside, ...(free !== undefined && { free }) });
    this.bar.update(all.map(([name, size]) => ({ key: name, bytes: size ?? 0, className: name, title: `${words[name].label}: ${bytes(size)}` })));
    amounts(this.parts, all.map(([name, size]) => [words[name], name, `${least && size !== null ? "≥ " : ""}${bytes(size)}`]));
  }

  /** Show the components of a job, unmapped ones hatched, and how its engine uses the key-value cache. */
  showNamed({ component_bytes: mapped = {}, component_unmapped_bytes: unmapped = {}, engine }, words) {
    const [components, cache] = this.named;
    const colorOf = (name) => COLORS[name] ?? 4;
    const names = [...new Set([...Object.keys(mapped), ...Object.keys(unmapped)])].sort((a, b) => colorOf(a) - colorOf(b));
    components.update(
      names.map((name) => {
        const [here, asleep] = [mapped[name] ?? 0, unmapped[name] ?? 0];
        const text = asleep > 0 ? `${here > 0 ? `${bytes(here)} and ` : ""}${bytes(asleep)} unmapped` : bytes(here);
        return { word: words[name] ?? { label: safe(name) }, className: name === "other" ? "rest" : `component-${colorOf(name)}`, size: here + asleep, idle: asleep, text };
      }),
    );
    const kv = engine?.kv_cache;
    const states = Object.entries(STATES).map(([state, className]) => ({ word: words[`kv_${state}`], className, size: kv?.[state] ?? 0, text: bytes(kv?.[state]) }));
    cache.update(kv ? states.filter(({ text }) => text !== UNKNOWN) : []);
    if (!kv) return;
    const known = kv.peak_day === null ? "" : `: at most ${bytes(kv.peak_day)} used in ${duration(kv.observed_seconds)}${kv.observed_seconds > 3600 ? `, ${bytes(kv.peak_hour)} in the last hour` : ""}`;
    setText(cache.title, `${words.kv_cache?.label}, ${bytes(kv.size)}${known}`);
  }

  showDevice(id, device, { words, jobs }) {
    const known = device !== null;
    setText(this.title, known ? gpuName(device) : id);
    setAttribute(this.title, "data-hue", null);
    setText(this.owner, known ? `${safe(device.name)}${device.mig_profile ? ` · MIG ${device.mig_profile}` : ""}` : "The driver does not list this device.");
    setHidden(this.clear, true);
    setHidden(this.engine, true);
    setHidden(this.keeps, device?.up !== false);
    setText(this.keeps, device?.up === false ? `The device does not answer: ${safe(device.error)}. Its last values are not shown.` : "");
    for (const element of [this.facts, this.memory, this.users]) setHidden(element, !known);
    setHidden(this.processes.element, true);
    for (const named of this.named) named.update([]);
    if (!known) return;
    const { memory, ledger } = device;
    facts(this.facts, [
      [words.free, memory === null ? UNKNOWN : `${bytes(memory.free_bytes)} of ${bytes(memory.total_bytes)}`],
      [words.idle_cache, bytes(device.idle_cache_bytes)],
      [{ label: "Utilization", help: "The share of the time in which a kernel ran." }, percent(device.utilization_ratio)],
      [{ label: "UUID", help: device.pci_bus_id }, device.uuid],
    ]);
    const names = new Map(jobs.map((job) => [job.id, safe(job.name)]));
    this.strip.update(stripOf(device, (job) => names.get(job) ?? job, words));
    setHidden(this.memory, ledger === null);
    if (ledger !== null) {
      this.showMemory(Object.fromEntries(Object.entries(OF_DEVICE).map(([name, categories]) => [name, sum(categories.map((each) => ledger[each]))])), device.idle_cache_bytes, false, words);
      exactly(this.exact, Object.entries(ledger).map(([name, size]) => [words[name], size]));
    }
    const byId = new Map(jobs.map((job) => [job.id, job]));
    const there = device.jobs.map((part) => ({ ...part, of: byId.get(part.job) })).filter(({ of }) => of);
    arrange(this.jobs, this.jobViews.update(there, ({ job }) => job).map(({ element }) => element));
  }
}

/** A bar of sizes by name, and their amounts; hidden without sizes. */
class NamedParts {
  constructor(title) {
    this.title = h("h4", {}, title);
    this.bar = new Bar();
    this.parts = h("dl", { class: "parts" });
    this.element = h("div", { class: "named", hidden: "" }, this.title, this.bar.element, this.parts);
  }

  update(entries) {
    setHidden(this.element, entries.length === 0);
    this.bar.update(entries.map(({ word, className, size, idle = 0, text }) => ({ key: word?.label, bytes: size, idle, className, title: `${word?.label}: ${text}` })));
    amounts(this.parts, entries.map(({ word, className, text }) => [word, className, text]));
  }
}

class JobOfDevice {
  constructor() {
    this.link = h("a", { class: "name" });
    this.owner = h("span", { class: "faint" });
    this.used = h("span", { class: "number" });
    this.idle = h("span", { class: "number" });
    this.since = h("span", { class: "number faint" });
    this.clear = clearButton(() => this.of, "Clear…");
    this.element = h("li", {}, this.link, this.owner, this.used, this.idle, this.since, this.clear);
  }

  update({ job, used_bytes: used, idle_cache_bytes: idle, of }) {
    this.of = of;
    setAttribute(this.link, "href", jobHref(job));
    setAttribute(this.link, "data-hue", hueOf(job));
    setText(this.link, safe(of.name));
    setText(this.owner, safe(of.owner));
    setText(this.used, `${bytes(used)} used`);
    setText(this.idle, `${bytes(idle)} idle cache`);
    setText(this.since, of.since_unix_seconds === null ? "" : `since ${dayAndTime(of.since_unix_seconds, false)}`);
    this.clear.style.visibility = of.clear === null ? "hidden" : "visible";
    setAttribute(this.clear, "aria-label", `Clear ${safe(of.name)}…`);
  }
}

/** Return the mark of an event; of several that are shown as one, a mark of the first and of the last. */
function marksOf({ type, unix_seconds: time, title, text, folded }) {
  const kind = { oom: "oom", action: "action", device_lost: "oom" }[type];
  const times = [...new Set([folded?.first_unix_seconds ?? time, time])];
  return kind ? times.map((each) => ({ unix_seconds: each, kind, text: `${title}: ${text}` })) : [];
}

/** Return the name in the id of a job that has ended: `train` of `train~0a1b2c3d`, `pid 7` of `pid~7`. */
function nameIn(id) {
  const [, name, rest] = /^(.+)~(.*)$/s.exec(id) ?? [null, id, ""];
  return safe(name === "pid" ? `pid ${rest}` : name);
}

/** Show the known values. */
function facts(element, entries) {
  refill(element, entries.filter(([, text]) => text !== UNKNOWN), (all) => all.map(([word, text]) => h("div", { title: word?.help }, h("dt", {}, word?.label ?? ""), h("dd", {}, text))));
}

/** Return the sum of the known sizes; null if none is known. */
function sum(sizes) {
  const known = sizes.filter((size) => size !== null && size !== undefined);
  return known.length === 0 ? null : known.reduce((total, size) => total + size, 0);
}

/** Show the known categories of the ledger, in bytes. `least`: a process is missing in the sums. */
function exactly(element, entries, least = false) {
  const known = entries.filter(([, size]) => size !== null).map(([word, size]) => [word, `${least ? "≥ " : ""}${integer(size)}`]);
  refill(element, known, (all) => all.map(([word, text]) => h("div", {}, h("dt", {}, word.label), h("dd", {}, text), h("dd", { class: "faint" }, word.help))));
}

function amounts(element, entries) {
  refill(element, entries, (all) => all.map(([word, name, text]) => h("div", {}, h("dt", {}, h("span", { class: `swatch ${name ?? ""}` }), word?.label ?? ""), h("dd", {}, text), h("dd", { class: "faint" }, word?.help ?? ""))));
}

export const detail = new Detail();
