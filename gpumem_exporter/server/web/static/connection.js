// Receives the state by server-sent events, or by polling if those fail. If both fail, the exporter is lost.

const LIVE = "/api/v1/live";
const SILENCE_SECONDS = 6;
const POLL_SECONDS = 2;
const LOST_POLL_SECONDS = 1;
const STREAM_RETRY_SECONDS = { first: 2, last: 60 };

class Connection {
  /** `on`: the callbacks for the history, a state, a time, and the mode: "live", "polling", "lost" or "waiting". */
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

  /** Disconnect a hidden page: a browser has only six connections to one exporter for all tabs. */
  pause() {
    this.stream?.close();
    this.stream = null;
    clearTimeout(this.timer);
    this.timer = null;
    this.polls += 1;
  }

  /** Reconnect; hide values that are older than a few seconds. */
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

  /** Fall back to polling if the stream is silent: a proxy may buffer it, or the machine may be down. */
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
    const ownPoll = this.polls; // a later poll has replaced this one if the numbers differ
    let wait = POLL_SECONDS;
    try {
      const { document } = await access.request(LIVE, { seconds: SILENCE_SECONDS, acts: false });
      if (ownPoll !== this.polls) return;
      if (this.lost) this.retryAt = 0; // the exporter is back: try a stream at once
      this.lost = false;
      this.on.history(document.history);
      this.hear("polling", document.moment, document.state);
    } catch {
      if (ownPoll !== this.polls) return;
      this.lost = true;
      this.on.mode("lost");
      wait = LOST_POLL_SECONDS;
    }
    if (!this.lost && Date.now() >= this.retryAt && typeof EventSource === "function") this.open();
    else this.timer = setTimeout(() => this.poll(), wait * 1000);
  }
}
