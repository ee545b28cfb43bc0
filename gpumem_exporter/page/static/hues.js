// One color for each job, which the exporter assigns: the same in strips, rows and charts, for every viewer and in `top`.

const hues = new Map(); // of each job that the page has shown

export function takeHues(jobs) {
  for (const { id, hue } of jobs) hues.set(id, hue);
}

export function hueOf(id) {
  return hues.get(id) ?? null;
}
