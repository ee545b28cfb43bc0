// The memory profiles of a job: a list, links, and the dialog that takes another one.
// A profile is a page of its own: its texts come from a job, so it has no rights here.

import { hasToken, Refusal, request, save } from "./api.js";
import { explain, openDialog, runAction, show, staysOpen } from "./dialog.js";
import { $, h, refill, setHidden, setText } from "./dom.js";
import { happened } from "./events.js";
import { bytes, dayAndTime, processName, safe } from "./format.js";

const RECORDED_SECONDS = 30;
const EVERY_SECONDS = 10;
const COSTS = {
  0: "The process stands still for about as long as a full garbage collection takes.",
  [RECORDED_SECONDS]: "Meanwhile, each allocation takes about 2 µs longer. At the end, the process stands still for about 4 ms per 1,000 blocks.",
};

/** Return a link that opens a profile or a difference, or with a token saves it. */
function fileLink(path, name, text) {
  const link = h("a", { href: path, target: "_blank", rel: "noopener" }, text);
  link.addEventListener("click", async (event) => {
    if (!hasToken()) return;
    event.preventDefault();
    try {
      await save(path, name);
    } catch (error) {
      setText(link, error instanceof Refusal ? `${text}: ${error.message}` : text);
    }
  });
  return link;
}

const pathOf = (id) => `api/v1/profiles/${encodeURIComponent(id)}`;

/** Return a link to the page of a profile. */
export function profileLink(id, text) {
  return fileLink(`${pathOf(id)}?format=html`, `profile-${id}.html`, text);
}

export class ProfileList {
  constructor() {
    this.button = h("button", { type: "button", class: "act" }, "Take a profile…");
    this.button.addEventListener("click", () => askForProfile(this.job, () => this.request(true)));
    this.list = h("ul", { class: "profiles" });
    this.element = h("section", {}, h("div", { class: "title" }, h("h3", {}, "Memory profiles"), this.button), this.list);
    this.id = null;
  }

  /** Show the profiles of a job, which may have ended: then `job` is null. */
  update(id, job, node) {
    if (id !== this.id) {
      this.id = id;
      this.profiles = [];
      this.requested = -Infinity;
    }
    this.job = job;
    this.request();
    const canAct = job !== null && canProfile(job, node);
    setHidden(this.button, !canAct);
    setHidden(this.element, !canAct && this.profiles.length === 0);
    refill(this.list, this.profiles, (all) => (all.length === 0 ? [h("li", { class: "faint" }, "Which lines and objects hold the memory. None is kept yet.")] : all.map((each, i) => row(each, all.slice(i + 1)))));
  }

  async request(force = false) {
    const now = performance.now() / 1000;
    if (!force && now - this.requested < EVERY_SECONDS) return;
    this.requested = now;
    const { id } = this;
    const reply = await request(`api/v1/profiles?limit=20&job=${encodeURIComponent(id)}`).catch(() => null); // the list of events says why
    if (id === this.id) this.profiles = reply?.document.profiles ?? [];
  }
}

/** Return the line of a profile. `older` has the profiles before it: the last one of the same process can be compared. */
function row(profile, older) {
  const { id, unix_seconds: time, cause, recorded_seconds: recorded, devices } = profile;
  const sum = (name) => devices.reduce((total, device) => total + device[name], 0);
  const peak = devices.some((device) => device.peak_bytes === null) ? "" : `, ${bytes(sum("peak_bytes"))} at the highest moment`;
  const how = cause === "out_of_memory" ? "at an out-of-memory error" : recorded ? `recorded for ${Math.round(recorded)} s` : "without a recording";
  const before = older.find(({ pid }) => pid === profile.pid);
  return h(
    "li",
    {},
    profileLink(id, dayAndTime(time)),
    ` ${processName(profile)}, ${how}: ${bytes(sum("allocated_bytes"))}${peak} · `,
    fileLink(`${pathOf(id)}?format=pprof`, `profile-${id}.pb.gz`, "pprof"),
    ...(before ? [" · ", fileLink(`${pathOf(before.id)}/diff/${encodeURIComponent(id)}?format=html`, `difference-${id}.html`, `what changed since ${dayAndTime(before.unix_seconds)}`)] : []),
  );
}

/** Return whether the viewer may take a profile of a job. */
export function canProfile(job, node) {
  return node.allowed_actions.includes("profile") && happened.caller?.rights !== "none" && (job.processes ?? []).some(({ state }) => state === "reporting");
}

/** Ask for a process and a recording; `taken` is called when there is a new profile. */
export function askForProfile(job, taken = () => {}) {
  const processes = job.processes.filter(({ state }) => state === "reporting");
  const option = (seconds, text) => {
    const radio = h("input", { type: "radio", name: "recorded", value: seconds, ...(seconds === 0 && { checked: "" }) });
    radio.addEventListener("change", () => setText($("dialog-when"), COSTS[seconds]));
    return h("label", {}, radio, " ", text);
  };
  const select = h("select", { "aria-label": "Process" }, ...processes.map((each) => h("option", { value: each.pid }, processName(each))));
  const form = h(
    "form",
    { class: "profile" },
    ...(processes.length > 1 ? [select] : []),
    option(0, "Now: what is allocated, and what holds it"),
    option(RECORDED_SECONDS, `Record for ${RECORDED_SECONDS} s: also the lines that allocate, and the highest moment`),
  );
  form.addEventListener("submit", (event) => event.preventDefault());
  const start = () => take(processes[Math.max(0, select.selectedIndex)], Number(form.elements.recorded.value), taken);
  openDialog(`Memory profile of ${safe(job.name)}`);
  show({ status: "Which objects and which lines hold the memory of the process.", when: COSTS[0], results: form, confirm: "Take the profile", then: start });
}

async function take(process, seconds, taken) {
  const isShown = staysOpen();
  const started = performance.now();
  const left = () => Math.ceil(seconds - (performance.now() - started) / 1000);
  const progress = (_, cancel) => show({ status: left() > 0 ? `Recording ${processName(process)}: ${left()} s left…` : `Waiting for ${processName(process)}…`, confirm: "Cancel the profile", cancel: "Close", then: cancel });
  show({ status: "Starting…", cancel: "Close" });
  $("dialog-title").focus();
  try {
    const action = await runAction({ action: "profile", target: { pid: process.pid }, duration_seconds: seconds }, progress);
    taken();
    happened.refresh(true);
    if (action === null) return;
    const id = action.results.find(({ profile }) => profile)?.profile;
    const reasons = [...new Set(action.results.map(({ reason }) => reason).filter(Boolean))];
    show({ status: id ? "The profile is ready." : "There is no profile.", error: id ? "" : safe(reasons.join(" ") || action.sentence), results: id ? h("p", {}, profileLink(id, "Open the profile")) : null, cancel: "Close" });
    if (id) $("dialog-results").querySelector("a").focus();
    else $("dialog-cancel").focus();
  } catch (error) {
    if (isShown()) explain(error, () => take(process, seconds, taken));
  }
}
