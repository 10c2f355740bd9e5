// What waits: position, rule, blocker, expected start. What can never start is a list of its own.

import { deploymentLink, duration, interval, jobLink, make, panel, table } from "../elements.js";

const LISTS = { gpus: "for GPUs", turns: "for a turn", impossible: "impossible" };
const PAGE = 50;
const REFRESH_S = 5;

export function queueView(root, page) {
  const limit = page.most || PAGE;
  let which = page.params.get("which") in LISTS ? page.params.get("which") : "gpus";
  let first = page.most ? 0 : Math.max(0, Number(page.params.get("first")) || 0);
  let counts = {};
  let asked = 0;
  const controls = make("div", { class: "controls" });
  const body = make("div");
  const quality = make("p", { class: "dim" });
  root.append(panel("Queue", page.most ? "#/queue" : null, controls, body, quality));
  const stop = page.every(REFRESH_S, refresh);

  async function refresh() {
    asked += 1;
    const own = asked;
    try {
      const view = await page.ask(`v1/queue?which=${which}&first=${first}&limit=${limit}`);
      // Of two answers that are under way only that of the newer question counts.
      if (own === asked) showRows(view);
    } catch (error) {
      if (own === asked) body.replaceChildren(make("p", { class: "bad" }, error.message));
    }
  }

  function showRows(view) {
    showControls(view.total);
    body.replaceChildren(table(
      [["#", "number"], ["job", "name"], ["tenant", "name"], ["for", ""], ["GPUs", "number"], ["waits", "number"],
        ["rule", ""], ["behind", "name"], ["starts in", ""], ["why", "why"]],
      view.rows.map((row) => cells(row, view.now)), empty()));
  }

  function empty() {
    return which === "impossible" ? "Nothing asks for more than the nodes in service can give." : `Nothing waits ${LISTS[which]}.`;
  }

  function showControls(total) {
    const lists = Object.entries(LISTS).map(([name, text]) => {
      const count = name === which && total !== undefined ? total : counts[name];
      const button = make("button", { type: "button", "aria-pressed": String(name === which) },
        count === undefined ? text : `${text} ${count.toLocaleString()}`);
      button.addEventListener("click", () => { which = name; first = 0; refresh(); });
      return button;
    });
    controls.replaceChildren(...lists, ...(page.most || !(total > limit || first) ? [] : pager(total)));
  }

  function pager(total) {
    const button = (text, to, isOff) => {
      const made = make("button", { type: "button", disabled: isOff ? "" : null }, text);
      made.addEventListener("click", () => { first = to; refresh(); });
      return made;
    };
    const last = Math.min(total, first + limit);
    return [button("← before", Math.max(0, first - limit), first === 0), button("next →", first + limit, last >= total),
      make("span", { class: "dim" }, total ? `${first + 1} – ${last} of ${total.toLocaleString()}` : "")];
  }

  return {
    update(view) {
      counts = { gpus: view.waiting, turns: view.turns, impossible: view.impossible };
      showControls(undefined);
      quality.textContent = qualityText(view.eta_quality);
    },
    close: stop,
  };
}

function qualityText({ estimates, early, late }) {
  if (!estimates) return "No estimated start of a turn has been compared with the real one yet.";
  const inside = estimates - early - late;
  return `Of ${estimates.toLocaleString()} estimated starts of turns ${Math.round(100 * inside / estimates)} % were inside their 80 % interval, ${early} before and ${late} after it.`;
}

function cells(row, now) {
  return [
    row.position.toLocaleString(), jobLink(row.job, row.name === row.job ? row.job : `${row.name} (${row.job})`), row.tenant,
    `${row.kind}${row.priority ? `, priority ${row.priority}` : ""}`, row.gpus,
    duration(now - row.since),
    make("span", { class: row.rule === "impossible" ? "rule impossible" : "rule" }, row.rule),
    row.blocker === null ? null : deploymentLink(row.blocker), interval(row), row.reason,
  ];
}
