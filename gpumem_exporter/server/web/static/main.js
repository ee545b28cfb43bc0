// The page: receives states and shows them.

const MODES = { waiting: "connecting", live: "live", polling: `polling every ${POLL_SECONDS}${NBSP}s`, lost: "lost" };

/** Convert a state for the parts of the page. */
function viewOf(moment, state, history, { events, names: hidden }) {
  const names = state.columns;
  const rows = state.processes.map((values) => {
    const row = {};
    for (let i = 0; i < names.length; i += 1) row[names[i]] = values[i];
    Object.assign(row, hidden.get(row.pid));
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
      history: (document) => this.history.replace(document),
      state: (moment, state) => this.take(moment, state),
      moment: (moment) => this.at(moment),
      mode: (mode) => this.mode(mode),
    });
  },

  take(moment, state) {
    this.state = state;
    this.moment = moment;
    this.history.add(state.newest);
    if (state.page !== PAGE && !$("dialog").open && isFirstTry(state.page)) location.reload();
    else this.show();
  },

  /** The state is unchanged, but time has passed. */
  at(moment) {
    this.moment = moment;
    this.show();
  },

  show() {
    if (document.hidden || this.state === undefined) return;
    performance.clearMeasures("refresh");
    performance.mark("refresh started");
    this.refresh();
    performance.measure("refresh", "refresh started");
    performance.clearMarks("refresh started");
    this.events.refresh().then(() => this.showAccess());
  },

  refresh() {
    const { state, moment } = this;
    const view = viewOf(moment, state, this.history, this.events);
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

  mode(mode) {
    const { body } = document;
    if (body.dataset.mode === mode) return;
    const before = body.dataset.mode;
    body.dataset.mode = mode;
    $("connection").dataset.mode = mode;
    setText($("mode"), MODES[mode]);
    const lost = mode === "lost";
    const stale = lost || mode === "waiting";
    $("main").toggleAttribute("data-stale", stale);
    const seen = this.moment && `Last reply at ${timeOfDay(this.moment.unix_seconds)}; values are hidden until the next reply.`;
    const when = seen ?? "No reply yet.";
    setText($("lost"), lost ? `Connection to the exporter lost. ${when}` : "");
    setHidden($("lost"), !lost);
    $("clear-all").disabled = stale;
    if (before === "lost" || before === "waiting") this.events.forget();
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
