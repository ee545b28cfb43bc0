// The history of a job or a device: a chart with axes, values under the pointer, zoom, and marks of events.

import { request } from "./api.js";
import { h, setAttribute, setText } from "./dom.js";
import { bytes, day, dayAndTime, safe, timeOfDay } from "./format.js";
import { go, param } from "./route.js";

const RANGES = { "10m": 600, "1h": 3600, "6h": 21600, "24h": 86400 };
const RANGE_NAMES = { "10m": "10 min", "1h": "1 h", "6h": "6 h", "24h": "24 h" };
const HEIGHT = 240;
const MARK_PIXELS = 7; // from the pointer
const MIN_SECONDS = 10;
const BEFORE_SECONDS = 300; // around an event
const AFTER_SECONDS = 60;
// The line of the used memory has all others below it: tensors, on them the idle cache and the other cache. The rest is not torch's.
const SERIES = [
  ["used", "--chart-used"],
  ["other_cache", "--chart-other"],
  ["idle_cache", "--chart-idle"],
  ["allocated", "--chart-allocated"],
  ["in_use_peak", "--chart-peak"],
];
const [USED, OTHER, IDLE, ALLOCATED] = [1, 2, 3, 4]; // their places in the chart
const PEAK_LABEL = "Peak allocated";

export class Timeline {
  constructor() {
    this.legend = h("p", { class: "values" });
    this.values = SERIES.map(([name]) => h("span", { class: "value", "data-series": name }));
    this.moment = h("time", {});
    this.mark = h("span", { class: "mark" });
    this.legend.append(this.moment, ...this.values, this.mark);
    this.buttons = Object.keys(RANGES).map((range) => {
      const button = h("button", { type: "button", "data-range": range }, RANGE_NAMES[range]);
      button.addEventListener("click", () => go({ range: range === "10m" && !this.around ? null : range, from: null, to: null }));
      return button;
    });
    const move = (label, name, change) => {
      const button = h("button", { type: "button", "aria-label": name, title: name }, label);
      button.addEventListener("click", () => this.zoom(change));
      return button;
    };
    this.moves = [
      move("‹", "Earlier", (from, to) => [from - (to - from) / 2, to - (to - from) / 2]),
      move("›", "Later", (from, to) => [from + (to - from) / 2, to + (to - from) / 2]),
      move("+", "Zoom in", (from, to) => [from + (to - from) / 4, to - (to - from) / 4]),
      move("−", "Zoom out", (from, to) => [from - (to - from) / 2, to + (to - from) / 2]),
    ];
    const bar = h("div", { class: "ranges", role: "group", "aria-label": "Time range" }, ...this.buttons, ...this.moves);
    this.plot = h("div", { class: "plot" });
    this.note = h("p", { class: "note faint" });
    this.element = h("figure", { class: "timeline" }, h("div", { class: "title" }, h("h3", {}, "Timeline"), bar), this.legend, this.plot, this.note);
    this.requested = -Infinity;
    this.requesting = "";
    new ResizeObserver(() => this.resize()).observe(this.plot);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  /** The range of the URL: `from` and `to`, the time around an event, or the time until now. */
  range(now) {
    const [from, to] = [Number(param("from")), Number(param("to"))];
    if (from > 0 && to > from) return [from, to];
    if (this.around && !param("range")) return [this.around - BEFORE_SECONDS, this.around + AFTER_SECONDS];
    return [now - (RANGES[param("range")] ?? RANGES["10m"]), now];
  }

  zoom(change) {
    const [from, to] = change(...this.shown);
    const [start, end] = [Math.max(from, this.now - 8 * 86400), Math.min(to, this.now)];
    if (end - start >= MIN_SECONDS) go({ from: Math.round(start), to: Math.round(end) });
  }

  /** Show a subject: `query` of the history, `top` bytes of the axis (null for the largest value), `marks` of events, the time of an event or null. */
  update({ query, label, top, marks, around, words, now }) {
    this.now = now;
    this.around = around;
    const key = `${query} ${around} ${param("range")} ${param("from")} ${param("to")}`;
    const changed = key !== this.key;
    Object.assign(this, { key, query, top, words });
    if (JSON.stringify(marks) !== JSON.stringify(this.marks)) {
      this.marks = marks;
      this.chart?.redraw(false);
    }
    setAttribute(this.element, "aria-label", `Timeline of ${label}`);
    for (const button of this.buttons) {
      setAttribute(button, "aria-pressed", !param("from") && button.dataset.range === (param("range") || (around ? "" : "10m")));
    }
    this.request(changed);
  }

  async request(changed) {
    const seconds = performance.now() / 1000;
    const every = Math.max(2, this.document?.step_seconds ?? 2);
    if (!changed && (this.requesting === this.key || param("from") || seconds - this.requested < every)) return;
    this.requested = seconds;
    const key = (this.requesting = this.key);
    const [from, to] = this.range(this.now);
    try {
      const points = Math.min(2000, Math.max(300, this.plot.clientWidth));
      const reply = await request(`api/v1/history?${this.query}&from=${from.toFixed(3)}&to=${to.toFixed(3)}&points=${points}`);
      if (key !== this.key) return;
      this.document = reply.document;
      this.shown = [from, to];
      this.draw(changed);
    } catch {
      // The connection shows a missing reply. The next refresh tries again.
    } finally {
      if (this.requesting === key) this.requesting = "";
    }
  }

  /** Draw the document; a new chart only for other series, because a new one loses the pointer's position. */
  draw() {
    if (!this.document) return;
    const { series, unix_seconds: times, step_seconds: step } = this.document;
    const [line] = series;
    const columns = SERIES.map(([name]) => line?.[name]?.max ?? times.map(() => null));
    const minima = line?.used?.min ?? columns[0];
    const data = [times, ...stacked(columns), minima];
    const empty = columns.every((column) => column.every((value) => value === null));
    setText(this.note, empty ? "No history of this time." : `${stepInWords(step)} Above the other cache: not torch's. Drag to zoom, double-click to reset. Marks: out of memory, actions.`);
    const scheme = matchMedia("(prefers-color-scheme: dark)").matches;
    if (!this.chart || this.scheme !== scheme || this.charted !== this.query) {
      this.chart?.destroy();
      this.scheme = scheme;
      this.charted = this.query;
      this.chart = new uPlot(this.options(), data, this.plot);
    } else {
      this.chart.setData(data);
    }
    this.showValues();
  }

  options() {
    const color = (name) => getComputedStyle(this.element).getPropertyValue(name).trim();
    const axis = { stroke: color("--faint"), grid: { stroke: color("--line"), width: 1 }, ticks: { stroke: color("--line"), width: 1 }, font: "12px system-ui" };
    const line = ([name, variable]) => ({
      label: name,
      stroke: color(variable),
      width: name === "in_use_peak" ? 1 : 1.5,
      dash: name === "in_use_peak" ? [4, 3] : undefined,
      fill: name === "allocated" ? `${color(variable)}60` : undefined,
      points: { show: false },
    });
    return {
      width: Math.max(200, this.plot.clientWidth),
      height: HEIGHT,
      padding: [8, 24, 0, 0],
      legend: { show: false },
      cursor: { y: false, drag: { x: true, y: false, setScale: false }, bind: { dblclick: () => () => go({ from: null, to: null }) } },
      scales: {
        x: { time: true, range: () => this.shown },
        y: { range: (_, __, max) => [0, this.top ?? Math.max(2 ** 20, (max ?? 0) * 1.08)] },
      },
      axes: [
        { ...axis, size: 30, space: 72, values: (_, splits, __, ___, step) => splits.map((time) => (step >= 86400 ? day(time) : timeOfDay(time, step < 60))) },
        { ...axis, size: 72, incrs: Array.from({ length: 30 }, (_, power) => 2 ** (power + 16)), values: (_, splits) => splits.map((value) => bytes(value)) },
      ],
      series: [{}, ...SERIES.map(line), { stroke: "transparent", points: { show: false } }],
      bands: [
        { series: [USED, SERIES.length + 1], fill: `${color("--chart-used")}40` },
        { series: [USED, OTHER], fill: `${color("--chart-rest")}50` },
        { series: [OTHER, IDLE], fill: `${color("--chart-other")}60` },
        { series: [IDLE, ALLOCATED], fill: `${color("--chart-idle")}60` },
      ],
      hooks: {
        setCursor: [() => this.showValues()],
        setSelect: [({ select, posToVal }) => this.select(select, posToVal)],
        draw: [(chart) => this.drawMarks(chart)],
      },
    };
  }

  select({ left, width }, posToVal) {
    if (width < 4) return;
    const [from, to] = [posToVal(left, "x"), posToVal(left + width, "x")];
    this.chart.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    if (to - from >= MIN_SECONDS) go({ from: Math.floor(from), to: Math.ceil(to) }); // the range stays for the way back
  }

  drawMarks({ ctx, bbox, valToPos }) {
    ctx.save();
    for (const { unix_seconds: time, kind } of this.marks ?? []) {
      if (time < this.shown[0] || time > this.shown[1]) continue;
      const x = Math.round(valToPos(time, "x", true));
      const style = getComputedStyle(this.element).getPropertyValue(`--mark-${kind}`).trim();
      ctx.strokeStyle = ctx.fillStyle = style;
      ctx.lineWidth = devicePixelRatio;
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
      ctx.fillRect(x - 3 * devicePixelRatio, bbox.top, 6 * devicePixelRatio, 6 * devicePixelRatio);
    }
    ctx.restore();
  }

  /** Show the values under the pointer, otherwise the values at the event or the last ones, and the mark next to the pointer. */
  showValues() {
    const { chart } = this;
    if (!chart) return;
    const [times] = chart.data;
    const last = times.length - 1;
    const event = this.around && times[0] <= this.around && this.around <= times[last] ? times.findIndex((each) => each >= this.around) : last;
    const index = chart.cursor.idx ?? event;
    const time = times[index];
    setText(this.moment, time === undefined ? "" : dayAndTime(time));
    for (const [i, [name]] of SERIES.entries()) {
      const least = this.document.series[0]?.[name]?.min?.[index] ?? null;
      const most = this.document.series[0]?.[name]?.max?.[index] ?? null;
      setText(this.values[i], `${this.words[name]?.label ?? PEAK_LABEL} ${least !== null && least !== most ? `${bytes(least)}–` : ""}${bytes(most)}`);
    }
    const { left } = chart.cursor;
    const near = (mark) => Math.abs(chart.valToPos(mark.unix_seconds, "x") - left);
    const marks = left >= 0 ? (this.marks ?? []).filter((mark) => near(mark) <= MARK_PIXELS) : [];
    const nearest = marks.sort((a, b) => near(a) - near(b))[0];
    setText(this.mark, nearest ? `${timeOfDay(nearest.unix_seconds)} ${safe(nearest.text)}` : "");
    setAttribute(this.mark, "data-kind", nearest?.kind);
  }

  resize() {
    if (this.chart && this.plot.clientWidth > 0) this.chart.setSize({ width: this.plot.clientWidth, height: HEIGHT });
  }
}

function stepInWords(seconds) {
  return seconds < 60 ? (seconds === 1 ? "A point is a second." : `A point is ${seconds} seconds.`) : `A point is ${seconds / 60} min, with minimum and maximum.`;
}

/** Return the columns with the idle cache on top of the allocated memory, and the other cache on it, all within what is used. */
function stacked([used, other, idle, allocated, peak]) {
  const within = (value, i) => (used[i] === null ? value : Math.min(value, used[i]));
  const onTop = (below, sizes) => below.map((value, i) => (value === null ? null : within(value + (sizes?.[i] ?? 0), i)));
  const tensors = onTop(allocated, null);
  const cached = onTop(tensors, idle);
  return [used, onTop(cached, other), cached, tensors, peak];
}
