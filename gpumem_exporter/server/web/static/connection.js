// Polls the state once a second while the page is visible. A browser has only six connections to one exporter.

const LIVE = "/api/v1/live-rows";
const POLL_SECONDS = 1;
const TIMEOUT_SECONDS = 6;
const OLD_SECONDS = 6; // older values are hidden until the next reply: the page was hidden, or the machine slept
const REFUSED_SECONDS = 60; // with each refusal, a browser may ask for a password

class Connection {
  /** `on`: the callbacks for a reply (null if nothing has changed) and for the mode: "live", "waiting", "lost" or "refused". */
  constructor(on) {
    this.on = on;
    this.mode = "waiting";
    this.etag = null;
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
    let reply;
    try {
      const headers = this.etag === null || this.isOld() ? {} : { "If-None-Match": this.etag };
      const since = this.on.since();
      reply = await access.request(since === null ? LIVE : `${LIVE}?since=${since}`, { seconds: TIMEOUT_SECONDS, headers });
    } catch (error) {
      this.fail(error);
      return;
    } finally {
      this.polling = false;
    }
    this.heard = Date.now();
    this.etag = reply.etag;
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
