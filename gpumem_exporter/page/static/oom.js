// One out-of-memory error: why it happened, what to do, the memory at that moment, and what came before.
// The exporter has computed the cause and written the words.

import { Refusal, request } from "./api.js";
import { clearButton } from "./actions.js";
import { Bar } from "./devices.js";
import { h, refill, setHidden, setText } from "./dom.js";
import { EventList } from "./events.js";
import { bytes, dayAndTime, duration, gpuName, processName, safe } from "./format.js";
import { hueOf } from "./hues.js";
import { profileLink } from "./profiles.js";
import { go, jobHref, LAST_OOM, showAgain } from "./route.js";

const AGAIN_SECONDS = 5;

export class OomView {
  constructor() {
    this.title = h("h3", {});
    this.ago = h("span", { class: "faint" });
    const close = h("button", { type: "button", "aria-label": "Close" }, "×");
    close.addEventListener("click", () => go({ event: null }));
    this.content = h("div", {});
    this.before = h("ol", { class: "events" });
    this.list = new EventList(this.before, "Nothing happened on this device or in this job in the ten minutes before.");
    this.rest = h("div", {}, h("h4", {}, "Before"), this.before);
    this.element = h("section", { class: "oom", hidden: "" }, h("div", { class: "title" }, this.title, this.ago, close), this.content, this.rest);
    this.key = "";
  }

  /** When the shown error happened; null without one. */
  get unixSeconds() {
    return this.found?.event.unix_seconds ?? null;
  }

  /** Show the event that the URL names: its id, or the last error of the subject, which is a query: `job=…` or `device=…`. */
  update(wanted, subject, view) {
    const key = wanted && `${wanted} ${subject}`;
    if (key !== this.key) {
      this.key = key;
      this.found = this.refusal = this.denied = null;
      this.requested = -Infinity;
    }
    setHidden(this.element, !wanted);
    if (!wanted) return;
    if (this.denied && view.happened.refusal === "") this.refusal = this.denied = null; // the viewer has entered a token
    if (!this.found && !this.refusal) this.request(wanted, subject);
    this.show(view);
  }

  async request(wanted, subject) {
    const seconds = performance.now() / 1000;
    if (seconds - this.requested < AGAIN_SECONDS) return;
    this.requested = seconds;
    const { key } = this;
    let refusal = "The exporter does not have this event any more.";
    let found = null;
    try {
      const id = wanted.startsWith(LAST_OOM) ? await lastOom(subject, wanted.slice(LAST_OOM.length)) : wanted;
      if (id !== undefined) found = (await request(`api/v1/events/${encodeURIComponent(id)}`)).document;
    } catch (error) {
      if (!(error instanceof Refusal)) return; // the connection shows a missing reply
      this.denied = error.status === 401 || error.status === 403;
      if (this.denied) refusal = `Events need the same rights as actions: ${error.message}`;
      else if (error.status !== 404 && error.status !== 422) return;
    }
    if (key !== this.key) return;
    Object.assign(this, { found, refusal: found ? null : refusal });
    showAgain();
  }

  show({ jobs, now, jobOf }) {
    const { found, refusal } = this;
    const event = found?.event;
    setText(this.title, event ? `${event.type === "oom" ? "Out of memory" : safe(event.title)} on ${gpuName(event)} at ${dayAndTime(event.unix_seconds)}` : "Out of memory");
    setText(this.ago, event ? `${duration(now - event.unix_seconds)} ago` : refusal ? "" : "loading");
    setHidden(this.rest, !found);
    const known = new Map(jobs.map((job) => [job.id, job]));
    const { explanation = null } = found ?? {};
    const clears = explanation?.cause === "idle_cache" ? explanation.parts.map(({ job }) => known.get(job)).filter((job) => job?.clear) : [];
    const running = (explanation?.parts ?? []).filter(({ job }) => known.has(job)).map(({ job }) => job);
    refill(this.content, { refusal, event, explanation, clears: clears.map(({ name, clear }) => ({ name, clear })), running }, contentOf);
    if (found) this.list.update(found.before, "", jobOf);
  }
}

/** Return the id of the last error of a subject on a device; undefined if there is none. */
async function lastOom(subject, uuid) {
  const device = uuid && !subject.startsWith("device=") ? `&device=${encodeURIComponent(uuid)}` : "";
  const { document: page } = await request(`api/v1/events?type=oom&limit=1&${subject}${device}`);
  return page.events[0]?.id;
}

function contentOf({ refusal, event, explanation, clears, running }) {
  if (refusal) return [h("p", {}, refusal)];
  if (!event) return [];
  const text = h("p", {}, `${safe(event.text)}.`);
  if (!explanation) return [text];
  const { verdict, advice, parts } = explanation;
  const isWhole = parts.some(({ key }) => key === "rest"); // otherwise a full bar would look as if nothing else was there
  return [
    text,
    h("p", { class: "verdict" }, safe(verdict)),
    h("p", { class: "advice" }, safe(advice), ...clears.map((job) => clearButton(() => job, `Clear ${safe(job.name)}: ${bytes(job.clear.stays_free_bytes)}…`))),
    ...(event.detail.profile ? [h("p", {}, profileLink(event.detail.profile, "Memory profile of this moment"))] : []),
    ...(parts.length > 0 ? [h("h4", {}, `${isWhole ? "Memory" : "What is known of the memory"} of ${gpuName(event)} at that moment`), ...(isWhole ? [barOf(parts)] : []), h("dl", { class: "parts" }, ...parts.map((part) => amountOf(part, running)))] : []),
    h("dl", { class: "facts" }, ...factsOf(event).map(([label, value]) => h("div", {}, h("dt", {}, label), h("dd", {}, value)))),
  ];
}

const CLASSES = { job: "job", rest: "rest", free: "free" };

function barOf(parts) {
  const bar = new Bar();
  bar.update(parts.map(({ key, label, bytes: size, job, idle }) => ({ key: `${key} ${job}`, bytes: size, idle: idle ?? 0, className: CLASSES[key] ?? key, hue: job && hueOf(job), name: job ? safe(label) : "", title: `${safe(label)}: ${bytes(size)}` })));
  return bar.element;
}

function amountOf({ key, label, bytes: size, job, idle }, running) {
  const swatch = h("span", { class: `swatch ${key}`, "data-hue": job && hueOf(job) });
  const name = running.includes(job) ? h("a", { href: jobHref(job) }, safe(label)) : safe(label);
  return h("div", {}, h("dt", {}, swatch, name), h("dd", {}, bytes(size)), ...(idle ? [h("dd", { class: "faint" }, `of it idle cache ${bytes(idle)}`)] : []));
}

function factsOf(event) {
  const { detail } = event;
  const limit = detail.limit_bytes;
  return [
    ["Process", processName(event)],
    ["Requested", bytes(detail.requested_bytes)],
    ["Limit of the process", limit < detail.device?.total_bytes * 0.98 ? bytes(limit) : null],
    ["Reserved by PyTorch", detail.allocator ? bytes(detail.allocator.reserved_bytes) : null],
    ["Phase", detail.phase],
    ["Step", detail.step?.toLocaleString("en")],
  ].filter(([, value]) => value).map(([label, value]) => [label, safe(value)]);
}
