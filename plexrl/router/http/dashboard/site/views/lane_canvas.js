// Draws lanes, their axis of time, and bands.

const COLOURS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#b8a800"];
const STEPS_S = [1, 5, 10, 30, 60, 300, 900, 1800, 3600, 10800, 21600, 43200, 86400, 172800, 604800, 2592000];
const TICK_PX = 90;

// Kinds of spans besides work: a context switch, and a run on stored state, which used no GPU.
export const SWITCH = 1;
export const STORED = 2;

function ink(canvas, name) {
  return getComputedStyle(canvas).getPropertyValue(name).trim();
}

// The canvas in the device's pixels; returns its context, in pixels of the page.
function prepare(canvas) {
  const scale = globalThis.devicePixelRatio || 1;
  const [width, height] = [canvas.clientWidth, canvas.clientHeight];
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  return [context, width, height];
}

// A job keeps its colour on every page: seven colours, plain or with a pale lower edge. Hatching means
// something else: before the history begins.
function look(job) {
  let hash = 7;
  for (const letter of job) hash = (31 * hash + letter.codePointAt(0)) >>> 0;
  return { colour: COLOURS[hash % COLOURS.length], isEdged: Math.floor(hash / COLOURS.length) % 2 === 1 };
}

export function drawLane(canvas, view, { lane, chosen }) {
  const [context, width, height] = prepare(canvas);
  const scale = width / (view.until - view.since);
  drawUnknown(context, view, scale, height, ink(canvas, "--line"));
  lane.spans.forEach(([begin, end, at, kind], index) => {
    const x = begin * scale;
    const wide = Math.max(1, (end - begin) * scale);
    const job = view.jobs[at];
    if (kind === STORED) {
      context.fillStyle = job ? look(job.job).colour : ink(canvas, "--others");
      context.fillRect(x, height - 5, wide, 4);
    } else if (kind === SWITCH) {
      context.fillStyle = ink(canvas, "--ink");
      context.fillRect(x, height / 2 - 2, wide, 4);
    } else {
      drawWork(context, job ? look(job.job) : { colour: ink(canvas, "--others"), isEdged: false }, x, wide, height);
      if (job) drawName(context, job.name || job.job, x, wide, height);
    }
    if (index === chosen) {
      context.strokeStyle = ink(canvas, "--ink");
      context.lineWidth = 2;
      context.strokeRect(x, 1, wide, height - 2);
    }
  });
}

function drawWork(context, { colour, isEdged }, x, wide, height) {
  context.fillStyle = colour;
  context.fillRect(x, 1, wide, height - 2);
  if (!isEdged) return;
  const edge = Math.round(height / 3);
  context.fillStyle = "rgb(255 255 255 / 55%)";
  context.fillRect(x, height - 1 - edge, wide, edge);
}

function drawName(context, name, x, wide, height) {
  context.font = "11px system-ui, sans-serif";
  const length = context.measureText(name).width;
  if (length + 10 > wide) return;
  context.fillStyle = "#000c";
  context.fillRect(x + 3, 3, length + 6, height - 6);
  context.fillStyle = "#fff";
  context.textBaseline = "middle";
  context.fillText(name, x + 6, height / 2 + 0.5);
}

// Where nothing is known it is hatched, not empty: before the history begins, and where some is missing.
function drawUnknown(context, view, scale, height, colour) {
  const all = [[0, view.until - view.since]];
  for (const [begin, end] of view.oldest === null ? all : view.gaps) {
    if ((end - begin) * scale >= 1) hatch(context, begin * scale, end * scale, height, colour);
  }
}

function hatch(context, from, to, height, colour) {
  context.save();
  context.beginPath();
  context.rect(from, 0, to - from, height);
  context.clip();
  context.strokeStyle = colour;
  context.beginPath();
  for (let at = from - height; at < to; at += 8) {
    context.moveTo(at, 0);
    context.lineTo(at + height, height);
  }
  context.stroke();
  context.restore();
}

export function drawAxis(canvas, view) {
  const [context, width, height] = prepare(canvas);
  const span = view.until - view.since;
  const step = STEPS_S.find((each) => each / span * width >= TICK_PX) || STEPS_S[STEPS_S.length - 1];
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "top";
  const offset = 60 * new Date(1000 * view.until).getTimezoneOffset();
  // Ticks at round local times.
  for (let at = Math.ceil((view.since - offset) / step) * step + offset; at <= view.until; at += step) {
    const x = (at - view.since) / span * width;
    context.fillStyle = ink(canvas, "--dim");
    context.fillRect(x, 0, 1, 4);
    const text = tick(at, step);
    if (x + context.measureText(text).width + 4 < width) context.fillText(text, x + 3, 4);
  }
  context.fillStyle = ink(canvas, "--line");
  context.fillRect(0, 0, width, 1);
  return height;
}

function tick(epochSeconds, step) {
  const at = new Date(1000 * epochSeconds);
  if (step >= 86400) return at.toLocaleDateString([], { month: "short", day: "numeric" });
  const options = { hour: "2-digit", minute: "2-digit", ...(step < 60 ? { second: "2-digit" } : {}) };
  return at.toLocaleTimeString([], options);
}

// A row of cells for each band; the more of its GPUs were busy, the darker (in the dark: lighter).
export function drawBands(canvas, bands, rowHeight) {
  const [context, width] = prepare(canvas);
  context.fillStyle = ink(canvas, "--computing");
  bands.forEach((band, row) => {
    const cell = width / band.busy.length;
    [...band.busy].forEach((digit, at) => {
      context.globalAlpha = 0.06 + 0.94 * Number(digit) / 9;
      context.fillRect(at * cell, row * rowHeight, cell, rowHeight - 1);
    });
  });
  context.globalAlpha = 1;
}
