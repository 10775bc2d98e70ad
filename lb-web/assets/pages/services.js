// Services: a table of any length. The server sorts and searches; the page holds only the rows near the visible ones.

import { ask, h, s, show } from "../dom.js";
import { bytes, scaled, whole } from "../format.js";

const ROW = 34;
const MARGIN = 20;
// Number of rows that a request asks for, so that most of a scroll needs none.
const WINDOW = 200;
const COLUMNS = [
  ["name", "Service", "w-name"], [null, "Port", "w-port c-small"], [null, "Address", "w-addr c-addr"], ["backends", "Backends", "w-backs"],
  ["active", "Active", "w-num num c-small"], ["newFlows", "New/s", "w-num num c-small"], ["packets", "Packets/s", "w-num num c-small"],
  ["bytes", "Bytes/s", "w-num num"], [null, "Last minute", "w-spark c-small"],
];

export default function services(root, frame) {
  const given = frame.query();
  let [q, sort, reverse] = [given.q ?? "", given.sort ?? "health", given.reverse === "true"];
  let [total, rows, first, running] = [0, [], 0, null];
  // The rows in the table, by number: what they show as JSON, and their element.
  let held = new Map();
  let marked = false;

  const search = h("input", { type: "search", value: q, placeholder: "Name, port or address", "aria-label": "Search Services", autocomplete: "off", spellcheck: false });
  const count = h("span", { className: "muted" }, " ");
  const order = h("select", { "aria-label": "Order" }, [["health", "Unhealthy first"], ["name", "By name"], ["bytes", "By bytes"], ["newFlows", "By new connections"], ["active", "By active connections"], ["packets", "By packets"], ["backends", "By backends"]]
    .map(([value, text]) => h("option", { value, selected: value === sort }, text)));
  const notice = h("div");
  const heads = COLUMNS.map(([key, text, className]) => h("th", { scope: "col", className }, key ? h("button", { type: "button", onclick: () => by(key) }, text) : text));
  const [above, below] = [0, 1].map(() => h("tr", { className: "gap", "aria-hidden": "true" }, h("td")));
  const body = h("tbody", null, above, below);
  const list = h("div", { className: "list panel", tabindex: "0", role: "region", "aria-label": "Services" }, h("table", null, h("thead", null, h("tr", null, heads)), body));
  show(root, h("div", { className: "head" }, h("h1", null, "Services"), count),
    h("div", { className: "tools" }, h("div", { className: "search" }, search), h("label", null, order)), notice, list);

  function remember() { frame.remember({ q, sort: sort === "health" ? "" : sort, reverse: reverse ? "true" : "" }); }

  function by(key) {
    if (sort === key) reverse = !reverse; else [sort, reverse] = [key, false];
    order.value = sort;
    start();
  }

  function start() {
    remember();
    list.scrollTop = 0;
    COLUMNS.forEach(([key], at) => {
      const rising = (key === "name") !== reverse;
      if (key && key === sort) heads[at].setAttribute("aria-sort", rising ? "ascending" : "descending"); else heads[at].removeAttribute("aria-sort");
    });
    load().catch(fail);
  }

  function spark(values) {
    const top = Math.max(...values, 1);
    const points = values.map((value, at) => `${((at + 30 - values.length) * 100) / 29},${(19 - (value / top) * 18).toFixed(1)}`);
    return s("svg", { class: values.some(Boolean) ? "spark" : "spark idle", viewBox: "0 0 100 20", preserveAspectRatio: "none", "aria-hidden": "true" }, values.length > 1 ? s("polyline", { points: points.join(" ") }) : null);
  }

  const number = (text, className = "") => h("td", { className: `num ${className}${/^0B?$/.test(text) ? " zero" : ""}` }, text);

  function row(port) {
    if (!port) return h("tr", null, h("td", { className: "muted" }, "…"));
    const ready = port.terminating ? [`${port.ready} `, h("span", { className: "tag warn" }, `+${port.terminating}`, h("span", { className: "c-small" }, " ending"))]
      : port.ready ? String(port.ready) : h("span", { className: "tag bad" }, "none");
    const backends = [ready, port.unhealthy ? [" ", h("span", { className: "tag bad", title: `${port.unhealthy} endpoints fail the health check` }, port.unhealthy, h("span", { className: "c-small" }, " unhealthy"))] : null];
    const [address, place] = port.address ? [port.address, port.frontends > 1 ? ` +${port.frontends - 1}` : ""] : ["–", ""];
    return h("tr", null,
      h("td", null, h("div", { className: "name" }, h("i", { className: `dot ${port.health}`, title: port.health }),
        h("a", { href: `/services/${encodeURIComponent(port.namespace)}/${encodeURIComponent(port.name)}` }, h("span", null, `${port.namespace}/`), port.name, port.portName ? h("span", null, `:${port.portName}`) : null))),
      h("td", { className: "c-small" }, `${port.port}/${port.protocol}`), h("td", { className: "mono c-addr" }, address, h("span", { className: "muted" }, place)),
      h("td", null, backends),
      number(scaled(port.active), "c-small"), number(scaled(port.newFlows), "c-small"), number(scaled(port.packets), "c-small"), number(bytes(port.bytes)),
      h("td", { className: "c-small" }, spark(port.spark)));
  }

  /** The rows to hold: the visible ones and some around them. */
  function range() {
    const from = Math.max(0, Math.floor(list.scrollTop / ROW) - MARGIN);
    return [from, Math.min(total || 60, from + Math.min(WINDOW, Math.ceil(list.clientHeight / ROW) + 2 * MARGIN))];
  }

  /** Whether the table holds all visible rows. */
  function drawn() {
    const from = Math.floor(list.scrollTop / ROW);
    const last = Math.min(total, from + Math.ceil(list.clientHeight / ROW) + 1) - 1;
    return last < from || (held.has(from) && held.has(last));
  }

  function draw() {
    const [from, to] = range();
    const before = held;
    held = new Map();
    for (let at = from; at < Math.min(to, total); at += 1) {
      const [port, old] = [rows[at - first], before.get(at)];
      const text = JSON.stringify(port);
      held.set(at, old?.text === text ? old : { text, element: row(port) });
    }
    const shown = Array.from(held.values(), is => is.element);
    above.firstChild.style.height = `${from * ROW}px`;
    below.firstChild.style.height = `${Math.max(0, total - Math.max(to, from)) * ROW}px`;
    const focused = document.activeElement?.closest?.("tbody a")?.getAttribute("href");
    body.replaceChildren(above, ...shown, below);
    if (focused) body.querySelector(`a[href="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
  }

  /** Marks the moment at which the browser has painted the first rows; a test reads the mark. */
  function mark() {
    if (marked || !rows.length) return;
    marked = true;
    // The browser paints the rows between these two frames.
    requestAnimationFrame(() => requestAnimationFrame(() => performance.mark("rows-painted")));
  }

  async function load() {
    running?.abort();
    const mine = running = new AbortController();
    const [from, to] = range();
    const offset = Math.max(0, Math.floor((from + to - WINDOW) / 2));
    const page = await ask("services", { q, sort, reverse: reverse ? "true" : "", offset, limit: WINDOW }, mine.signal);
    // A later request is under way, and will bring what is visible then.
    if (mine !== running) return;
    [total, rows, first] = [page.matched, page.rows, offset];
    const found = q ? `${whole(page.matched)} of ${whole(page.total)}` : whole(page.total);
    count.textContent = `${found} service ports${page.unready ? `, ${whole(page.unready)} without ready backends` : ""}${page.unhealthy ? `, ${whole(page.unhealthy)} with unhealthy endpoints` : ""}`;
    show(notice, total ? null : h("p", { className: "hint" }, q ? "No Service has this in its name or addresses." : "The kernel has no Services: give the agent manifests or an API server."));
    draw();
    mark();
  }

  function fail(error) {
    if (error.name !== "AbortError") show(notice, h("p", { className: "notice", role: "alert" }, error.message));
  }

  /** Loads the rows at which a scroll has arrived. Does not interrupt the request of the scroll before: else rows would come only
   *  when the list stands still. */
  let following = false;
  async function follow() {
    if (following) return;
    following = true;
    try {
      let row = missing();
      while (row >= 0) {
        await load();
        const next = missing();
        // The server has fewer rows than it says.
        if (next === row) break;
        row = next;
      }
    } finally { following = false; }
  }

  /** The first row to hold if the page lacks one of those to hold, else -1. */
  function missing() {
    const [from, to] = range();
    return from < first || Math.min(to, total) > first + rows.length ? from : -1;
  }

  let pending = 0;
  list.addEventListener("scroll", () => {
    if (pending) return;
    pending = requestAnimationFrame(() => {
      pending = 0;
      if (!drawn()) draw();
      follow().catch(fail);
    });
  }, { passive: true });
  let typing = 0;
  search.addEventListener("input", () => { clearTimeout(typing); typing = setTimeout(() => { q = search.value.trim(); start(); }, 120); });
  order.addEventListener("change", () => { [sort, reverse] = [order.value, false]; start(); });

  return { update: load, fail, stop() { running?.abort(); cancelAnimationFrame(pending); } };
}
