/* The table of answers: find, sort, open. */

const answerView = {
  run: 0, query: "", step: "", source: "", finish: "", only: "", sort: "step", down: true, at: 0, mode: "table",
};
const PER_PAGE = 25;
const COLUMNS = [
  ["step", "step"], ["prompt", "prompt"], ["answer", "answer"], ["score", "score"], ["advantage", "advantage"],
  ["finish", "finish"], ["data_source", "source"],
];

async function drawAnswers() {
  const section = byId("answers");
  if (!section.firstChild) {
    fill(section, h("div", { class: "controls", id: "answer-controls" }), h("div", { id: "answer-note" }), h("div", { id: "answer-body" }));
    fill(byId("answer-body"), note("Reading the answers …"));
  }
  await loadAnswers();
  drawAnswerView();
}

function keptAnswers() {
  return page.answers[answerView.run];
}

function promptText(kept, row) {
  const messages = kept.prompts[row.prompt];
  return messages.length ? messages[messages.length - 1][1] : "(given as tokens)";
}

function drawAnswerView() {
  const kept = keptAnswers();
  drawAnswerControls(kept);
  fill(byId("answer-note"), answerNotes(kept));
  if (!kept.rows.length) {
    const why = page.data.runs[answerView.run].kind !== "train" ? "Only reinforcement learning samples answers."
      : kept.problems.length ? "No answers can be read."
      : "No answers are kept yet. Those of the first and the last step are, and with rollout.dump_every=10 those of every tenth.";
    fill(byId("answer-body"), note(why));
  } else if (answerView.mode === "table") drawAnswerTable();
  else drawPrompts(kept);
}

function answerNotes(kept) {
  const notes = [];
  const some = kept.rows.length < kept.total;
  if (kept.rows.length) {
    notes.push(some
      ? `Shown are ${kept.rows.length.toLocaleString("en")} of ${plural(kept.total, "answer")}, of ${kept.shown_steps.length} of ${plural(kept.steps.length, "step")} that kept theirs (evenly chosen).`
      : `All ${plural(kept.total, "answer")} of the ${plural(kept.steps.length, "step")} that kept theirs.`);
  }
  if (kept.plain) notes.push(`Answers are shown without their tokens: ${kept.plain}`);
  return [notes.length ? note(notes.join(" ")) : null,
    kept.problems.map((text) => h("p", { class: "note bad" }, text))];
}

function drawAnswerControls(kept) {
  const change = (name) => (value) => {
    answerView[name] = value;
    answerView.at = 0;
    drawAnswerBody();
  };
  const values = (name) => [...new Set(kept.rows.map((row) => row[name]).filter((v) => v !== null && v !== undefined))];
  const signature = JSON.stringify([answerView.run, answerView.mode, kept.shown_steps, values("data_source"), values("finish")]);
  const controls = byId("answer-controls");
  if (controls.dataset.signature === signature) return;
  controls.dataset.signature = signature;
  const typing = controls.contains(document.activeElement) ? document.activeElement : null;
  const list = (name, label, format = String) => choice(label, [["", "all"], ...values(name).map((v) => [v, format(v)])], answerView[name === "data_source" ? "source" : name], change(name === "data_source" ? "source" : name));
  fill(controls,
    runChoice(answerView.run, (value) => {
      Object.assign(answerView, { run: value, step: "", source: "", finish: "", at: 0 });
      drawAnswerView();
    }),
    segments("show", [["table", "all answers"], ["prompts", "same prompt over steps"]], answerView.mode, (value) => {
      answerView.mode = value;
      drawAnswerView();
    }),
    answerView.mode === "table" && kept.rows.length ? [
      searchBox("find", "text of prompt or answer", answerView.query, change("query")),
      list("step", "step"),
      values("data_source").length > 1 && list("data_source", "source"),
      values("finish").length > 1 && list("finish", "finish"),
      choice("only", [["", "all"], ["best", "best score of its step"], ["worst", "worst score of its step"], ["error", "could not be scored"], ["up", "advantage above 0"], ["down", "advantage below 0"]], answerView.only, change("only")),
    ] : null);
  if (typing) focusAgain(controls, typing.getAttribute("aria-label"));
}

function drawAnswerBody() {
  if (answerView.mode === "table") drawAnswerTable();
}

function matchingAnswers(kept) {
  const words = answerView.query.toLowerCase();
  const ends = new Map();
  for (const row of kept.rows) {
    const [low, high] = ends.get(row.step) || [Infinity, -Infinity];
    if (row.score !== null) ends.set(row.step, [Math.min(low, row.score), Math.max(high, row.score)]);
  }
  const only = {
    "": () => true,
    error: (row) => Boolean(row.error),
    up: (row) => row.advantage > 0,
    down: (row) => row.advantage < 0,
    best: (row) => row.score !== null && row.score === ends.get(row.step)[1],
    worst: (row) => row.score !== null && row.score === ends.get(row.step)[0],
  }[answerView.only];
  const found = kept.rows.filter((row) => (answerView.step === "" || row.step === Number(answerView.step))
    && (answerView.source === "" || row.data_source === answerView.source)
    && (answerView.finish === "" || row.finish === answerView.finish)
    && only(row)
    && (!words || row.answer.toLowerCase().includes(words) || promptText(kept, row).toLowerCase().includes(words)));
  const value = answerView.sort === "prompt" ? (row) => promptText(kept, row) : (row) => row[answerView.sort] ?? null;
  const order = (a, b) => {
    const [x, y] = [value(a), value(b)];
    if (x === null || y === null) return (x === null) - (y === null);
    const sign = typeof x === "string" ? x.localeCompare(y) : x - y;
    return (answerView.down ? -sign : sign) || a.step - b.step || a.number - b.number;
  };
  return found.sort(order);
}

function drawAnswerTable() {
  const kept = keptAnswers(), found = matchingAnswers(kept);
  const pages = Math.max(1, Math.ceil(found.length / PER_PAGE));
  answerView.at = Math.min(answerView.at, pages - 1);
  const some = found.slice(answerView.at * PER_PAGE, (answerView.at + 1) * PER_PAGE);
  const largest = Math.max(1e-9, ...kept.rows.map((row) => Math.abs(row.advantage ?? 0)));
  const columns = COLUMNS.filter(([name]) => name !== "data_source" || new Set(kept.rows.map((r) => r.data_source)).size > 1);
  fill(byId("answer-body"),
    h("table", { class: "answers" },
      h("thead", {}, h("tr", {}, columns.map(([name, label]) => h("th", {
        class: name, "aria-sort": name === answerView.sort ? (answerView.down ? "descending" : "ascending") : "none",
      }, h("button", {
        type: "button",
        onclick: () => {
          answerView.down = answerView.sort === name ? !answerView.down : true;
          answerView.sort = name;
          drawAnswerTable();
        },
      }, label))))),
      h("tbody", {}, some.map((row) => answerRow(kept, row, columns, largest, found)))),
    found.length ? pager(found.length, pages) : note("No answer is like this."));
}

function answerRow(kept, row, columns, largest, found) {
  const cells = {
    step: () => String(row.step),
    prompt: () => shorten(promptText(kept, row), 160),
    answer: () => [row.error ? h("span", { class: "tag bad", title: row.error }, row.score === null ? "unscored" : "error") : null, shorten(row.answer, 220) || h("i", {}, "(empty)")],
    score: () => number(row.score),
    advantage: () => (row.advantage === null ? "–" : h("span", { class: "shade", style: { background: diverging(row.advantage / largest) } }, signed(row.advantage))),
    finish: () => row.finish,
    data_source: () => row.data_source,
  };
  const open = () => openAnswer(kept, row, found);
  return h("tr", {
    tabIndex: 0, onclick: open, onkeydown: (event) => { if (event.key === "Enter") open(); },
  }, columns.map(([name]) => h("td", { class: name }, cells[name]())));
}

function pager(count, pages) {
  const go = (to) => () => {
    answerView.at = to;
    drawAnswerTable();
  };
  const first = answerView.at * PER_PAGE + 1, last = Math.min(count, first + PER_PAGE - 1);
  return h("div", { class: "pager" },
    h("button", { type: "button", disabled: answerView.at === 0, onclick: go(answerView.at - 1) }, "← previous"),
    h("span", {}, `${first.toLocaleString("en")}–${last.toLocaleString("en")} of ${count.toLocaleString("en")}`),
    h("button", { type: "button", disabled: answerView.at >= pages - 1, onclick: go(answerView.at + 1) }, "next →"));
}
