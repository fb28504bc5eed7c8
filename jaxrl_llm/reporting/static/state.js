/* What is shown, and what the reader has chosen. */

const COLORS = ["#3b7ddd", "#e0762f", "#2a9d6f", "#b565c4", "#c9a227", "#d1495b", "#17a2b8", "#8d6e63"];

const page = {
  data: null, // runs, groups, metrics
  answers: null, // of each run, once they are unpacked
  hidden: new Set(), // names of runs
  live: null, // versions of what is shown, where a server follows the runs
  pollMs: 2000, // between two questions to the server
};

function runs() {
  return page.data.runs.map((run, index) => ({ ...run, index, color: COLORS[index % COLORS.length] }));
}

function shownRuns() {
  return runs().filter((run) => !page.hidden.has(run.name));
}

async function loadAnswers() {
  if (page.answers === null) {
    const first = JSON.parse(await unpack("data-answers"));
    page.answers ??= first; // newer ones may have come meanwhile
  }
  return page.answers;
}

function runChoice(current, onchange) {
  if (page.data.runs.length < 2) return null;
  return choice("run", runs().map((run) => [run.index, run.name]), current, (value) => onchange(Number(value)));
}

function drawLegend() {
  const legend = byId("legend");
  legend.hidden = page.data.runs.length < 2;
  fill(legend, runs().map((run) => h("button", {
    type: "button", class: "run", "aria-pressed": String(!page.hidden.has(run.name)),
    title: `show or hide ${run.folder}`,
    onclick: () => {
      if (!page.hidden.delete(run.name)) page.hidden.add(run.name);
      drawLegend();
      drawView();
    },
  }, h("i", { style: { background: run.color } }), run.name)));
}
