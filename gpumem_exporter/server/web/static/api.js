// Requests to the exporter. The paths are relative, so that the page also works behind a path prefix.
// The token of actions stays in this module's memory.

export const ACTIONS = "api/v1/actions";

export class Refusal extends Error {
  constructor(status, detail, wrongToken) {
    super(detail);
    this.status = status;
    this.wrongToken = wrongToken; // the refused request had a token, which is now forgotten
  }
}

let token = "";

/** Return status, document and ETag of a reply. Throws a Refusal for an error, and what `fetch` throws without a reply. */
export async function request(path, { method = "GET", body, headers = {}, seconds = 15 } = {}) {
  const sentToken = token;
  const reply = await fetch(path, {
    method,
    headers: {
      ...headers,
      ...(body && { "Content-Type": "application/json" }),
      ...(sentToken && { Authorization: `Bearer ${sentToken}` }),
    },
    body: body && JSON.stringify(body),
    cache: "no-store",
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
export function setToken(text) {
  const usable = /^[\x21-\x7e]+$/.test(text);
  if (usable) token = text;
  return usable;
}
