// Small charts of a job's metrics: first those that tell whether it learns or is sick.

import { make } from "../elements.js";

const FIRST = [/reward/i, /length|tokens/i, /(^|\/|_)kl/i, /grad_norm/i, /staleness/i, /entropy/i, /loss/i, /clip/i];
const MOST = 24;
const POINTS = 300;
const SVG = "http://www.w3.org/2000/svg";

export function charts(rows) {
  const names = [...new Set(rows.flatMap((row) => Object.keys(row.values)))];
  if (!names.length) return make("p", { class: "dim" }, "The controller has logged no metrics (`job.log`).");
  names.sort((a, b) => rank(a) - rank(b) || a.localeCompare(b));
  const made = make("div", { class: "charts" }, ...names.slice(0, MOST).map((name) => chart(name, rows)));
  if (names.length <= MOST) return made;
  return make("div", {}, made, make("p", { class: "dim" }, `and ${names.length - MOST} more: plexrl metrics shows all`));
}

function rank(name) {
  const at = FIRST.findIndex((pattern) => pattern.test(name));
  return at < 0 ? FIRST.length : at;
}

function chart(name, rows) {
  const points = thin(rows.filter((row) => Number.isFinite(row.values[name])).map((row) => [row.step, row.values[name]]));
  const last = points.length ? points[points.length - 1][1] : null;
  const caption = make("figcaption", {}, make("span", {}, name), make("b", {}, last === null ? "no data" : Number(last.toPrecision(4))));
  return make("figure", {}, caption, line(points, name));
}

// At most `POINTS` points: of each part of the steps the last.
function thin(points) {
  if (points.length <= POINTS) return points;
  const step = points.length / POINTS;
  return Array.from({ length: POINTS }, (_, at) => points[Math.min(points.length - 1, Math.floor((at + 1) * step) - 1)]);
}

function line(points, name) {
  const drawn = document.createElementNS(SVG, "svg");
  drawn.setAttribute("class", "chart");
  drawn.setAttribute("viewBox", "0 0 100 40");
  drawn.setAttribute("preserveAspectRatio", "none");
  drawn.setAttribute("role", "img");
  const [xs, ys] = [points.map(([x]) => x), points.map(([, y]) => y)];
  const [low, high] = [Math.min(...ys), Math.max(...ys)];
  drawn.setAttribute("aria-label", points.length ? `${name} from ${low} to ${high} over steps ${xs[0]} to ${xs[xs.length - 1]}` : name);
  if (!points.length) return drawn;
  const [left, right] = [Math.min(...xs), Math.max(...xs)];
  const at = ([x, y]) => `${(right > left ? 100 * (x - left) / (right - left) : 50).toFixed(2)} ${(high > low ? 37 - 34 * (y - low) / (high - low) : 20).toFixed(2)}`;
  const path = document.createElementNS(SVG, "path");
  const whole = points.length > 1 ? points : [points[0], points[0]];
  path.setAttribute("d", `M${whole.map(at).join("L")}`);
  drawn.append(path);
  return drawn;
}
