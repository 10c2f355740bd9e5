// The page: asks for a key, follows the overview, and shows the view that the address names.

import { ask, follow, key, login } from "./api.js";
import { clock, duration, make } from "./elements.js";
import { jobView } from "./views/job.js";
import { lanesView } from "./views/lanes.js";
import { overviewView } from "./views/overview.js";
import { queueView } from "./views/queue.js";
import { rolloutsView } from "./views/rollouts.js";
import { sharesView } from "./views/shares.js";

const VIEWS = { "": overviewView, lanes: lanesView, queue: queueView, shares: sharesView, rollouts: rolloutsView, job: jobView };
const byId = (id) => document.getElementById(id);
let shown = null;
let following = null;
let overview = null;

// `#/job/ID?step=3`: the view, its subject and its parameters.
function place() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const [name, ...subject] = path.split("/");
  return { name: Object.hasOwn(VIEWS, name) ? name : "", subject: decodeURIComponent(subject.join("/")), params: new URLSearchParams(query) };
}

function go() {
  shown?.close?.();
  shown = null;
  const { name, subject, params } = place();
  for (const link of document.querySelectorAll("nav a")) {
    const isCurrent = link.getAttribute("href") === `#/${name}`;
    if (isCurrent) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (!key.get()) return;
  const root = make("div");
  byId("main").replaceChildren(root);
  document.title = subject ? `${subject} · PlexRL` : "PlexRL";
  shown = VIEWS[name](root, { ask, params, subject, every });
  if (overview) shown.update?.(overview);
}

// Calls `refresh` now and then every `seconds` while the tab is visible; returns what ends that.
function every(seconds, refresh) {
  let timer = null;
  let isOver = false;
  async function turn() {
    clearTimeout(timer);
    if (isOver) return;
    if (!document.hidden) await refresh();
    if (!isOver) timer = setTimeout(turn, 1000 * seconds);
  }
  const wake = () => { if (!document.hidden) turn(); };
  document.addEventListener("visibilitychange", wake);
  turn();
  return () => {
    isOver = true;
    clearTimeout(timer);
    document.removeEventListener("visibilitychange", wake);
  };
}

function showHealth(view) {
  const age = (since) => duration(Math.max(0, Date.now() / 1000 - since));
  const parts = view.conditions.map((each) => make("span", { class: "condition" },
    `${each.code} for ${age(each.since)}`, each.message ? make("span", { class: "dim" }, `  ${each.message}`) : null));
  if (!parts.length) parts.push(make("span", { class: "good" }, "healthy"));
  const last = view.last_restart_at ? `, the last ${age(view.last_restart_at)} ago` : "";
  parts.push(make("span", { class: "dim" }, `${view.restarts} restarts of parts${last}`),
    make("span", { class: "dim" }, `as of ${clock(Date.now() / 1000)}`));
  byId("health").replaceChildren(...parts);
}

function showError(error) {
  byId("health").replaceChildren(make("span", { class: "condition" }, error.message));
  if (error.status !== 401 && error.code !== "unauthenticated") return;
  if (login.isUsed()) renew();
  else askForKey();
}

async function renew() {
  if (await login.renew()) start();
  else askForKey();
}

function askForKey() {
  key.forget();
  following?.abort();
  shown?.close?.();
  shown = null;
  byId("main").replaceChildren();
  byId("access").hidden = false;
  byId("forget").hidden = true;
  byId("key").focus();
  offerLogin();
}

async function offerLogin() {
  if (!(await login.isOffered())) return;
  byId("login").hidden = false;
  // After a login, and in a second tab of it.
  if (!key.get() && (await login.find())) start();
}

function heard(name, content) {
  if (name === "error") {
    showError(content);
    return;
  }
  overview = content;
  showHealth(content);
  shown?.update?.(content);
}

function start() {
  if (!key.get()) {
    askForKey();
    return;
  }
  byId("access").hidden = true;
  byId("forget").hidden = false;
  byId("forget").textContent = login.isUsed() ? "Log out" : "Forget key";
  following?.abort();
  following = new AbortController();
  overview = null;
  go();
  // A hidden tab costs the scheduler nothing.
  if (!document.hidden) follow("v1/overview/stream", heard, following.signal);
}

document.addEventListener("visibilitychange", () => {
  following?.abort();
  if (document.hidden || !key.get()) return;
  following = new AbortController();
  follow("v1/overview/stream", heard, following.signal);
});
byId("access").addEventListener("submit", (event) => {
  event.preventDefault();
  key.set(byId("key").value.trim());
  byId("key").value = "";
  start();
});
byId("forget").addEventListener("click", async () => {
  byId("health").replaceChildren();
  const url = login.isUsed() ? await login.end() : "";
  askForKey();
  if (url) location.assign(url);
});
byId("find").addEventListener("submit", (event) => {
  event.preventDefault();
  const job = byId("job").value.trim();
  if (job) location.hash = `#/job/${encodeURIComponent(job)}`;
  byId("job").value = "";
});
addEventListener("hashchange", () => {
  go();
  byId("main").focus({ preventScroll: true });
  scrollTo(0, 0);
});
start();
