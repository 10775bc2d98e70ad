// Plots over the last fifteen minutes, by uPlot, in the colours of the style sheet.

import { h } from "./dom.js";
import { scaled } from "./format.js";

const HEIGHT = 164;
const dark = matchMedia("(prefers-color-scheme: dark)");
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** A panel with a plot. `format` writes values; `top` is the smallest upper end of the axis. */
export function plot(title, { format = scaled, top = 1, nothing = "nothing yet" } = {}) {
  const area = h("div", { className: "plot", role: "img", "aria-label": title });
  const legend = h("div", { className: "legend" });
  const now = h("span", { className: "muted" });
  const element = h("section", { className: "panel" }, h("header", null, h("h2", null, title), now), area, legend);
  let drawn = null;
  let names = "";
  let last = null;

  function options(lines) {
    const [text, grid] = [colour("--muted"), colour("--line")];
    const axis = { stroke: text, font: "11px system-ui, sans-serif", grid: { stroke: grid, width: 1 }, ticks: { show: false } };
    return {
      width: area.clientWidth - 12, height: HEIGHT, legend: { show: false },
      cursor: { y: false, drag: { x: false, y: false }, points: { size: 6 } },
      scales: { x: { time: true }, y: { range: (_, __, max) => [0, Math.max(top, (max ?? 0) * 1.08)] } },
      axes: [
        { ...axis, space: 70, size: 26, values: (_, times) => times.map((time) => new Date(time * 1000).toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" })) },
        { ...axis, space: 34, size: 46, values: (_, values) => values.map((value) => format(value)) },
      ],
      series: [{}, ...lines.map((_, index) => {
        const stroke = colour(`--c${(index % 8) + 1}`);
        return { stroke, width: 1.5, points: { show: false }, fill: lines.length === 1 ? `${stroke}22` : undefined };
      })],
      hooks: { setCursor: [(chart) => label(chart.cursor.idx)] },
    };
  }

  function label(index) {
    if (!last) return;
    const at = index ?? last.times.length - 1;
    legend.replaceChildren(...last.lines.map(([name, values], place) =>
      h("span", { className: `k${(place % 8) + 1}` }, h("i"), name, " ", h("b", null, format(values[at])))));
    now.textContent = index === null || index === undefined ? "" : new Date(last.times[at] * 1000).toLocaleTimeString("en-GB");
  }

  function draw() {
    const { times, lines, step, points } = last;
    const end = times.at(-1);
    // The axis always spans fifteen minutes, so the plot does not stretch while it fills.
    const padded = times[0] > end - step * points ? [end - step * (points - 1), ...times] : times;
    const data = [padded, ...lines.map(([, values]) => (padded === times ? values : [null, ...values]))];
    if (drawn) { drawn.setData(data); return; }
    area.replaceChildren();
    drawn = new window.uPlot(options(lines), data, area);
  }

  const again = () => { drawn?.destroy(); drawn = null; if (last?.lines.length) draw(); };
  const resized = new ResizeObserver(() => drawn?.setSize({ width: area.clientWidth - 12, height: HEIGHT }));
  resized.observe(area);
  dark.addEventListener("change", again);

  return {
    element,
    /** Draws lines `[name, values]` over `times`. */
    update(times, lines, { step, points }) {
      last = { times, lines, step, points };
      const fresh = lines.map(([name]) => name).join("\n");
      if (!lines.length || !times.length) {
        drawn?.destroy(); drawn = null; names = "";
        area.replaceChildren(h("div", { className: "empty" }, times.length ? nothing : "collecting"));
        legend.replaceChildren();
        return;
      }
      if (fresh !== names) { drawn?.destroy(); drawn = null; names = fresh; }
      draw();
      if (drawn.cursor.idx === null || drawn.cursor.idx === undefined) label(null);
    },
    stop() { resized.disconnect(); dark.removeEventListener("change", again); drawn?.destroy(); },
  };
}
