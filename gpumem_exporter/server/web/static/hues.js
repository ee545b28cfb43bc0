// One color for each job, the same in strips, rows and charts, and after a reload.

const HUES = 12; // --job-0 … --job-11 in theme.css

const taken = new Map(); // the hue of each job that the page has shown

/** Give each job a hue: the one of its id, or the next that no other job has. */
export function assignHues(jobs) {
  const now = new Set(jobs.map(({ id }) => id));
  for (const id of taken.keys()) if (!now.has(id)) taken.delete(id);
  const used = new Set(taken.values());
  for (const { id } of [...jobs].sort((a, b) => (a.id < b.id ? -1 : 1))) {
    if (taken.has(id)) continue;
    const preferred = hash(id) % HUES;
    const free = Array.from({ length: HUES }, (_, i) => (preferred + i) % HUES).find((hue) => !used.has(hue));
    taken.set(id, free ?? preferred);
    used.add(free ?? preferred);
  }
}

export function hueOf(id) {
  return taken.get(id) ?? null;
}

function hash(text) {
  let value = 2166136261; // FNV-1a
  for (const character of text) value = Math.imul(value ^ character.codePointAt(0), 16777619);
  return value >>> 0;
}
