// The prompt box: one chat request, its streamed answer, and the service's numbers about it.

const byId = (id) => document.getElementById(id);
const number = (value) => value.toLocaleString("en-US");

export function setUpPrompt(authorization) {
  let aborter = null;

  byId("prompt-form").addEventListener("submit", async (event) => {
    event.preventDefault();
    if (aborter) return;
    aborter = new AbortController();
    setBusy(true);
    try {
      await run(authorization(), aborter.signal);
    } catch (error) {
      showError(aborter.signal.aborted ? "Stopped." : error.message);
    } finally {
      aborter = null;
      setBusy(false);
    }
  });
  byId("stop").addEventListener("click", () => aborter?.abort());
  byId("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("prompt-form").requestSubmit();
  });
}

function setBusy(isBusy) {
  byId("send").disabled = isBusy;
  byId("stop").hidden = !isBusy;
  byId("answer").classList.toggle("busy", isBusy);
}

function showError(text) {
  byId("error").textContent = text;
  byId("error").hidden = !text;
}

function requestBody() {
  const flag = document.querySelector("input[name=hisparse]:checked").value;
  return {
    messages: [{ role: "user", content: byId("prompt").value }],
    max_tokens: byId("max-tokens").valueAsNumber,
    temperature: 0,
    stream: true,
    stream_options: { include_usage: true },
    hisparse: flag === "auto" ? "auto" : flag === "true",
  };
}

async function run(headers, signal) {
  showError("");
  byId("answer").textContent = "";
  byId("usage").replaceChildren();
  const startedAt = performance.now();
  const answer = await fetch("/v1/chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json", ...headers },
    body: JSON.stringify(requestBody()),
    signal,
  });
  if (!answer.ok) throw new Error(await errorText(answer));

  let firstAt, lastAt, usage, finish;
  for await (const event of events(answer.body)) {
    if (event.error) throw new Error(event.error.message);
    usage = event.usage ?? usage;
    const choice = event.choices?.[0];
    finish = choice?.finish_reason ?? finish;
    if (!choice?.delta?.content) continue;
    lastAt = performance.now();
    firstAt ??= lastAt;
    byId("answer").append(choice.delta.content);
  }
  const times = { firstMs: firstAt - startedAt, restMs: lastAt - firstAt };
  if (usage) showUsage(usage, finish, times, answer.headers);
}

async function errorText(answer) {
  const text = await answer.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return `${answer.status} ${answer.statusText}`;
  }
}

// Yields the JSON of each server-sent event up to [DONE]. Raises when the connection breaks off before it.
async function* events(body) {
  let text = "";
  for await (const piece of pieces(body.pipeThrough(new TextDecoderStream()))) {
    text += piece.replaceAll("\r\n", "\n");
    const complete = text.split("\n\n");
    text = complete.pop();
    for (const event of complete) {
      const lines = event.split("\n").filter((line) => line.startsWith("data:"));
      const data = lines.map((line) => line.slice(5).trim()).join("\n");
      if (data === "[DONE]") return;
      if (data) yield JSON.parse(data);
    }
  }
  throw new Error("The answer broke off.");
}

// Not every browser can iterate over a stream.
async function* pieces(stream) {
  const reader = stream.getReader();
  try {
    for (let read = await reader.read(); !read.done; read = await reader.read()) yield read.value;
  } finally {
    reader.cancel().catch(() => {});
  }
}

const address = (url) => url?.replace(/^https?:\/\//, "") ?? "–";

// The tiers that had cached tokens, such as "448 device · 64 host".
function cached({ cached_tokens: total = 0, cached_tokens_details: tiers = {} }) {
  const found = Object.entries(tiers).filter(([, tokens]) => tokens);
  return found.map(([tier, tokens]) => `${number(tokens)} ${tier}`).join(" · ") || number(total);
}

function showUsage(usage, finish, times, headers) {
  const { mode, hits = 0, misses = 0 } = usage.hisparse ?? {};
  const selected = hits + misses;
  const { accepted_prediction_tokens: accepted = 0, rejected_prediction_tokens: rejected = 0 } =
    usage.completion_tokens_details ?? {};
  const tokens = usage.completion_tokens;
  const rest = 1000 * (tokens - 1); // from the first token on
  const rows = [
    ["served as", mode ?? "–"],
    ["prompt tokens", number(usage.prompt_tokens)],
    ["of them cached", cached(usage.prompt_tokens_details ?? {})],
    ["completion tokens", number(tokens)],
    ["drafts accepted", accepted + rejected ? `${number(accepted)} of ${number(accepted + rejected)}` : "–"],
    ["tokens a step", tokens > accepted ? (tokens / (tokens - accepted)).toFixed(2) : "–"],
    ["hot-buffer hits", mode === "hisparse" ? number(hits) : "–"],
    ["misses", mode === "hisparse" ? number(misses) : "–"],
    ["hit rate", mode === "hisparse" && selected ? `${((100 * hits) / selected).toFixed(1)} %` : "–"],
    ["first token", Number.isFinite(times.firstMs) ? `${number(Math.round(times.firstMs))} ms` : "–"],
    ["tokens a second", times.restMs > 0 ? number(Math.round(rest / times.restMs)) : "–"],
    ["ended by", finish ?? "–"],
    ["prefill node", address(headers.get("x-hisparse-pd-prefill"))],
    ["decode node", address(headers.get("x-hisparse-pd-decode"))],
  ];
  byId("usage").replaceChildren(
    ...rows.map(([name, value]) => {
      const row = document.createElement("div");
      const [term, definition] = [document.createElement("dt"), document.createElement("dd")];
      term.textContent = name;
      definition.textContent = value;
      if (value === "hisparse" || value === "dense") definition.className = `mode ${value}`;
      row.append(term, definition);
      return row;
    }),
  );
}
