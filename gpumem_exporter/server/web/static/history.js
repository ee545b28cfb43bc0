// The last ten minutes. Points come from the exporter; gaps are not filled.

const WIDTH = 6000; // fine enough for paths without decimals, which are slow
const HEIGHT = 600;
const REDRAW_SECONDS = 10; // without a new point, the old ones still move to the left

class History {
  constructor() {
    this.seconds = [];
    this.devices = new Map();
    this.version = 0;
  }

  /** The time of the newest point; null without a point. */
  newest() {
    return this.seconds.at(-1) ?? null;
  }

  /** Add the points of a reply of this time. A device that a point lacks has a gap there. */
  add({ span_seconds: span, gap_seconds: gap, seconds, devices }, now) {
    this.span = span;
    this.gap = gap;
    // Later points are of another exporter, whose clock was ahead.
    const end = firstAt(this.seconds, Math.min(seconds[0] ?? Infinity, now + gap));
    const start = firstAt(this.seconds, now - span);
    if (seconds.length === 0 && start === 0 && end === this.seconds.length) return;
    const gaps = (count) => new Array(count).fill(null);
    for (const uuid of Object.keys(devices)) {
      if (!this.devices.has(uuid)) this.devices.set(uuid, { in_use: gaps(this.seconds.length), allocated: gaps(this.seconds.length) });
    }
    for (const [uuid, line] of this.devices) {
      for (const name of ["in_use", "allocated"]) {
        line[name] = [...line[name].slice(start, end), ...(devices[uuid]?.[name] ?? gaps(seconds.length))];
      }
      if (line.in_use.every((value) => value === null)) this.devices.delete(uuid);
    }
    this.seconds = [...this.seconds.slice(start, end), ...seconds];
    this.version += 1;
  }

  /** Return since when every point of a device (MiB in use, null for a gap) matches; null if the last does not. */
  since(uuid, matches) {
    const values = this.devices.get(uuid)?.in_use;
    if (values === undefined) return null;
    const { seconds } = this;
    const last = seconds.length - 1;
    const joins = (i) => i === last || seconds[i + 1] - seconds[i] <= this.gap;
    let first = last + 1;
    while (first > 0 && joins(first - 1) && matches(values[first - 1])) first -= 1;
    if (first > last) return null;
    return { seconds: seconds[first], orBefore: first === 0 || !joins(first - 1) };
  }
}

/** Return the index of the first time at or after `seconds`. */
function firstAt(times, seconds) {
  const index = times.findIndex((time) => time >= seconds);
  return index < 0 ? times.length : index;
}

/** Return ` (since 12:53:08)` or ` (for at least 5 min)`; empty if unknown. */
function sinceInWords(since, moment) {
  if (since === null) return "";
  const seconds = moment.clock_seconds - since.seconds;
  return since.orBefore ? ` (for at least ${duration(seconds)})` : ` (since ${timeOfDay(moment.unix_seconds - seconds)})`;
}

/** The chart of a device's last ten minutes: memory in use as an area, allocated memory as a line. */
class Chart {
  constructor() {
    this.area = svg("path", { class: "area" });
    this.inUse = svg("path", { class: "in-use" });
    this.allocated = svg("path", { class: "allocated" });
    const options = { class: "chart", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none" };
    this.picture = svg("svg", { ...options, "aria-hidden": "true" }, this.area, this.inUse, this.allocated);
    this.caption = h("figcaption");
    this.element = h("figure", { class: "history" }, this.picture, this.caption);
    this.version = -1;
    this.drawn = 0;
  }

  update(history, uuid, total, now) {
    if (this.version === history.version && now - this.drawn < REDRAW_SECONDS) return;
    this.version = history.version;
    this.drawn = now;
    const line = history.devices.get(uuid);
    const scale = { start: now - history.span, perSecond: WIDTH / history.span, perMib: HEIGHT / (total / 2 ** 20) };
    const empty = { line: "", area: "" };
    const inUse = line ? pathOf(history, line.in_use, scale) : empty;
    this.inUse.setAttribute("d", inUse.line);
    this.area.setAttribute("d", inUse.area);
    this.allocated.setAttribute("d", (line ? pathOf(history, line.allocated, scale) : empty).line);
    setText(this.caption, captionOf(history, line, now));
  }
}

function captionOf(history, line, now) {
  let first = null;
  let low = Infinity;
  let high = -Infinity;
  for (const [i, value] of line?.in_use.entries() ?? []) {
    if (value === null) continue;
    first ??= history.seconds[i];
    if (value < low) low = value;
    if (value > high) high = value;
  }
  if (first === null) return "no data for the last 10 min";
  const span = duration(now - first);
  const [from, to] = [bytes(low * 2 ** 20), bytes(high * 2 ** 20)];
  return from === to ? `${to} in use for ${span}` : `${from} to ${to} in use in ${span}`;
}

/** Return a line through the points and the area below it, with gaps where points are missing. */
function pathOf(history, values, { start, perSecond, perMib }) {
  let line = "";
  let area = "";
  let previous = -Infinity;
  const close = () => {
    if (previous > -Infinity) area += `V${HEIGHT}Z`;
  };
  for (let i = 0; i < values.length; i += 1) {
    const seconds = history.seconds[i];
    if (values[i] === null) {
      close();
      previous = -Infinity;
      continue;
    }
    const x = Math.round((seconds - start) * perSecond);
    const y = Math.round(HEIGHT - values[i] * perMib);
    if (seconds - previous > history.gap) {
      close();
      line += `M${x} ${y}h1`;
      area += `M${x} ${HEIGHT}V${y}`;
    } else {
      line += `L${x} ${y}`;
      area += `L${x} ${y}`;
    }
    previous = seconds;
  }
  close();
  return { line, area };
}
