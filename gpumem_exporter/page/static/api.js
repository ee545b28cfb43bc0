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
export async function request(path, options) {
  const reply = await send(path, options);
  return { status: reply.status, document: reply.status === 304 ? null : await reply.json(), etag: reply.headers.get("ETag") };
}

/** Save a reply as a file. Throws as `request` does. */
export async function save(path, name) {
  const url = URL.createObjectURL(await (await send(path, { seconds: 60 })).blob());
  const link = document.createElement("a");
  link.href = url;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}

async function send(path, { method = "GET", body, headers = {}, seconds = 15 } = {}) {
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
  if (!reply.ok && reply.status !== 304) {
    const wrongToken = sentToken !== "" && reply.status === 401;
    if (wrongToken && token === sentToken) token = "";
    throw new Refusal(reply.status, await problemOf(reply), wrongToken);
  }
  return reply;
}

async function problemOf(reply) {
  try {
    return String((await reply.json()).detail);
  } catch {
    return `the exporter replied with status ${reply.status}`;
  }
}

/** Whether requests have a token, which the address of a link cannot have. */
export const hasToken = () => token !== "";

/** Return false if the text cannot be sent in a header. */
export function setToken(text) {
  const usable = /^[\x21-\x7e]+$/.test(text);
  if (usable) token = text;
  return usable;
}
