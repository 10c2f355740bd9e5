// Elements and texts. A text that comes from data becomes a text node, never markup.

export function make(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [attribute, value] of Object.entries(attributes)) {
    if (value !== undefined && value !== null && value !== false) made.setAttribute(attribute, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined).map(shown));
  return made;
}

function shown(child) {
  return child instanceof Node ? child : document.createTextNode(String(child));
}

export const NO_DATA = "–";

// A table whose rows become cards on a narrow screen. `columns`: [title, class of its cells].
export function table(columns, rows, empty) {
  if (!rows.length) return make("p", { class: "dim" }, empty);
  const head = make("tr", {}, ...columns.map(([title, kind]) => make("th", { class: kind, scope: "col" }, title)));
  const body = rows.map((cells) => make("tr", {}, ...cells.map((content, at) =>
    make("td", { class: columns[at][1], "data-label": columns[at][0] }, content ?? noData()))));
  const made = make("table", { class: "cards" }, make("thead", {}, head), make("tbody", {}, ...body));
  return make("div", { class: "scroll" }, made);
}

export function noData() {
  return make("span", { class: "dim", title: "no data" }, NO_DATA);
}

export function facts(pairs) {
  return make("div", { class: "facts" }, ...pairs.map(([name, value]) =>
    make("span", {}, `${name} `, make("b", {}, value ?? NO_DATA))));
}

// A bar of parts [class, size], as parts of `total`.
export function bar(total, parts, label, thin = true) {
  const made = make("div", { class: thin ? "bar thin" : "bar", role: "img", "aria-label": label });
  for (const [kind, size] of parts) {
    if (!(size > 0) || !(total > 0)) continue;
    const part = make("i", { class: kind });
    part.style.width = `${Math.min(100, 100 * size / total)}%`;
    made.append(part);
  }
  return made;
}

export function legend(entries) {
  return make("ul", { class: "legend" }, ...entries.map(([kind, text]) =>
    make("li", {}, make("i", { class: kind }), text)));
}

export function panel(title, more, ...children) {
  const link = more ? make("a", { class: "more", href: more }, "all") : null;
  return make("section", {}, make("h2", {}, title, link), ...children);
}

export function jobLink(job, text) {
  return make("a", { href: `#/job/${encodeURIComponent(job)}` }, text || job);
}

// A deployment is named <job>/<name>; another tenant's is not named, and has no link.
export function deploymentLink(deployment) {
  const at = deployment.lastIndexOf("/");
  return at < 0 ? deployment : jobLink(deployment.slice(0, at), deployment);
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return NO_DATA;
  const steps = [[86400, "d"], [3600, "h"], [60, "min"]];
  for (const [size, unit] of steps) {
    if (Math.abs(seconds) >= size) {
      const value = seconds / size;
      return `${Math.abs(value) < 10 ? value.toFixed(1) : Math.round(value)} ${unit}`;
    }
  }
  return `${Math.abs(seconds) < 10 ? Number(seconds.toFixed(1)) : Math.round(seconds)} s`;
}

export function interval(row) {
  if (row.eta_s === null) return null;
  const start = duration(row.eta_s);
  if (row.eta_low_s === null) return start;
  return `${start} (${duration(Math.max(0, row.eta_low_s))} – ${duration(row.eta_high_s)})`;
}

export function gpuHours(gpuSeconds) {
  const hours = gpuSeconds / 3600;
  return `${Math.abs(hours) < 10 ? hours.toFixed(2) : Math.round(hours).toLocaleString()} h`;
}

export function size(bytes) {
  if (!Number.isFinite(bytes)) return NO_DATA;
  const steps = [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]];
  for (const [unit, text] of steps) {
    if (bytes >= unit) return `${bytes / unit < 10 ? (bytes / unit).toFixed(1) : Math.round(bytes / unit).toLocaleString()} ${text}`;
  }
  return `${bytes} B`;
}

export function percent(part) {
  return Number.isFinite(part) ? `${(100 * part).toFixed(part !== 0 && Math.abs(part) < 0.1 ? 1 : 0)} %` : NO_DATA;
}

export function clock(epochSeconds, withDate) {
  const at = new Date(1000 * epochSeconds);
  const time = at.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit" });
  return withDate ? `${at.toLocaleDateString([], { month: "short", day: "numeric" })} ${time}` : time;
}
