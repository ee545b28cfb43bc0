// What Grafana's code finds in a browser, before any of it is loaded.
import { JSDOM } from "jsdom";

const { window } = new JSDOM("<!doctype html><body></body>", { url: "http://localhost/" });
window.matchMedia = () => ({ matches: false, addEventListener() {}, removeEventListener() {} });
Object.assign(globalThis, { window, document: window.document, matchMedia: window.matchMedia });
for (const name of ["HTMLElement", "Element", "Node", "DOMParser", "MutationObserver", "localStorage", "navigator"]) {
  globalThis[name] ??= window[name];
}
