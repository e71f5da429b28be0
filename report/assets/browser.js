// The trajectory browser: one step at a time is unpacked, one prompt's group at a time is drawn.

const state = { step: null, rows: [], groups: [], shown: [], prompt: null, reason: "", mixed: false };
let vocabulary = null;
const signed = (value) => (value > 0 ? "+" : "") + number(value);

async function openBrowser() {
  await chartsDrawn;
  vocabulary = new Vocabulary(await unpackJson("blob-vocabulary"));
  const wanted = new URLSearchParams(location.hash.slice(1));
  const steps = [...byId("step").options].map((option) => option.value);
  await openStep(steps.includes(wanted.get("step")) ? wanted.get("step") : steps[steps.length - 1], wanted.get("prompt"));
}

async function openStep(step, prompt = null) {
  byId("step").value = step;
  state.step = step;
  const rows = readStep(await unpack(`blob-step-${step}`));
  if (state.step !== step) return; // another step was asked for while this one was unpacked
  state.rows = rows;
  const groups = new Map();
  for (const row of rows) groups.set(row.prompt, [...(groups.get(row.prompt) || []), row]);
  state.groups = [...groups.values()];
  const steps = byId("step");
  byId("step-back").disabled = steps.selectedIndex === 0;
  byId("step-on").disabled = steps.selectedIndex === steps.options.length - 1;
  offerReasons();
  listGroups(prompt);
}

function offerReasons() {
  const counts = new Map();
  for (const row of state.rows) counts.set(reasonOf(row), (counts.get(reasonOf(row)) || 0) + 1);
  if (!counts.has(state.reason)) state.reason = "";
  const names = [...counts.keys()].sort((a, b) => counts.get(b) - counts.get(a));
  byId("reason").replaceChildren(make("option", { value: "", text: `all ${state.rows.length}` }),
    ...names.map((name) => make("option", { value: name, text: `${name} (${counts.get(name)})` })));
  byId("reason").value = state.reason;
}

const reasonOf = (row) => row.reason ?? row.stop;
const isRight = (row) => row.reward !== null && row.correct;
const isMixed = (group) => new Set(group.map((row) => row.reward)).size > 1;

function listGroups(prompt = null) {
  state.shown = state.groups.filter((group) => (!state.reason || group.some((row) => reasonOf(row) === state.reason))
    && (!state.mixed || isMixed(group)));
  byId("groups").replaceChildren(...state.shown.map(groupButton));
  byId("none").hidden = state.shown.length > 0;
  const words = `step ${state.step}: ${state.shown.length} of ${state.groups.length} prompts`;
  byId("found").textContent = words;
  const chosen = state.shown.find((group) => String(group[0].prompt) === String(prompt ?? state.prompt)) || state.shown[0];
  if (chosen) openGroup(chosen);
  else byId("group").replaceChildren();
}

function groupButton(group) {
  const right = group.filter(isRight).length;
  const marks = group.map((row) => make("span", { class: `mark ${row.reward === null ? "none" : isRight(row) ? "right" : ""}` }));
  const button = make("button", { type: "button", onclick: () => openGroup(group) },
    make("span", { class: "ask", text: vocabulary.question(group[0]) }),
    make("span", { class: "marks" }, ...marks, make("span", { class: "count", text: `${right} of ${group.length} correct` })));
  button.prompt = group[0].prompt;
  return make("li", {}, button);
}

function openGroup(group) {
  state.prompt = group[0].prompt;
  const list = byId("groups");
  for (const button of list.querySelectorAll("button")) {
    const current = button.prompt === state.prompt;
    button.setAttribute("aria-current", String(current));
    const top = button.offsetTop - list.offsetTop;
    const hidden = top < list.scrollTop || top + button.offsetHeight > list.scrollTop + list.clientHeight;
    if (current && hidden) list.scrollTop = top - list.clientHeight / 2; // the list alone moves, never the page
  }
  const first = group[0];
  const prompt = make("details", { class: "panel shared" },
    make("summary", { text: `Prompt ${first.prompt}, ${first.turns[0].from} tokens · expected answer: ${first.answer}` }),
    tokenLine(first, vocabulary, 0, first.turns[0].from, false, "Prompt"));
  const columns = make("div", { class: "columns", tabindex: "0", role: "region", "aria-label": `The ${group.length} samples of prompt ${first.prompt}` },
    ...group.map(trajectory));
  byId("group").replaceChildren(prompt, columns);
  history.replaceState(null, "", `#step=${state.step}&prompt=${state.prompt}`);
}

function trajectory(row) {
  const verdict = row.reward === null ? "no reward" : `${isRight(row) ? "✓" : "✗"} ${signed(row.reward)}`;
  const sampled = row.turns.reduce((sum, turn) => sum + turn.to - turn.from, 0);
  const advantage = row.advantage === null ? "not trained" : `advantage ${signed(row.advantage)}`;
  const stop = row.stop === reasonOf(row) ? row.stop : `${reasonOf(row)}, ${row.stop}`;
  const box = make("article", { class: "trajectory", "aria-label": `Sample ${row.sample}` },
    make("header", {},
      make("h4", {}, make("span", { text: `Sample ${row.sample}` }), make("span", { class: `verdict ${isRight(row) ? "right" : ""}`, text: verdict })),
      make("p", { class: "facts", text: `${stop} · ${advantage}` }),
      make("p", { class: "facts", text: `${sampled} of ${row.places.length} tokens sampled · replay --sample ${row.index}` })),
    ...row.turns.map((turn, i) => turnBox(row, turn, i)));
  if (state.reason && reasonOf(row) === state.reason) box.classList.add("match");
  if (row.advantage) box.classList.add(row.advantage > 0 ? "plus" : "minus");
  box.style.setProperty("--strength", Math.min(0.12 + 0.28 * Math.abs(row.advantage || 0), 0.5));
  return box;
}

function turnBox(row, turn, i) {
  let sum = 0;
  for (let place = turn.from; place < turn.to; place++) sum += row.surprise[place];
  const mean = number(Number((sum ? -sum / 1000 / (turn.to - turn.from) : 0).toFixed(3)));
  const words = `Turn ${i + 1} · ${turn.to - turn.from} tokens · mean log-prob ${mean}${turn.ended ? "" : " · cut off"}`;
  const box = make("details", { class: "turn", open: "" }, make("summary", { text: words }),
    tokenLine(row, vocabulary, turn.from, turn.to, true, `Turn ${i + 1}`), ...turn.calls.map(callBox));
  const next = i + 1 < row.turns.length ? row.turns[i + 1].from : row.places.length;
  if (next > turn.to) {
    box.append(make("details", { class: "appended" }, make("summary", { text: `${next - turn.to} tokens appended` }),
      tokenLine(row, vocabulary, turn.to, next, false, `Appended after turn ${i + 1}`)));
  }
  return box;
}

// The Python tool's program as it is; other arguments one a line.
function argumentsText(call) {
  if (call.name === "python" && typeof call.args.code === "string") return call.args.code;
  return Object.entries(call.args).map(([name, value]) => `${name}: ${typeof value === "string" ? value : JSON.stringify(value)}`).join("\n");
}

function callBox(call) {
  const took = call.seconds < 1 ? `${number(Math.round(1000 * call.seconds))} ms` : `${number(call.seconds)} s`;
  const status = make("span", { class: `status ${call.status === "ok" ? "" : "bad"}`, text: call.status });
  const parts = [make("p", {}, make("span", { text: call.name || "Unreadable call" }), status, make("span", { text: took }))];
  if (call.name) parts.push(make("pre", { text: argumentsText(call) }), make("p", {}, make("span", { text: "Output" })));
  return make("div", { class: "call" }, ...parts, make("pre", { text: call.text || "(nothing)" }));
}

function inspect(token) {
  const line = token.parentElement;
  byId("group").querySelector(".cur")?.classList.remove("cur");
  token.classList.add("cur");
  byId("inspector").textContent = describeToken(line.row, vocabulary, token.place);
}

function tokenKeys(event) {
  const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!by || !event.target.classList.contains("tokens")) return;
  event.preventDefault();
  const tokens = [...event.target.children];
  const at = tokens.findIndex((token) => token.classList.contains("cur"));
  inspect(tokens[Math.min(Math.max(at + by, 0), tokens.length - 1)]);
}

function moveStep(by) {
  const steps = byId("step");
  const at = steps.selectedIndex + by;
  if (at >= 0 && at < steps.options.length) openStep(steps.options[at].value);
}

function moveGroup(by) {
  const at = state.shown.findIndex((group) => group[0].prompt === state.prompt) + by;
  if (at >= 0 && at < state.shown.length) openGroup(state.shown[at]);
}

function setColour(value) {
  byId("browser").dataset.colour = value;
  for (const key of document.querySelectorAll(".key")) key.hidden = key.dataset.for !== value;
}

if (byId("browser")) {
  byId("step").addEventListener("change", (event) => openStep(event.target.value));
  byId("step-back").addEventListener("click", () => moveStep(-1));
  byId("step-on").addEventListener("click", () => moveStep(1));
  byId("reason").addEventListener("change", (event) => { state.reason = event.target.value; listGroups(); });
  byId("mixed").addEventListener("change", (event) => { state.mixed = event.target.checked; listGroups(); });
  for (const input of document.querySelectorAll("input[name=colour]")) {
    input.addEventListener("change", () => setColour(input.value));
  }
  byId("group").addEventListener("mouseover", (event) => event.target.classList.contains("t") && inspect(event.target));
  byId("group").addEventListener("keydown", tokenKeys);
  // Letters act only while the focus is inside the browser and not in a field that takes letters.
  byId("browser").addEventListener("keydown", (event) => {
    if (["SELECT", "INPUT"].includes(event.target.tagName) || event.ctrlKey || event.metaKey || event.altKey) return;
    ({ "[": () => moveStep(-1), "]": () => moveStep(1), j: () => moveGroup(1), k: () => moveGroup(-1) })[event.key]?.();
  });
  setColour("mask");
  openBrowser();
}
