// The last ten minutes. Points come from the exporter; a hole in them stays one.

const WIDTH = 6000; // so fine that a path needs no decimals, which cost it most of its time
const HEIGHT = 600;
const REDRAW_SECONDS = 10; // where no new point comes, the old ones still move into the past

class History {
  constructor() {
    this.replace({ span_seconds: 600, gap_seconds: 6, seconds: [], devices: {} });
  }

  /** Forget all, and take what the exporter has. */
  replace(document) {
    this.span = document.span_seconds;
    this.gap = document.gap_seconds;
    this.seconds = document.seconds;
    this.devices = new Map(Object.entries(document.devices));
    this.version = (this.version ?? 0) + 1;
  }

  /** Take the newest point, if it is new; whatever it does not name has a hole there. */
  add(newest) {
    const length = this.seconds.length;
    if (newest === null || (length > 0 && newest.seconds <= this.seconds[length - 1])) return;
    let old = 0;
    while (old < length && this.seconds[old] < newest.seconds - this.span) old += 1;
    this.seconds.splice(0, old);
    this.seconds.push(newest.seconds);
    for (const uuid of Object.keys(newest.devices)) {
      if (!this.devices.has(uuid)) {
        const holes = new Array(length).fill(null);
        this.devices.set(uuid, { in_use: holes, allocated: holes.slice() });
      }
    }
    for (const [uuid, line] of this.devices) {
      const [inUse, allocated] = newest.devices[uuid] ?? [null, null];
      for (const [values, value] of [[line.in_use, inUse], [line.allocated, allocated]]) {
        values.splice(0, old);
        values.push(value);
      }
      if (line.in_use.every((value) => value === null)) this.devices.delete(uuid);
    }
    this.version += 1;
  }

  /** Since when each point of a device's MiB in use, null for a hole, has been such; null where the last is not. */
  since(uuid, isSuch) {
    const values = this.devices.get(uuid)?.in_use;
    if (values === undefined) return null;
    const { seconds } = this;
    const last = seconds.length - 1;
    const joins = (i) => i === last || seconds[i + 1] - seconds[i] <= this.gap;
    let first = last + 1;
    while (first > 0 && joins(first - 1) && isSuch(values[first - 1])) first -= 1;
    if (first > last) return null;
    return { seconds: seconds[first], orBefore: first === 0 || !joins(first - 1) };
  }
}

/** Since when that is, in words: ` (since 12:53:08)`, or at least for how long; empty where it is not known. */
function sinceInWords(since, moment) {
  if (since === null) return "";
  const seconds = moment.clock_seconds - since.seconds;
  return since.orBefore ? ` (for at least ${duration(seconds)})` : ` (since ${timeOfDay(moment.unix_seconds - seconds)})`;
}

/** One device's last ten minutes: what is in use as an area, what is in tensors as a line in it. */
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
  if (first === null) return "nothing is known of the last 10 min";
  const span = duration(now - first);
  const [from, to] = [bytes(low * 2 ** 20), bytes(high * 2 ** 20)];
  return from === to ? `${to} in use for ${span}` : `${from} to ${to} in use in ${span}`;
}

/** A line through the points, and the area below it, broken wherever one is missing. */
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
