// A clear: what it would free, the question, what it did free. The dialog is modal; the browser keeps the focus in it.

const CLEAR = "empty_cache";
const WAIT_SECONDS = 10;
const EXPLANATION =
  "PyTorch gives back memory that it caches and that no tensor uses. The programs go on; they ask the driver again when they need more.";

const clearing = (() => {
  const dialog = $("dialog");
  let attempt = 0; // what an earlier dialog still waits for is not shown in a later one
  let target = null;
  let next = null;

  function begin(what, name) {
    target = what;
    attempt += 1;
    setText($("dialog-title"), `Clear ${name}`);
    setText($("dialog-text"), EXPLANATION);
    if (!dialog.open) dialog.showModal();
    $("dialog-title").focus();
    return preview();
  }

  /** What there is to say: a state of the dialog, whole. */
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
    next = then;
  }

  async function preview() {
    const mine = attempt;
    if (app.view !== null && !app.view.allowed_actions.includes(CLEAR)) {
      show({ error: `Clears are switched off here: ${CLEAR} is not among --action.allow.`, cancel: "Close" });
      return;
    }
    show({ status: "Asking what it would free…" });
    let asked;
    try {
      asked = await access.ask("/api/v1/actions", { method: "POST", body: { action: CLEAR, target, dry_run: true } });
    } catch (error) {
      if (mine === attempt) explain(error, preview);
      return;
    }
    app.events.refresh(true);
    if (mine !== attempt) return;
    const action = asked.document;
    const freed = freedBytes(action);
    const status =
      freed === null
        ? `What it would free in ${processCount(action)} cannot be known beforehand.`
        : `It would free ${freed} in ${processCount(action)}.`;
    const confirm = action.freed_bytes > 0 ? `Free ${freed}` : "Clear anyway";
    show({ status, action, results: "What it would free", confirm, then: run });
    $("dialog-confirm").focus();
  }

  async function run() {
    const mine = attempt;
    show({ status: "Clearing…", cancel: "Close" });
    try {
      const body = { action: CLEAR, target, wait_seconds: WAIT_SECONDS, reason: "asked for on the live page" };
      const headers = { "Idempotency-Key": randomKey() };
      let answer = await access.ask("/api/v1/actions", { method: "POST", body, headers, seconds: WAIT_SECONDS + 5 });
      while (answer.status === 202 || isUnderWay(answer.document)) {
        if (mine !== attempt) return;
        await new Promise((resolve) => setTimeout(resolve, 500));
        answer = await access.ask(`/api/v1/actions/${encodeURIComponent(answer.document.id)}`);
      }
      app.events.refresh(true);
      if (mine !== attempt) return;
      const action = answer.document;
      const failed = action.results.filter((result) => result.outcome !== "done").length;
      const rest = failed > 0 ? ` Of ${action.results.length} results ${failed} were not done.` : "";
      const freed = freedBytes(action);
      const status = freed === null ? `What came back of ${processCount(action)} is not known.${rest}` : `Freed ${freed} in ${processCount(action)}.${rest}`;
      show({ status, action, results: "What it freed", cancel: "Close" });
      $("dialog-cancel").focus();
    } catch (error) {
      if (mine === attempt) explain(error, run);
    }
  }

  function explain(error, again) {
    if (error instanceof Refusal && error.status === 401) {
      const said = access.hasToken() ? { error: sentence(error.message) } : { status: "The exporter wants its token for this." };
      show({ ...said, token: true, confirm: "Use this token", then: () => takeToken(again) });
      $("token").focus();
    } else if (error instanceof Refusal) {
      show({ error: sentence(error.message), cancel: "Close" });
      $("dialog-cancel").focus();
    } else {
      show({ error: "The exporter did not answer.", confirm: "Try again", then: again });
    }
  }

  function takeToken(again) {
    const usable = access.setToken($("token").value.trim());
    $("token").value = "";
    if (usable) return again();
    setText($("dialog-error"), "That is no token: it is empty, or has characters that none can have.");
    $("token").focus();
    return undefined;
  }

  $("dialog-confirm").addEventListener("click", () => next?.());
  $("token-form").addEventListener("submit", (event) => {
    event.preventDefault();
    next?.();
  });
  $("dialog-cancel").addEventListener("click", () => dialog.close());
  dialog.addEventListener("close", () => {
    attempt += 1;
    next = null;
    $("token").value = "";
    $("dialog-results").replaceChildren();
  });
  return { begin };
})();

function isUnderWay(action) {
  return action.state === "queued" || action.state === "running";
}

/** How much an action frees or has freed, in words; null where that is known of none of its results. */
function freedBytes(action) {
  const least = action.results.some((result) => result.freed_bytes === null) ? "at least " : "";
  return action.freed_bytes === null ? null : least + bytes(action.freed_bytes);
}

function processCount(action) {
  const count = new Set(action.results.map((result) => result.pid)).size;
  return count === 1 ? "1 process" : `${count} processes`;
}

/** Also where the page comes over plain HTTP, where `randomUUID` is not. */
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
    const outcome = result.reason ? `${result.outcome}: ${tamed(result.reason)}` : result.outcome;
    const name = processName(result.workload, result.rank, result.pid);
    const cells = [result.gpu || "–", change, bytes(result.freed_bytes), ...(action.dry_run ? [] : [outcome])];
    return h("tr", {}, h("th", { scope: "row" }, name), ...cells.map((cell) => h("td", {}, cell)));
  });
  return h("table", {}, h("thead", {}, head), h("tbody", {}, ...body));
}
