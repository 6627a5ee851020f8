// Keeps a page up to date: the server sends a revision, and the page fetches itself again.
"use strict";
(() => {
  const root = document.documentElement;
  let source = null, busy = false;

  const show = (text) => { document.getElementById("live").textContent = text; };

  function open(from) {
    return new Set([...from.querySelectorAll("details")].map((d, i) => d.open ? i : -1));
  }

  // Replaces a block; opened details stay open, and the focus stays at the same position.
  function replace(old, fresh) {
    const opened = open(old), active = document.activeElement;
    const items = (from) => [...from.querySelectorAll("a, summary, [tabindex]")];
    const index = old.contains(active) ? items(old).indexOf(active) : -1;
    const block = document.adoptNode(fresh);
    old.replaceWith(block);
    block.querySelectorAll("details").forEach((d, i) => { d.open = opened.has(i); });
    if (index >= 0) {
      const now = items(block);
      (now[Math.min(index, now.length - 1)] || document.getElementById("main")).focus({preventScroll: true});
    }
  }

  async function refresh() {
    if (busy) return;
    busy = true;
    try {
      const answer = await fetch(location.pathname + location.search, {cache: "no-store"});
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      const blocks = [...document.querySelectorAll("[data-live]")];
      const pairs = blocks.map((b) => [b, page.getElementById(b.id)]);
      if (!blocks.length || pairs.some(([, fresh]) => !fresh) || document.querySelector("main > .problem")) {
        replace(document.getElementById("main"), page.getElementById("main"));
      } else {
        pairs.filter(([b, fresh]) => b.innerHTML !== fresh.innerHTML).forEach(([b, fresh]) => replace(b, fresh));
      }
      document.querySelector("footer").replaceWith(document.adoptNode(page.querySelector("footer")));
      root.dataset.revision = page.documentElement.dataset.revision;
      show("live");
    } catch (error) {
      show("not connected");
    } finally {
      busy = false;
    }
  }

  function connect() {
    source = new EventSource("/events");
    source.addEventListener("revision", (event) => {
      if (event.data === root.dataset.revision) show("live"); else refresh();
    });
    source.onerror = () => show("not connected");
  }

  // A hidden page holds no connection: browsers allow six to one server.
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) { if (source) source.close(); source = null; } else if (!source) connect();
  });
  connect();
})();
