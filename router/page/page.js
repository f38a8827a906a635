// The live page: asks /status once a second and shows it. Text is inserted as textContent only.

import { setUpPrompt } from "/page/prompt.js";

const POLL_MS = 1000;
const POLL_TIMEOUT_MS = 6000;
const RATE_SECS = 3;
const NUM_SPARKS = 120;

const byId = (id) => document.getElementById(id);
const number = (value) => value.toLocaleString("en-US");
const percent = (part, whole) => (whole > 0 ? `${((100 * part) / whole).toFixed(1)} %` : "–");
const sum = (values) => values.reduce((total, value) => total + value, 0);

// The sum of a metric over all ranks of some nodes: of the series with this label, or of all series.
const labelled = (loads, name, label = "") =>
  sum(loads.flatMap((load) => load.ranks).map((rank) => rank.numbers[name]?.[label] ?? 0));
const inAll = (loads, name) =>
  sum(loads.flatMap((load) => load.ranks).flatMap((rank) => Object.values(rank.numbers[name] ?? {})));

export function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  const power = value < 1 ? 0 : Math.min(Math.floor(Math.log10(value) / 3), units.length - 1);
  return `${(value / 1000 ** power).toFixed(power && value < 1e16 ? 1 : 0)} ${units[power]}`;
}

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text; // screen readers read every change
}

// --- requests ------------------------------------------------------------------------------------------

const authorization = () => {
  const key = byId("key").value.trim();
  return key ? { authorization: `Bearer ${key}` } : {};
};

async function ask(path) {
  const signal = AbortSignal.timeout(POLL_TIMEOUT_MS);
  return await fetch(path, { headers: authorization(), signal, cache: "no-store" });
}

let hasModel = false;

async function poll() {
  let answer;
  try {
    answer = await ask("/status");
    if (answer.ok) {
      const status = await answer.json();
      show(status);
      setState(...stateOf(status));
      if (!hasModel && status.ready) await askModel();
    } else if (answer.status === 401) {
      setState(byId("key").value ? "the API key is wrong" : "an API key is needed", "warn");
    } else {
      setState(`/status answered ${answer.status}`, "bad");
    }
  } catch {
    setState("the router cannot be reached", "bad");
  }
  const isRefused = answer?.status === 401;
  byId("key").setAttribute("aria-invalid", String(isRefused));
  document.body.classList.toggle("stale", !answer?.ok);
}

function stateOf(status) {
  if (status.draining) return ["shutting down", "warn"];
  return status.ready ? ["serving", "good"] : ["no healthy pair", "bad"];
}

async function askModel() {
  const answer = await ask("/v1/models");
  if (!answer.ok) return;
  const models = (await answer.json()).data;
  setText(byId("model"), models.map(modelText).join(", "));
  hasModel = true;
}

const modelText = (model) =>
  model.max_model_len ? `${model.id} · context of ${number(model.max_model_len)} tokens` : model.id;

function setState(text, kind) {
  setText(byId("state"), text);
  byId("state").className = `pill ${kind}`;
  document.title = kind === "good" ? "hisparse-pd" : `hisparse-pd: ${text}`;
}

// --- numbers -------------------------------------------------------------------------------------------

function show(status) {
  const loads = status.nodes.filter((node) => node.load).map((node) => ({ kind: node.kind, ...node.load }));
  const decode = loads.filter((load) => load.kind === "decode");
  const prefill = loads.filter((load) => load.kind === "prefill");
  showTiles(decode, prefill);
  showRates(status.at, decode, prefill);
  showRouter(status);
  showNodes(byId("prefill"), status.nodes.filter((node) => node.kind === "prefill"));
  showNodes(byId("decode"), status.nodes.filter((node) => node.kind === "decode"));
}

function showTiles(decode, prefill) {
  const byMode = (name) => ["hisparse", "dense"].map((mode) => labelled(decode, name, mode));
  const [hisparse, dense] = byMode("running_reqs");
  setText(byId("running"), number(labelled(decode, "num_running_reqs")));
  setText(byId("running-note"), `${hisparse} hisparse · ${dense} dense`);

  setText(byId("queued"), number(labelled([...decode, ...prefill], "num_queue_reqs")));
  setText(byId("queued-note"), `${labelled(decode, "num_transfer_queue_reqs")} in transfer`);

  const requests = byMode("requests_total");
  setText(byId("requests"), number(sum(requests)));
  setText(byId("requests-note"), `${number(requests[0])} hisparse · ${number(requests[1])} dense`);
  byId("hisparse-share").style.flexGrow = requests[0];
  byId("dense-share").style.flexGrow = requests[1];

  const [hits, misses] = ["hits", "misses"].map((name) => labelled(decode, `swap_in_${name}_total`));
  setText(byId("hit-rate"), percent(hits, hits + misses));
  setText(byId("hit-note"), `${bytes(labelled(decode, "swap_in_bytes_total"))} swapped in`);

  const steps = labelled(decode, "verifying_steps_total");
  const verified = labelled(decode, "drafted_tokens_total");
  const accepted = labelled(decode, "accepted_draft_tokens_total");
  setText(byId("accept-length"), steps ? (1 + accepted / steps).toFixed(2) : "–");
  setText(byId("draft-note"), steps ? `${number(accepted)} of ${number(verified)} accepted` : "no drafts");

  const prompts = labelled(prefill, "prompt_tokens_total");
  setText(byId("cache-rate"), percent(labelled(prefill, "cached_tokens_total"), prompts));
  setText(byId("cache-note"), `of ${number(prompts)} prompt tokens`);
}

const totals = [];

function showRates(at, decode, prefill) {
  if (totals.at(-1)?.at === at) return; // the router gave the same answer again
  const generated = inAll(decode, "generation_tokens_total");
  const transferred = labelled(prefill, "kv_transfer_bytes_total");
  totals.push({ at, generated, transferred });
  if (totals.length > NUM_SPARKS + 1) totals.shift();

  const first = totals.find((entry) => entry.at >= at - RATE_SECS - 0.5);
  setText(byId("throughput"), number(Math.round(rate("generated", first, totals.at(-1)))));
  showSpark(totals.slice(1).map((entry, i) => rate("generated", totals[i], entry)));

  const linkRate = rate("transferred", first, totals.at(-1));
  setText(byId("link-rate"), linkRate > 0 ? `${bytes(linkRate)}/s` : "idle");
  byId("link").classList.toggle("flowing", linkRate > 0);
}

// A node that restarts or is away makes a total smaller; no rate is shown then, instead of a negative one.
function rate(name, from, to) {
  return to.at > from.at ? Math.max(0, (to[name] - from[name]) / (to.at - from.at)) : 0;
}

function showSpark(values) {
  const highest = Math.max(1, ...values);
  const x = (i) => NUM_SPARKS - values.length + i + 1;
  const points = values.map((value, i) => `${x(i)},${(22 - (20 * value) / highest).toFixed(1)}`);
  byId("spark").firstElementChild.setAttribute("points", points.join(" "));
}

function showRouter(status) {
  const answers = Object.entries(status.answers);
  const isFailure = ([code]) => code.startsWith("5");
  const failed = sum(answers.filter(isFailure).map(([, count]) => count));
  const inFlight = sum(status.nodes.filter((node) => node.kind === "decode").map((node) => node.in_flight));
  const [state, kind] = status.draining ? ["draining", "warn"] : status.ready ? ["ready", "good"] : ["not ready", "bad"];
  setStatus(byId("router-status"), state, kind);
  const words = [status.policy.replaceAll("_", " "), `${inFlight} in flight`];
  words.push(`${number(sum(answers.map(([, count]) => count)))} answered`, `${number(failed)} with a 5xx`);
  if (status.retries) words.push(`${number(status.retries)} retried`);
  if (status.resumes) words.push(`${number(status.resumes)} moved to another decode node`);
  setText(byId("router-note"), words.join(" · "));
}

function setStatus(element, text, kind) {
  setText(element, text);
  element.className = `status ${kind}`;
}

// --- nodes ---------------------------------------------------------------------------------------------

const clone = (id) => byId(id).content.firstElementChild.cloneNode(true);

function showNodes(list, nodes) {
  while (list.children.length > nodes.length) list.lastElementChild.remove();
  nodes.forEach((node, i) => {
    if (!list.children[i]) list.append(clone("node-template"));
    showNode(list.children[i], node);
  });
}

function showNode(item, node) {
  const [text, kind] = !node.healthy ? ["away", "bad"] : node.load ? ["healthy", "good"] : ["no numbers", "warn"];
  const trouble = node.healthy ? node.load_trouble : node.trouble;
  setText(item.querySelector("h4"), node.url.replace(/^https?:\/\//, ""));
  setStatus(item.querySelector(".status"), text, kind);
  setText(item.querySelector(".trouble"), trouble);
  item.querySelector(".trouble").hidden = !trouble;
  item.classList.toggle("away", !node.load);

  const load = node.load;
  setText(item.querySelector(".counts"), load ? countsText(node.kind, load) : "");
  item.querySelector(".counts").hidden = !load;
  showPools(item.querySelector(".pools"), load);
  showRanks(item.querySelector(".ranks"), load && load.ranks.length > 1 ? load.ranks : []);
}

function countsText(kind, load) {
  const of = (name) => number(inAll([load], name));
  const words = [`${of("num_running_reqs")} running`, `${of("num_queue_reqs")} queued`];
  words.push(`${of("num_transfer_queue_reqs")} ${kind === "prefill" ? "sending" : "landing"}`);
  const troubles = { kv_transfer_failures_total: "failed transfers", kv_rows_corrupt_total: "wrong rows of KV" };
  for (const [name, what] of Object.entries(troubles)) if (inAll([load], name)) words.push(`${of(name)} ${what}`);
  return words.join(" · ");
}

const poolNames = (load) => Object.keys(load?.ranks[0]?.numbers.pool_total_tokens ?? {});

function showPools(container, load) {
  const names = poolNames(load);
  while (container.children.length > names.length) container.lastElementChild.remove();
  names.forEach((name, i) => {
    if (!container.children[i]) container.append(clone("pool-template"));
    const row = container.children[i];
    const [used, total] = ["used", "total"].map((what) => labelled([load], `pool_${what}_tokens`, name));
    const share = total > 0 ? (100 * used) / total : 0;
    const bar = row.querySelector(".bar");
    setText(row.querySelector(".pool-name"), name);
    setText(row.querySelector(".pool-use"), `${number(used)} / ${number(total)}`);
    bar.setAttribute("aria-label", `${name} pool`);
    bar.setAttribute("aria-valuenow", share.toFixed(0));
    bar.setAttribute("aria-valuetext", `${number(used)} of ${number(total)} token slots`);
    bar.className = `bar ${share > 90 ? "bad" : share > 75 ? "warn" : ""}`;
    bar.firstElementChild.style.width = `${used > 0 ? Math.max(share, 1) : 0}%`;
  });
}

// A line for each rank of a node of several: its requests, and how full its pools are.
function showRanks(table, ranks) {
  const names = poolNames({ ranks });
  const rows = ranks.map((rank) => {
    const of = (name, label) => labelled([{ ranks: [rank] }], name, label);
    const shares = names.map((name) => percent(of("pool_used_tokens", name), of("pool_total_tokens", name)));
    return [...[rank.dp_rank, of("num_running_reqs"), of("num_queue_reqs")].map(number), ...shares];
  });
  showRows(table.tHead, rows.length ? [["rank", "running", "queued", ...names]] : [], "th");
  showRows(table.tBodies[0], rows, "td");
  table.hidden = !rows.length;
}

function showRows(container, rows, tag) {
  while (container.children.length > rows.length) container.lastElementChild.remove();
  rows.forEach((texts, i) => {
    const row = container.children[i] ?? container.appendChild(document.createElement("tr"));
    while (row.children.length > texts.length) row.lastElementChild.remove();
    texts.forEach((text, j) => setText(row.children[j] ?? row.appendChild(document.createElement(tag)), text));
  });
}

// --- the clock -----------------------------------------------------------------------------------------

let timer;

async function turn() {
  clearTimeout(timer);
  if (document.hidden) return;
  await poll();
  clearTimeout(timer);
  timer = setTimeout(turn, POLL_MS);
}

document.addEventListener("visibilitychange", turn);
byId("key").addEventListener("change", turn);
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  turn();
});
setUpPrompt(authorization);
turn();
