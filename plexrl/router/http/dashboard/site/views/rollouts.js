// Asynchronous rollouts: their buffers by version, the ages of what was trained, their instances.

import { bar, facts, legend, make, panel, table } from "../elements.js";

const REFRESH_S = 2;

export function rolloutsView(root, page) {
  const stop = page.every(REFRESH_S, refresh);
  async function refresh() {
    try {
      const { rollouts } = await page.ask("v1/rollouts");
      root.replaceChildren(...(rollouts.length ? rollouts.map(rolloutPanel) : [none()]));
    } catch (error) {
      root.replaceChildren(error.status === 404 ? none() : make("p", { class: "bad" }, error.message));
    }
  }
  return { close: stop };
}

function none() {
  return panel("Rollouts", null, make("p", { class: "dim" }, "No job has an asynchronous rollout."));
}

export function rolloutPanel(view) {
  const instances = Object.entries(view.instances);
  const link = make("a", { href: `#/job/${encodeURIComponent(view.job)}` }, view.job);
  return make("section", {}, make("h2", {}, link, ` / ${view.name}`),
    facts([["state", view.state], ["staleness bound η", view.staleness], ["version", view.newest_version], ["batches ready", view.batches_ready],
      ["in flight", `${view.in_flight} of ${view.in_flight_max}`], ["tokens/s", Math.round(view.tokens_per_s).toLocaleString()],
      ["dropped prompts", view.dropped], ...(view.round ? [["round", view.round], ["queued prompts", view.queued_prompts]] : [])]),
    facts([["staleness of trained trajectories", ages(view.staleness_seen)]]),
    view.failure ? make("p", { class: "bad" }, `It failed: ${view.failure.message}`) : null,
    make("h3", {}, "Buffers by version: groups of samples"),
    table([["version", "number"], ["state", ""], ["complete", "number"], ["reserved", "number"], ["of", "number"], ["filled", ""]],
      view.buffers.map((each) => [each.version, each.state, each.occupied, each.reserved, each.size,
        bar(each.size, [["compute", each.occupied], ["queue", each.reserved]], `${each.occupied} complete and ${each.reserved} reserved of ${each.size}`)]),
      "No buffer."),
    legend([["compute", "complete"], ["queue", "reserved"]]),
    make("h3", {}, "Instances: trajectories, and share of the KV cache in use"),
    table([["instance", "name"], ["state", ""], ["version", "number"], ["running", "number"], ["waiting", "number"], ["KV cache", ""]],
      instances.map(([name, each]) => [name, each.state, each.version, each.running, each.waiting,
        each.kv_budget ? bar(each.kv_budget, [["compute", each.kv_tokens]], `${Math.round(100 * each.kv_tokens / each.kv_budget)} %`) : null]),
      "No instance."),
    ...instances.filter(([, each]) => each.reason).map(([name, each]) => make("p", { class: "bad" }, `${name} is ${each.state}: ${each.reason}`)));
}

function ages(counts) {
  const total = Object.values(counts).reduce((sum, each) => sum + each, 0);
  const known = Object.keys(counts).sort((a, b) => a - b);
  return total ? known.map((age) => `${age}: ${Math.round(100 * counts[age] / total)} %`).join(", ") : null;
}
