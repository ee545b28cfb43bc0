// Requests to the exporter. The token is stored only in this closure, not in any storage or URL.

class Refusal extends Error {
  /** `wrongToken`: the exporter has refused the token, which is forgotten. */
  constructor(status, detail, wrongToken) {
    super(detail);
    this.status = status;
    this.wrongToken = wrongToken;
  }
}

const access = (() => {
  let token = "";

  /**
   * Send a request; return the status and the document, which is null if it is unchanged. Throws Refusal with the
   * exporter's detail, or another error if there is no reply. The token replaces the password of the browser.
   */
  async function request(path, { method = "GET", body, headers = {}, seconds = 10 } = {}) {
    const sent = { Accept: "application/json", ...headers };
    const sentToken = token;
    if (sentToken) sent.Authorization = `Bearer ${sentToken}`;
    if (body !== undefined) sent["Content-Type"] = "application/json";
    const reply = await fetch(path, {
      method,
      headers: sent,
      body: body === undefined ? undefined : JSON.stringify(body),
      cache: "no-store",
      credentials: "same-origin",
      redirect: "error",
      referrerPolicy: "no-referrer",
      signal: AbortSignal.timeout(seconds * 1000),
    });
    const etag = reply.headers.get("ETag");
    if (reply.status === 304) return { status: 304, document: null, etag };
    if (!reply.ok) {
      const wrongToken = sentToken !== "" && reply.status === 401;
      if (wrongToken && token === sentToken) token = "";
      throw new Refusal(reply.status, await problemOf(reply), wrongToken);
    }
    return { status: reply.status, document: await reply.json(), etag };
  }

  async function problemOf(reply) {
    try {
      return String((await reply.json()).detail);
    } catch {
      return `the exporter replied with status ${reply.status}`;
    }
  }

  /** Return false if the text cannot be sent in a header. */
  function setToken(text) {
    const usable = /^[\x21-\x7e]+$/.test(text);
    if (usable) token = text;
    return usable;
  }

  return { request, setToken };
})();
