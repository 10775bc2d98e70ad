// Connections: the flow table, filtered by the server.

import { ask, h, scroll, show } from "../dom.js";
import { duration, whole } from "../format.js";

const FIELDS = [["client", "Client", "192.0.2.1"], ["service", "Service", "namespace/name"], ["vip", "Virtual address", "10.96.0.10"], ["backend", "Backend", "10.244.1.11"]];
const PHASES = ["opening", "accepted", "established", "half-closed", "time-wait", "closed", "unreplied", "replied", "stream"];

const choice = (name, text, values, chosen) => h("label", null, text, h("select", { name }, h("option", { value: "" }, "any"), values.map((value) => h("option", { value, selected: value === chosen }, value))));

export default function connections(root, frame) {
  const query = frame.query();
  const form = h("form", { className: "tools" },
    FIELDS.map(([name, text, placeholder]) => h("label", null, text, h("input", { name, value: query[name] ?? "", placeholder, autocomplete: "off", spellcheck: false }))),
    choice("phase", "Phase", PHASES, query.phase), choice("protocol", "Protocol", ["tcp", "udp", "sctp"], query.protocol),
    h("button", { className: "primary" }, "Filter"), h("a", { className: "button", id: "export", download: "connections.csv" }, "Export CSV"));
  const count = h("span", { className: "muted" }, " ");
  const notice = h("div");
  const body = h("tbody");
  const heads = [["Protocol"], ["Client"], ["Virtual address"], ["Backend"], ["Phase"], ["Idle", "num"], ["Expires in", "num"], ["Service"]];
  show(root, h("div", { className: "head" }, h("h1", null, "Connections"), count), form, notice,
    h("div", { className: "panel" }, scroll("Connections", h("table", null, h("thead", null, h("tr", null, heads.map(([text, className]) => h("th", { scope: "col", className: className ?? "" }, text)))), body))));

  const given = () => Object.fromEntries([...new FormData(form)].map(([name, value]) => [name, value.trim()]).filter(([, value]) => value));

  function row(flow) {
    const service = flow.service ? h("a", { href: `/services/${flow.service.split("/").map(encodeURIComponent).join("/")}` }, flow.service) : h("span", { className: "muted" }, "deleted");
    const phase = { established: "on", stream: "on", replied: "on", closed: "bad", opening: "warn", unreplied: "warn" }[flow.phase] ?? "";
    return h("tr", null, h("td", null, flow.protocol),
      h("td", { className: "mono" }, flow.client, flow.masqueradedAs ? h("span", { className: "muted" }, ` as ${flow.masqueradedAs}`) : null),
      h("td", { className: "mono" }, flow.vip), h("td", { className: "mono" }, flow.backend, flow.tunnelled ? h("span", { className: "muted" }, " (tunnel)") : null),
      h("td", null, h("span", { className: `tag ${phase}` }, flow.phase), flow.half ? " half" : ""),
      h("td", { className: "num" }, duration(flow.idleSeconds)), h("td", { className: "num" }, duration(flow.secondsLeft)), h("td", null, service));
  }

  /** Asks again, unless that would take away what a person has selected; a new filter (`force`) always asks. */
  async function update(force = false) {
    const wanted = given();
    form.querySelector("#export").href = `/api/connections.csv?${new URLSearchParams(wanted)}`;
    if (!force && (body.contains(document.activeElement) || String(getSelection()))) return;
    const answer = await ask("connections", wanted);
    const shown = answer.connections.length;
    count.textContent = shown < answer.matched ? `${whole(answer.matched)}, the first ${whole(shown)} shown` : whole(answer.matched);
    notice.replaceChildren();
    show(body, shown ? answer.connections.map(row) : h("tr", null, h("td", { colSpan: heads.length, className: "muted" }, Object.keys(wanted).length ? "No connection meets these conditions." : "No connections.")));
  }

  function fail(error) { show(notice, h("p", { className: "notice", role: "alert" }, error.message)); }
  const filter = () => { frame.remember(given()); update(true).catch(fail); };
  form.addEventListener("submit", (event) => { event.preventDefault(); filter(); });
  form.addEventListener("change", filter);
  return { update: () => update(), fail };
}
