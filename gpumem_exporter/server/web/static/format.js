// Values as text, and elements. Names from reports are only ever inserted as text, never as markup.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
const NBSP = "\u00a0";
const SVG = "http://www.w3.org/2000/svg";

const $ = (id) => document.getElementById(id);

/** Return the amount in its unit, and the number of decimals to show. */
function scaled(value) {
  let amount = Math.abs(value);
  let unit = 0;
  while (unit < UNITS.length - 1 && Math.round(amount) >= 1024) {
    amount /= 1024;
    unit += 1;
  }
  return { amount, unit, decimals: unit === 0 || amount >= 99.95 ? 0 : 1 };
}

/** `1.5 GiB`, `−3.0 KiB`, `0` or `unknown`. */
function bytes(value) {
  if (value === null || value === undefined) return "unknown";
  if (value === 0) return "0";
  const { amount, unit, decimals } = scaled(value);
  return `${value < 0 ? "−" : ""}${amount.toFixed(decimals)}${NBSP}${UNITS[unit]}`;
}

/** Return the bytes that the shown text stands for: equal texts give equal numbers. */
function roundedBytes(value) {
  const { amount, unit, decimals } = scaled(value);
  return Math.sign(value) * Math.round(amount * 10 ** decimals) * 1024 ** unit * 10 ** (1 - decimals);
}

function percent(ratio) {
  if (ratio === null || ratio === undefined) return "unknown";
  return ratio > 0 && ratio < 0.01 ? `<${NBSP}1${NBSP}%` : `${Math.round(ratio * 100)}${NBSP}%`;
}

function twoDigits(number) {
  return String(number).padStart(2, "0");
}

/** Return the viewer's local time of day. */
function timeOfDay(unixSeconds) {
  const date = new Date(unixSeconds * 1000);
  return [date.getHours(), date.getMinutes(), date.getSeconds()].map(twoDigits).join(":");
}

/** Return the local time, with the day unless it is today. */
function dayAndTime(unixSeconds, nowUnix) {
  const date = new Date(unixSeconds * 1000);
  const today = date.toDateString() === new Date(nowUnix * 1000).toDateString();
  const day = today ? "" : `${twoDigits(date.getMonth() + 1)}-${twoDigits(date.getDate())} `;
  return day + timeOfDay(unixSeconds);
}

function duration(seconds) {
  if (seconds < 120) return `${Math.max(0, Math.floor(seconds))}${NBSP}s`;
  if (seconds < 7200) return `${Math.floor(seconds / 60)}${NBSP}min`;
  if (seconds < 172800) return `${Math.floor(seconds / 3600)}${NBSP}h`;
  return `${Math.floor(seconds / 86400)}${NBSP}d`;
}

/** Create an element. Attributes that are null are left out; children that are not nodes become text. */
function h(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

function svg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

/** Set the text only if it differs: an unchanged node needs no layout, and no screen reader reads it again. */
function setText(element, text) {
  const node = element.firstChild;
  if (node === null) {
    if (text !== "") element.append(text);
  } else if (node.data !== text) {
    node.data = text;
  }
}

/** A text that remembers its value, because reading hundreds of them from the document is slow. */
class Text {
  constructor(element) {
    this.element = element;
    this.text = "";
  }

  set(text) {
    if (this.text === text) return;
    this.text = text;
    setText(this.element, text);
  }
}

function setHidden(element, hidden) {
  if (element.hidden !== hidden) element.hidden = hidden;
}

function setAttribute(element, name, value) {
  if (element.getAttribute(name) !== value) element.setAttribute(name, value);
}

/** Give `parent` these children in this order with as few moves as possible, because each move needs layout. */
function arrange(parent, elements) {
  const wanted = new Set(elements);
  const positions = new Map();
  for (const child of [...parent.children]) {
    if (wanted.has(child)) positions.set(child, positions.size);
    else child.remove();
  }
  const staying = longestIncrease(elements.map((element) => positions.get(element) ?? -1));
  let next = null;
  for (let i = elements.length - 1; i >= 0; i -= 1) {
    if (!staying.has(i)) parent.insertBefore(elements[i], next);
    next = elements[i];
  }
}

/** Return the indexes of the longest increasing subsequence; negative numbers are never part of it. */
function longestIncrease(positions) {
  const ends = []; // the index of the smallest last element of an increase of each length
  const before = new Array(positions.length).fill(-1);
  for (let i = 0; i < positions.length; i += 1) {
    if (positions[i] < 0) continue;
    let [low, high] = [0, ends.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (positions[ends[middle]] < positions[i]) low = middle + 1;
      else high = middle;
    }
    if (low > 0) before[i] = ends[low - 1];
    ends[low] = i;
  }
  const found = new Set();
  for (let i = ends.at(-1) ?? -1; i >= 0; i = before[i]) found.add(i);
  return found;
}

// Control characters, and those that reverse the direction of the text that follows, such as a pid.
const UNSAFE = /[\p{Cc}\p{Zl}\p{Zp}\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]/gu;

/** Replace characters that would change the text around a name. */
function safe(text) {
  return text.replace(UNSAFE, "\ufffd");
}

/** Return the name of a process. */
function processName(workload, rank, pid) {
  const name = workload ? safe(rank ? `${workload} rank ${rank}` : workload) : "";
  if (pid === null || pid === undefined) return name || "a process";
  return name ? `${name} (pid ${pid})` : `pid ${pid}`;
}

/** Return the name of a job with its number of ranks; empty if the rows are of one process, or not of one job. */
function jobInWords(rows) {
  const pids = new Set(rows.map((row) => row.pid));
  const workloads = new Set(rows.map((row) => row.workload));
  if (pids.size < 2 || workloads.size > 1 || !rows[0].workload) return "";
  return `${safe(rows[0].workload)} (${pids.size} ${rows.every((row) => row.rank) ? "ranks" : "processes"})`;
}

function gpuName(gpu, uuid) {
  return gpu ? `GPU ${gpu}` : uuid || "an unknown device";
}
