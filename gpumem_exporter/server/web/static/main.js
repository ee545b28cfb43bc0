// The page as a whole: takes what comes and has it shown.

const MODES = { waiting: "connecting", live: "live", polling: `polling every ${POLL_SECONDS}${NBSP}s`, lost: "lost" };

/** A state as the parts of the page want it. */
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
    setText($("place"), location.host);
    $("clear-all").addEventListener("click", () => clearing.begin({ all: true }, "all processes"));
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

  /** Nothing has changed, but time has passed. */
  at(moment) {
    this.moment = moment;
    this.show();
  },

  show() {
    if (document.hidden || this.state === undefined) return;
    performance.clearMeasures("refresh");
    performance.mark("refresh begins");
    this.refresh();
    performance.measure("refresh", "refresh begins");
    performance.clearMarks("refresh begins");
    this.events.refresh().then(() => this.showAccess());
  },

  refresh() {
    const { state, moment } = this;
    const view = viewOf(moment, state, this.history, this.events.events);
    this.view = view;
    setText($("moment"), timeOfDay(moment.unix_seconds));
    const driver = state.nvml.driver_version;
    setText($("place"), driver ? `${location.host} · driver ${driver}` : location.host);
    const why = state.nvml.up ? "" : `NVML is down, so devices are not shown: ${state.nvml.error || "no reason is known"}`;
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
      token: "To clear, the exporter's token is needed: the buttons ask for it.",
      refused: `Clearing is not open to you here. ${sentence(detail)}`,
    };
    const text = off ? `Clears are switched off here: ${CLEAR} is not among --action.allow.` : (words[may] ?? "");
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
    const seen = this.moment && `Last seen ${timeOfDay(this.moment.unix_seconds)}; no figures are shown until it answers again.`;
    const when = seen ?? "It has not answered yet.";
    setText($("lost"), lost ? `Lost the exporter. ${when}` : "");
    setHidden($("lost"), !lost);
    $("clear-all").disabled = stale;
    if (before === "lost" || before === "waiting") this.events.forget();
  },
};

/** The exporter has another version of this page; but one that cannot be had is tried for once, not for ever. */
function isFirstTry(page) {
  try {
    if (sessionStorage.getItem("page") === page) return false;
    sessionStorage.setItem("page", page);
    return true;
  } catch {
    return false; // a browser that stores nothing would try for ever
  }
}

const PAGE = document.querySelector("meta[name=page]").content;

app.start();
