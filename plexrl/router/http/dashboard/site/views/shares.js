// Each tenant: what it has beside what it is due, its quotas, what it paid, and what sharing saved.

import { bar, gpuHours, make, panel, percent, table } from "../elements.js";

const REFRESH_S = 15;
const PAGE = 200;

export function sharesView(root, page) {
  const body = make("div");
  const note = page.most ? null : make("p", { class: "dim" },
    "Due: the tenant's part of the weights of those with live jobs. Has: its part of what all hold. Switches and savings are sums over the jobs that are remembered.");
  root.append(panel("Tenants", page.most ? "#/shares" : null, body, note));
  const stop = page.every(REFRESH_S, refresh);

  async function refresh() {
    try {
      const { tenants } = await page.ask("v1/shares");
      const most = page.most || PAGE;
      const active = tenants.filter((each) => each.live_jobs || each.gpu_seconds || each.operations);
      const shown = active.slice(0, most);
      body.replaceChildren(table(
        [["tenant", "name"], ["weight", "number"], ["due", "number"], ["has", "number"], ["share", ""], ["GPUs", "number"],
          ["jobs on GPUs", "number"], ["live jobs", "number"], ["GPU time", "number"], ["switches", "number"],
          ["saved by sharing", "number"], ["failed", "number"]],
        shown.map(cells), "No tenant has had a job."));
      if (active.length > most) body.append(make("p", { class: "dim" }, `and ${active.length - shown.length} more tenants`));
    } catch (error) {
      body.replaceChildren(make("p", { class: "bad" }, error.message));
    }
  }

  return { close: stop };
}

function cells(each) {
  const most = Math.max(each.due, each.held, 0.01);
  return [
    each.tenant, each.weight, each.live_jobs ? percent(each.due) : null, percent(each.held),
    make("div", {}, bar(most, [["idle", each.due]], `due ${percent(each.due)}`), bar(most, [["computing", each.held]], `has ${percent(each.held)}`)),
    of(each.gpus_held, each.gpus_max), of(each.jobs_running, each.jobs_max), of(each.live_jobs, each.live_jobs_max),
    each.gpu_seconds_max === null ? gpuHours(each.gpu_seconds) : `${gpuHours(each.gpu_seconds)} of ${gpuHours(each.gpu_seconds_max)}`,
    each.remembered_gpu_seconds ? `${gpuHours(each.switch_gpu_seconds)} (${percent(each.switch_gpu_seconds / each.remembered_gpu_seconds)})` : null,
    each.operations ? gpuHours(each.saved_gpu_seconds) : null,
    each.operations ? `${each.failed.toLocaleString()} of ${each.operations.toLocaleString()}` : null,
  ];
}

function of(count, most) {
  return most === null ? count.toLocaleString() : `${count.toLocaleString()} of ${most.toLocaleString()}`;
}
