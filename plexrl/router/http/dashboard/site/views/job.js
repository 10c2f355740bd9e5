// A job: its state, why it waits, where the time went, what it learns, what it says.

import { bar, duration, facts, gpuHours, interval, legend, make, panel, percent, size, table } from "../elements.js";
import { charts } from "./charts.js";
import { rolloutPanel } from "./rollouts.js";

const REFRESH_S = 5;
const METRICS_PAGES = 5;
const PHASES = [["queue", "queue_s"], ["switch", "switch_s"], ["transfer", "transfer_s"], ["compute", "compute_s"], ["other", "other_s"]];

export function jobView(root, page) {
  const path = `v1/jobs/${encodeURIComponent(page.subject)}`;
  const places = Object.fromEntries(["state", "waits", "times", "metrics", "samples", "rollouts"].map((name) => [name, make("div")]));
  root.append(...Object.values(places));
  const rows = [];
  let shownStep = null;
  const stops = [page.every(REFRESH_S, refresh), page.every(3 * REFRESH_S, refreshRecords)];

  async function refresh() {
    await fill(places.state, async () => {
      const [job, explained] = await Promise.all([page.ask(path), page.ask(`${path}/explain`)]);
      places.waits.replaceChildren(waits(explained));
      return state(job, explained);
    });
    await fill(places.rollouts, rollouts);
  }

  async function refreshRecords() {
    await fill(places.times, async () => times(await page.ask(`${path}/times`)));
    await fill(places.metrics, metrics);
    await fill(places.samples, samples);
  }

  async function metrics() {
    for (let read = 0; read < METRICS_PAGES; read += 1) {
      const after = rows.length ? rows[rows.length - 1].index : 0;
      const found = await page.ask(`${path}/metrics?after=${after}`);
      rows.push(...(found.rows));
      if (!(found.rows).length) break;
    }
    return panel("Metrics", null, charts(rows));
  }

  async function samples() {
    const { steps } = await page.ask(`${path}/samples`);
    if (!steps.length) return panel("Samples", null, make("p", { class: "dim" }, "The controller has logged no samples (`job.log(samples=…)`)."));
    const newest = steps[steps.length - 1];
    if (newest === shownStep) return null;
    shownStep = newest;
    return samplesPanel(await page.ask(`${path}/samples/${newest}`));
  }

  async function rollouts() {
    const found = await page.ask("v1/rollouts").catch((error) => {
      if (error.status === 404) return { rollouts: [] };
      throw error;
    });
    const own = found.rollouts.filter((each) => each.job === page.subject).map(rolloutPanel);
    return own.length ? make("div", {}, ...own) : make("div");
  }

  return { close() { for (const stop of stops) stop(); } };
}

// Shows what `content` returns; null leaves what is there.
async function fill(place, content) {
  try {
    const made = await content();
    if (made) place.replaceChildren(made);
  } catch (error) {
    place.replaceChildren(make("p", { class: "bad" }, error.message));
  }
}

function state(job, explained) {
  const warnings = (job.health?.warnings || []).map((each) => make("p", { class: "condition" }, each.text));
  const age = (job.ended_at ?? Date.now() / 1000) - job.submitted_at;
  return panel(job.name === job.job ? job.job : `${job.name} (${job.job})`, null,
    facts([["tenant", job.tenant], ["state", job.state], ["age", duration(age)], ["GPU time", gpuHours(job.gpu_seconds)],
      ["priority", job.priority], ["accepts to wait", percent(job.slo)], ...quoted(job.quoted)]),
    make("p", {}, job.reason || explained.summary), ...warnings,
    job.failure ? make("p", { class: "bad" }, `It failed: ${job.failure.message}`) : null,
    table([["deployment", "name"], ["kind", ""], ["state", ""], ["GPUs", "number"], ["groups", "name"], ["state on", ""], ["waited", "number"], ["placed", "why"]],
      job.deployments.map((each) => {
        const placed = explained.deployments.find((other) => other.deployment === each.deployment);
        return [short(each.deployment), each.kind, each.running.length ? `${each.state}, runs ${each.running.join(", ")}` : each.state,
          each.workers, each.groups.join(", ") || null, each.residency,
          each.waiting_part === null ? null : percent(each.waiting_part), placed?.sharing || placed?.topology || null];
      }), "It has no deployments."));
}

// What the job was quoted, beside what came of it.
function quoted(view) {
  if (!view) return [];
  const actual = (value, shown) => value === null ? "" : `, was ${shown(value)}`;
  return [["quoted start", `${duration(view.quoted_start_s)}${actual(view.start_s, duration)}`],
    ["quoted end", `${duration(view.quoted_end_s)} (${duration(view.quoted_end_low_s)} to ${duration(view.quoted_end_high_s)})${actual(view.end_s, duration)}`],
    ["quoted GPU time", `${gpuHours(view.quoted_gpu_hours * 3600)} of which ${gpuHours(view.gpu_hours * 3600)} are billed`]];
}

function waits(explained) {
  if (!explained.operations.length) return make("div");
  return panel("Unfinished operations", null, table(
    [["operation", "name"], ["of", ""], ["waited", "number"], ["rule", ""], ["starts or ends in", ""], ["why", "why"]],
    explained.operations.map((each) => [each.operation, `${short(each.deployment)} ${each.kind}`, duration(each.waited_s),
      make("span", { class: "rule" }, each.rule), interval(each), each.reason]), ""));
}

function times(view) {
  const most = Math.max(...view.rows.map((row) => PHASES.reduce((sum, [, field]) => sum + row[field], 0)), 0);
  const age = view.since === null ? "" : ` since ${duration(Date.now() / 1000 - view.since)} ago`;
  return panel(`Where the time went${age}`, null,
    table([["deployment", "name"], ["operation", ""], ["count", "number"], ["failed", "number"], ["seconds by phase", ""], ...PHASES.map(([name]) => [name, "number"])],
      view.rows.map((row) => [short(row.deployment), row.kind, row.operations.toLocaleString(), row.failed,
        bar(most, PHASES.map(([name, field]) => [name, row[field]]), `${row.kind} by phase`), ...PHASES.map(([, field]) => duration(row[field]))]),
      "No operation has finished, or they have left the history."),
    view.rows.length ? legend(PHASES.map(([name]) => [name, name])) : null,
    view.memory.length ? memory(view.memory) : null);
}

// What is on GPUs may also be stored: it takes memory in both.
function memory(rows) {
  return table([["state of", "name"], ["on GPUs", "number"], ["in host memory", "number"], ["on NVMe alone", "number"]],
    rows.map((row) => [short(row.deployment), ...["gpu", "host", "nvme"].map((tier) => size(row.bytes[tier]))]), "");
}

function samplesPanel(found) {
  const shown = found.samples.map((each) => make("details", {},
    make("summary", {}, `reward ${each.reward === null ? "failed" : Number(each.reward.toFixed(4))} · ${each.length} tokens · ended by ${each.ended_by} · ${each.text.slice(0, 90)}`),
    each.prompt ? make("pre", { class: "dim" }, each.prompt) : null, make("pre", {}, each.text)));
  return panel(`Samples of step ${found.step}`, null, make("p", { class: "dim" }, `${found.samples.length} of ${found.total}`), ...shown);
}

function short(deployment) {
  return deployment.slice(deployment.lastIndexOf("/") + 1);
}
