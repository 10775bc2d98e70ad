// Explain: what the data plane would do with a packet, drawn step by step.

import { ask, h, panel, show } from "../dom.js";

const HOOKS = ["tc-ingress", "tc-egress", "xdp", "socket"];
const BAD = new Set(["noBackends", "deniedSource", "full", "noRoute", "torn", "noSuchBackend", "invalidFlags", "strayReset"]);
const KINDS = { begins: "end", translated: "end", untouched: "end same", rejected: "end bad", dropped: "end bad" };

const option = (value, chosen, text = value) => h("option", { value, selected: value === chosen }, text);

export default function explain(root, frame) {
  const query = frame.query();
  const field = (name, text, placeholder, required) => h("label", null, text, h("input", { name, value: query[name] ?? "", placeholder, required, autocomplete: "off", spellcheck: false }));
  const form = h("form", { className: "tools" },
    field("from", "From (address, or address:port)", "198.51.100.2", true), field("to", "To (address:port)", "10.96.0.10:80", true),
    h("label", null, "Protocol", h("select", { name: "protocol" }, ["tcp", "udp", "sctp"].map((value) => option(value, query.protocol)))),
    h("label", null, "Hook", h("select", { name: "at" }, option("", query.at, "the first one"), HOOKS.map((value) => option(value, query.at)))),
    field("device", "Arrives on", "by the route"), h("button", { className: "primary" }, "Explain"));
  const answer = h("div");
  show(root, h("div", { className: "head" }, h("h1", null, "Explain"), h("span", { className: "muted" }, "What would the data plane do with a packet, and why?")), form, answer);

  // The topic of a step is a link to the section of the documentation that explains it.
  const topic = (text, doc) => doc ? h("a", { className: "topic", href: doc }, text) : h("span", { className: "topic" }, text);

  function step({ step: kind, text, doc, allowed, program }) {
    const at = text.indexOf(": ");
    const [about, rest] = at > 0 && at < 24 ? [text.slice(0, at), text.slice(at + 2)] : ["step", text];
    const bad = BAD.has(kind) || allowed === false || program === false;
    return h("li", { className: bad ? "bad" : "" }, topic(about, doc), rest);
  }

  function draw(result) {
    const at = result.at === "socket" ? "a system call of this node" : `${result.at}${result.device ? ` of ${result.device}` : ""}`;
    const [first, ...others] = result.text.split("\n");
    show(answer, panel(`${result.protocol} ${result.from} → ${result.to}`, `at ${at}`,
      h("ol", { className: "path", "aria-label": "Steps of the packet" },
        result.steps.map(step),
        h("li", { className: KINDS[result.verdict] ?? "end" }, topic("result", result.doc), h("span", { className: "verdict" }, first),
          others.length ? h("ul", null, others.map((line) => h("li", null, line.trim()))) : null))));
  }

  async function run() {
    const given = Object.fromEntries([...new FormData(form)].map(([name, value]) => [name, value.trim()]));
    frame.remember(given);
    if (!given.from || !given.to) return;
    try {
      draw(await ask("explain", given));
    } catch (error) {
      show(answer, h("p", { className: "notice", role: "alert" }, error.message));
    }
  }
  form.addEventListener("submit", (event) => { event.preventDefault(); run(); });
  run();
  // Nothing is read again, but the frame asks whether the server is there.
  return { update: () => ask("ping") };
}
