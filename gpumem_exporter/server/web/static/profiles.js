// Links to memory profiles. A profile is a page of its own: its texts come from a job, so it has no rights here.

import { hasToken, Refusal, save } from "./api.js";
import { h, setText } from "./dom.js";

/** Return a link that opens a profile, or with a token saves it. */
export function profileLink(id, text) {
  const path = `api/v1/profiles/${encodeURIComponent(id)}?format=html`;
  const link = h("a", { href: path, target: "_blank", rel: "noopener" }, text);
  link.addEventListener("click", async (event) => {
    if (!hasToken()) return;
    event.preventDefault();
    try {
      await save(path, `profile-${id}.html`);
    } catch (error) {
      setText(link, error instanceof Refusal ? `${text}: ${error.message}` : text);
    }
  });
  return link;
}
