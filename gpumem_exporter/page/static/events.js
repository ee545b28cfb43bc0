// Events and the viewer's rights. The exporter has written the words of each event.

import { Refusal, request } from "./api.js";
import { $, arrange, h, isInUse, setAttribute, setText, Views } from "./dom.js";
import { dayAndTime, safe } from "./format.js";
import { deviceHref, go, jobHref, param, showAgain } from "./route.js";

const EVERY_SECONDS = 5;
const REFUSED_EVERY_SECONDS = 60;
const SINCE_SECONDS = 10; // of a shorter series of starts and ends, one time is enough
const TYPES = ["oom", "action", "process_started,process_ended", "device_lost,device_returned", "policy_stopped"];
const TYPE_NAMES = ["out of memory", "actions", "starts and ends", "devices", "rules"];

/** The events of one subject, and what the viewer may do. */
class Happened {
  events = [];
  /** Why the viewer may not read events; empty if they may. */
  refusal = "";
  /** Whether the subject's events have arrived. */
  known = false;
  /** The document of /api/v1/caller; null while unknown. */
  caller = null;
  subject = "";
  requested = -Infinity;
  requesting = false;
  shownSubject = null;

  /** Show events of this query from now on: `job=…` or `device=…`, with types. */
  about(subject) {
    if (subject === this.subject) return;
    this.subject = subject;
    this.events = [];
    this.known = false;
    this.forget();
  }

  forget() {
    this.requested = -Infinity;
  }

  /** Request the events, at most every few seconds. */
  async refresh(force = false) {
    const now = performance.now() / 1000;
    if (this.requesting || (!force && now - this.requested < (this.refusal ? REFUSED_EVERY_SECONDS : EVERY_SECONDS))) return;
    this.requesting = true;
    this.requested = now;
    const { subject, known } = this;
    try {
      const { document: page } = await request(`api/v1/events?fold=true&limit=100${subject}`);
      if (subject === this.subject) {
        // By time: a process may have started long before its first report, which adds its event.
        this.events = page.events.reverse().sort((a, b) => b.unix_seconds - a.unix_seconds);
        this.known = true;
      }
      this.refusal = "";
    } catch (error) {
      // The connection shows a missing reply; a finding shows a failing disk.
      if (error instanceof Refusal && (error.status === 401 || error.status === 403)) {
        this.refusal = error.message;
        this.events = [];
        this.known = true;
      }
    } finally {
      this.requesting = false;
    }
    if (this.known !== known || subject !== this.subject) showAgain();
    // The rights to all processes do not change; the number of a user's processes does.
    if (this.caller?.rights !== "all") this.caller = (await request("api/v1/caller").catch(() => null))?.document ?? this.caller;
  }
}

export const happened = new Happened();

class EventRow {
  constructor() {
    this.time = h("time", {});
    this.kind = h("span", { class: "kind" });
    this.words = h("span", { class: "words" });
    this.element = h("li", {}, this.time, this.kind, this.words);
  }

  update(event) {
    setAttribute(this.element, "data-severity", event.severity);
    setAttribute(this.time, "datetime", event.time);
    setText(this.time, dayAndTime(event.unix_seconds)); // the day may end meanwhile
    setText(this.kind, event.title);
    const first = event.folded?.first_unix_seconds ?? event.unix_seconds;
    const since = event.unix_seconds - first >= SINCE_SECONDS ? `, since ${dayAndTime(first)}` : "";
    const href = hrefOf(event);
    if (href !== null && this.link === undefined) this.words.append((this.link = h("a", { class: event.type === "oom" ? null : "plain" })));
    setText(this.link ?? this.words, safe(event.text) + since);
    if (this.link) setAttribute(this.link, "href", href);
  }
}

/** An out-of-memory error leads to its explanation, another event to its job or device. */
function hrefOf({ type, id, job, uuid, gpu }) {
  const place = job ? jobHref(job) : uuid ? deviceHref({ gpu, uuid }) : null;
  return place !== null && type === "oom" ? `${place}&event=${id}` : place;
}

export class EventList {
  constructor(element, none = "No events.") {
    this.element = element;
    this.rows = new Views(() => new EventRow());
    this.none = h("li", { class: "faint" });
    this.noneText = none;
  }

  /** `jobOf`: the id of an event's job, if the job is known. `known`: whether the events have arrived. */
  update(events, refusal, jobOf, known = true) {
    const rows = this.rows.update(events.map((event) => ({ ...event, job: event.job ?? jobOf(event) })), ({ id }) => id);
    setText(this.none, refusal ? `Events need the same rights as actions: ${refusal}` : known ? this.noneText : "Loading…");
    const elements = rows.length > 0 ? rows.map(({ element }) => element) : [this.none];
    if (isInUse(this.element) && elements.includes(this.element.firstElementChild)) return; // nothing moves under the pointer
    arrange(this.element, elements, { glide: true });
  }
}

/** Return a function that finds the job of an event among the jobs of a state. */
export function jobFinder(jobs) {
  return ({ workload, pid }) => {
    const ofJob = (job) => (workload ? job.workload === workload : job.processes.some((process) => process.pid === pid));
    return jobs.find(ofJob)?.id ?? null;
  };
}

/** Return the choice of the types of events; the URL keeps it. */
export function typeFilter() {
  const options = TYPES.map((type, i) => h("option", { value: type }, TYPE_NAMES[i]));
  const select = h("select", { "aria-label": "Types of events" }, h("option", { value: "" }, "all types"), ...options);
  select.addEventListener("change", () => go({ type: select.value }, { replace: true }));
  return select;
}

let nodeEvents = null;
let nodeFilter = null;

export function showNodeEvents({ jobs }) {
  if (nodeEvents === null) {
    nodeEvents = new EventList($("events"));
    nodeFilter = typeFilter();
    $("events-filter").append(nodeFilter);
  }
  nodeFilter.value = param("type");
  happened.about(param("type") ? `&type=${encodeURIComponent(param("type"))}` : "");
  nodeEvents.update(happened.events.slice(0, 30), happened.refusal, jobFinder(jobs), happened.known);
}
