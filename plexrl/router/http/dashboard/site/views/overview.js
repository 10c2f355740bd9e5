// The first page: how full the cluster is, who has it, what waits, and whether that is fair.

import { bar, duration, facts, legend, make, panel, table } from "../elements.js";
import { lanesView } from "./lanes.js";
import { queueView } from "./queue.js";
import { sharesView } from "./shares.js";

const STATES = {
  computing: "computing", switching: "switching", idle: "held, idle", others: "others'", free: "free",
  draining: "draining", lost: "lost",
};
const LANES = 12;
const ROWS = 8;
const TENANTS = 8;

export function overviewView(root, page) {
  const gpus = panel("GPUs");
  const places = [make("div"), make("div"), make("div")];
  root.append(gpus, ...places);
  const parts = [
    lanesView(places[0], { ...page, most: LANES }),
    queueView(places[1], { ...page, most: ROWS }),
    sharesView(places[2], { ...page, most: TENANTS }),
  ];
  return {
    update(view) {
      gpus.replaceChildren(make("h2", {}, "GPUs"), ...gpuParts(view));
      for (const part of parts) part.update?.(view);
    },
    close() {
      for (const part of parts) part.close();
    },
  };
}

function gpuParts(view) {
  const { gpus, states } = view.gpus;
  const found = Object.entries(STATES).filter(([name]) => states[name]);
  const label = found.map(([name, text]) => `${text} ${states[name]}`).join(", ");
  const parts = [
    gpus ? bar(gpus, found.map(([name]) => [name, states[name]]), `${gpus} GPUs: ${label}`, false)
      : make("p", { class: "dim" }, "No node has joined: `plexrl node token` prints the command that adds one."),
    legend(found.map(([name, text]) => [name, `${text} ${states[name].toLocaleString()} (${Math.round(100 * states[name] / gpus)} %)`])),
    facts([
      ["GPUs", gpus.toLocaleString()], ["nodes", view.nodes.toLocaleString()], ["groups", view.groups.toLocaleString()],
      ["live jobs", view.jobs_live.toLocaleString()],
      ["wait for GPUs", waiting(view)],
      ["wait for a turn", view.turns ? `${view.turns.toLocaleString()}, the longest ${duration(view.now - view.turns_since)}` : 0],
      ["impossible", view.impossible.toLocaleString()],
      ...(view.switches === undefined ? [] : [["context switches", `${view.switches.toLocaleString()}, ${duration(view.switch_seconds)}`]]),
    ]),
  ];
  if (view.node_types.length > 1) parts.push(byType(view.node_types, found));
  return parts;
}

function waiting(view) {
  return view.waiting_since !== null ? `${view.waiting.toLocaleString()}, the longest ${duration(view.now - view.waiting_since)}` : 0;
}

function byType(types, found) {
  return table([["type of nodes", "name"], ["GPUs", "number"], ["by state", ""], ...found.map(([, text]) => [text, "number"])],
    types.map((each) => [each.node_type || "any", each.gpus,
      bar(each.gpus, found.map(([name]) => [name, each.states[name] || 0]), `GPUs of ${each.node_type || "any type"} by state`),
      ...found.map(([name]) => each.states[name] || 0)]), "");
}
