// A ledger as a stacked bar and as a list. The categories and their order are those of `gpumem_ledger_bytes`.

const CATEGORIES = [
  ["torch_allocated", "allocated", "in use by PyTorch"],
  ["torch_reclaimable", "reclaimable", "cached; clearing frees it"],
  ["torch_fragmented", "fragmented", "cached; clearing cannot free it"],
  ["non_torch", "non-torch", "CUDA context, NCCL, libraries"],
  ["other_processes", "other processes", "processes without a reporter"],
  ["driver_reserved", "driver reserved", "used by driver and firmware"],
  ["unattributed", "unattributed", "used by no listed process"],
  ["free", "free", "used by no process"],
];

// The allocator cudaMallocAsync does not know which part of its cache a clear releases.
const CACHE = ["cache, may be released", "cached; how much clearing frees is unknown"];

const NEARLY_FULL = 0.9;
const FULL = 0.95;

/** Pressure: the share of a device's usable memory that is neither free nor reclaimable. See docs/numbers.md. */
function pressureOf(ledger, total) {
  return 1 - (ledger.free + (ledger.torch_reclaimable ?? 0)) / (total - (ledger.driver_reserved ?? 0));
}

/** The bar. A negative category has no width; it is drawn as an overlap of the others, before the free part. */
class LedgerBar {
  constructor() {
    this.parts = new Map();
    this.element = h("div", { class: "ledger", "aria-hidden": "true" });
    for (const [category] of CATEGORIES) {
      const part = h("div", { class: `part ${category}` });
      this.parts.set(category, { part, shown: undefined });
      this.element.append(part);
    }
    this.overlap = h("div", { class: "overlap", hidden: "" });
    this.shownOverlap = 0;
    this.element.append(this.overlap);
  }

  update(ledger, total) {
    let positive = 0;
    let negative = 0;
    for (const [category] of CATEGORIES) {
      const value = ledger?.[category] ?? 0;
      if (value > 0) positive += value;
      else negative -= value;
    }
    for (const [category, known] of this.parts) {
      const value = ledger?.[category] ?? null;
      const share = value > 0 ? (value / positive) * 100 : 0;
      if (known.shown === share && known.value === value) continue;
      known.shown = share;
      known.value = value;
      known.part.style.flexGrow = share.toFixed(3);
      known.part.hidden = share === 0;
      known.part.dataset.bytes = value === null ? "unknown" : String(value);
    }
    if (this.shownOverlap === negative && negative === 0) return;
    this.shownOverlap = negative;
    const free = Math.max(0, ledger?.free ?? 0);
    this.overlap.hidden = negative === 0;
    this.overlap.style.right = `${((free / (positive || 1)) * 100).toFixed(3)}%`;
    this.overlap.style.width = `${((negative / (positive || 1)) * 100).toFixed(3)}%`;
  }
}

/** The list of categories with their colors; `words` adds their meaning. */
class LedgerValues {
  constructor(words) {
    this.element = h("dl", { class: words ? "amounts words" : "amounts" });
    this.values = new Map();
    for (const [category, name, meaning] of CATEGORIES) {
      const value = h("dd", { "data-category": category });
      const label = h("span", {}, name);
      const term = h("dt", {}, h("span", { class: `swatch ${category}`, "aria-hidden": "true" }), label);
      const entry = h("div", { class: "amount", title: meaning }, term, value);
      const explained = words ? h("span", { class: "meaning" }, meaning) : null;
      if (explained) term.append(explained);
      this.values.set(category, { entry, value, label, explained, name, meaning, shown: undefined });
      this.element.append(entry);
    }
  }

  update(ledger) {
    const cache = this.values.get("torch_fragmented");
    const unknown = ledger?.torch_fragmented > 0 && (ledger.torch_reclaimable ?? null) === null;
    const [name, meaning] = unknown ? CACHE : [cache.name, cache.meaning];
    setText(cache.label, name);
    cache.entry.title = meaning;
    if (cache.explained) setText(cache.explained, meaning);
    for (const [category, known] of this.values) {
      const amount = ledger?.[category] ?? null;
      if (known.shown === amount) continue;
      known.shown = amount;
      setText(known.value, bytes(amount));
      known.entry.classList.toggle("none", amount === 0);
      known.entry.classList.toggle("unknown", amount === null);
    }
  }
}

/** Return the sum; null if a value is null. */
function sumOfKnown(values) {
  return values.includes(null) ? null : values.reduce((all, value) => all + value, 0);
}

/** Return the sum of ledgers. A category that is unknown in one of them is unknown in the sum. */
function sumOfLedgers(ledgers) {
  const sum = {};
  for (const [category] of CATEGORIES) {
    sum[category] = sumOfKnown(ledgers.map((ledger) => ledger[category] ?? null));
  }
  return sum;
}
