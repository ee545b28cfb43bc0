// The page: receives the state of the node, and shows the view that the URL names.

import { Connection } from "./connection.js";
import { detail } from "./detail.js";
import { showDevices } from "./devices.js";
import { $, setHidden, setText } from "./dom.js";
import { happened, showNodeEvents } from "./events.js";
import { showFindings } from "./findings.js";
import { bytes, count, percent, timeOfDay } from "./format.js";
import { takeHues } from "./hues.js";
import { showJobs } from "./jobs.js";
import { deviceHref, go, jobHref, onRoute, param } from "./route.js";

const MODES = { waiting: "connecting", live: "live", lost: "lost", refused: "refused" };
const PAGE = document.querySelector("meta[name=page]").content;

let state = null;
let left = null; // the href of the job or device that is shown

/** Return the job or the device of the URL: `?job=`, `?gpu=`, `?device=`; null for the node. */
function selected() {
  const [job, gpu, uuid] = ["job", "gpu", "device"].map(param);
  if (job) return { kind: "job", id: job, job: state.jobs.find(({ id }) => id === job) ?? null };
  if (gpu || uuid) return { kind: "device", id: gpu || uuid, device: state.devices.find((device) => (gpu ? device.gpu === gpu : device.uuid === uuid)) ?? null };
  return null;
}

/** Replace `?workload=`, which dashboards link to, by the job, or by a filter if there are several or none. */
function resolveWorkload() {
  const workload = param("workload");
  const jobs = state.jobs.filter((each) => each.workload === workload);
  go({ workload: null, ...(jobs.length === 1 ? { job: jobs[0].id } : { q: workload }) }, { replace: true });
}

function receive(reply) {
  if (reply !== null) state = { ...withAllowedActions(reply), receivedAt: Date.now() };
  if (state.page !== PAGE && !$("dialog").open && isFirstTry(state.page)) location.reload();
  else show();
}

/** Return the state without what the exporter does not allow: a button that is always refused helps no one. */
function withAllowedActions(reply) {
  const allowed = reply.node.allowed_actions;
  const clears = allowed.includes("empty_cache");
  const permit = (each) => ({ ...each, clear: clears ? each.clear : null, engine_memory: allowed.includes(each.engine_memory?.action) ? each.engine_memory : null });
  return { ...reply, jobs: reply.jobs.map(permit), findings: clears ? reply.findings : reply.findings.map(permit) };
}

function show() {
  if (document.hidden || state === null) return;
  if (param("workload")) {
    resolveWorkload(); // shows the page again
    return;
  }
  performance.clearMeasures("refresh");
  performance.mark("refresh started");
  refresh();
  performance.measure("refresh", "refresh started");
  performance.clearMarks("refresh started");
  happened.refresh();
}

function refresh() {
  const now = state.time.unix_seconds + Math.max(0, (Date.now() - state.receivedAt) / 1000);
  const view = { ...state, now, happened };
  const { node } = state;
  const target = selected();
  takeHues(state.jobs);
  showHeader(node, now, target);
  showFindings(view);
  setHidden($("node"), target !== null);
  setHidden($("detail"), target === null);
  detail.show(target, view);
  if (target !== null) {
    left = target.kind === "job" ? jobHref(target.id) : target.device && deviceHref(target.device);
    return;
  }
  showDevices(view);
  showJobs(view);
  showNodeEvents(view);
  if (left !== null) returnFocus();
}

/** Focus the link to the job or device that was shown, as if the viewer had never left the node. */
function returnFocus() {
  const links = [...document.querySelectorAll("#jobs a.name, #devices a")];
  links.find((link) => link.getAttribute("href") === left)?.focus({ preventScroll: true });
  left = null;
}

function showHeader({ host, driver, source, totals }, now, target) {
  const name = target?.job?.name ?? (target?.kind === "device" ? `GPU ${target.device?.gpu ?? target.id}` : "GPU memory");
  const title = `${host} · ${name}${source === "demo" ? " (demo)" : ""}`;
  if (document.title !== title) document.title = title;
  setText($("host"), host);
  setText($("moment"), timeOfDay(now));
  const facts = [count(totals.devices, "device"), ...(driver.version ? [`driver ${driver.version}`] : [])];
  if (totals.idle_cache_bytes) facts.push(`${bytes(totals.idle_cache_bytes)} idle cache`);
  if (totals.coverage_ratio !== null) facts.push(`${percent(totals.coverage_ratio)} of the used memory is reported`);
  setText($("node-facts"), driver.up ? facts.join(" · ") : "no driver");
}

function enter(mode, reason) {
  const { body } = document;
  if (body.dataset.mode === mode) return;
  body.dataset.mode = mode;
  $("connection").dataset.mode = mode;
  const asOf = state && mode !== "live" ? `as of ${timeOfDay(state.time.unix_seconds)}` : "";
  setText($("mode"), [mode === "refused" ? `The exporter refuses access: ${reason}` : MODES[mode], asOf].filter(Boolean).join(", "));
  setHidden($("moment"), mode !== "live");
  $("main").toggleAttribute("data-stale", mode !== "live" && state !== null);
  for (const button of document.querySelectorAll("button.act")) button.disabled = mode !== "live" && !button.closest("dialog");
  if (mode === "live") happened.forget();
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

const connection = new Connection({
  path: () => (param("job") ? `api/v1/live?details=${encodeURIComponent(param("job"))}` : "api/v1/live"),
  reply: receive,
  mode: enter,
});
onRoute(() => {
  show();
  connection.tick();
});
