// Polls the state once a second while the page is visible. A browser has only six connections to one exporter.

import { Refusal, request } from "./api.js";

const POLL_SECONDS = 1;
const TIMEOUT_SECONDS = 6;
const OLD_SECONDS = 6; // older values are greyed until the next reply: the page was hidden, or the machine slept
const REFUSED_SECONDS = 60; // with each refusal, a browser may ask for a password

export class Connection {
  /** `on.path()`: what to request. `on.reply(document)`: null if nothing has changed. `on.mode(mode, reason)`: "live", "waiting", "lost", "refused". */
  constructor(on) {
    this.on = on;
    this.mode = "waiting";
    this.known = { path: "", etag: null };
    this.heard = 0; // by Date.now(), because performance.now() may stop while a machine sleeps
    this.polling = false;
    this.nextPoll = 0;
    setInterval(() => this.tick(), POLL_SECONDS * 1000);
    document.addEventListener("visibilitychange", () => this.tick());
    this.tick();
  }

  tick() {
    if (document.hidden) return;
    if (this.mode === "live" && this.isOld()) this.enter("waiting");
    if (!this.polling && Date.now() >= this.nextPoll) this.poll();
  }

  isOld() {
    return Date.now() - this.heard > OLD_SECONDS * 1000;
  }

  enter(mode, reason = "") {
    this.mode = mode;
    this.on.mode(mode, reason);
  }

  async poll() {
    this.polling = true;
    const path = this.on.path();
    let reply;
    try {
      const known = this.known.path === path && this.known.etag !== null && !this.isOld();
      reply = await request(path, { seconds: TIMEOUT_SECONDS, headers: known ? { "If-None-Match": this.known.etag } : {} });
    } catch (error) {
      this.fail(error);
      return;
    } finally {
      this.polling = false;
    }
    this.heard = Date.now();
    this.known = { path, etag: reply.etag };
    this.enter("live");
    this.on.reply(reply.document);
  }

  fail(error) {
    if (error.wrongToken) return; // the next poll is without it
    const refused = error instanceof Refusal && (error.status === 401 || error.status === 403);
    this.nextPoll = refused ? Date.now() + REFUSED_SECONDS * 1000 : 0;
    this.enter(refused ? "refused" : "lost", refused ? error.message : "");
  }
}
