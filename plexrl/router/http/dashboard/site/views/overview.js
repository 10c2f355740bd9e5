// The first page: how full the cluster is, who has it, what waits, and whether that is fair.

import { bar, duration, facts, legend, make, panel, size, table } from "../elements.js";
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
      ["states on GPUs", size(view.memory.gpu)], ["in host memory", size(view.memory.host)], ["on NVMe alone", size(view.memory.nvme)],
      ...(view.switches === undefined ? [] : [["context switches", `${view.switches.toLocaleString()}, ${duration(view.switch_seconds)}`]]),
    ]),
  ];
  if (view.node_types.length > 1) {
    parts.push(byPart("type of nodes", view.node_types.map((each) => [each.node_type || "any", each]), found));
  }
  if (view.blocks.length > 1) parts.push(blocks(view.blocks, found));
  return parts;
}

function waiting(view) {
  return view.waiting_since !== null ? `${view.waiting.toLocaleString()}, the longest ${duration(view.now - view.waiting_since)}` : 0;
}

function byPart(title, parts, found) {
  return table([[title, "name"], ["GPUs", "number"], ["by state", ""], ...found.map(([, text]) => [text, "number"])],
    parts.map(([name, each]) => [name, each.gpus,
      bar(each.gpus, found.map(([state]) => [state, each.states[state] || 0]), `GPUs of ${name} by state`),
      ...found.map(([state]) => each.states[state] || 0)]), "");
}

// Closed at first if there are many; it stays as the reader has left it.
let blocksAreOpen = null;

function blocks(all, found) {
  const rows = byPart("block", all.map((each) => [each.block || "none", each]), found);
  const details = make("details", {}, make("summary", {}, `${all.length} blocks of nodes`), rows);
  details.open = blocksAreOpen ?? all.length <= 4;
  details.addEventListener("toggle", () => { blocksAreOpen = details.open; });
  return details;
}
