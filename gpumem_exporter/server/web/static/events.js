// The last events. Their request also shows whether the viewer may act.

const SHOWN_EVENTS = 40;
const EVENTS_EVERY_SECONDS = 3;
const REFUSED_EVERY_SECONDS = 60;

const EVENT_WORDS = {
  oom: (event) => oomInWords(event),
  device_lost: ({ detail }) => `does not answer${detail.error ? `: ${detail.error}` : ""}`,
  device_returned: () => "answers again",
  process_started: (event) => processName(event.workload, event.rank, event.pid),
  process_ended: (event) => `${processName(event.workload, event.rank, event.pid)}: ${event.detail.reason}`,
  action: ({ detail }) => {
    const counts = detail.freed_bytes !== null && detail.action !== "reset_peak";
    const freed = counts ? `, freed ${bytes(detail.freed_bytes)}` : "";
    return actionInWords(detail, new Set(detail.results.map((result) => result.pid)).size, `: ${detail.state}${freed}`);
  },
  policy_stopped: ({ detail }) => `${detail.rule}: ${detail.reason}`,
};
const EVENT_NAMES = {
  oom: "out of memory",
  device_lost: "device lost",
  device_returned: "device returned",
  process_started: "process started",
  process_ended: "process ended",
  action: "action finished",
  policy_stopped: "rule stopped",
};

function actionInWords(detail, processes, outcome) {
  const on = processes === 1 ? "1 process" : `${processes} processes`;
  const reason = detail.reason ? ` (${detail.reason})` : "";
  return `${detail.action} on ${on}${outcome}, by ${detail.requested_by}${reason}`;
}

class Events {
  constructor() {
    this.events = [];
    this.after = null;
    this.elements = new Map();
    this.requested = -Infinity;
    this.requesting = false;
  }

  /** Whether the viewer may act: "open", "token" (a token is required) or "refused"; null while unknown. */
  access = null;
  detail = "";
  /** The document of /api/v1/caller; null while unknown. */
  caller = null;

  /** Request new events, at most every few seconds. */
  async refresh(force = false) {
    const now = performance.now() / 1000;
    const pause = this.access === "token" || this.access === "refused" ? REFUSED_EVERY_SECONDS : EVENTS_EVERY_SECONDS;
    if (this.requesting || (!force && now - this.requested < pause)) return;
    this.requesting = true;
    this.requested = now;
    try {
      const since = this.after === null ? "" : `&after=${this.after}`;
      const { document: page } = await access.request(`/api/v1/events?limit=${SHOWN_EVENTS}${since}`);
      this.add(page);
      // The rights to all processes do not change; the number of a user's processes does.
      if (this.caller?.rights !== "all") this.caller = (await access.request("/api/v1/caller")).document;
      this.allow("open", "");
    } catch (error) {
      // The connection shows a missing reply; a warning shows a failing disk.
      if (error instanceof Refusal && error.status === 401) this.allow("token", error.message);
      else if (error instanceof Refusal && error.status === 403) this.allow("refused", error.message);
    } finally {
      this.requesting = false;
    }
  }

  allow(what, detail) {
    if (what !== "open") {
      this.after = null;
      this.events = [];
      this.caller = null;
    }
    this.access = what;
    this.detail = detail;
    this.show();
  }

  /** Request all events again: after a reconnect, another exporter may have smaller ids. */
  forget() {
    this.after = null;
    this.requested = -Infinity;
  }

  add({ events, next_after: after }) {
    if (this.after === null) this.events = [];
    this.after = after;
    if (events.length > 0) this.events = [...this.events, ...events].slice(-SHOWN_EVENTS);
  }

  show() {
    const refused = this.access === "token" || this.access === "refused";
    setText($("events-note"), refused ? `Events need the same rights as actions. ${sentence(this.detail)}` : "");
    if (!refused && this.events.length === 0) setText($("events-note"), "No events yet.");
    setHidden($("events-note"), !refused && this.events.length > 0);
    const ids = new Set(this.events.map(({ id }) => id));
    for (const id of this.elements.keys()) if (!ids.has(id)) this.elements.delete(id);
    const newestFirst = [...this.events].sort((a, b) => b.unix_seconds - a.unix_seconds || b.id - a.id);
    arrange($("events"), newestFirst.map((event) => this.entry(event)));
  }

  entry(event) {
    let known = this.elements.get(event.id);
    if (known === undefined) {
      const words = EVENT_WORDS[event.type]?.(event) ?? "";
      const where = event.gpu || event.uuid ? h("span", { class: "where" }, `${gpuName(event.gpu, event.uuid)},`) : "";
      const time = h("time", { datetime: event.time });
      const kind = h("span", { class: "kind" }, EVENT_NAMES[event.type] ?? event.type);
      const text = h("span", { class: "words" }, safe(words));
      known = { element: h("li", { "data-type": event.type }, time, " ", kind, " ", where, " ", text), time };
      this.elements.set(event.id, known);
    }
    setText(known.time, dayAndTime(event.unix_seconds, app.moment.unix_seconds)); // the day may end meanwhile
    return known.element;
  }
}

function sentence(text) {
  return text ? `${text[0].toUpperCase()}${text.slice(1)}${text.endsWith(".") ? "" : "."}` : "";
}
