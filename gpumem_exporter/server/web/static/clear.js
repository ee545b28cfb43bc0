// The dialog of a clear: a dry run, the confirmation, the results. It is modal, so the browser keeps the focus in it.

const CLEAR = "empty_cache";
const WAIT_SECONDS = 10;
const SETTLE_SECONDS = 10;
const EXPLANATION =
  "PyTorch frees its reclaimable memory for other processes. The processes continue, and allocate from the driver again when they need memory.";

const clearing = (() => {
  const dialog = $("dialog");
  let attempt = 0; // a reply for an earlier dialog is not shown in a later one
  let target = null;
  let onConfirm = null;

  function open(newTarget, name) {
    target = newTarget;
    attempt += 1;
    setText($("dialog-title"), `Clear ${name}`);
    setText($("dialog-text"), EXPLANATION);
    if (!dialog.open) dialog.showModal();
    $("dialog-title").focus();
    return preview();
  }

  /** Show one state of the dialog; everything not given is empty. */
  function show({ status = "", error = "", action = null, results = "", confirm = "", cancel = "Cancel", then = null, token = false }) {
    setText($("dialog-status"), status);
    setText($("dialog-error"), error);
    setHidden($("dialog-error"), error === "");
    setHidden($("token-form"), !token);
    const list = $("dialog-results");
    setHidden(list, action === null);
    setAttribute(list, "aria-label", results || "Results");
    list.replaceChildren(...(action === null ? [] : [resultsTable(action)]));
    setText($("dialog-confirm"), confirm);
    setHidden($("dialog-confirm"), confirm === "");
    setText($("dialog-cancel"), cancel);
    onConfirm = then;
  }

  async function preview() {
    const ownAttempt = attempt;
    if (app.view !== null && !app.view.allowed_actions.includes(CLEAR)) {
      show({ error: `Clearing is disabled: --action.allow does not include ${CLEAR}.`, cancel: "Close" });
      return;
    }
    show({ status: "Estimating…" });
    let reply;
    try {
      reply = await access.request("/api/v1/actions", { method: "POST", body: { action: CLEAR, target, dry_run: true } });
    } catch (error) {
      if (ownAttempt === attempt) explain(error, preview);
      return;
    }
    app.events.refresh(true);
    if (ownAttempt !== attempt) return;
    const action = reply.document;
    const freed = freedBytes(action);
    const status =
      freed === null
        ? `The result for ${processCount(action)} is unknown in advance.`
        : `This would free ${freed} in ${processCount(action)}.`;
    const confirm = action.freed_bytes > 0 ? `Free ${freed}` : "Clear anyway";
    show({ status, action, results: "Expected results", confirm, then: run });
    $("dialog-confirm").focus();
  }

  async function run() {
    const ownAttempt = attempt;
    show({ status: "Clearing…", cancel: "Close" });
    try {
      const reason = "requested on the live page";
      const body = { action: CLEAR, target, wait_seconds: WAIT_SECONDS, settle_seconds: SETTLE_SECONDS, reason };
      const headers = { "Idempotency-Key": randomKey() };
      let reply = await access.request("/api/v1/actions", { method: "POST", body, headers, seconds: WAIT_SECONDS + 5 });
      while (reply.status === 202 || isRunning(reply.document)) {
        if (ownAttempt !== attempt) return;
        reply = await later(reply.document);
      }
      app.events.refresh(true);
      if (ownAttempt !== attempt) return;
      const action = reply.document;
      const failed = action.results.filter((result) => result.outcome !== "done").length;
      const rest = failed > 0 ? ` ${failed} of ${action.results.length} results are not done.` : "";
      const freed = freedBytes(action);
      const status = freed === null ? `The memory that ${processCount(action)} freed is unknown.${rest}` : `Freed ${freed} in ${processCount(action)}.${rest}`;
      const settling = action.settling && action.freed_bytes > 0 ? ` Checking how much of it is still free after ${SETTLE_SECONDS} s…` : "";
      show({ status: status + settling, action, results: "Results", cancel: "Close" });
      $("dialog-cancel").focus();
      if (settling) await settle(reply.document, status, ownAttempt);
    } catch (error) {
      if (ownAttempt === attempt) explain(error, run);
    }
  }

  /** Wait until the processes have reported how much is still free, and add it to the status. */
  async function settle(cleared, status, ownAttempt) {
    let action = cleared;
    while (action.settling) {
      action = (await later(action)).document;
      if (ownAttempt !== attempt) return;
    }
    setText($("dialog-status"), `${status}${stillFree(action)}`);
  }

  /** Read an action again after half a second. */
  async function later(action) {
    await new Promise((resolve) => setTimeout(resolve, 500));
    return access.request(`/api/v1/actions/${encodeURIComponent(action.id)}`);
  }

  function explain(error, again) {
    if (error instanceof Refusal && error.status === 401) {
      const text = access.hasToken() ? { error: sentence(error.message) } : { status: "The exporter requires a token." };
      show({ ...text, token: true, confirm: "Use token", then: () => takeToken(again) });
      $("token").focus();
    } else if (error instanceof Refusal) {
      show({ error: sentence(error.message), cancel: "Close" });
      $("dialog-cancel").focus();
    } else {
      show({ error: "The exporter did not reply.", confirm: "Try again", then: again });
    }
  }

  function takeToken(again) {
    const usable = access.setToken($("token").value.trim());
    $("token").value = "";
    if (usable) return again();
    setText($("dialog-error"), "Invalid token: it is empty or has characters that a token cannot have.");
    $("token").focus();
    return undefined;
  }

  $("dialog-confirm").addEventListener("click", () => onConfirm?.());
  $("token-form").addEventListener("submit", (event) => {
    event.preventDefault();
    onConfirm?.();
  });
  $("dialog-cancel").addEventListener("click", () => dialog.close());
  dialog.addEventListener("close", () => {
    attempt += 1;
    onConfirm = null;
    $("token").value = "";
    $("dialog-results").replaceChildren();
  });
  return { open };
})();

function isRunning(action) {
  return action.state === "queued" || action.state === "running";
}

/** Return the freed bytes of an action as text; null if no result has them. */
function freedBytes(action) {
  const least = action.results.some((result) => result.freed_bytes === null) ? "at least " : "";
  return action.freed_bytes === null ? null : least + bytes(action.freed_bytes);
}

/** Say how much of the freed memory is still free after settling; empty if it is unknown. */
function stillFree(action) {
  if (action.still_free_bytes === null) return "";
  const missing = action.results.some((result) => result.freed_bytes > 0 && result.still_free_bytes === null);
  const complete = missing || action.still_free_bytes === action.freed_bytes;
  const job = new Set(action.results.map((result) => result.pid)).size === 1 ? "job" : "jobs";
  const rest = complete ? "" : `: the ${job} reserved ${action.still_free_bytes === 0 ? "it" : "the rest"} again`;
  const size = action.still_free_bytes === 0 ? "0 B" : bytes(action.still_free_bytes);
  return ` ${missing ? "At least " : ""}${size} of it is still free after ${action.settle_seconds} s${rest}.`;
}

function processCount(action) {
  const count = new Set(action.results.map((result) => result.pid)).size;
  return count === 1 ? "1 process" : `${count} processes`;
}

/** Return a random key; `crypto.randomUUID` does not exist over plain HTTP. */
function randomKey() {
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

function resultsTable(action) {
  const titles = ["Process", "GPU", "Reserved", action.dry_run ? "Would free" : "Freed", action.dry_run ? "" : "Outcome"].filter(Boolean);
  const head = h("tr", {}, ...titles.map((title) => h("th", { scope: "col" }, title)));
  const byFreed = [...action.results].sort((a, b) => (b.freed_bytes ?? -1) - (a.freed_bytes ?? -1));
  const body = byFreed.map((result) => {
    const change = action.dry_run
      ? bytes(result.reserved_before_bytes)
      : `${bytes(result.reserved_before_bytes)} → ${bytes(result.reserved_after_bytes)}`;
    const outcome = result.reason ? `${result.outcome}: ${safe(result.reason)}` : result.outcome;
    const name = processName(result.workload, result.rank, result.pid);
    const cells = [result.gpu || "–", change, bytes(result.freed_bytes), ...(action.dry_run ? [] : [outcome])];
    return h("tr", {}, h("th", { scope: "row" }, name), ...cells.map((cell) => h("td", {}, cell)));
  });
  return h("table", {}, h("thead", {}, head), h("tbody", {}, ...body));
}
