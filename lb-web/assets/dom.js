// Elements without HTML texts: every text that the server sends becomes a text node.

const SVG = "http://www.w3.org/2000/svg";

function build(element, props, children) {
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name in element && name !== "list" && element.namespaceURI !== SVG) element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** An HTML element with properties and children. */
export const h = (tag, props, ...children) => build(document.createElement(tag), props, children);

/** An SVG element with attributes and children. */
export const s = (tag, props, ...children) => build(document.createElementNS(SVG, tag), props, children);

/** Replaces the children of an element if its text would change; keeps focus and selection otherwise. */
export function fill(element, ...children) {
  const fresh = h(element.tagName, null, ...children);
  if (fresh.textContent !== element.textContent || fresh.childElementCount !== element.childElementCount) {
    element.replaceChildren(...fresh.childNodes);
  }
}

/** Replaces the children of an element. */
export function show(element, ...children) {
  element.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
}

/** A panel with a heading. */
export const panel = (title, aside, ...children) =>
  h("section", { className: "panel" }, h("header", null, h("h2", null, title), aside ? h("span", { className: "muted" }, aside) : null), ...children);

/** The head of a table: for each column its text, or its text and class. */
export const heads = (...names) => h("thead", null, h("tr", null, names.map((name) => {
  const [text, className] = [].concat(name);
  return h("th", { scope: "col", className: className ?? "" }, text);
})));

/** An area that scrolls by itself, also by keys. */
export const scroll = (label, ...children) =>
  h("div", { className: "scroll", tabindex: "0", role: "region", "aria-label": label }, ...children);

/** Asks the server; an error has the server's own words. */
export async function ask(path, query = {}, signal) {
  const given = Object.entries(query).filter(([, value]) => value !== "" && value !== undefined && value !== null && value !== false);
  const search = new URLSearchParams(given).toString();
  let answer;
  try {
    answer = await fetch(`/api/${path}${search ? `?${search}` : ""}`, { signal, headers: { accept: "application/json" } });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw Object.assign(new Error("this server does not answer"), { gone: true });
  }
  if (answer.status === 401) { location.assign("/login"); throw new Error("log in first"); }
  const body = await answer.json().catch(error => {
    if (error.name === "AbortError") throw error;
    return {};
  });
  if (!answer.ok) throw new Error(body.error ?? `the server answers ${answer.status}`);
  return body;
}
