// Lanes: who had the GPUs of each group. A lane's colour is the job's; a switch is a low bar across the
// middle, so that it is known without colour. With more than 64 groups, bands show all of them.

import { clock, duration, jobLink, make, panel } from "../elements.js";
import { STORED, SWITCH, drawAxis, drawBands, drawLane } from "./lane_canvas.js";

const WINDOWS = [[900, "15 min"], [3600, "1 h"], [21600, "6 h"], [86400, "24 h"], [604800, "7 d"]];
const LEAST_S = 10;
const MOST_S = 366 * 86400;
const LANES = 64;
const REFRESH_S = 5;
const REFRESH_MOST_S = 60;
const BAND_HEIGHT = 7;
const HINT = "Colours, plain or with a pale lower edge, are jobs, a low bar is a context switch, a thin bar at the lower edge is work on stored state, beside another job, hatching is where nothing is known. Point at a span, or move with ← and → along a lane.";

export function lanesView(root, page) {
  let seconds = Number(page.params.get("seconds")) || 3600;
  let until = 0;
  let first = page.most ? 0 : Math.max(0, Number(page.params.get("first")) || 0);
  let view = null;
  let asked = 0;
  let askedAt = 0;
  const controls = make("div", { class: "controls" });
  const spot = make("p", { class: "spot dim", "aria-live": "polite" }, HINT);
  const bands = make("div", { class: "bands" });
  const body = make("div", { role: "group", "aria-label": "Lanes of groups. Left and right move along a lane, plus and minus zoom." });
  root.append(panel("Lanes", page.most ? "#/lanes" : null, controls, bands, body, spot));
  const resized = new ResizeObserver(() => draw());
  resized.observe(body);
  body.addEventListener("keydown", onKey);
  showControls();
  const stop = page.every(REFRESH_S, refreshIfDue);

  // A week changes by a pixel in half an hour, and is read from the archive.
  function refreshIfDue() {
    const period = Math.min(REFRESH_MOST_S, seconds / 1000);
    return Date.now() - askedAt < 1000 * period - 500 ? null : refresh();
  }

  async function refresh() {
    asked += 1;
    askedAt = Date.now();
    const own = asked;
    try {
      const found = await page.ask(`v1/lanes?seconds=${seconds}&until_s=${until}&first=${first}`);
      // Of two answers that are under way only that of the newer question counts.
      if (own !== asked) return;
      view = found;
      build();
    } catch (error) {
      if (own === asked) body.replaceChildren(make("p", { class: "bad" }, error.message));
    }
  }

  function change(newSeconds, newUntil) {
    seconds = Math.min(MOST_S, Math.max(LEAST_S, newSeconds));
    until = Math.min(MOST_S, Math.max(0, newUntil));
    showControls();
    refresh();
  }

  // Zooming keeps the middle of the window, and a window that ends now ends now.
  function zoom(factor) {
    const wanted = Math.min(MOST_S, Math.max(LEAST_S, seconds * factor));
    change(wanted, until === 0 ? 0 : until + (seconds - wanted) / 2);
  }

  function showControls() {
    const button = (text, label, onClick, pressed) => {
      const made = make("button", { type: "button", "aria-label": label, "aria-pressed": pressed }, text);
      made.addEventListener("click", onClick);
      return made;
    };
    const windows = WINDOWS.map(([size, text]) =>
      button(text, `the last ${text}`, () => change(size, 0), String(size === seconds && until === 0)));
    controls.replaceChildren(...windows,
      button("−", "zoom out", () => zoom(2)), button("+", "zoom in", () => zoom(0.5)),
      button("←", "earlier", () => change(seconds, until + seconds / 2)),
      button("→", "later", () => change(seconds, until - seconds / 2)),
      ...(until ? [button("now", "up to now", () => change(seconds, 0))] : []));
  }

  function build() {
    const lanes = view.lanes.slice(0, page.most || LANES);
    const focused = [...body.querySelectorAll("canvas[tabindex]")].indexOf(document.activeElement);
    if (!lanes.length) {
      bands.replaceChildren();
      body.replaceChildren(make("p", { class: "dim" }, "No group: no job has GPUs now, or had some in this time."));
      return;
    }
    body.replaceChildren(...lanes.map(laneRow), axisRow());
    buildBands();
    if (focused >= 0) body.querySelectorAll("canvas[tabindex]")[focused]?.focus({ preventScroll: true });
    draw();
  }

  function laneRow(lane) {
    const canvas = make("canvas", { tabindex: 0, role: "img", "aria-label": summary(lane) });
    const state = { lane, chosen: -1 };
    canvas.lane = state;
    canvas.addEventListener("pointermove", (event) => choose(canvas, spanAt(canvas, event)));
    canvas.addEventListener("pointerleave", () => choose(canvas, -1));
    canvas.addEventListener("click", (event) => openJob(lane, spanAt(canvas, event)));
    const now = lane.is_gone ? "gone now" : `${lane.members} members`;
    const title = `${lane.group}: ${lane.gpus} GPUs${lane.node_type ? ` of ${lane.node_type}` : ""}, ${now}`;
    const label = make("span", { class: lane.is_gone ? "label dim" : "label", title }, lane.group);
    return make("div", { class: lane.is_gone ? "lane gone" : "lane" }, label, canvas);
  }

  function axisRow() {
    const axis = make("canvas", { role: "img", "aria-label": `from ${clock(view.since, true)} to ${clock(view.until, true)}` });
    return make("div", { class: "lane axis" }, make("span", { class: "label dim" }, until ? `until ${clock(view.until, true)}` : ""), axis);
  }

  function buildBands() {
    if (!view.bands.length || page.most) {
      bands.replaceChildren(...(view.groups > view.lanes.length || page.most && view.groups > page.most
        ? [make("p", { class: "dim" }, `${Math.min(page.most || LANES, view.lanes.length)} of ${view.groups} groups`)] : []));
      return;
    }
    const canvas = make("canvas", { role: "img", "aria-label": `busy GPUs of all ${view.groups} groups over the window` });
    canvas.style.height = `${BAND_HEIGHT * view.bands.length}px`;
    canvas.addEventListener("click", (event) => {
      const at = Math.floor(event.offsetY / BAND_HEIGHT);
      show(view.bands[Math.min(at, view.bands.length - 1)].first);
    });
    const pages = make("div", { class: "controls" });
    const button = (text, to, isOff) => {
      const made = make("button", { type: "button", disabled: isOff ? "" : null }, text);
      made.addEventListener("click", () => show(to));
      return made;
    };
    const last = Math.min(view.groups, view.first + LANES);
    pages.append(button("← before", Math.max(0, view.first - LANES), view.first === 0),
      button("next →", view.first + LANES, last >= view.groups),
      make("span", { class: "dim" }, `lanes ${view.first + 1} – ${last} of ${view.groups}; above: all groups, dark where their GPUs were busy`));
    bands.replaceChildren(canvas, pages);
  }

  function show(newFirst) {
    first = Math.max(0, Math.min(newFirst, view.groups - 1));
    refresh();
  }

  function draw() {
    if (!view) return;
    for (const canvas of body.querySelectorAll("canvas[tabindex]")) drawLane(canvas, view, canvas.lane);
    const axis = body.querySelector(".axis canvas");
    if (axis) drawAxis(axis, view);
    const all = bands.querySelector("canvas");
    if (all) drawBands(all, view.bands, BAND_HEIGHT);
  }

  function summary(lane) {
    const jobs = new Set(lane.spans.map((span) => span[2]).filter((at) => at >= 0));
    const switches = lane.spans.filter((span) => span[3] === SWITCH).length;
    return `group ${lane.group}${lane.is_gone ? ", gone now" : ""}: ${jobs.size} jobs, ${switches} switches, ${lane.spans.length} spans`;
  }

  function spanAt(canvas, event) {
    const at = event.offsetX / canvas.clientWidth * (view.until - view.since);
    const slack = 2 / canvas.clientWidth * (view.until - view.since);
    return canvas.lane.lane.spans.findLastIndex(([begin, end]) => begin - slack <= at && at <= end + slack);
  }

  function choose(canvas, index) {
    if (canvas.lane.chosen === index) return;
    canvas.lane.chosen = index;
    drawLane(canvas, view, canvas.lane);
    const { lane } = canvas.lane;
    if (index < 0) spot.replaceChildren(HINT);
    else spot.replaceChildren(...spanText(lane, lane.spans[index]));
  }

  function spanText(lane, [begin, end, at, kind]) {
    const job = view.jobs[at];
    const withDate = seconds > 43200;
    const what = { [SWITCH]: "switch", [STORED]: "on stored state" }[kind] || "work";
    return [
      `${lane.group} · `, job ? jobLink(job.job, job.name || job.job) : "several short runs", job ? ` of ${job.tenant}` : "",
      ` · ${what} · ${clock(view.since + begin, withDate)} – ${clock(view.since + end, withDate)} (${duration(end - begin)})`,
    ];
  }

  function openJob(lane, index) {
    const job = index >= 0 ? view.jobs[lane.spans[index][2]] : null;
    if (job) location.hash = `#/job/${encodeURIComponent(job.job)}`;
  }

  function onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "+" || event.key === "=") zoom(0.5);
    else if (event.key === "-") zoom(2);
    else if (event.target.lane) {
      const { lane, chosen } = event.target.lane;
      const last = lane.spans.length - 1;
      if (event.key === "ArrowRight") choose(event.target, Math.min(last, chosen + 1));
      else if (event.key === "ArrowLeft") choose(event.target, chosen < 0 ? last : Math.max(0, chosen - 1));
      else if (event.key === "Enter") openJob(lane, chosen);
      else return;
    } else return;
    event.preventDefault();
  }

  return {
    close() {
      stop();
      resized.disconnect();
    },
  };
}

