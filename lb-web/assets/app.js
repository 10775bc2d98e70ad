// The frame of all pages: routes, refresh, keys.

import { h } from "./dom.js";
import overview from "./pages/overview.js";
import services from "./pages/services.js";
import service from "./pages/service.js";
import connections from "./pages/connections.js";
import explain from "./pages/explain.js";
import live from "./pages/live.js";

const ROUTES = [
  [/^\/$/, overview, "Overview"],
  [/^\/services$/, services, "Services"],
  [/^\/services\/([^/]+)\/([^/]+)$/, service, "Service"],
  [/^\/connections$/, connections, "Connections"],
  [/^\/explain$/, explain, "Explain"],
  [/^\/live$/, live, "Live"],
];
const KEYS = { o: "/", s: "/services", c: "/connections", e: "/explain", l: "/live" };
const PERIOD = 2000;

// Only Overview reads the name of the node.
document.getElementById("node").textContent = sessionStorage.getItem("node") ?? "lb-agent";

const main = document.getElementById("main");
const pulse = document.getElementById("pulse");
const keys = document.getElementById("keys");
let page = null;
let timer = 0;

/** What pages get from the frame. */
const frame = {
  /** Opens another page of ours. */
  go(path) { history.pushState(null, "", path); open(); },
  /** Writes the conditions of a page into its address, so that the address can be shared. */
  remember(query) {
    const given = Object.entries(query).filter(([, value]) => value);
    const search = new URLSearchParams(given).toString();
    history.replaceState(null, "", location.pathname + (search ? `?${search}` : ""));
  },
  query: () => Object.fromEntries(new URLSearchParams(location.search)),
  setNode(name) { document.getElementById("node").textContent = name; sessionStorage.setItem("node", name); },
};

function setPulse(state, text) {
  pulse.className = `pulse ${state}`;
  if (pulse.lastChild.textContent !== text) pulse.lastChild.textContent = text;
}

let fresh = null;
async function refresh(current) {
  clearTimeout(timer);
  if (page !== current) return;
  if (current.update && !document.hidden) {
    try {
      await current.update();
      fresh = new Date();
      setPulse("ok", "live");
    } catch (error) {
      if (error.name !== "AbortError") {
        const since = fresh ? `, last data ${fresh.toLocaleTimeString("en-GB")}` : "";
        setPulse("bad", error.gone ? `no answer${since}` : "error");
        current.fail?.(error);
      }
    }
  }
  if (page === current) timer = setTimeout(() => refresh(current), PERIOD);
}

function open() {
  const path = location.pathname;
  const [pattern, build, title] = ROUTES.find(([pattern]) => pattern.test(path)) ?? ROUTES[0];
  const params = (path.match(pattern) ?? []).slice(1).map(decodeURIComponent);
  page?.stop?.();
  document.title = `${params.length ? params.join("/") : title} · lb-agent`;
  for (const link of document.querySelectorAll("#nav a")) {
    const at = link.getAttribute("href");
    const here = at === "/" ? path === "/" : path === at || path.startsWith(`${at}/`);
    if (here) link.setAttribute("aria-current", "page"); else link.removeAttribute("aria-current");
  }
  const root = h("div", { className: "page" });
  page = build(root, frame, params);
  main.replaceChildren(root);
  scrollTo(0, 0);
  refresh(page);
}

document.addEventListener("click", (event) => {
  const link = event.target.closest("a[href^='/']");
  if (!link || event.defaultPrevented || event.button || event.metaKey || event.ctrlKey || event.shiftKey) return;
  if (link.hasAttribute("download") || ["/api/", "/docs", "/login"].some((start) => link.pathname.startsWith(start))) return;
  event.preventDefault();
  if (link.pathname + link.search !== location.pathname + location.search) frame.go(link.pathname + link.search);
});
addEventListener("popstate", open);
document.addEventListener("visibilitychange", () => { if (!document.hidden && page) refresh(page); });

let leader = 0;
document.addEventListener("keydown", (event) => {
  if (event.metaKey || event.ctrlKey || event.altKey) return;
  const typing = event.target.matches("input, select, textarea");
  if (event.key === "Escape" && typing) { event.target.blur(); return; }
  if (typing || keys.open) return;
  if (Date.now() - leader < 1500 && KEYS[event.key]) { leader = 0; event.preventDefault(); frame.go(KEYS[event.key]); return; }
  leader = event.key === "g" ? Date.now() : 0;
  if (event.key === "/") {
    const field = main.querySelector("input");
    if (field) { event.preventDefault(); field.focus(); field.select?.(); }
  } else if (event.key === "?") keys.showModal();
  else page?.key?.(event.key);
});
document.getElementById("help").addEventListener("click", () => keys.showModal());

open();
