// Warnings for a person on call, the most severe first.

const LEVELS = ["critical", "warning", "note"];
const SHOWN_WARNINGS = 8;
const OOM_SECONDS = 600;
const LASTING_SECONDS = 10; // a cache that changes with each step is no warning

function warningsOf(view) {
  const found = [];
  const add = (level, key, text, mustLast = false) => found.push({ level, key, text, mustLast });
  for (const device of view.devices) warningsOfDevice(device, view, add);
  warningsOfReporters(view, add);
  warningsOfEvents(view, add);
  for (const { part, status, detail } of view.failed_checks) {
    if (part !== "nvml" && part !== "devices") add(status === "failing" ? "critical" : "warning", part, `${part}: ${detail}`);
  }
  found.sort((a, b) => LEVELS.indexOf(a.level) - LEVELS.indexOf(b.level));
  return found;
}

function warningsOfDevice(device, view, add) {
  const name = gpuName(device.gpu, device.uuid);
  if (!device.up) {
    const since = sinceInWords(view.history.since(device.uuid, (mib) => mib === null), view.moment);
    add("critical", `down ${device.uuid}`, `${name} does not answer${since}: ${device.error}`);
    return;
  }
  const ledger = device.ledger;
  if (ledger === null) return;
  const total = device.memory.total_bytes;
  const { free, torch_reclaimable: reclaimable, unattributed } = ledger;
  const rows = view.rows.filter((row) => row.uuid === device.uuid);
  // If the reclaimable part of a cache is unknown, the ledger counts the whole cache as fragmented.
  const unsplit = rows.some((row) => row.reclaimable_bytes === null && row.reserved_bytes > (row.allocated_bytes ?? 0));
  const fragmented = unsplit ? rows.reduce((sum, row) => sum + (row.fragmented_bytes ?? 0), 0) : ledger.torch_fragmented;
  const nameOf = ({ workload, command, rank, pid }) => processName(workload || command, rank, pid);
  const largestShare = (column, all) => {
    const row = view.largest(device.uuid, column);
    if (row === null) return "";
    return `, ${row[column] > all / 2 ? "most" : bytes(row[column])} of it in ${nameOf(row)}`;
  };
  const pressure = pressureOf(ledger, total);
  if (pressure > NEARLY_FULL) {
    const help =
      reclaimable >= 0.01 * total
        ? `${cacheInWords(device, rows, reclaimable, unsplit)}${largestShare("reclaimable_bytes", reclaimable)}.`
        : unsplit
          ? "The reclaimable memory is unknown."
          : `A clear would free ${reclaimable > 0 ? `no more than ${bytes(reclaimable)}` : "nothing"}.`;
    const [level, word] = pressure > FULL ? ["critical", "full"] : ["warning", "nearly full"];
    const user = view.largest(device.uuid, "used_bytes");
    const whose = user === null ? "" : `; ${nameOf(user)} uses ${bytes(user.used_bytes)}`;
    const text = `${name} is ${word}: ${bytes(free)} of ${bytes(total)} free${whose}. ${help}`;
    add(level, `full ${device.uuid}`, text);
  } else if (device.idle_cache_bytes >= 0.2 * total) {
    const share = largestShare("idle_cache_bytes", device.idle_cache_bytes);
    const text = `${name}: ${bytes(device.idle_cache_bytes)} of idle cache${share}. A clear would free ${bytes(reclaimable)} now.`;
    add("note", `cached ${device.uuid}`, text, true);
  }
  if (fragmented >= 0.1 * total) {
    const text = `${name}: ${bytes(fragmented)} is fragmented${largestShare("fragmented_bytes", fragmented)}. Clearing cannot free it.`;
    add("warning", `fragmented ${device.uuid}`, text, true);
  }
  // No warning if the memory of a process may be unattributed, or if the memory is the host's.
  const hidden = rows.some((row) => (row.state === "reporting" ? row.non_torch_bytes : row.used_bytes) === null);
  const ownersKnown = ledger.other_processes !== undefined && !hidden && !device.memory.of_host;
  if (ownersKnown && unattributed >= 0.02 * total) {
    const text = `${name}: ${bytes(unattributed)} is unattributed: used by no process that the driver lists.`;
    add("warning", `unattributed ${device.uuid}`, text, true);
  }
}

/** Describe the idle cache and what a clear would free now, as `info` does. */
function cacheInWords({ idle_cache_bytes: idle }, rows, reclaimable, unsplit) {
  const freed = `clear would free ${unsplit ? "at least " : ""}${bytes(reclaimable)} now`;
  if (idle === null) return `A ${freed}`;
  const unknown = rows.reduce((sum, row) => sum + (row.idle_cache_bytes === null ? row.reclaimable_bytes : 0), 0);
  const rest = reclaimable - unknown - idle;
  const part = rest > reclaimable / 2 ? "most" : bytes(rest);
  const fate = rest < 0.05 * reclaimable ? "" : `, ${part} of it would be reserved again`;
  return `Idle cache: ${unknown > 0 ? "at least " : ""}${bytes(idle)}; a ${freed}${fate}`;
}

function warningsOfReporters(view, add) {
  const silent = new Map();
  for (const row of view.rows) if (row.state === "silent") silent.set(row.pid, row);
  if (silent.size === 0) return;
  const names = [...silent.values()].slice(0, 3).map((row) => processName(row.workload, row.rank, row.pid));
  const more = silent.size > 3 ? ` and ${silent.size - 3} more` : "";
  add("warning", "silent", `No recent report from ${names.join(", ")}${more}: their allocated memory is unknown.`);
}

function warningsOfEvents(view, add) {
  const ooms = new Map();
  for (const event of view.events) {
    if (event.type !== "oom" || view.moment.unix_seconds - event.unix_seconds > OOM_SECONDS) continue;
    const key = `oom ${event.uuid} ${event.workload} ${event.rank}`;
    const known = ooms.get(key);
    ooms.set(key, { event, count: (known?.count ?? 0) + 1 });
  }
  for (const [key, { event, count }] of ooms) {
    const times = count > 1 ? `, ${count} times in ten minutes, last` : "";
    const text = `Out of memory on ${gpuName(event.gpu, event.uuid)}${times} at ${timeOfDay(event.unix_seconds)}: ${oomInWords(event)}`;
    add("critical", key, text);
  }
}

/** Describe the failed request and the memory at that time. */
function oomInWords(event) {
  const { requested_bytes: requested, device_free_bytes: free, limit_bytes: limit, allocator } = event.detail;
  const who = processName(event.workload, event.rank, event.pid);
  const request = requested === null ? `${who} requested more than was available` : `${who} requested ${bytes(requested)}`;
  const memory = [];
  if (free !== null && free !== undefined) memory.push(`${bytes(free)} was free`);
  const reserved = allocator?.reserved_bytes ?? null;
  if (free >= requested && limit !== null && reserved !== null) memory.push(`it had reserved ${bytes(reserved)} of its limit of ${bytes(limit)}`);
  if (allocator?.fragmented_bytes) memory.push(`${bytes(allocator.fragmented_bytes)} fragmented`);
  return memory.length > 0 ? `${request}; ${memory.join(", ")}.` : `${request}.`;
}

class Warnings {
  constructor() {
    this.known = new Map();
    this.since = new Map();
    this.more = h("li", { class: "more" });
  }

  update(view) {
    const found = this.lasting(warningsOf(view), view.moment.clock_seconds);
    const shown = found.slice(0, SHOWN_WARNINGS);
    const keys = new Set(shown.map(({ key }) => key));
    for (const key of this.known.keys()) if (!keys.has(key)) this.known.delete(key);
    const elements = shown.map((warning) => this.entry(warning));
    if (found.length > shown.length) {
      setText(this.more, `and ${found.length - shown.length} more`);
      elements.push(this.more);
    }
    arrange($("warnings"), elements);
    setText($("quiet"), view.nvml.up ? "No warnings." : "No warnings, but the devices are unknown.");
    setHidden($("quiet"), found.length > 0);
  }

  /** Drop warnings that must last for some time and have not yet. */
  lasting(found, now) {
    this.since = new Map(found.map(({ key }) => [key, Math.min(this.since.get(key) ?? now, now)]));
    return found.filter(({ key, mustLast }) => !mustLast || now - this.since.get(key) >= LASTING_SECONDS);
  }

  entry({ level, key, text }) {
    let known = this.known.get(key);
    if (known === undefined) {
      const [label, words] = [h("span", { class: "level" }), h("span", { class: "words" })];
      known = { element: h("li", {}, label, " ", words), label, words };
      this.known.set(key, known);
    }
    setAttribute(known.element, "data-level", level);
    setText(known.label, level);
    setText(known.words, text);
    return known.element;
  }
}
