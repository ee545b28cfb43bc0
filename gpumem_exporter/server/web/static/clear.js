// The dialog of a clear, and of an engine's sleep: a dry run, the confirmation, the results. It is modal, so the browser
// keeps the focus in it.
// Target, mode, group and deadline are the exporter's choice; they go to the exporter as they came.

import { ACTIONS, Refusal, request, setToken } from "./api.js";
import { $, h, setHidden, setText } from "./dom.js";
import { happened } from "./events.js";
import { bytes, safe, UNKNOWN } from "./format.js";

const WAIT_SECONDS = 10;
const SETTLE_SECONDS = 10;

const dialog = $("dialog");
let attempt = 0; // a reply for an earlier dialog is not shown in a later one
let clear = null;
let onConfirm = null;

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

/** Open the dialog for a job's `clear`. */
export function openClear(name, choice) {
  open(name, { ...CLEAR, ...choice });
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
  clear = choice;
  forget();
  setText($("dialog-title"), `${clear.verb} ${safe(name)}`);
  if (!dialog.open) dialog.showModal();
  $("dialog-title").focus();
  preview();
}

function forget() {
  attempt += 1;
  onConfirm = null;
  $("token").value = "";
  $("dialog-results").replaceChildren();
}

/** Show one state of the dialog; everything not given is empty. */
function show({ status = "", when = "", error = "", action = null, confirm = "", cancel = "Cancel", then = null, token = false }) {
  setText($("dialog-status"), status);
  setText($("dialog-when"), when);
  setText($("dialog-error"), error);
  setHidden($("dialog-error"), error === "");
  setHidden($("token-form"), !token);
  setHidden($("dialog-results"), action === null);
  $("dialog-results").replaceChildren(...(action === null ? [] : [resultsTable(action)]));
  setText($("dialog-confirm"), confirm);
  setHidden($("dialog-confirm"), confirm === "");
  setText($("dialog-cancel"), cancel);
  onConfirm = then;
}

function bodyOf(more) {
  const { action, target, mode, group, deadline_seconds } = clear;
  return { action, target, mode, group, deadline_seconds, ...more };
}

async function preview() {
  const own = attempt;
  show({ status: "Estimating…" });
  try {
    const { document: action } = await request(ACTIONS, { method: "POST", body: bodyOf({ dry_run: true }) });
    if (own !== attempt) return;
    show({ status: safe(action.sentence), when: when(action), action, confirm: clear.verb, then: run });
    $("dialog-confirm").focus();
    if (happened.refusal) happened.refresh(true); // the token that was accepted also shows events
  } catch (error) {
    if (own === attempt) explain(error, preview);
  }
}

/** Say when the processes clear, and what the job notices. */
function when({ results }) {
  if (clear.when !== undefined) return clear.when;
  if (clear.mode !== "step") return "The job continues. It clears at once.";
  if (clear.group) return `The job continues. Its ${new Set(results.map(({ pid }) => pid)).size} ranks clear after the same step, so that none waits for another.`;
  return "The job continues. It clears at the end of its next step.";
}

async function run() {
  const own = attempt;
  show({ status: clear.doing, cancel: "Close" });
  $("dialog-title").focus();
  try {
    const wait = clear.mode === "step" ? 0 : WAIT_SECONDS;
    const body = bodyOf({ wait_seconds: wait, settle_seconds: clear.settles ? SETTLE_SECONDS : 0, reason: "requested on the live page" });
    let action = (await request(ACTIONS, { method: "POST", body, headers: { "Idempotency-Key": randomKey() }, seconds: wait + 5 })).document;
    const path = `${ACTIONS}/${encodeURIComponent(action.id)}`;
    const cancel = () => request(path, { method: "DELETE" }).catch(() => {});
    while (own === attempt && (isRunning(action) || action.settling)) {
      if (isRunning(action)) show({ status: safe(action.sentence), confirm: `Cancel the ${clear.verb.toLowerCase()}`, cancel: "Close", then: cancel });
      else show({ status: `${safe(action.sentence)} Checking how much of it stays free…`, action, cancel: "Close" });
      await new Promise((resolve) => setTimeout(resolve, 500));
      action = (await request(path)).document;
    }
    happened.refresh(true);
    if (own !== attempt) return;
    show({ status: safe(action.sentence), action, cancel: "Close" });
    $("dialog-cancel").focus();
  } catch (error) {
    if (own === attempt) explain(error, run);
  }
}

function isRunning({ state }) {
  return state === "queued" || state === "running";
}

function explain(error, again) {
  if (error instanceof Refusal && error.status === 401) {
    show({ ...(error.wrongToken ? { error: error.message } : { status: "The exporter requires a token." }), token: true, confirm: "Use token", then: () => useToken(again) });
    $("token").focus();
  } else if (error instanceof Refusal) {
    show({ error: error.message, cancel: "Close" });
    $("dialog-cancel").focus();
  } else {
    show({ error: "The exporter did not reply.", confirm: "Try again", then: again });
  }
}

function useToken(again) {
  const usable = setToken($("token").value.trim());
  $("token").value = "";
  if (usable) {
    again();
    return;
  }
  setText($("dialog-error"), "Invalid token: it is empty or has characters that a token cannot have.");
  setHidden($("dialog-error"), false);
  $("token").focus();
}

/** Return a random key; `crypto.randomUUID` does not exist over plain HTTP. */
function randomKey() {
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

function resultsTable({ results, dry_run: dry }) {
  const head = ["Process", "GPU", ...clear.head(dry), "Outcome"];
  const row = (result) => {
    const { pid, rank, gpu, outcome: end, reason } = result;
    return [`${rank ? `rank ${safe(rank)}, ` : ""}pid ${pid}`, gpu ?? UNKNOWN, ...clear.sizes(result).map(bytes), `${end.replaceAll("_", " ")}${reason ? `: ${safe(reason)}` : ""}`];
  };
  return h(
    "table",
    {},
    h("thead", {}, h("tr", {}, ...head.map((title) => h("th", { scope: "col" }, title)))),
    h("tbody", {}, ...results.map((result) => h("tr", {}, ...row(result).map((text) => h("td", {}, text))))),
  );
}

$("dialog-confirm").addEventListener("click", () => onConfirm?.());
$("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  onConfirm?.();
});
$("dialog-cancel").addEventListener("click", () => dialog.close());
dialog.addEventListener("close", () => {
  if (!dialog.open) forget(); // the browser sends the event later: the dialog may have been opened again
});
