// Requests to the exporter. The token is stored only in this closure, not in any storage or URL.

class Refusal extends Error {
  constructor(status, detail) {
    super(detail);
    this.status = status;
  }
}

const access = (() => {
  let token = "";

  /**
   * Send a request; return the status and the document. Throws Refusal with the exporter's detail, or another error if
   * there is no reply. `acts`: send the token, which replaces the password with which the browser reads this page.
   */
  async function request(path, { method = "GET", body, headers = {}, seconds = 10, acts = true } = {}) {
    const sent = { Accept: "application/json", ...headers };
    if (token && acts) sent.Authorization = `Bearer ${token}`;
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
    if (!reply.ok) throw new Refusal(reply.status, await problemOf(reply));
    return { status: reply.status, document: await reply.json(), location: reply.headers.get("Location") };
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

  return { request, setToken, hasToken: () => token !== "" };
})();
