// Processes the results of the dashboards' queries with Grafana's code: data source, transformations, overrides, links
// and units. Prints a line for each panel, and exits with 1 if one differs from tests/support/truth/panel_frames.py.
import "./browser.mjs";
import { readFileSync } from "node:fs";
import {
  applyFieldOverrides,
  createTheme,
  FieldConfigOptionsRegistry,
  fieldMatchers,
  getFieldDisplayName,
  getFieldDisplayValuesProxy,
  getValueFormats,
  standardTransformers,
  standardTransformersRegistry,
  toDataFrame,
  transformDataFrame,
} from "@grafana/data";
import { firstValueFrom } from "rxjs";
import { transformV2 } from "@grafana/prometheus/result_transformer";

// Labels of some targets only; without one, Grafana leaves the value of a link's variable empty.
const OPTIONAL_LABELS = new Set(["cluster"]);

const [, , file] = process.argv;
const transformers = new Map(Object.values(standardTransformers).map((each) => [each.id, each]));
standardTransformersRegistry.setInit(() =>
  [...transformers.values()].map((transformation) => ({ id: transformation.id, name: transformation.name, transformation })),
);
const units = new Set(getValueFormats().flatMap((group) => group.submenu.map((unit) => unit.value)));

// The options of a field that change the text of a cell.
const options = ["unit", "decimals", "noValue", "displayName", "mappings", "thresholds"];
const fieldConfigRegistry = new FieldConfigOptionsRegistry(() =>
  options.map((id) => ({ id, path: id, name: id, process: (value) => value, shouldApply: () => true })),
);

const numberOf = (text) => ({ "+Inf": Infinity, "-Inf": -Infinity })[text] ?? Number(text);

/** One series as Grafana's server hands it to the browser: a frame of two fields. */
function frameOf({ refId, instant }, name, { metric, values }) {
  const kind = instant ? { type: "numeric-multi", resultType: "vector" } : { type: "timeseries-multi", resultType: "matrix" };
  return toDataFrame({
    refId,
    meta: { type: kind.type, custom: { resultType: kind.resultType } },
    fields: [
      { name: "Time", type: "time", values: values.map(([moment]) => moment * 1000), config: {} },
      { name: "Value", type: "number", labels: metric, values: values.map(([, text]) => numberOf(text)), config: { displayNameFromDS: name } },
    ],
  });
}

/** A panel's frames once the data source and the transformations are through. */
async function framesOf({ panel, answers }) {
  // The server returns an empty frame if there is no series.
  const sent = answers.flatMap(({ target, series, names }) =>
    series.length ? series.map((one, at) => frameOf(target, names[at], one)) : [toDataFrame({ refId: target.refId, fields: [] })],
  );
  const targets = answers.map(({ target }) => target);
  const { data } = transformV2({ data: sent }, { targets, app: "dashboard" }, {});
  return firstValueFrom(transformDataFrame(panel.transformations ?? [], data, { interpolate: (text) => text }));
}

const cellOf = (value) => (value === "" || value === undefined || value === null ? null : Number.isNaN(value) ? "NaN" : value);
const linesOf = (rows) => rows.map((row) => JSON.stringify(row.map(cellOf))).sort();

function* wrongInTable({ table }, frames) {
  const [frame] = frames;
  const found = frame?.fields ?? [];
  const filled = found.filter((field) => field.values.some((value) => cellOf(value) !== null));
  const headings = filled.map((field) => getFieldDisplayName(field, frame, frames));
  const rows = Array.from({ length: frame?.length ?? 0 }, (_, at) => filled.map((field) => field.values[at]));
  // Grafana also has a column for a query without a result; frames.py does not.
  if (frames.length > 1) yield `${frames.length} tables`;
  if (String(headings) !== String(table.headings)) yield `columns ${headings}\n  frames.py has ${table.headings}`;
  const [expected, grafana] = [linesOf(table.rows), linesOf(rows)];
  if (String(expected) !== String(grafana)) yield `rows ${grafana.join("\n  ")}\n  frames.py has ${expected.join("\n  ")}`;
}

/** The frames with what the panel's options and overrides make of each field. */
const dressed = ({ panel: { fieldConfig } }, data) =>
  applyFieldOverrides({ data, fieldConfig, fieldConfigRegistry, replaceVariables: (text) => text, theme: createTheme() });

/** A label is shown as it is, though it looks like a number or is empty; only words for values take its place. */
function* wrongInCells(frames) {
  for (const { fields } of frames) {
    for (const { name, type, values, config, display } of fields) {
      if (type !== "string" || config.mappings?.length) continue;
      const changed = values.map((value) => [value ?? "", display(value).text]).find(([value, text]) => value !== text);
      if (changed) yield `the label ${name} ${JSON.stringify(changed[0])} is shown as ${JSON.stringify(changed[1])}`;
    }
  }
}

function* wrongInLinks({ panel }, frames) {
  const texts = [panel.fieldConfig.defaults, ...panel.fieldConfig.overrides].map((each) => JSON.stringify(each));
  const wanted = new Set(texts.flatMap((text) => [...text.matchAll(/\$\{__data\.fields(?:\.(\w+)|\[(\d+)\])/g)].map(([, name, at]) => name ?? at)));
  for (const frame of frames.filter((each) => each.length > 0)) {
    const fields = getFieldDisplayValuesProxy({ frame, rowIndex: 0 });
    for (const name of wanted) if (fields[name] === undefined && !OPTIONAL_LABELS.has(name)) yield `a link wants the field ${name}, which is not there`;
  }
}

function* wrongInOverrides({ panel }, frames) {
  if (frames.every((frame) => frame.length === 0)) return;
  // Labels that no series has get no column; `organize` has the headings of the others. A query may have no series.
  const declared = new Set([
    ...panel.targets.map(({ legendFormat }) => legendFormat),
    ...(panel.transformations ?? []).flatMap(({ options }) => [
      ...Object.keys(options.indexByName ?? {}),
      ...Object.values(options.renameByName ?? {}),
    ]),
  ]);
  for (const { matcher } of panel.fieldConfig.overrides) {
    const fits = fieldMatchers.get(matcher.id).get(matcher.options);
    const hit = frames.some((frame) => frame.fields.some((field) => fits(field, frame, frames)));
    if (!hit && !declared.has(matcher.options)) yield `the override ${matcher.id} ${JSON.stringify(matcher.options)} is of nothing`;
  }
}

function* wrongInUnits({ panel }) {
  const used = JSON.stringify(panel.fieldConfig).matchAll(/"(?:unit|id":"unit","value)":"([^"]+)"/g);
  // The text behind `suffix:` is free.
  for (const [, unit] of used) if (!units.has(unit) && !unit.startsWith("suffix:")) yield `the unit ${unit} is not known`;
}

let failed = 0;
for (const shown of JSON.parse(readFileSync(file, "utf8"))) {
  const frames = await framesOf(shown);
  const asShown = dressed(shown, frames);
  const wrong = [
    ...(shown.table ? [...wrongInTable(shown, frames), ...wrongInCells(asShown)] : []),
    ...wrongInLinks(shown, asShown),
    ...wrongInOverrides(shown, frames),
    ...wrongInUnits(shown),
  ];
  failed += wrong.length > 0;
  const rows = frames.reduce((all, frame) => all + frame.length, 0);
  console.log(`${wrong.length ? "FAIL" : "ok  "} ${shown.dashboard} / ${shown.panel.title}: ${frames.length} frames, ${rows} rows`);
  for (const text of wrong) console.log(`     ${text}`);
}
process.exitCode = failed ? 1 : 0;
