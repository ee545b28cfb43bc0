// One out-of-memory error: the memory at that moment, why it happened, what to do, and what came before.

import { Bar } from "./devices.js";
import { h, refill, setHidden } from "./dom.js";
import { bytes, dayAndTime, safe } from "./format.js";
import { go } from "./route.js";

export class OomView {
  constructor() {
    this.element = h("section", { class: "oom", hidden: "" });
  }

  /** Show the event of the URL: its id, or `oom` for the last error. */
  update(wanted, events, { words }) {
    const ooms = events.filter(({ type }) => type === "oom");
    const event = wanted === "oom" ? ooms[0] : ooms.find(({ id }) => String(id) === wanted);
    setHidden(this.element, event === undefined);
    if (event === undefined) return;
    const before = events.filter((each) => each.unix_seconds < event.unix_seconds && event.unix_seconds - each.unix_seconds < 600).slice(0, 5);
    refill(this.element, { event, before }, (content) => contentOf(content, words));
  }
}

function contentOf({ event, before }, words) {
  const { explanation = null } = event;
  const close = h("button", { type: "button", "aria-label": "Close" }, "×");
  close.addEventListener("click", () => go({ event: null }));
  const around = h("button", { type: "button" }, "Show this time");
  around.addEventListener("click", () => go({ from: Math.round(event.unix_seconds - 300), to: Math.round(event.unix_seconds + 120), range: null }));
  const bar = new Bar();
  const parts = explanation?.parts ?? [];
  bar.update(parts.map(({ key, bytes: size }) => ({ key, bytes: size ?? 0, className: key, title: `${words[key]?.label ?? key}: ${bytes(size)}` })));
  return [
    h("div", { class: "title" }, h("h3", {}, `Out of memory at ${dayAndTime(event.unix_seconds)}`), around, close),
    h("p", {}, safe(event.text)),
    ...(explanation === null ? [] : [h("p", { class: "verdict" }, safe(explanation.verdict)), h("p", {}, safe(explanation.advice))]),
    ...(parts.length > 0 ? [bar.element, h("dl", { class: "parts" }, ...parts.map(({ key, label, bytes: size }) => h("div", {}, h("dt", {}, h("span", { class: `swatch ${key}` }), label), h("dd", {}, bytes(size)))))] : []),
    ...(before.length > 0 ? [h("h4", {}, "Before"), h("ol", { class: "events" }, ...before.map((each) => h("li", {}, h("time", {}, dayAndTime(each.unix_seconds)), h("span", { class: "kind" }, each.title), h("span", { class: "words" }, safe(each.text)))))] : []),
  ];
}
