// The health check of a Service: what it probes, and the last result of each endpoint.

import { h, heads, panel, scroll } from "./dom.js";
import { milliseconds, socket } from "./format.js";

const DOTS = { unhealthy: "down", healthy: "up" };

/** The results of all probed endpoints, unhealthy ones first, then those whose last probe has failed. */
function results(check) {
  const rank = ({ verdict, reason }) => (verdict === "unhealthy" ? 0 : reason ? 1 : 2);
  return [...check.failing, ...check.passing].sort((a, b) => rank(a) - rank(b));
}

function row({ address, port, verdict, since, heldUntil, reason }) {
  const held = heldUntil ? [" ", h("span", { className: "tag warn" }, `it flaps: held until ${heldUntil}`)] : null;
  return h("tr", { className: "probed" },
    h("td", { className: "mono" }, h("div", { className: "name" }, h("i", { className: `dot ${DOTS[verdict] ?? ""}`, title: verdict }), socket(address, port))),
    h("td", null, h("span", { className: verdict === "unhealthy" ? "tag bad" : "" }, verdict)),
    h("td", null, since ?? "–"), h("td", null, reason ?? "–", held));
}

/** What is probed and how often, and how many endpoints have which health: the words of `lb-agent service show`. */
function summary({ check, intervalMilliseconds, healthy, unhealthy, unknown }) {
  const waiting = unknown ? `, ${unknown} without a result yet` : "";
  return `${check} every ${milliseconds(intervalMilliseconds)}: ${healthy} healthy, ${unhealthy} unhealthy${waiting}`;
}

/** The panel of a health check. */
export const healthPanel = (check) => panel("Health check", summary(check),
  scroll("Probed endpoints", h("table", null, heads("Probed", "Health", "Since", "Last failure"), h("tbody", null, results(check).map(row)))));
