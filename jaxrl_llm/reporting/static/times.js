/* Where the time of the steps went, and their memory. */

const timeView = { run: 0, bar: null };
const STAGE_COLORS = ["#3b7ddd", "#2a9d6f", "#c9a227", "#b565c4", "#e0762f", "#17a2b8", "#d1495b", "#8d6e63", "#5b6fc0", "#7a9a3a"];
const OTHER_COLOR = "#9aa3ad";
const CUT = 4; // bars of so many times the usual length are cut

function drawTime() {
  const section = byId("time");
  const times = page.data.runs[timeView.run].times;
  if (!section.firstChild) {
    fill(section, h("div", { class: "controls", id: "time-controls" }), h("div", { id: "time-body" }));
  }
  if (page.data.runs.length > 1 && !byId("time-controls").firstChild) {
    fill(byId("time-controls"), runChoice(timeView.run, (value) => {
      Object.assign(timeView, { run: value, bar: null });
      fill(byId("time-body"));
      drawTime();
    }));
  }
  const body = byId("time-body");
  if (!times.whole.length) {
    fill(body, note("The run has not timed a step yet."));
    return;
  }
  if (!byId("time-plot")) {
    fill(body,
      h("figure", { class: "card" }, h("figcaption", {}, h("strong", {}, "Seconds of each step, by stage"), h("span", { id: "time-note" })),
        h("div", { class: "plot", id: "time-plot" })),
      h("div", { class: "card", id: "one-step" }),
      h("figure", { class: "card" }, h("figcaption", {}, h("strong", {}, "Peak memory so far"), h("span", {}, "of this process, and of its first device where that reports it")),
        h("div", { class: "plot", id: "memory-plot" })));
  }
  drawTimePlot(times);
  drawOneStep(times);
  drawMemory();
}

function stagesOf(times) {
  /* The stages and what is left of the step, with colours. */
  const rest = times.whole.map((whole, i) => Math.max(0, whole - times.seconds.reduce((sum, s) => sum + s[i], 0)));
  const stages = times.stages.map((name, i) => ({ name, seconds: times.seconds[i], color: STAGE_COLORS[i % STAGE_COLORS.length] }));
  return [...stages, { name: "other", seconds: rest, color: OTHER_COLOR }];
}

function barName([first, last]) {
  return first === last ? `step ${first}` : `steps ${first}–${last}`;
}

async function drawTimePlot(times) {
  const sorted = [...times.whole].sort((a, b) => a - b), usual = sorted[Math.floor(sorted.length * 0.9)];
  const cut = sorted[sorted.length - 1] > CUT * usual;
  const wide = times.steps.some(([a, b]) => a !== b);
  byId("time-note").textContent = [
    wide ? "A bar is the mean of a few steps; click one to see its stages." : "Click a bar to see the stages of its step.",
    cut ? "The longest bars are cut off, double-click to see them whole." : "",
  ].filter(Boolean).join(" ");
  const x = times.steps.map(([first, last]) => (first + last) / 2);
  const gap = x.length > 120 ? 0 : 0.15, width = times.steps.map(([first, last]) => last - first + 1 - gap);
  const traces = stagesOf(times).map((stage) => ({
    type: "bar", name: plain(stage.name), x, width, y: stage.seconds, marker: { color: stage.color, line: { width: 0 } },
    hovertemplate: "%{y:.3g} s", customdata: times.steps.map(barName),
  }));
  const plot = byId("time-plot");
  await drawPlot(plot, traces, {
    height: 320, barmode: "stack", showlegend: true,
    legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, font: { size: 11 }, traceorder: "normal" },
    margin: { l: 48, r: 12, t: 40, b: 40 },
    xaxis: { title: { text: "step" } },
    yaxis: { title: { text: "seconds" }, range: cut ? [0, 1.6 * usual] : undefined, autorange: !cut, rangemode: "tozero" },
  });
  if (!plot.listens && plot.on) {
    plot.listens = true;
    plot.on("plotly_click", (event) => {
      timeView.bar = event.points[0].pointIndex;
      drawOneStep(page.data.runs[timeView.run].times);
    });
  }
}

function drawOneStep(times) {
  const count = times.whole.length, bar = Math.min(timeView.bar ?? count - 1, count - 1);
  const parts = stagesOf(times).map((stage) => ({ ...stage, length: stage.seconds[bar] })).filter((part) => part.length > 0);
  const whole = Math.max(times.whole[bar], parts.reduce((sum, part) => sum + part.length, 0));
  const go = (to) => () => {
    timeView.bar = to;
    drawOneStep(times);
  };
  let start = 0;
  const rows = parts.map((part) => {
    const from = start;
    start += part.length;
    const meaning = part.name === "other" ? "what no stage has timed" : page.data.metrics[`timing_s/${part.name}`]?.[1];
    return h("tr", {},
      h("th", { scope: "row" }, h("i", { class: "dot", style: { background: part.color } }), part.name),
      h("td", { class: "lane" }, h("i", { style: { background: part.color, left: `${(100 * from) / whole}%`, width: `${Math.max(0.3, (100 * part.length) / whole)}%` } })),
      h("td", { class: "amount" }, seconds(part.length)),
      h("td", { class: "amount" }, `${((100 * part.length) / whole).toFixed(1)} %`),
      h("td", { class: "meaning" }, meaning || ""));
  });
  fill(byId("one-step"),
    h("div", { class: "card-head" },
      h("h3", {}, `${barName(times.steps[bar])}: ${seconds(times.whole[bar])}`),
      h("button", { type: "button", disabled: bar === 0, onclick: go(bar - 1) }, "← earlier"),
      h("button", { type: "button", disabled: bar === count - 1, onclick: go(bar + 1) }, "later →")),
    h("table", { class: "timeline" }, h("tbody", {}, rows)));
}

function drawMemory() {
  const run = runs()[timeView.run];
  const names = [["perf/cpu_memory_used_gb", "process"], ["perf/max_memory_allocated_gb", "device"]].filter(([name]) => run.curves[name]);
  byId("memory-plot").closest("figure").hidden = !names.length;
  if (!names.length) return null;
  return drawPlot(byId("memory-plot"), names.map(([name, label], i) => ({
    type: "scatter", mode: run.curves[name].x.length > 1 ? "lines" : "markers", name: label, x: run.curves[name].x, y: run.curves[name].y, line: { color: COLORS[i], width: 2 },
  })), {
    height: 200, showlegend: names.length > 1, legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 },
    xaxis: { title: { text: "step" } }, yaxis: { title: { text: "GiB" }, rangemode: "tozero", hoverformat: ".3f" },
  });
}
