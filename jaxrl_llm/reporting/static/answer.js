/* One answer, token by token. */

const COLORINGS = [
  ["adv", "advantage"], ["diff", "trainer − engine"], ["ent", "entropy"], ["lp", "log-prob"], ["none", "no colour"],
];
const MISSING = {
  adv: "this run kept no advantages of tokens", diff: "no log-probs are known",
  ent: "this step did not compute entropies", lp: "no log-probs are known",
};
const VISIBLE_DIFFERENCE = 0.01; // nats at which a difference of log-probs has its full colour, at least
const opened = { coloring: "adv", row: null };

function diverging(share) {
  /* From orange (−1) by nothing (0) to blue (1). */
  const strength = 0.6 * Math.min(1, Math.abs(share));
  return share >= 0 ? `rgba(59,125,221,${strength.toFixed(3)})` : `rgba(224,118,47,${strength.toFixed(3)})`;
}

function rising(share) {
  return `rgba(181,101,196,${(0.65 * Math.min(1, Math.max(0, share))).toFixed(3)})`;
}

function openAnswer(kept, row, among) {
  opened.row = row;
  const dialog = byId("answer"), at = among.indexOf(row);
  const step = (by) => () => openAnswer(kept, among[at + by], among);
  fill(dialog,
    h("div", { class: "dialog-head" },
      h("h2", {}, `Step ${row.step}, answer ${row.number + 1}`),
      h("button", { type: "button", disabled: at <= 0, onclick: step(-1) }, "← previous"),
      h("button", { type: "button", disabled: at < 0 || at >= among.length - 1, onclick: step(1) }, "next →"),
      h("button", { type: "button", class: "close", "aria-label": "close", onclick: () => dialog.close() }, "✕")),
    h("div", { class: "dialog-body" },
      facts(row), messages(kept.prompts[row.prompt]), h("h3", {}, "Answer"), h("div", { id: "tokens" }), rewardFacts(row)));
  drawTokens(kept, row);
  if (!dialog.open) dialog.showModal();
  dialog.querySelector(".dialog-body").scrollTop = 0;
}

function facts(row) {
  const pairs = [["score", row.score === null ? "unscored" : number(row.score)], ["advantage", row.advantage === null ? "–" : signed(row.advantage)],
    ["finish", row.finish], ["source", row.data_source]];
  return [h("dl", { class: "facts" }, pairs.filter(([, v]) => v).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))),
    row.error ? h("p", { class: "note bad" }, row.error) : null];
}

function messages(prompt) {
  if (!prompt.length) return note("The prompt was given as tokens.");
  return [h("h3", {}, "Prompt"), prompt.map(([role, text]) => h("div", { class: "message" }, h("b", {}, role), h("pre", {}, text)))];
}

function rewardFacts(row) {
  const parts = [];
  const show = (title, json) => {
    if (json === null || json === undefined) return;
    let value = json;
    try { value = JSON.parse(json); } catch { /* it is a plain text */ }
    const empty = value === null || value === "" || (typeof value === "object" && !Object.keys(value).length);
    if (empty) return;
    parts.push(h("div", {}, h("h3", {}, title), typeof value === "object"
      ? h("table", { class: "config" }, h("tbody", {}, Object.entries(value).map(([k, v]) => h("tr", {}, h("th", {}, k), h("td", {}, typeof v === "string" ? v : JSON.stringify(v))))))
      : h("pre", {}, String(value))));
  };
  show("Ground truth", row.truth);
  show("What the reward function reported", row.extra);
  return h("div", { class: "columns" }, parts);
}

function drawTokens(kept, row) {
  const holder = byId("tokens");
  if (!row.tokens) {
    fill(holder, h("pre", { class: "stream" }, row.answer));
    return;
  }
  if (opened.coloring !== "none" && row[opened.coloring] === undefined) {
    opened.coloring = COLORINGS.map(([name]) => name).find((name) => row[name] !== undefined) || "none";
  }
  const scale = scaleOf(kept, row, opened.coloring);
  fill(holder,
    h("div", { class: "controls tight" },
      segments("colour tokens by", COLORINGS.map(([name, text]) => [name, text, name !== "none" && row[name] === undefined ? MISSING[name] : ""]), opened.coloring, (value) => {
        opened.coloring = value;
        drawTokens(kept, row);
      }), colorLegend(scale)),
    h("div", { class: "stream" }, streamParts(kept, row, scale)));
}

function scaleOf(kept, row, name) {
  const values = (r) => [r[name] ?? []].flat().filter((v) => v !== null).map(Math.abs);
  const among = name === "adv" ? kept.rows.filter((r) => r.step === row.step) : [row];
  const largest = among.reduce((most, r) => Math.max(most, ...values(r).slice(0, 20000)), name === "diff" ? VISIBLE_DIFFERENCE : 1e-9);
  return { name, largest, color: (v) => (v === null || v === undefined ? "" : name === "adv" || name === "diff" ? diverging(v / largest) : rising(Math.abs(v) / largest)) };
}

function colorLegend(scale) {
  if (scale.name === "none") return null;
  const two = scale.name === "adv" || scale.name === "diff";
  const ends = two ? [-1, -0.5, 0, 0.5, 1].map(diverging) : [0, 0.25, 0.5, 0.75, 1].map(rising);
  const labels = two ? [signed(-scale.largest, 2), "0", signed(scale.largest, 2)]
    : scale.name === "lp" ? ["0 (certain)", `−${number(scale.largest, 2)} nats`] : ["0 (certain)", `${number(scale.largest, 2)} nats`];
  const hints = { adv: ["worse", "better than expected"], diff: ["engine", "trainer finds it likelier (nats)"] }[scale.name];
  return h("div", { class: "scale", title: hints ? hints.join(" … ") : "" },
    h("div", { class: "ramp", style: { background: `linear-gradient(90deg, ${ends.join(", ")})` } }),
    h("div", { class: "ends" }, labels.map((text) => h("span", {}, text))));
}

function streamParts(kept, row, scale) {
  /* Pieces of one origin in order: turns that the policy drew, and what it was told between them. */
  const pieces = [];
  let drawn = 0;
  row.tokens.forEach((text, i) => {
    const turn = row.turns ? row.turns[i] : 0, last = pieces[pieces.length - 1];
    const token = { text: kept.texts[text], at: turn < 0 ? null : drawn++ };
    if (last && last.turn === turn) last.tokens.push(token);
    else pieces.push({ turn, tokens: [token] });
  });
  return pieces.map((piece, i) => (piece.turn < 0 ? toldPiece(piece) : turnPiece(kept, row, piece, scale, i + 1 < pieces.length)));
}

function toldPiece(piece) {
  const text = piece.tokens.map((token) => token.text).join("");
  return h("details", { class: "told" },
    h("summary", {}, `told, ${plural(piece.tokens.length, "token")}: `, h("span", {}, shorten(text, 100))), h("pre", {}, text));
}

function turnPiece(kept, row, piece, scale, isAnswered) {
  const reward = row.turn_rewards?.some((r) => r) ? row.turn_rewards[piece.turn] : undefined;
  const head = row.turns ? h("div", { class: "turn-head" }, `turn ${piece.turn + 1}`,
    reward !== undefined && reward !== null ? `, reward ${number(reward)}` : "") : null;
  const calls = row.turns ? callRanges(piece.tokens, kept.calls, isAnswered) : [];
  const parts = [];
  let at = 0;
  for (const [from, to] of calls) {
    parts.push(tokenSpans(row, piece.tokens.slice(at, from), scale));
    parts.push(h("div", { class: "call" }, h("b", {}, "tool call"), h("div", {}, tokenSpans(row, piece.tokens.slice(from, to), scale))));
    at = to;
  }
  parts.push(tokenSpans(row, piece.tokens.slice(at), scale));
  return h("div", { class: "turn" }, head, parts);
}

/* Calls without markers are whole turns, and something was told after them. */
const WHOLE_CALLS = [/^\s*\[\s*[A-Za-z_][\w.]*\s*\([^]*\)\s*\]/, /^\s*\{\s*"(name|type)"\s*:[^]*\}/];

function callRanges(tokens, markers, isAnswered) {
  /* From which token to which the calls of tools go, by their markers in the text. */
  const starts = [];
  let text = "";
  for (const token of tokens) {
    starts.push(text.length);
    text += token.text;
  }
  const tokenAt = (place) => {
    let index = starts.findIndex((start) => start > place) - 1;
    if (index < 0) index = starts.length - 1;
    return index;
  };
  const ranges = [];
  for (const [open, close] of markers) {
    for (let from = text.indexOf(open); from >= 0; from = text.indexOf(open, from + open.length)) {
      const end = close ? text.indexOf(close, from) : -1;
      const stop = end < 0 ? text.length : end + close.length;
      if (!ranges.some(([a, b]) => from < b && stop > a)) ranges.push([from, stop]);
      if (!close) break;
    }
  }
  const whole = isAnswered && !ranges.length && WHOLE_CALLS.map((form) => form.exec(text)).find(Boolean);
  if (whole) ranges.push([0, whole[0].length]);
  return ranges.sort((a, b) => a[0] - b[0]).map(([from, stop]) => [tokenAt(from), tokenAt(stop - 1) + 1]);
}

function tokenSpans(row, tokens, scale) {
  /* A character that takes several tokens is one span, of its strongest value. */
  const groups = [];
  for (const token of tokens) {
    if (token.text === "" && groups.length) groups[groups.length - 1].push(token);
    else groups.push([token]);
  }
  return groups.map((group) => {
    const values = group.map((token) => valueOf(row, scale.name, token.at));
    const strongest = values.reduce((a, b) => (Math.abs(b ?? 0) > Math.abs(a ?? 0) ? b : a), values[0]);
    const text = group[0].text;
    return h("span", {
      class: /^\n+$/.test(text) ? "token newline" : "token", title: group.map((token) => tokenTitle(row, token.at)).join("\n"),
      style: { background: scale.color(strongest) },
    }, text === "" ? "·" : text);
  });
}

function valueOf(row, name, at) {
  const values = row[name];
  return values === undefined ? null : Array.isArray(values) ? values[at] : values;
}

function tokenTitle(row, at) {
  const parts = [["adv", "advantage", signed], ["lp", "log-prob", number], ["diff", "trainer − engine", signed], ["ent", "entropy", number]];
  return parts.filter(([name]) => row[name] !== undefined)
    .map(([name, label, format]) => `${label} ${format(valueOf(row, name, at))}`).join(" · ");
}
