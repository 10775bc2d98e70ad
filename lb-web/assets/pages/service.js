// A Service: a picture of each port, from clients to backends, and its tables.

import { ask, h, heads, panel, s, scroll, show } from "../dom.js";
import { bytes, percent, scaled, socket } from "../format.js";
import { healthPanel } from "../health.js";
import { listen } from "./live.js";

const MOST_FRONTENDS = 8;
const MOST_BACKENDS = 20;
const LATELY = 12;

/** The backends with their rates and shares, those with the most traffic first. */
function backendsOf(port) {
  const rates = port.rates?.backends ?? {};
  const list = port.backends.map((backend) => {
    const key = socket(backend.address, backend.port);
    const none = { active: 0, newFlows: 0, packets: 0, bytes: 0 };
    return { ...backend, key, weight: port.weights?.[key] ?? 1, rates: rates[key] ?? none };
  });
  const measure = ["newFlows", "active", "bytes"].find((name) => list.some((backend) => backend.rates[name] > 0));
  const sum = list.reduce((total, backend) => total + (measure ? backend.rates[measure] : 0), 0);
  for (const backend of list) backend.share = sum ? backend.rates[measure] / sum : null;
  list.sort((a, b) => (b.share ?? 0) - (a.share ?? 0) || a.key.localeCompare(b.key));
  return [list, measure];
}

const cut = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);

/** Clients → frontends → scheduler → backends. The width of a line is the share of the traffic. */
function picture(port, width) {
  const wide = width >= 760;
  const [backends] = backendsOf(port);
  const [shown, frontends] = [backends.slice(0, MOST_BACKENDS), port.frontends.slice(0, MOST_FRONTENDS)];
  const [step, top] = [46, 26];
  const rows = Math.max(shown.length + (backends.length > shown.length ? 1 : 0), frontends.length + (port.frontends.length > frontends.length ? 1 : 0), wide ? 2 : 1, 1);
  const height = top + rows * step + 4;
  const middle = (count, at) => top + (rows * step) / 2 + (at - (count - 1) / 2) * step;
  const box = Math.min(250, wide ? width * 0.24 : width * 0.4);
  const x = wide ? { clients: 0, frontends: width * 0.17, scheduler: width * 0.5, backends: width - box } : { frontends: 0, backends: width - box };
  const hub = wide ? { x: x.scheduler, w: Math.min(140, width * 0.15) } : { x: (box + x.backends) / 2 - 5, w: 10 };
  const letters = Math.floor(box / 7.4);
  const lines = [];
  const boxes = [];
  const line = (x1, y1, x2, y2, share, className = "") => {
    const bend = (x1 + x2) / 2;
    lines.push(s("path", { class: `flow ${share ? "" : "idle"} ${className}`, d: `M${x1} ${y1}C${bend} ${y1} ${bend} ${y2} ${x2} ${y2}`, "stroke-width": share ? Math.max(1.5, share * 14) : 1.2 }));
  };
  // A box whose texts are too long shows them when the pointer is over it.
  const node = (left, y, w, title, sub, className = "", mono = true) => boxes.push(s("g", null,
    title.length > letters || sub?.length > letters + 2 ? s("title", null, [title, sub].filter(Boolean).join("\n")) : null,
    s("rect", { class: `box ${className}`, x: left + 0.5, y: y - 18.5, width: w - 1, height: 37, rx: 6 }),
    s("text", { x: left + 10, y: sub ? y - 3 : y + 4, class: mono ? "address" : "" }, cut(title, letters)),
    sub ? s("text", { x: left + 10, y: y + 11, class: "sub" }, cut(sub, letters + 2)) : null));
  const column = (left, text) => boxes.push(s("text", { x: left + 1, y: 12, class: "column" }, text));

  const busy = backends.some((backend) => backend.share);
  const centre = middle(1, 0);
  if (wide) {
    const groups = [["Pods, node", "inside the cluster", (kind) => kind === "ClusterIP"], ["Other machines", "external clients", (kind) => kind !== "ClusterIP"]]
      .filter(([, , has]) => port.frontends.some((frontend) => has(frontend.kind)));
    column(x.clients, "Clients");
    groups.forEach(([title, sub, has], at) => {
      const y = middle(groups.length, at);
      node(x.clients, y, width * 0.12, title, sub, "", false);
      frontends.forEach((frontend, place) => { if (has(frontend.kind)) line(width * 0.12, y, x.frontends, middle(frontends.length, place), 0); });
    });
  }
  column(x.frontends, "Frontends");
  frontends.forEach((frontend, at) => {
    const y = middle(frontends.length, at);
    const announced = announcers(frontend).map((by) => `, at ${by}`).join("");
    node(x.frontends, y, box, socket(frontend.address, frontend.port), frontend.kind + announced);
    line(x.frontends + box, y, hub.x, centre, 0);
  });
  if (port.frontends.length > frontends.length) boxes.push(s("text", { x: x.frontends + 10, y: middle(frontends.length, frontends.length), class: "sub" }, `and ${port.frontends.length - frontends.length} more below`));
  column(x.backends, "Backends");
  shown.forEach((backend, at) => {
    const y = middle(shown.length, at);
    const draining = backend.state === "terminating";
    const share = backend.share === null ? "" : `${percent(backend.share)} · `;
    const twins = backend.pod && backends.filter((other) => other.pod === backend.pod).length > 1;
    const family = backend.address.includes(":") ? " · IPv6" : " · IPv4";
    node(x.backends, y, box, backend.pod ? backend.pod + (twins ? family : "") : backend.key, `${share}${scaled(backend.rates.active)} active${draining ? " · ending" : ""}${backend.weight === 1 ? "" : ` · weight ${backend.weight}`}`, draining ? "draining" : "", !backend.pod);
    line(hub.x + hub.w, centre, x.backends, y, backend.share ?? 0, draining ? "draining" : "");
  });
  if (!shown.length) { node(x.backends, centre, box, "No backends", `new connections are ${unserved(port.frontends)}`, "none", false); line(hub.x + hub.w, centre, x.backends, centre, 0); }
  if (backends.length > shown.length) boxes.push(s("text", { x: x.backends + 10, y: middle(shown.length, shown.length), class: "sub" }, `and ${backends.length - shown.length} more below`));
  if (wide) {
    const affinity = port.sessionAffinity === "None" ? "no affinity" : `ClientIP ${port.sessionAffinitySeconds} s`;
    column(hub.x, "Choice");
    node(hub.x, centre, hub.w, port.scheduler, affinity, "middle", false);
  } else boxes.push(s("circle", { class: "box middle", cx: hub.x + 5, cy: centre, r: 6 }));
  const said = `${port.frontends.length} frontends, scheduler ${port.scheduler}, ${backends.length} backends${busy ? ", lines as wide as their share" : ""}`;
  return s("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": said }, lines, boxes);
}

/** What happens to new connections while the Service has no backends. */
function unserved(frontends) {
  const drops = frontends.filter((frontend) => frontend.withoutBackends === "drop").length;
  if (drops === 0) return "refused";
  return drops === frontends.length ? "dropped" : "refused or dropped";
}

function facts(port) {
  const sum = port.rates ?? {};
  const list = [
    ["Traffic", `${scaled(sum.newFlows)} new/s, ${bytes(sum.bytes)}/s, ${scaled(sum.active)} active`],
    ["Scheduler", port.scheduler],
    ["Affinity", port.sessionAffinity === "None" ? "none" : `ClientIP, ${port.sessionAffinitySeconds} s`],
  ];
  if (port.nodePort) list.push(["Node port", port.nodePort]);
  if (port.externalTrafficPolicy) list.push(["External traffic", `policy ${port.externalTrafficPolicy}${port.northSouthMode ? `, ${port.northSouthMode}` : ""}`]);
  if (port.sourceRanges.length) list.push(["Allowed clients", port.sourceRanges.join(", ")]);
  return h("dl", { className: "facts wide" }, list.map(([name, value]) => h("div", null, h("dt", null, name), h("dd", null, String(value)))));
}

// The nodes that announce the frontend's address, at layer 2 and by BGP. `mark` follows the name of this node.
function announcers({ announced, announcedByBgp }, mark = "") {
  const name = (by) => `${by.node ?? "no node"}${by.here ? mark : ""}`;
  return [announced && name(announced), announcedByBgp && `${name(announcedByBgp)} by BGP`].filter(Boolean);
}

function frontendTable(port) {
  const row = (frontend) => h("tr", null, h("td", { className: "mono" }, socket(frontend.address, frontend.port)), h("td", null, frontend.kind),
    h("td", null, frontend.slots === 0 ? h("span", { className: "tag bad" }, "none") : frontend.internalSlots === undefined ? frontend.slots : `${frontend.slots}, internal clients ${frontend.internalSlots}`),
    h("td", null, { all: "all clients", outsiders: "external clients", none: "no" }[frontend.masquerade]), h("td", null, frontend.withoutBackends),
    h("td", null, announcers(frontend, " (this node)").join(", ") || "–"));
  return h("table", null, heads("Frontend", "Kind", "Backends", "Masquerade", "Without backends", "Announced by"), h("tbody", null, port.frontends.map(row)));
}

function backendTable(port) {
  const [list, measure] = backendsOf(port);
  const by = { newFlows: "of new connections", active: "of active connections", bytes: "of bytes" }[measure] ?? "";
  const row = (backend) => h("tr", null, h("td", { className: "mono" }, h("div", { className: "name" }, h("i", { className: `dot ${backend.state === "terminating" ? "draining" : "up"}`, title: backend.state }), backend.key)),
    h("td", null, backend.pod ?? "–"), h("td", null, backend.node ?? "–"), h("td", null, backend.zone ?? "–"),
    h("td", null, backend.state === "terminating" ? h("span", { className: "tag warn" }, "ending") : "active"),
    h("td", { className: "num" }, backend.weight), h("td", { className: "num" }, backend.share === null ? "–" : percent(backend.share)),
    ["active", "newFlows", "packets"].map((name) => h("td", { className: "num" }, scaled(backend.rates[name]))), h("td", { className: "num" }, bytes(backend.rates.bytes)));
  return h("table", null, heads("Backend", "Pod", "Node", "Zone", "State", ["Weight", "num"], [`Share ${by}`, "num"], ["Active", "num"], ["New/s", "num"], ["Packets/s", "num"], ["Bytes/s", "num"]),
    h("tbody", null, list.map(row)));
}

export default function service(root, frame, [namespace, name]) {
  const notice = h("div");
  const ports = h("div", { className: "stack" });
  const lately = h("tbody");
  const watch = h("button", { type: "button" }, "Show choices as they happen");
  const links = h("span", null, h("a", { href: `/connections?service=${encodeURIComponent(`${namespace}/${name}`)}` }, "Connections"));
  const chosen = panel("Chosen lately, and why", null, h("div", { className: "body" }, watch, h("p", { className: "hint" }, "Programs emit events only while this is on; that costs time for each new connection.")),
    scroll("Choices", h("table", null, heads("Time", "Verdict", "Client", "Frontend", "Backend", "Why"), lately)));
  // It appears with the ports, which would push it down.
  chosen.hidden = true;
  show(root, h("div", { className: "head" }, h("h1", null, h("span", { className: "muted" }, `${namespace}/`), name), links), notice, h("div", { className: "stack" }, ports, chosen));

  let stopListening = null;
  watch.addEventListener("click", () => {
    if (stopListening) { stopListening(); stopListening = null; watch.textContent = "Show choices as they happen"; return; }
    watch.textContent = "Stop";
    stopListening = listen({ service: `${namespace}/${name}` }, ({ events, failure }) => {
      const fresh = events.slice(-LATELY).reverse().map((event) => h("tr", null, h("td", { className: "mono" }, event.time.slice(11, 23)), h("td", null, event.verdict),
        h("td", { className: "mono" }, event.process ? `process ${event.process}` : event.client ?? "–"), h("td", { className: "mono" }, event.vip ?? "–"), h("td", { className: "mono" }, event.backend ?? "–"), h("td", null, event.reason)));
      lately.prepend(...fresh);
      while (lately.childElementCount > LATELY) lately.lastChild.remove();
      if (failure) show(notice, h("p", { className: "notice" }, failure));
    });
  });

  let last = null;
  function draw() {
    if (!last) return;
    const width = Math.max(300, ports.clientWidth - 30);
    const one = (port) => {
      const title = `${port.port}/${port.protocol}${port.portName ? ` · ${port.portName}` : ""}`;
      const ready = port.backends.filter((backend) => backend.state === "active").length;
      const first = port.frontends[0];
      const explain = first ? h("a", { href: `/explain?to=${encodeURIComponent(socket(first.address, first.port))}&protocol=${port.protocol.toLowerCase()}` }, "Explain a packet to it") : null;
      const count = port.backends.length;
      // Terminating backends get new connections while there is no other one.
      const state = ready ? `${ready} ready of ${count}` : count ? `${count} terminating, no other backend` : "no backend";
      return panel(title, state,
        h("div", { className: "picture" }, picture(port, width)), h("div", { className: "body" }, facts(port), explain ? h("p", { className: "hint" }, explain) : null),
        scroll(`Backends of ${title}`, backendTable(port)), scroll(`Frontends of ${title}`, frontendTable(port)));
    };
    // The check belongs to the Service, so that all ports have the same one.
    const check = last.ports.find((port) => port.healthCheck)?.healthCheck;
    const unknown = last.agentAnswers ? null : h("p", { className: "hint" }, "No agent answers, so the results of health checks and the announcing nodes are unknown.");
    const [at, inside] = [document.scrollingElement.scrollTop, [...ports.querySelectorAll(".scroll")].map((area) => area.scrollLeft)];
    show(ports, unknown, check ? healthPanel(check) : null, last.ports.map(one));
    chosen.hidden = false;
    ports.querySelectorAll(".scroll").forEach((area, place) => { area.scrollLeft = inside[place] ?? 0; });
    document.scrollingElement.scrollTop = at;
  }
  const resized = new ResizeObserver(draw);
  resized.observe(root);

  return {
    async update() {
      const answer = await ask(`service/${encodeURIComponent(namespace)}/${encodeURIComponent(name)}`);
      notice.replaceChildren();
      const busy = ports.contains(document.activeElement) || String(getSelection());
      const is = JSON.stringify(answer);
      if (busy && last || is === JSON.stringify(last)) return;
      last = answer;
      draw();
    },
    fail(error) { show(notice, h("p", { className: "notice", role: "alert" }, error.message)); },
    stop() { resized.disconnect(); stopListening?.(); },
  };
}
