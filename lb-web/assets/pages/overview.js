// Overview: problems, rates, plots, programs and maps.

import { ask, fill, h, panel, s, scroll, show } from "../dom.js";
import { ago, duration, percent, scaled, whole } from "../format.js";
import { plot } from "../plots.js";

const lastOf = (values) => (values.length ? values.at(-1) : null);
const MAPS = ["FLOWS", "CONNTRACK", "SERVICES", "BACKENDS", "TABLES", "AFFINITY", "VIPS", "SOURCE_RANGES"];

export default function overview(root, frame) {
  const problems = h("div", { className: "panel" }, h("div", { className: "fine muted" }, "reading the state"));
  const stats = Object.fromEntries(
    ["New connections", "Service packets", "Other packets", "Dropped, rejected", "Connections", "Services", "Backends"].map((name) => [name, h("dd", null, "–")]));
  const plots = {
    flows: plot("New connections per second"),
    packets: plot("Packets per second"),
    refused: plot("Dropped and rejected packets per second, by reason", { nothing: "none in the last 15 minutes" }),
    fill: plot("Fill of the maps", { format: (value) => (value === null || value === undefined ? "–" : percent(value / 100)), top: 10 }),
  };
  const [agent, programs, maps] = [h("div", { className: "body" }), scroll("Programs"), scroll("Maps")];
  // The rest appears with the problems, which would push it down.
  const rest = h("div", { className: "stack", hidden: true },
    h("dl", { className: "panel stats" }, Object.entries(stats).map(([name, value]) => h("div", null, h("dt", null, name), value))),
    h("div", { className: "grid2 plots" }, Object.values(plots).map((one) => one.element)),
    h("div", { className: "grid2" }, h("div", { className: "stack" }, panel("Maps", null, maps)), h("div", { className: "stack" }, panel("Agent and node", null, agent), panel("Programs", null, programs))));
  show(root, h("div", { className: "stack" }, h("h1", { className: "head" }, "Overview"), problems, rest));

  function drawProblems(state, failure) {
    const list = failure ? [{ severity: "error", topic: "Data plane", text: failure }] : state.problems;
    const items = list.map(({ severity, topic, text }) =>
      h("li", null, h("i", { className: `dot ${severity}`, title: severity }), h("b", null, topic), h("span", null, text)));
    fill(problems, items.length ? h("ul", { className: "problems" }, items)
      : h("div", { className: "fine" }, h("i", { className: "dot up" }), "No problems."));
  }

  function drawStats(lines, state) {
    const rate = (value) => [scaled(value), h("small", null, " /s")];
    const refused = Object.values(lines.refused).reduce((sum, values) => sum + (lastOf(values) ?? 0), 0);
    const report = state?.status.agent;
    const flows = state?.status.maps.filter((map) => ["FLOWS", "CONNTRACK"].includes(map.name)).reduce((sum, map) => sum + map.entries, 0);
    const values = {
      "New connections": rate(lastOf(lines.newFlows)), "Service packets": rate(lastOf(lines.translated)),
      "Other packets": rate(lastOf(lines.untouched)), "Dropped, rejected": rate(lines.times.length ? refused : null),
      Connections: state ? ["≈ ", scaled(flows / 2)] : "–",
      Services: report?.services !== undefined ? [whole(report.services), h("small", null, " ports")] : "–",
      Backends: report?.endpoints !== undefined ? whole(report.endpoints) : "–",
    };
    for (const [name, value] of Object.entries(values)) show(stats[name], value);
  }

  function drawPlots(lines) {
    plots.flows.update(lines.times, [["new", lines.newFlows]], lines);
    plots.packets.update(lines.times, [["of Services", lines.translated], ["other", lines.untouched]], lines);
    plots.refused.update(lines.times, Object.entries(lines.refused), lines);
    const known = MAPS.filter((name) => lines.fill[name]);
    plots.fill.update(lines.times, known.slice(0, 6).map((name) => [name, lines.fill[name]]), lines);
  }

  function drawAgent({ agent: is, folder, socketPrograms }) {
    const facts = [["Agent", is.running ? (is.version ? `${is.version}, pid ${is.pid}` : is.process) : "not running; the data plane works without it"]];
    if (is.started) {
      frame.setNode(is.nodeName);
      facts.push(["Node", is.nodeName], ["Up", duration((Date.now() - Date.parse(is.started)) / 1000)],
        ["Last change written", ago(is.lastSync)],
        ["Addresses", is.node.addresses.join(", ") || "none"], ["Node ports at", is.node.nodePortAddresses.join(", ") || "none"],
        ["Internal clients", is.node.internalNetworks.join(", ") || is.node.internalDevices.join(", ") || "none known"],
        ["Masquerade", `from ${is.node.primary.join(", ") || "no address"}, ports ${is.node.masqueradeFirstPort}–${is.node.masqueradeLastPort}`],
        ["External clients", is.node.northSouthMode]);
    }
    const served = socketPrograms.filter((program) => program.cgroup);
    facts.push(["Sockets", served.length ? `served by ${served.length} programs` : "not served"], ["Pins", folder]);
    fill(agent, h("dl", { className: "facts" }, facts.map(([name, value]) => [h("dt", null, name), h("dd", null, value)])));
  }

  function drawPrograms(list) {
    const devices = new Map();
    for (const program of list) devices.set(program.device, [...(devices.get(program.device) ?? []), program]);
    const row = ([device, all]) => h("tr", null,
      h("td", { className: "mono" }, device), h("td", null, all[0].kind ?? "–"),
      h("td", null, h("div", { className: "tags" }, all.map((program) =>
        h("span", { className: "tag on", title: `${program.program}, id ${program.programId}` }, `${program.direction} · ${program.layer}`)))));
    fill(programs, list.length ? h("table", null,
      h("thead", null, h("tr", null, h("th", { scope: "col" }, "Device"), h("th", { scope: "col" }, "Kind"), h("th", { scope: "col" }, "Programs"))),
      h("tbody", null, [...devices].map(row))) : h("div", { className: "fine muted" }, "No programs on the devices of this network namespace."));
  }

  function drawMaps(list) {
    const row = ({ name, entries, capacity }) => {
      const share = entries / Math.max(capacity, 1);
      const mood = share >= 0.95 ? "bad" : share >= 0.75 ? "warn" : "";
      const bar = s("svg", { class: `gauge ${mood}`, viewBox: "0 0 100 6", preserveAspectRatio: "none", "aria-hidden": "true" },
        s("rect", { x: 0, y: 0, height: 6, width: Math.min(100, Math.max(share * 100, entries ? 0.6 : 0)) }));
      return h("tr", null, h("td", { className: "mono" }, name), h("td", null, bar),
        h("td", { className: "num" }, whole(entries)), h("td", { className: "num muted" }, `of ${scaled(capacity)}`), h("td", { className: "num" }, percent(share)));
    };
    fill(maps, h("table", null,
      h("thead", null, h("tr", null, ["Map", "Fill", "Entries", "Capacity", "%"].map((name, at) => h("th", { scope: "col", className: at > 1 ? "num" : "" }, name)))),
      h("tbody", null, list.map(row))));
  }

  return {
    async update() {
      const { plots: lines, state, failure } = await ask("overview");
      drawProblems(state, failure);
      rest.hidden = false;
      drawStats(lines, state);
      drawPlots(lines);
      if (state) { drawAgent(state.status); drawPrograms(state.status.programs); drawMaps(state.status.maps); }
    },
    fail(error) {
      drawProblems(null, error.gone ? "This server does not answer: the agent, or `lb-agent web`, has ended. The data plane works without it; the plots show the last data." : error.message);
    },
    stop() { Object.values(plots).forEach((one) => one.stop()); },
  };
}
