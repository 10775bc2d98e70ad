// Live: events as they happen.

import { ask, h, show } from "../dom.js";
import { whole } from "../format.js";

const MOST = 500;

/** Listens to events that meet the conditions; returns what ends it. */
export function listen(query, hear) {
  const given = Object.entries(query).filter(([, value]) => value);
  let [source, timer, stopped] = [null, 0, false];
  const url = `/api/live?${new URLSearchParams(given)}`;
  function begin() {
    source = new EventSource(url);
    source.onmessage = (message) => {
      const heard = JSON.parse(message.data);
      hear(heard);
      if (heard.failure) again();
    };
    source.onerror = async () => {
      if (stopped || source.readyState !== EventSource.CLOSED) return;
      // The stream does not say why it was refused; the same request does.
      const stop = new AbortController();
      const refusal = (answer) => {
        if (answer.status === 401) { stopped = true; location.assign("/login"); }
        return answer.ok || stopped ? null : answer.json();
      };
      const why = await fetch(url, { signal: stop.signal }).then(refusal).catch(() => ({ error: "this server does not answer" }));
      stop.abort();
      if (why) hear({ events: [], skipped: 0, failure: why.error });
      again();
    };
  }
  function again() { source?.close(); clearTimeout(timer); if (!stopped) timer = setTimeout(begin, 3000); }
  begin();
  return () => { stopped = true; source?.close(); clearTimeout(timer); };
}

export default function live(root, frame) {
  const query = frame.query();
  const field = (name, text, placeholder) => h("label", null, text, h("input", { name, value: query[name] ?? "", placeholder, autocomplete: "off", spellcheck: false }));
  const form = h("form", { className: "tools" }, field("service", "Service or address", "namespace/name:port"), field("client", "Client", "192.0.2.0/24"),
    h("label", null, "Verdict", h("select", { name: "verdict" }, h("option", { value: "" }, "any"), ["new", "reject", "drop"].map((value) => h("option", { value, selected: value === query.verdict }, value)))),
    h("button", { className: "primary" }, "Filter"), h("button", { type: "button", id: "pause" }, "Pause"), h("button", { type: "button", id: "clear" }, "Clear"));
  const [pause, clear] = [form.querySelector("#pause"), form.querySelector("#clear")];
  const count = h("span", { className: "muted" }, "waiting for events");
  const notice = h("div");
  const body = h("tbody");
  const columns = [["Time", "t"], ["Verdict", "v"], ["Protocol", "v"], ["Client", "a"], ["Frontend"], ["Service"], ["Backend"], ["Why", "y"], ["Where", "y"]];
  show(root, h("div", { className: "head" }, h("h1", null, "Live"), count), form, notice,
    h("div", { className: "events panel", tabindex: "0", role: "region", "aria-label": "Events" }, h("table", null, h("thead", null, h("tr", null, columns.map(([name, className]) => h("th", { scope: "col", className: className ?? "" }, name)))), body)));

  let [stop, paused, held, seen, skipped] = [null, false, [], 0, 0];

  function row(event) {
    const service = event.service ? `${event.service.namespace}/${event.service.name}${event.service.port ? `:${event.service.port}` : ""}` : "–";
    const client = event.process ? `process ${event.process}` : event.client ?? "–";
    const cells = [event.time.slice(11, 23), event.verdict, event.protocol ?? "–", client, event.vip ?? "–", service,
      `${event.backend ?? "–"}${event.tunnel ? " (tunnel)" : ""}`, event.reason, [event.device, event.hook].filter(Boolean).join(" ")];
    return h("tr", { className: event.verdict }, cells.map((text) => h("td", { title: text }, text)));
  }

  function tell() {
    const left = skipped ? `, ${whole(skipped)} left out because they came too fast` : "";
    count.textContent = `${whole(seen)} events${left}${paused ? `, paused with ${whole(held.length)} waiting` : ""}`;
  }

  function hear({ events, skipped: more, failure }) {
    seen += events.length;
    skipped += more;
    if (paused) held = [...held, ...events].slice(-MOST);
    else add(events);
    if (failure) show(notice, h("p", { className: "notice", role: "alert" }, failure)); else notice.replaceChildren();
    tell();
  }

  function add(events) {
    body.prepend(...events.slice(-MOST).reverse().map(row));
    while (body.childElementCount > MOST) body.lastChild.remove();
  }

  function begin() {
    stop?.();
    const given = Object.fromEntries([...new FormData(form)].map(([name, value]) => [name, value.trim()]));
    frame.remember(given);
    stop = listen(given, hear);
  }
  function toggle() {
    paused = !paused;
    pause.textContent = paused ? "Go on" : "Pause";
    if (!paused) { add(held); held = []; }
    tell();
  }
  pause.addEventListener("click", toggle);
  clear.addEventListener("click", () => { body.replaceChildren(); [held, seen, skipped] = [[], 0, 0]; tell(); });
  form.addEventListener("submit", (event) => { event.preventDefault(); begin(); });
  form.addEventListener("change", begin);
  begin();
  return { update: () => ask("ping"), key: (key) => { if (key === "p") toggle(); }, stop: () => stop?.() };
}
