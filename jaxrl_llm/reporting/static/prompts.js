/* How the answers to one prompt change over the steps. */

const promptView = { prompt: null, query: "" };
const ANSWERS_OF_A_STEP = 16;

function drawPrompts(kept) {
  const byPrompt = new Map();
  for (const row of kept.rows) {
    if (!byPrompt.has(row.prompt)) byPrompt.set(row.prompt, new Map());
    const steps = byPrompt.get(row.prompt);
    if (!steps.has(row.step)) steps.set(row.step, []);
    steps.get(row.step).push(row);
  }
  const several = [...byPrompt].filter(([, steps]) => steps.size > 1).sort((a, b) => b[1].size - a[1].size || a[0] - b[0]);
  const body = byId("answer-body");
  if (!several.length) {
    fill(body, note("No prompt is there at two of these steps. A smaller rollout.dump_every, or more passes over the data, gives some."));
    return;
  }
  if (!several.some(([prompt]) => prompt === promptView.prompt)) promptView.prompt = several[0][0];
  const text = (prompt) => promptText(kept, { prompt });
  const listed = several.filter(([prompt]) => text(prompt).toLowerCase().includes(promptView.query.toLowerCase())).slice(0, 500);
  const steps = byPrompt.get(promptView.prompt);
  fill(body,
    h("div", { class: "controls tight" },
      searchBox("find a prompt", `among ${several.length.toLocaleString("en")} that several steps have`, promptView.query, (value) => {
        promptView.query = value;
        if (listed.length) promptView.prompt = (several.find(([p]) => text(p).toLowerCase().includes(value.toLowerCase())) || several[0])[0];
        drawPrompts(kept);
        focusAgain(byId("answer-body"), "find a prompt");
      }),
      choice("prompt", listed.map(([prompt, found]) => [prompt, `${shorten(text(prompt), 80)}  (${found.size} steps)`]), promptView.prompt, (value) => {
        promptView.prompt = Number(value);
        drawPrompts(kept);
      })),
    h("div", { class: "message" }, h("b", {}, "prompt"), h("pre", {}, text(promptView.prompt))),
    h("figure", { class: "card" }, h("figcaption", {}, h("span", {}, "Score of each answer, and their mean")), h("div", { class: "plot", id: "prompt-plot" })),
    h("div", { class: "over-steps" }, [...steps].map(([step, rows]) => stepColumn(kept, step, rows))));
  drawPromptPlot(steps);
}

function meanScore(rows) {
  const scores = rows.map((row) => row.score).filter((score) => score !== null);
  return scores.length ? scores.reduce((a, b) => a + b, 0) / scores.length : null;
}

function stepColumn(kept, step, rows) {
  const most = rows.slice(0, ANSWERS_OF_A_STEP);
  return h("div", { class: "step-column" },
    h("h3", {}, `step ${step}`), h("small", {}, `mean score ${number(meanScore(rows), 3)}`),
    most.map((row) => h("button", { type: "button", class: "small-answer", onclick: () => openAnswer(kept, row, rows) },
      h("span", { class: "score" }, number(row.score, 3)), h("span", {}, shorten(row.answer, 300) || "(empty)"))),
    rows.length > most.length && h("small", {}, `and ${rows.length - most.length} more`));
}

function drawPromptPlot(steps) {
  const run = runs()[answerView.run], rows = [...steps.values()].flat();
  return drawPlot(byId("prompt-plot"), [
    { type: "scatter", mode: "markers", name: "answer", x: rows.map((row) => row.step), y: rows.map((row) => row.score), marker: { color: fade(run.color, 0.35), size: 9 }, hoverinfo: "skip" },
    { type: "scatter", mode: "lines+markers", name: "mean score", x: [...steps.keys()], y: [...steps.values()].map(meanScore), line: { color: run.color, width: 2 } },
  ], { height: 200, xaxis: { title: { text: "step" } }, yaxis: { title: { text: "score" }, hoverformat: ".4g" } });
}
