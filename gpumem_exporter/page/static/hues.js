// One color for each job, the same in strips, rows and charts, and after a reload.

const HUES = 12; // --job-0 … --job-11 in theme.css

const taken = new Map(); // the hue of each job that the page has shown

/** Give each job a hue: the one of its id, or the next one that fewer jobs have. */
export function assignHues(jobs) {
  const now = new Set(jobs.map(({ id }) => id));
  for (const id of taken.keys()) if (!now.has(id)) taken.delete(id);
  const uses = new Array(HUES).fill(0);
  for (const hue of taken.values()) uses[hue] += 1;
  for (const id of [...now].filter((each) => !taken.has(each)).sort()) {
    const preferred = hash(id) % HUES;
    const least = Math.min(...uses);
    const hue = Array.from(uses, (_, i) => (preferred + i) % HUES).find((each) => uses[each] === least);
    taken.set(id, hue);
    uses[hue] += 1;
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
