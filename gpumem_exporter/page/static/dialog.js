// The dialog of an action: a question, the progress, the results. It is modal, so the browser keeps the focus in it.

import { ACTIONS, Refusal, request, setToken } from "./api.js";
import { $, setHidden, setText } from "./dom.js";

const dialog = $("dialog");
let attempt = 0;
let onConfirm = null;

/** Open the dialog with a title and without any state. */
export function openDialog(title) {
  forget();
  setText($("dialog-title"), title);
  if (!dialog.open) dialog.showModal();
  $("dialog-title").focus();
}

/** Return a function that says whether the dialog is still the same: a reply for an earlier one is not shown in a later one. */
export function staysOpen() {
  const own = attempt;
  return () => own === attempt;
}

export const isRunning = ({ state }) => state === "queued" || state === "running";

/** Request an action, call `progress(action, cancel)` while it lasts, and return it; null if the dialog was closed. */
export async function runAction(body, progress, lasts = isRunning) {
  const isShown = staysOpen();
  const sent = { wait_seconds: 0, reason: "requested on the live page", ...body };
  let { document: action } = await request(ACTIONS, { method: "POST", body: sent, headers: { "Idempotency-Key": randomKey() }, seconds: sent.wait_seconds + 5 });
  const path = `${ACTIONS}/${encodeURIComponent(action.id)}`;
  const cancel = () => request(path, { method: "DELETE" }).catch(() => {});
  while (isShown() && lasts(action)) {
    progress(action, cancel);
    await new Promise((resolve) => setTimeout(resolve, 500));
    action = (await request(path)).document;
  }
  return isShown() ? action : null;
}

function forget() {
  attempt += 1;
  onConfirm = null;
  $("token").value = "";
  $("dialog-results").replaceChildren();
}

/** Show one state of the dialog; everything not given is empty. */
export function show({ status = "", when = "", error = "", results = null, confirm = "", cancel = "Cancel", then = null, token = false }) {
  setText($("dialog-status"), status);
  setText($("dialog-when"), when);
  setText($("dialog-error"), error);
  setHidden($("dialog-error"), error === "");
  setHidden($("token-form"), !token);
  setHidden($("dialog-results"), results === null);
  $("dialog-results").replaceChildren(...(results === null ? [] : [results]));
  setText($("dialog-confirm"), confirm);
  setHidden($("dialog-confirm"), confirm === "");
  setText($("dialog-cancel"), cancel);
  onConfirm = then;
}

/** Say why a request failed, and offer to enter a token or to try again. */
export function explain(error, again) {
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

$("dialog-confirm").addEventListener("click", () => onConfirm?.());
$("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  onConfirm?.();
});
$("dialog-cancel").addEventListener("click", () => dialog.close());
dialog.addEventListener("close", () => {
  if (!dialog.open) forget(); // the browser sends the event later: the dialog may have been opened again
});
