// Values as text. An unknown value is a dash.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
const NBSP = "\u00a0";
export const UNKNOWN = "–";

/** `1.5 GiB`, `−3.0 KiB`, `0`, or a dash. */
export function bytes(value) {
  if (value === null || value === undefined) return UNKNOWN;
  if (value === 0) return "0";
  let amount = Math.abs(value);
  let unit = 0;
  while (unit < UNITS.length - 1 && Math.round(amount) >= 1024) {
    amount /= 1024;
    unit += 1;
  }
  const decimals = unit === 0 || amount >= 99.95 ? 0 : 1;
  return `${value < 0 ? "−" : ""}${amount.toFixed(decimals)}${NBSP}${UNITS[unit]}`;
}

export function percent(ratio) {
  if (ratio === null || ratio === undefined) return UNKNOWN;
  return ratio > 0 && ratio < 0.01 ? `<${NBSP}1${NBSP}%` : `${Math.round(ratio * 100)}${NBSP}%`;
}

const NUMBERS = new Intl.NumberFormat("en"); // toLocaleString makes a new one each time, which took a fifth of a refresh

/** `12,345`. */
export function integer(value) {
  return NUMBERS.format(value);
}

export function count(number, noun, plural = `${noun}s`) {
  return `${integer(number)} ${number === 1 ? noun : plural}`;
}

const twoDigits = (number) => String(number).padStart(2, "0");

/** Return the viewer's local time of day, to the second or to the minute. */
export function timeOfDay(unixSeconds, toSecond = true) {
  const date = new Date(unixSeconds * 1000);
  const parts = [date.getHours(), date.getMinutes(), ...(toSecond ? [date.getSeconds()] : [])];
  return parts.map(twoDigits).join(":");
}

export function day(unixSeconds) {
  const date = new Date(unixSeconds * 1000);
  return `${twoDigits(date.getMonth() + 1)}-${twoDigits(date.getDate())}`;
}

/** Return the local time, with the day unless it is today. */
export function dayAndTime(unixSeconds, toSecond = true) {
  const today = new Date(unixSeconds * 1000).toDateString() === new Date().toDateString();
  return `${today ? "" : `${day(unixSeconds)} `}${timeOfDay(unixSeconds, toSecond)}`;
}

export function duration(seconds) {
  if (seconds < 120) return `${Math.max(0, Math.floor(seconds))}${NBSP}s`;
  if (seconds < 7200) return `${Math.floor(seconds / 60)}${NBSP}min`;
  if (seconds < 172800) return `${Math.floor(seconds / 3600)}${NBSP}h`;
  return `${Math.floor(seconds / 86400)}${NBSP}d`;
}

/** `fails in 36 min`, from the seconds until a job that grows has no memory left. */
export function failsIn(seconds) {
  return seconds < 1 ? "no memory left" : `fails in ${duration(seconds)}`;
}

/** `0–3, 6`: indexes that follow each other as a range; other names as they are. */
export function gpuList(gpus) {
  const parts = [];
  for (const gpu of gpus) {
    const last = parts.at(-1);
    if (last !== undefined && /^\d+$/.test(gpu) && Number(gpu) === Number(last.to) + 1) last.to = gpu;
    else parts.push({ from: gpu, to: gpu });
  }
  return parts.map(({ from, to }) => (from === to ? from : `${from}–${to}`)).join(", ") || UNKNOWN;
}

export function gpuName({ gpu, uuid }) {
  return gpu ? `GPU ${gpu}` : uuid || "an unknown device";
}

/** Return the name of a process in a list: `rank 3, pid 4711`. */
export function processName({ rank, pid }) {
  return `${rank ? `rank ${safe(rank)}, ` : ""}pid ${pid}`;
}

// Control characters, and those that reverse the direction of the text that follows, such as a pid.
const UNSAFE = /[\p{Cc}\p{Zl}\p{Zp}\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]/gu;

/** Replace characters that would change the text around a name. */
export function safe(text) {
  return String(text ?? "").replace(UNSAFE, "\ufffd");
}
