// The link to the scheduler's live page.

const LOOPBACK = ["localhost", "127.0.0.1", "[::1]"];
const ANY = ["0.0.0.0", "[::]"];

/** Corrects the link for this browser, and removes it if the browser is on another machine than a local live page. */
export function correctLink(link, ownName) {
  if (!link) return;
  const url = new URL(link.href);
  if (ANY.includes(url.hostname)) {
    url.hostname = ownName;
    link.href = url;
  } else if (LOOPBACK.includes(url.hostname) && !LOOPBACK.includes(ownName)) {
    link.remove();
  }
}
