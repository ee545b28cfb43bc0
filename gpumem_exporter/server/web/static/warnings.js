// What a person on call should see first, in words and with its figures; the worst first.

const LEVELS = ["critical", "warning", "note"];
const SHOWN_WARNINGS = 8;
const OOM_SECONDS = 600;
const LASTING_SECONDS = 10; // a cache that comes and goes with each step is no trouble

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
  // Of some allocators it cannot be known what of their cache a clear gives back: the ledger has it as fragmented.
  const unsplit = rows.some((row) => row.reclaimable_bytes === null && row.reserved_bytes > (row.allocated_bytes ?? 0));
  const fragmented = unsplit ? rows.reduce((sum, row) => sum + (row.fragmented_bytes ?? 0), 0) : ledger.torch_fragmented;
  const who = ({ workload, command, rank, pid }) => processName(workload || command, rank, pid);
  const most = (column, all) => {
    const row = view.largest(device.uuid, column);
    if (row === null) return "";
    return `, ${row[column] > all / 2 ? "most" : bytes(row[column])} of it in ${who(row)}`;
  };
  if (free < 0.1 * total) {
    const help =
      reclaimable >= 0.01 * total
        ? `Clearing would free ${unsplit ? "at least " : ""}${bytes(reclaimable)}${most("reclaimable_bytes", reclaimable)}.`
        : unsplit
          ? "What clearing would free is not known."
          : `Clearing would free ${reclaimable > 0 ? `no more than ${bytes(reclaimable)}` : "nothing"}.`;
    const [level, word, left] = free < 0.05 * total ? ["critical", "full", 0.05] : ["warning", "nearly full", 0.1];
    const leastMib = Math.floor(((1 - left) * total) / 2 ** 20);
    const since = sinceInWords(view.history.since(device.uuid, (mib) => mib !== null && mib >= leastMib), view.moment);
    const user = view.largest(device.uuid, "used_bytes");
    const whose = user === null ? "" : `; ${who(user)} uses ${bytes(user.used_bytes)}`;
    const text = `${name} is ${word}${since}: ${bytes(free)} of ${bytes(total)} free${whose}. ${help}`;
    add(level, `full ${device.uuid}`, text);
  } else if (reclaimable >= 0.2 * total) {
    const text = `${name} caches ${bytes(reclaimable)} that no tensor uses${most("reclaimable_bytes", reclaimable)}. Clearing gives it back.`;
    add("note", `cached ${device.uuid}`, text, true);
  }
  if (fragmented >= 0.1 * total) {
    const text = `${name}: ${bytes(fragmented)} is fragmented${most("fragmented_bytes", fragmented)}. Clearing cannot give it back.`;
    add("warning", `fragmented ${device.uuid}`, text, true);
  }
  // As with the alert: nothing can be said where the driver keeps to itself what others hold, or the memory is the host's.
  const hidden = rows.some((row) => row.state !== "reporting" && row.used_bytes === null);
  const ownersKnown = ledger.other_processes !== undefined && !hidden && !device.memory.of_host;
  if (ownersKnown && unattributed >= 0.02 * total) {
    const text = `${name}: ${bytes(unattributed)} is used, and no process that the driver lists owns it.`;
    add("warning", `unattributed ${device.uuid}`, text, true);
  }
}

function warningsOfReporters(view, add) {
  const silent = new Map();
  for (const row of view.rows) if (row.state === "silent") silent.set(row.pid, row);
  if (silent.size === 0) return;
  const names = [...silent.values()].slice(0, 3).map((row) => processName(row.workload, row.rank, row.pid));
  const more = silent.size > 3 ? ` and ${silent.size - 3} more` : "";
  add("warning", "silent", `No report lately from ${names.join(", ")}${more}: what they hold is not known.`);
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

/** What failed, against what there was. */
function oomInWords(event) {
  const { requested_bytes: requested, device_free_bytes: free, limit_bytes: limit, allocator } = event.detail;
  const who = processName(event.workload, event.rank, event.pid);
  const asked = requested === null ? `${who} asked for more than there was` : `${who} asked for ${bytes(requested)}`;
  const had = [];
  if (free !== null && free !== undefined) had.push(`${bytes(free)} was free`);
  const reserved = allocator?.reserved_bytes ?? null;
  if (free >= requested && limit !== null && reserved !== null) had.push(`it held ${bytes(reserved)} of its limit of ${bytes(limit)}`);
  if (allocator?.fragmented_bytes) had.push(`${bytes(allocator.fragmented_bytes)} fragmented`);
  return had.length > 0 ? `${asked}; ${had.join(", ")}.` : `${asked}.`;
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
    setText($("quiet"), view.nvml.up ? "Nothing does." : "Nothing that is known, but the devices are not known.");
    setHidden($("quiet"), found.length > 0);
  }

  /** Without those that have to last and have not. */
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
