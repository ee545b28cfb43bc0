// A clear, and an engine's sleep and wake: a dry run, the confirmation, the results.
// The exporter chooses when each process acts.

import { ACTIONS, request } from "./api.js";
import { explain, isRunning, openDialog, runAction, show, staysOpen } from "./dialog.js";
import { $, h } from "./dom.js";
import { happened } from "./events.js";
import { bytes, processName, safe, UNKNOWN } from "./format.js";

const WAIT_SECONDS = 10;
const SETTLE_SECONDS = 10;

let chosen = null;

const CLEAR = {
  action: "empty_cache",
  verb: "Clear",
  doing: "Clearing…",
  settles: true,
  head: (dry) => [dry ? "Reclaimable now" : "Freed", dry ? "Stays free" : "Still free"],
  sizes: ({ freed_bytes, still_free_bytes }) => [freed_bytes, still_free_bytes],
};
const resident = ({ driver_before_bytes: before, driver_after_bytes: after }) => [before, after];
const ENGINE = {
  release_memory: { verb: "Sleep", doing: "Releasing the engine's memory…", settles: true, when: "Requests that arrive meanwhile wait, or load the model again. An engine with requests is refused.", head: () => ["Before", "Resident"], sizes: resident },
  resume_memory: { verb: "Wake", doing: "Resuming the engine's memory…", settles: false, when: "", head: () => ["Before", "After"], sizes: resident },
};

function openClear(name, choice) {
  open(name, { ...CLEAR, ...choice });
}

/** Return a button that opens the dialog; `job` returns the present name and clear. */
export function clearButton(job, ...children) {
  const button = h("button", { type: "button", class: "act" }, ...children);
  button.addEventListener("click", () => openClear(job().name, job().clear));
  return button;
}

/** Open the dialog for a job's `engine_memory`. */
export function openEngine(name, choice) {
  open(name, { ...ENGINE[choice.action], ...choice });
}

/** Return the verb of a job's `engine_memory`. */
export function engineVerb({ action }) {
  return ENGINE[action].verb;
}

function open(name, choice) {
  chosen = choice;
  openDialog(`${chosen.verb} ${safe(name)}`);
  preview();
}

function bodyOf(more) {
  return { action: chosen.action, target: chosen.target, ...more };
}

async function preview() {
  const isShown = staysOpen();
  show({ status: "Estimating…" });
  try {
    const { document: action } = await request(ACTIONS, { method: "POST", body: bodyOf({ dry_run: true }) });
    if (!isShown()) return;
    chosen.waits = action.results.some(({ mode }) => mode === "step" || mode === "idle");
    show({ status: safe(action.sentence), when: chosen.when ?? "The job continues.", results: resultsTable(action), confirm: chosen.verb, then: run });
    $("dialog-confirm").focus();
    if (happened.refusal) happened.refresh(true); // the token that was accepted also shows events
  } catch (error) {
    if (isShown()) explain(error, preview);
  }
}

async function run() {
  const isShown = staysOpen();
  show({ status: chosen.doing, cancel: "Close" });
  $("dialog-title").focus();
  try {
    const wait = chosen.waits ? 0 : WAIT_SECONDS;
    const action = await runAction(bodyOf({ wait_seconds: wait, settle_seconds: chosen.settles ? SETTLE_SECONDS : 0 }), showProgress, (action) => isRunning(action) || action.settling);
    happened.refresh(true);
    if (action === null) return;
    show({ status: safe(action.sentence), results: resultsTable(action), cancel: "Close" });
    $("dialog-cancel").focus();
  } catch (error) {
    if (isShown()) explain(error, run);
  }
}

function showProgress(action, cancel) {
  if (isRunning(action)) show({ status: safe(action.sentence), confirm: `Cancel the ${chosen.verb.toLowerCase()}`, cancel: "Close", then: cancel });
  else show({ status: `${safe(action.sentence)} Checking how much of it stays free…`, results: resultsTable(action), cancel: "Close" });
}

function resultsTable({ results, dry_run: dry }) {
  const head = ["Process", "GPU", ...chosen.head(dry), "Outcome"];
  const row = (result) => {
    const { gpu, outcome: end, reason } = result;
    return [processName(result), gpu ?? UNKNOWN, ...chosen.sizes(result).map(bytes), `${end.replaceAll("_", " ")}${reason ? `: ${safe(reason)}` : ""}`];
  };
  return h(
    "table",
    {},
    h("thead", {}, h("tr", {}, ...head.map((title) => h("th", { scope: "col" }, title)))),
    h("tbody", {}, ...results.map((result) => h("tr", {}, ...row(result).map((text) => h("td", {}, text))))),
  );
}
