// The dialog of a clear: a dry run, the confirmation, the results. It is modal, so the browser keeps the focus in it.
// The exporter's reply to the dry run says which processes clear at once, and which at the end of a step.

const CLEAR = "empty_cache";
const ACTIONS = "/api/v1/actions";
const WAIT_SECONDS = 10;
const SETTLE_SECONDS = 10;
const WORTH_SAYING = 0.05; // the share of the freed memory from which the rest is worth a sentence
const NAMED_JOBS = 8;
const REFUSALS = [404, 409, 429]; // the processes of a part exited, its ranks cannot act together, or a limit is reached
const EXPLANATION =
  "PyTorch frees its reclaimable memory for other processes. The processes continue, and allocate from the driver again when they need memory.";

const clearing = (() => {
  const dialog = $("dialog");
  let attempt = 0; // a reply for an earlier dialog is not shown in a later one
  let target = null;
  let onConfirm = null;
  let onNow = null;

  function open(newTarget, name) {
    target = newTarget;
    forget();
    setText($("dialog-title"), `Clear ${name}`);
    setText($("dialog-text"), EXPLANATION);
    if (!dialog.open) dialog.showModal();
    $("dialog-title").focus();
    return preview();
  }

  function forget() {
    attempt += 1;
    onConfirm = null;
    onNow = null;
    $("token").value = "";
    $("dialog-results").replaceChildren();
  }

  /** Show one state of the dialog; everything not given is empty. */
  function show({ status = "", rest = "", when = "", error = "", action = null, results = "", confirm = "", now = "", cancel = "Cancel", then = null, thenNow = null, token = false }) {
    setText($("dialog-status"), status);
    setText($("dialog-rest"), rest);
    setText($("dialog-when"), when);
    setHidden($("dialog-when"), when === "");
    setText($("dialog-error"), error);
    setHidden($("dialog-error"), error === "");
    setHidden($("token-form"), !token);
    const list = $("dialog-results");
    setHidden(list, action === null);
    setAttribute(list, "aria-label", results || "Results");
    list.replaceChildren(...(action === null ? [] : [resultsTable(action)]));
    setText($("dialog-confirm"), confirm);
    setHidden($("dialog-confirm"), confirm === "");
    setText($("dialog-now"), now);
    setHidden($("dialog-now"), now === "");
    setText($("dialog-cancel"), cancel);
    onConfirm = then;
    onNow = thenNow;
  }

  /** Request the dry run. Its mode and its deadline are left to the exporter. */
  async function expect() {
    const body = { action: CLEAR, target, dry_run: true };
    return (await access.request(ACTIONS, { method: "POST", body })).document;
  }

  async function preview() {
    const ownAttempt = attempt;
    if (app.view !== null && !app.view.allowed_actions.includes(CLEAR)) {
      show({ error: `Clearing is disabled: --action.allow does not include ${CLEAR}.`, cancel: "Close" });
      return;
    }
    show({ status: "Estimating…" });
    let action;
    try {
      action = await expect();
    } catch (error) {
      if (ownAttempt === attempt) explain(error, preview);
      return;
    }
    app.events.refresh(true);
    if (ownAttempt !== attempt) return;
    const parts = partsOf(action);
    const waits = parts.some(isAtStep);
    const now = waits ? { now: "Clear now", thenNow: () => run([{ request: { target, mode: "now" }, results: action.results }]) } : {};
    const confirm = waits ? "Clear at the step's end" : "Clear";
    show({ ...figure(action, parts), when: when(parts), action, results: "Expected results", confirm, then: () => run(), ...now });
    $("dialog-confirm").focus();
  }

  /** Clear, as the exporter suggests now: the jobs may have changed since the dialog was opened. */
  async function run(given = null) {
    const ownAttempt = attempt;
    show({ status: "Clearing…", cancel: "Close" });
    $("dialog-title").focus();
    try {
      const parts = given ?? partsOf(await expect());
      if (ownAttempt !== attempt) return;
      const actions = await finish(parts, ownAttempt);
      app.events.refresh(true);
      if (ownAttempt !== attempt) return;
      const action = joined(actions);
      const failed = action.results.filter((result) => result.outcome !== "done").length;
      const rest = failed > 0 ? ` ${failed} of ${action.results.length} results are not done.` : "";
      const freed = freedBytes(action);
      const status = freed === null ? `The memory that ${processCount(action)} freed is unknown.${rest}` : `Freed ${freed} in ${processCount(action)}.${rest}`;
      const settling = action.settling && action.freed_bytes > 0;
      show({ status: status + (settling ? ` Checking how much of it is still free after ${SETTLE_SECONDS} s…` : ""), action, results: "Results", cancel: "Close" });
      $("dialog-cancel").focus();
      if (settling) await settle(actions, status, ownAttempt);
    } catch (error) {
      if (ownAttempt === attempt) explain(error, () => run(given));
    }
  }

  /** Send all parts and wait for their ends. The dialog says what they wait for, and can cancel them. */
  async function finish(parts, ownAttempt) {
    const waiting = new Set();
    const waits = parts.filter(isAtStep);
    const cancel = () => {
      show({ status: "Cancelling…", cancel: "Close" });
      for (const id of waiting) access.request(`${ACTIONS}/${encodeURIComponent(id)}`, { method: "DELETE" }).catch(() => {});
    };
    const ends = parts.map(async (part) => {
      let action = await submit(part, parts.length === 1);
      while (isRunning(action)) {
        const [engine] = action.waits_for;
        if ((isAtStep(part) || engine) && !waiting.has(action.id) && ownAttempt === attempt) {
          waiting.add(action.id);
          const status = engine
            ? `Waiting until the engine in pid ${engine.pid} (${safe(engine.title)}) has started on GPU ${engine.gpu}, at most until ${timeOfDay(engine.until_unix_seconds)}…`
            : `Waiting for the end of a step of ${jobsInWords(waits)}, at most ${longestDeadline(waits)} s…`;
          if (onConfirm !== cancel) show({ status, confirm: "Cancel the clear", cancel: "Close", then: cancel });
        }
        action = (await later(action)).document;
      }
      waiting.delete(action.id);
      return action;
    });
    return Promise.all(ends);
  }

  /** Send one part. If only this part is refused, return its refusal, because the others may run. */
  async function submit({ request, results }, only) {
    const wait = request.mode === "step" ? 0 : WAIT_SECONDS;
    const body = { action: CLEAR, ...request, wait_seconds: wait, settle_seconds: SETTLE_SECONDS, reason: "requested on the live page" };
    const headers = { "Idempotency-Key": randomKey() };
    try {
      return (await access.request(ACTIONS, { method: "POST", body, headers, seconds: wait + 5 })).document;
    } catch (error) {
      if (only || !(error instanceof Refusal) || !REFUSALS.includes(error.status)) throw error;
      const unknown = { reserved_after_bytes: null, freed_bytes: null, still_free_bytes: null };
      const refused = results.map((result) => ({ ...result, outcome: "refused", reason: error.message, ...unknown }));
      return { state: "failed", results: refused, freed_bytes: null, still_free_bytes: null, settling: false, settle_seconds: 0 };
    }
  }

  /** Wait until the processes have reported how much is still free, and add it to the status. */
  async function settle(cleared, status, ownAttempt) {
    let actions = cleared;
    while (actions.some((action) => action.settling)) {
      actions = await Promise.all(actions.map(async (action) => (action.settling ? (await later(action)).document : action)));
      if (ownAttempt !== attempt) return;
    }
    setText($("dialog-status"), `${status}${stillFree(joined(actions))}`);
  }

  /** Read an action again after half a second. */
  async function later(action) {
    await new Promise((resolve) => setTimeout(resolve, 500));
    return access.request(`${ACTIONS}/${encodeURIComponent(action.id)}`);
  }

  function explain(error, again) {
    if (error instanceof Refusal && error.status === 401) {
      const text = error.wrongToken ? { error: sentence(error.message) } : { status: "The exporter requires a token." };
      show({ ...text, token: true, confirm: "Use token", then: () => useToken(again) });
      $("token").focus();
    } else if (error instanceof Refusal) {
      show({ error: sentence(error.message), cancel: "Close" });
      $("dialog-cancel").focus();
    } else {
      show({ error: "The exporter did not reply.", confirm: "Try again", then: again });
    }
  }

  function useToken(again) {
    const usable = access.setToken($("token").value.trim());
    $("token").value = "";
    if (usable) return again();
    setText($("dialog-error"), "Invalid token: it is empty or has characters that a token cannot have.");
    $("token").focus();
    return undefined;
  }

  $("dialog-confirm").addEventListener("click", () => onConfirm?.());
  $("dialog-now").addEventListener("click", () => onNow?.());
  $("token-form").addEventListener("submit", (event) => {
    event.preventDefault();
    onConfirm?.();
  });
  $("dialog-cancel").addEventListener("click", () => dialog.close());
  dialog.addEventListener("close", () => {
    if (!dialog.open) forget(); // the browser sends the event later: the dialog may have been opened again
  });
  return { open };
})();

function isRunning(action) {
  return action.state === "queued" || action.state === "running";
}

/** Return the requests that a dry run suggests, each with its expected results. */
function partsOf(expected) {
  return expected.suggested.map((request) => {
    const pids = request.target.pid === undefined ? null : new Set([request.target.pid].flat());
    return { request, results: expected.results.filter((result) => pids === null || pids.has(result.pid)) };
  });
}

function isAtStep({ request }) {
  return request.mode === "step";
}

/** Return how much of the freed memory stays free, and in `rest` what would be reserved again. */
function figure(expected, parts) {
  const known = expected.results.filter((result) => result.freed_bytes !== null);
  if (known.length === 0) return { status: "It is not known how much memory a clear would free." };
  const hidden = expected.results.some((result) => result.outcome === "done" && result.freed_bytes === null);
  const freed = known.reduce((sum, result) => sum + result.freed_bytes, 0);
  if (freed === 0 && !hidden) return { status: "A clear would free nothing." };
  const settled = known.filter((result) => result.still_free_bytes !== null);
  if (settled.length === 0) {
    return { status: `Would free ${hidden ? "at least " : ""}${bytes(freed)} now`, rest: "; how much of it stays free is not known yet." };
  }
  const restOf = (result) => result.freed_bytes - result.still_free_bytes;
  const stays = settled.reduce((sum, result) => sum + result.still_free_bytes, 0);
  const rest = settled.reduce((sum, result) => sum + restOf(result), 0);
  const status = `Stays free ${hidden || settled.length < known.length ? "at least " : ""}${sizeInWords(stays)}`;
  if (rest < WORTH_SAYING * freed) return { status: `${status}.` };
  const waiting = new Set(parts.filter(isAtStep).flatMap((part) => part.results.map((result) => result.pid)));
  const atStep = settled.every((result) => restOf(result) <= 0 || waiting.has(result.pid));
  return { status, rest: `; ${bytes(rest)} more would be reserved again${atStep ? " in the next step" : ""}.` };
}

/** Say which jobs clear at the end of a step, and how many processes at once; empty if all clear at once. */
function when(parts) {
  const waits = parts.filter(isAtStep);
  if (waits.length === 0) return "";
  const text = `At the end of a step, within ${longestDeadline(waits)} s: ${jobsInWords(waits)}.`;
  const others = parts.filter((part) => !isAtStep(part)).flatMap((part) => part.results);
  return others.length > 0 ? `${text} At once: ${processCount({ results: others })}.` : text;
}

function longestDeadline(parts) {
  return Math.round(Math.max(...parts.map(({ request }) => request.deadline_seconds)));
}

/** Return the names of the jobs of some parts. A group is a job. */
function jobsInWords(parts) {
  const names = parts.flatMap(({ request, results }) => {
    const jobs = new Map();
    for (const result of results) {
      const key = request.group ? "" : result.workload || result.pid;
      jobs.set(key, [...(jobs.get(key) ?? []), result]);
    }
    return [...jobs.values()].map((rows) => jobInWords(rows) || processName(rows[0].workload, rows[0].rank, rows[0].workload ? null : rows[0].pid));
  });
  const more = names.length - NAMED_JOBS;
  return [...names.slice(0, NAMED_JOBS), ...(more > 0 ? [`and ${more} more`] : [])].join(", ");
}

/** Return one action for several. */
function joined(actions) {
  const sum = (name) => {
    const known = actions.map((action) => action[name]).filter((value) => value !== null);
    return known.length > 0 ? known.reduce((all, value) => all + value, 0) : null;
  };
  return {
    results: actions.flatMap((action) => action.results),
    freed_bytes: sum("freed_bytes"),
    still_free_bytes: sum("still_free_bytes"),
    settling: actions.some((action) => action.settling),
    settle_seconds: Math.max(...actions.map((action) => action.settle_seconds)),
  };
}

function sizeInWords(size) {
  return size === 0 ? "0 B" : bytes(size);
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
  return ` ${missing ? "At least " : ""}${sizeInWords(action.still_free_bytes)} of it is still free after ${action.settle_seconds} s${rest}.`;
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
  const sizes = action.dry_run ? ["Reserved", "Stays free", "Would free"] : ["Reserved", "Freed", "Outcome"];
  const head = h("tr", {}, ...["Process", "GPU", ...sizes].map((title) => h("th", { scope: "col" }, title)));
  const figureOf = (result) => (action.dry_run ? (result.still_free_bytes ?? -1) : 0);
  const order = (a, b) => figureOf(b) - figureOf(a) || (b.freed_bytes ?? -1) - (a.freed_bytes ?? -1);
  const body = [...action.results].sort(order).map((result) => {
    const name = h("th", { scope: "row" }, processName(result.workload, result.rank, result.pid));
    const outcome = result.reason ? `${result.outcome}: ${safe(result.reason)}` : result.outcome;
    if (action.dry_run && (result.reason || result.outcome !== "done")) {
      name.append(h("span", { class: "detail" }, result.outcome === "done" ? safe(result.reason) : outcome));
    }
    const reserved = bytes(result.reserved_before_bytes);
    const cells = action.dry_run
      ? [h("td", {}, reserved), h("td", {}, bytes(result.still_free_bytes)), h("td", { class: "faint" }, bytes(result.freed_bytes))]
      : [`${reserved} → ${bytes(result.reserved_after_bytes)}`, bytes(result.freed_bytes), outcome].map((text) => h("td", {}, text));
    return h("tr", {}, name, h("td", {}, result.gpu || "–"), ...cells);
  });
  return h("table", {}, h("thead", {}, head), h("tbody", {}, ...body));
}
