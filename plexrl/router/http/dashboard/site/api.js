// The router's API with the key of this tab, or as the user who has logged in. The key is in the
// tab's session storage, and in the header of requests; it is never in an address. The tokens of a
// login are in cookies that no script can read, and count beside the header PlexRL-Page only.

const KEY = "plexrl-key";
const RETRY_MS = [1000, 2000, 5000, 10000];

export const key = {
  get: () => sessionStorage.getItem(KEY),
  set: (value) => sessionStorage.setItem(KEY, value),
  forget: () => sessionStorage.removeItem(KEY),
};

const LOGIN = "login";
const OF_PAGE = { "PlexRL-Page": "1" };

export const login = {
  isUsed: () => key.get() === LOGIN,
  isOffered: async () => (await (await fetch("v1/login/settings")).json()).issuer !== "",
  // Whether a user is logged in; an expired login goes on if it may.
  find: async () => {
    const isKnown = async () => (await fetch("v1/whoami", { headers: OF_PAGE })).ok;
    const found = (await isKnown()) || ((await login.renew()) && (await isKnown()));
    if (found) key.set(LOGIN);
    return found;
  },
  renew: async () => (await fetch("v1/login/refresh", { method: "POST", headers: OF_PAGE })).ok,
  // Returns where to log out of the identity provider too.
  end: async () => {
    const reply = await fetch("v1/login/logout", { method: "POST", headers: OF_PAGE });
    return reply.ok ? (await reply.json()).url : "";
  },
};

export class ApiError extends Error {
  constructor(status, code, message) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

function headers() {
  if (login.isUsed()) return OF_PAGE;
  return { Authorization: `Bearer ${key.get()}` };
}

async function failure(reply) {
  const body = await reply.json().catch(() => ({}));
  const error = body.error || body;
  return new ApiError(reply.status, error.code || "", error.message || `status ${reply.status}`);
}

// The JSON at `path`, which is relative to the page, so that the page works behind a prefix.
export async function ask(path, signal) {
  const reply = await fetch(path, { headers: headers(), signal });
  if (!reply.ok) throw await failure(reply);
  return reply.json();
}

// Calls `heard(name, content)` for each server-sent event until `signal` aborts; connects again after
// a fault. EventSource cannot send a header, so the events are read from a response.
export async function follow(path, heard, signal) {
  let tries = 0;
  while (!signal.aborted) {
    try {
      const reply = await fetch(path, { headers: headers(), signal });
      if (!reply.ok) throw await failure(reply);
      tries = 0;
      await readEvents(reply.body, heard);
    } catch (error) {
      if (signal.aborted) return;
      heard("error", { code: error.code || "", status: error.status || 0, message: error.message });
      if (error.status === 401 || error.status === 403) return;
    }
    const wait = RETRY_MS[Math.min(tries, RETRY_MS.length - 1)];
    tries += 1;
    await new Promise((done) => setTimeout(done, wait));
  }
}

async function readEvents(body, heard) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) hear(event, heard);
  }
}

function hear(event, heard) {
  const lines = event.split("\n");
  const field = (name) => lines.find((line) => line.startsWith(`${name}: `))?.slice(name.length + 2);
  heard(field("event"), JSON.parse(field("data")));
}
