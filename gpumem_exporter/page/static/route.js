// What the page shows is in its URL: a job or a device, the filter, the order, the range of time.

const KEPT = ["q", "sort", "type", "range", "from", "to"]; // by links from one view to another

const TIMES = ["range", "from", "to"];

const listeners = [];

/** Return the value of a parameter; empty if the URL has none. */
export function param(name) {
  return new URLSearchParams(location.search).get(name) ?? "";
}

/** Call `listener` after each change of the URL. */
export function onRoute(listener) {
  listeners.push(listener);
}

/** Change parameters; null removes one. `replace` adds no entry to the browser's history. */
export function go(changes, { replace = false } = {}) {
  const params = new URLSearchParams(location.search);
  for (const [name, value] of Object.entries(changes)) {
    if (value === null || value === "") params.delete(name);
    else params.set(name, value);
  }
  enter(params, replace);
}

/** The value of `event` for the last out-of-memory error; a device's uuid may follow. */
export const LAST_OOM = "oom@";
export const jobHref = (id) => `?job=${encodeURIComponent(id)}`;
export const deviceHref = ({ gpu, uuid }) => (gpu ? `?gpu=${encodeURIComponent(gpu)}` : `?device=${encodeURIComponent(uuid)}`);

function enter(params, replace) {
  const query = params.toString();
  const url = query === "" ? location.pathname : `?${query}`;
  if (replace) history.replaceState(null, "", url);
  else history.pushState(null, "", url);
  showAgain();
}

/** Show the view of the URL at once, for example when a reply has arrived for it. */
export function showAgain() {
  for (const listener of listeners) listener();
}

addEventListener("popstate", showAgain);
document.addEventListener("click", (event) => {
  const link = event.target.closest?.('a[href^="?"]');
  if (!link || event.defaultPrevented || event.button !== 0 || event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  const [now, params] = [new URLSearchParams(location.search), new URLSearchParams(link.getAttribute("href"))];
  // An event brings its own time, and none of the event before stays when the link leaves it.
  const kept = params.has("event") || now.has("event") ? KEPT.filter((name) => !TIMES.includes(name)) : KEPT;
  for (const name of kept) if (now.has(name) && !params.has(name)) params.set(name, now.get(name));
  enter(params, false);
  scrollTo(0, 0);
});
