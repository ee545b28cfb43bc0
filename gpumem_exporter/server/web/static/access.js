// Asking the exporter. Its token, where it wants one, lives in this closure alone: no storage, no address has it.

class Refusal extends Error {
  constructor(status, detail) {
    super(detail);
    this.status = status;
  }
}

const access = (() => {
  let token = "";

  /**
   * Ask, and return the answer's status and document. Refusal: the exporter's own words; any other error: no answer.
   * `acts`: the token goes with it. It takes the place of the password by which the browser may read this page.
   */
  async function ask(path, { method = "GET", body, headers = {}, seconds = 10, acts = true } = {}) {
    const sent = { Accept: "application/json", ...headers };
    if (token && acts) sent.Authorization = `Bearer ${token}`;
    if (body !== undefined) sent["Content-Type"] = "application/json";
    const answer = await fetch(path, {
      method,
      headers: sent,
      body: body === undefined ? undefined : JSON.stringify(body),
      cache: "no-store",
      credentials: "same-origin",
      redirect: "error",
      referrerPolicy: "no-referrer",
      signal: AbortSignal.timeout(seconds * 1000),
    });
    if (!answer.ok) throw new Refusal(answer.status, await problemOf(answer));
    return { status: answer.status, document: await answer.json(), location: answer.headers.get("Location") };
  }

  async function problemOf(answer) {
    try {
      return String((await answer.json()).detail);
    } catch {
      return `the exporter answered ${answer.status}`;
    }
  }

  /** False for what no header can carry. */
  function setToken(text) {
    const usable = /^[\x21-\x7e]+$/.test(text);
    if (usable) token = text;
    return usable;
  }

  return { ask, setToken, hasToken: () => token !== "" };
})();
