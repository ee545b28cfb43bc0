// What needs attention, in one slot of fixed height until the viewer opens it: a new finding moves nothing below it.

import { clearButton } from "./actions.js";
import { $, arrange, h, isInUse, setAttribute, setHidden, setText, Views } from "./dom.js";
import { bytes, duration, safe } from "./format.js";
import { hueOf } from "./hues.js";
import { askForProfile, canProfile } from "./profiles.js";
import { deviceHref, jobHref, LAST_OOM } from "./route.js";

const SEVERITIES = ["critical", "warning", "info"];

class Finding {
  constructor() {
    this.severity = h("span", { class: "severity" });
    this.title = h("a", {});
    this.sentence = h("span", { class: "sentence" });
    this.next = h("span", { class: "next faint" });
    this.since = h("span", { class: "since faint" });
    this.clear = clearButton(() => ({ name: this.finding.clear.name, clear: this.finding.clear }));
    this.why = h("a", { class: "button why" }, "Why");
    this.profile = h("button", { type: "button", class: "act" }, "What holds it…");
    this.profile.addEventListener("click", () => askForProfile(this.job));
    this.element = h("li", {}, this.severity, h("p", {}, this.title, " ", this.sentence, " ", this.next), this.since, this.why, this.profile, this.clear);
  }

  update(finding) {
    this.finding = finding;
    setAttribute(this.element, "data-severity", finding.severity);
    setText(this.severity, finding.severity);
    setText(this.title, finding.title);
    setAttribute(this.title, "href", hrefOf(finding));
    setAttribute(this.why, "href", hrefOf(finding));
    setHidden(this.why, finding.kind !== "oom");
    this.job = finding.kind === "growth" ? view.jobs.find(({ id }) => id === finding.job) : undefined;
    const explains = this.job !== undefined && canProfile(this.job, view.node);
    setHidden(this.profile, !explains);
    setAttribute(this.profile, "aria-label", explains ? `What holds the memory of ${safe(this.job.name)}…` : null);
    setAttribute(this.why, "aria-label", `Why: ${safe(finding.sentence)}`);
    setAttribute(this.title, "data-hue", finding.job === null ? null : hueOf(finding.job));
    setText(this.sentence, safe(finding.sentence));
    // A button says what comes next for an error, for growth, and where a clear helps.
    setText(this.next, finding.kind === "oom" || explains || finding.clear !== null ? "" : safe(finding.next));
    const lasts = finding.since_unix_seconds === null ? "" : duration(view.now - finding.since_unix_seconds);
    setText(this.since, lasts && (finding.kind === "oom" ? `${lasts} ago` : `for ${lasts}`));
    setHidden(this.clear, finding.clear === null);
    if (finding.clear !== null) {
      setText(this.clear, `Clear ${bytes(finding.clear.stays_free_bytes)}…`);
      setAttribute(this.clear, "aria-label", `Clear ${safe(finding.clear.name)}…`);
    }
  }
}

const views = new Views(() => new Finding());
const quiet = h("li", { class: "quiet" });
let view = null;

export function showFindings(state) {
  view = state;
  const { findings, node } = state;
  const list = $("findings-list");
  const known = views.update(findings, ({ id }) => id).map(({ element }) => element);
  setText(quiet, node.driver.up ? "Nothing needs attention." : "The driver does not answer: the devices are unknown.");
  const wanted = known.length > 0 ? known : [quiet];
  // While the pointer is in the slot, new findings come last.
  const order = isInUse(list) ? [...[...list.children].filter((each) => wanted.includes(each)), ...wanted.filter((each) => each.parentNode !== list)] : wanted;
  arrange(list, order, { glide: true });
  showMore();
  const counts = SEVERITIES.map((severity) => [findings.filter((each) => each.severity === severity).length, severity]);
  setText($("findings-count"), counts.filter(([number]) => number > 0).map(([number, severity]) => `${number} ${severity}`).join(", "));
  setAttribute(document.body, "data-worst", findings[0]?.severity ?? null);
}

/** Offer what the slot has no room for: more findings, or the ends of their lines. */
function showMore() {
  const [list, more] = [$("findings-list"), $("findings-more")];
  const open = $("findings").hasAttribute("data-open");
  const cut = [...list.children].filter((each) => each.offsetTop + each.offsetHeight > list.clientHeight + 1).length;
  const long = [...list.querySelectorAll("p")].some((each) => each.scrollWidth > each.clientWidth);
  setText(more, open ? "less" : cut > 0 ? `${cut} more` : "whole lines");
  setAttribute(more, "aria-expanded", String(open));
  setHidden(more, !open && cut === 0 && !long);
}
$("findings-more").addEventListener("click", () => {
  $("findings").toggleAttribute("data-open");
  showMore();
});
addEventListener("resize", showMore);

function hrefOf({ job, kind, gpu, uuid }) {
  if (kind === "unreported") return `?q=${encodeURIComponent("not reporting")}`;
  const place = job !== null ? jobHref(job) : uuid === null ? "?" : deviceHref({ gpu, uuid });
  return kind === "oom" && place !== "?" ? `${place}&event=${LAST_OOM}${encodeURIComponent(uuid ?? "")}` : place;
}

