// How the state comes: by server-sent events, else by asking again and again. Without either the exporter is lost.

const LIVE = "/api/v1/live";
const SILENCE_SECONDS = 6;
const POLL_SECONDS = 2;
const LOST_POLL_SECONDS = 1;
const STREAM_RETRY_SECONDS = { first: 2, last: 60 };

class Connection {
  /** `on`: what is called with the history, a state, a moment, and the mode: "live", "polling", "lost" or "waiting". */
  constructor(on) {
    this.on = on;
    this.stream = null;
    this.timer = null;
    this.polls = 0;
    this.heard = Date.now();
    this.retrySeconds = STREAM_RETRY_SECONDS.first;
    this.retryAt = 0;
    setInterval(() => this.watch(), 1000);
    document.addEventListener("visibilitychange", () => (document.hidden ? this.pause() : this.resume()));
    if (!document.hidden) this.open();
  }

  /** A page that nobody sees needs nothing: a browser has six connections to one exporter for all of its tabs. */
  pause() {
    this.stream?.close();
    this.stream = null;
    clearTimeout(this.timer);
    this.timer = null;
    this.polls += 1;
  }

  /** What was known when the page was last seen is not shown as if it were known now. */
  resume() {
    if (this.stream !== null) return;
    if (Date.now() - this.heard > SILENCE_SECONDS * 1000) this.on.mode("waiting");
    this.open();
  }

  open() {
    clearTimeout(this.timer);
    this.timer = null;
    try {
      this.stream = new EventSource(LIVE);
    } catch {
      this.fallBack();
      return;
    }
    this.opened = Date.now();
    const { stream } = this;
    const listen = (type, take) => {
      stream.addEventListener(type, ({ data }) => {
        if (this.stream === stream) take(JSON.parse(data));
      });
    };
    listen("history", (history) => this.on.history(history));
    listen("state", ({ moment, state }) => this.hear("live", moment, state));
    listen("beat", (moment) => this.hear("live", moment, null));
    stream.onerror = () => {
      if (this.stream === stream) this.fallBack();
    };
  }

  hear(mode, moment, state) {
    this.heard = Date.now();
    if (mode === "live") this.retrySeconds = STREAM_RETRY_SECONDS.first;
    this.on.mode(mode);
    if (state !== null) this.on.state(moment, state);
    else this.on.moment(moment);
  }

  /** A stream that says nothing is as good as none: a proxy may hold it back, or the machine be gone. */
  watch() {
    const since = Math.max(this.heard, this.opened ?? 0);
    if (this.stream !== null && Date.now() - since > SILENCE_SECONDS * 1000) this.fallBack();
  }

  fallBack() {
    this.stream?.close();
    this.stream = null;
    this.retryAt = Date.now() + this.retrySeconds * 1000;
    this.retrySeconds = Math.min(2 * this.retrySeconds, STREAM_RETRY_SECONDS.last);
    this.poll();
  }

  async poll() {
    clearTimeout(this.timer);
    this.polls += 1;
    const mine = this.polls; // another one has taken over where it is no longer the last
    let wait = POLL_SECONDS;
    try {
      const { document } = await access.ask(LIVE, { seconds: SILENCE_SECONDS, acts: false });
      if (mine !== this.polls) return;
      if (this.lost) this.retryAt = 0; // it is back, and so will its streams be
      this.lost = false;
      this.on.history(document.history);
      this.hear("polling", document.moment, document.state);
    } catch {
      if (mine !== this.polls) return;
      this.lost = true;
      this.on.mode("lost");
      wait = LOST_POLL_SECONDS;
    }
    if (!this.lost && Date.now() >= this.retryAt && typeof EventSource === "function") this.open();
    else this.timer = setTimeout(() => this.poll(), wait * 1000);
  }
}
