// The page: shows the last reply.

const MODES = { waiting: "connecting", live: "live", lost: "lost", refused: "refused" };

/** Convert a state for the parts of the page. */
function viewOf(moment, state, history, events) {
  const names = state.columns;
  const rows = state.processes.map((values) => {
    const row = {};
    for (let i = 0; i < names.length; i += 1) row[names[i]] = values[i];
    row.pod = podOf(row);
    return row;
  });
  const reports = new Set();
  for (const row of rows) if (row.clears && row.uuid !== null) reports.add(row.uuid);
  return {
    ...state,
    moment,
    history,
    events,
    rows,
    reports: (uuid) => reports.has(uuid),
    largest: (uuid, column) => {
      let largest = null;
      for (const row of rows) if (row.uuid === uuid && row[column] > (largest?.[column] ?? 0)) largest = row;
      return largest;
    },
  };
}

const app = {
  view: null,
  history: new History(),
  events: new Events(),
  warnings: new Warnings(),
  devices: new Devices(),
  processes: new Processes(),

  start() {
    setText($("node-name"), location.host);
    $("clear-all").addEventListener("click", () => clearing.open({ all: true }, "all processes"));
    $("filter").value = "";
    this.connection = new Connection({
      since: () => this.history.newest(),
      reply: (document) => this.receive(document),
      mode: (mode, reason) => this.mode(mode, reason),
    });
  },

  /** Show a reply; null if only time has passed. */
  receive(reply) {
    if (reply === null) {
      const passed = Math.max(0, (Date.now() - this.replied.at) / 1000);
      const { clock_seconds: clock, unix_seconds: unix } = this.replied.moment;
      this.moment = { clock_seconds: clock + passed, unix_seconds: unix + passed };
    } else {
      this.replied = { at: Date.now(), moment: reply.moment };
      this.moment = reply.moment;
      this.state = reply.state;
      this.history.add(reply.history, reply.moment.clock_seconds);
    }
    const { page } = this.state;
    if (page !== PAGE && !$("dialog").open && isFirstTry(page)) location.reload();
    else this.show();
  },

  show() {
    if (document.hidden) return;
    performance.clearMeasures("refresh");
    performance.mark("refresh started");
    this.refresh();
    performance.measure("refresh", "refresh started");
    performance.clearMarks("refresh started");
    this.events.refresh().then(() => this.showAccess());
  },

  refresh() {
    const { state, moment } = this;
    const view = viewOf(moment, state, this.history, this.events.events);
    this.view = view;
    setText($("moment"), timeOfDay(moment.unix_seconds));
    const driver = state.nvml.driver_version;
    const host = state.host || location.host;
    setText($("node-name"), driver ? `${host} · driver ${driver}` : host);
    const title = `${host} · ${TITLE}`;
    if (document.title !== title) document.title = title;
    const why = state.nvml.up ? "" : `NVML is down, so devices are not shown: ${state.nvml.error || "unknown reason"}`;
    setText($("degraded"), why);
    setHidden($("degraded"), why === "");
    setHidden($("clear-all"), !view.rows.some((row) => row.clears));
    this.warnings.update(view);
    this.devices.update(view);
    this.processes.update(view);
  },

  showAccess() {
    const { access: may, detail } = this.events;
    const off = this.view !== null && !this.view.allowed_actions.includes(CLEAR);
    const words = {
      open: ownRights(this.events.caller),
      token: "Clearing requires the exporter's token; the buttons request it.",
      refused: `You may not clear. ${sentence(detail)}`,
    };
    const text = off ? `Clearing is disabled: --action.allow does not include ${CLEAR}.` : (words[may] ?? "");
    setText($("access"), text);
    setHidden($("access"), text === "");
    setAttribute(document.body, "data-access", off || may === "refused" ? "refused" : (may ?? "unknown"));
  },

  mode(mode, reason) {
    const { body } = document;
    if (body.dataset.mode === mode) return;
    const before = body.dataset.mode;
    body.dataset.mode = mode;
    $("connection").dataset.mode = mode;
    setText($("mode"), MODES[mode]);
    const stale = mode !== "live";
    $("main").toggleAttribute("data-stale", stale);
    const problem = { lost: "Connection to the exporter lost.", refused: `The exporter refuses access: ${reason}.` }[mode] ?? "";
    const last = this.moment && `Last reply at ${timeOfDay(this.moment.unix_seconds)}; values are hidden until the next reply.`;
    setText($("lost"), problem && `${problem} ${last ?? "No reply yet."}`);
    setHidden($("lost"), problem === "");
    $("clear-all").disabled = stale;
    if (!stale && before !== undefined) this.events.forget();
  },
};

/** Say what a viewer may clear that may not clear every process. */
function ownRights(caller) {
  if (caller?.rights !== "own") return "";
  const count = caller.processes === 1 ? "process" : `${caller.processes} processes`;
  return `You can clear your own ${count} (uid ${caller.uid}).`;
}

/** Return whether the page has not yet reloaded for this version, so that it never reloads in a loop. */
function isFirstTry(page) {
  try {
    if (sessionStorage.getItem("page") === page) return false;
    sessionStorage.setItem("page", page);
    return true;
  } catch {
    return false; // without storage it would reload in a loop
  }
}

const TITLE = document.title;
const PAGE = document.querySelector("meta[name=page]").content;

app.start();
