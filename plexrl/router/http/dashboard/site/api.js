// The router's API with the key of this tab. The key is in the tab's session storage, and in the
// header of requests; it is never in an address.

const KEY = "plexrl-key";
const RETRY_MS = [1000, 2000, 5000, 10000];

export const key = {
  get: () => sessionStorage.getItem(KEY),
  set: (value) => sessionStorage.setItem(KEY, value),
  forget: () => sessionStorage.removeItem(KEY),
};

export class ApiError extends Error {
  constructor(status, code, message) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

function headers() {
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
