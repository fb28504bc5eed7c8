/* Each run in short: how far it is, its key numbers, and what looks wrong. */

const STATES = {
  training: "training", finished: "finished", stopped: "stopped", empty: "no step yet",
};

const GLANCES = 3; // plots below the runs

function drawOverview() {
  const section = byId("overview");
  if (!section.firstChild) fill(section, h("div", { id: "run-cards" }), h("div", { id: "glances", class: "plots" }));
  fill(byId("run-cards"), shownRuns().map(runCard));
  requestAnimationFrame(() => setTimeout(drawGlances)); // once the numbers can be read
}

function drawGlances() {
  /* The curves of the first key numbers, of all runs. */
  const numbers = new Map(shownRuns().flatMap((run) => run.key_numbers.map((row) => [row.metric, row.label])));
  const metrics = [...numbers.keys()].slice(0, GLANCES), holder = byId("glances");
  if (holder.dataset.names !== metrics.join("\n")) {
    holder.dataset.names = metrics.join("\n");
    fill(holder, metrics.map((metric) => h("figure", { class: "card" },
      h("figcaption", {}, h("strong", {}, numbers.get(metric)), h("code", { class: "path" }, metric)), h("div", { class: "plot", "data-metric": metric }))));
  }
  for (const plot of holder.querySelectorAll(".plot")) {
    drawPlot(plot, shownRuns().flatMap((run) => tracesOf(run, plot.dataset.metric, false)), {
      height: 220, xaxis: { title: { text: axisUnit().title }, rangemode: "tozero" }, yaxis: { hoverformat: ".4g" },
    });
  }
}

function runCard(run) {
  return h("article", { class: "card run-card" },
    h("div", { class: "card-head" },
      page.data.runs.length > 1 && h("i", { class: "dot", style: { background: run.color } }),
      h("h2", {}, run.name), statusPill(run.status), h("span", { class: "path" }, run.folder)),
    h("p", { class: "summary" }, run.summary),
    progress(run.status),
    h("div", { class: "columns" },
      h("div", {}, h("h3", {}, "Key numbers"), keyNumbers(run)),
      h("div", {}, h("h3", {}, "What looks wrong"), findings(run), problems(run), h("h3", {}, "The run"), runFacts(run))));
}

function runFacts(run) {
  return h("table", { class: "run-facts" }, h("tbody", {}, Object.entries(run.facts).map(([name, value]) =>
    h("tr", {}, h("th", { scope: "row" }, name), h("td", {}, value)))));
}

function statusPill(status) {
  const of = status.planned ? ` of ${status.planned.toLocaleString("en")}` : "";
  const at = status.step === null ? "" : status.state === "finished"
    ? `, ${plural(status.step, "step")}` : `${status.state === "stopped" ? " at" : ","} step ${status.step.toLocaleString("en")}${of}`;
  return h("span", { class: `pill ${status.state}` }, STATES[status.state] + at);
}

function progress(status) {
  if (!status.planned || status.step === null || status.state === "finished") return null;
  const share = Math.min(1, status.step / status.planned);
  return h("div", { class: "progress", title: `${Math.round(share * 100)} % of the steps` },
    h("i", { style: { width: `${share * 100}%` } }));
}

function keyNumbers(run) {
  if (!run.key_numbers.length) return note("The run has not written a step yet.");
  const point = (pair) => (pair ? [number(pair[1]), h("small", {}, `step ${pair[0]}`)] : null);
  return h("table", { class: "numbers" },
    h("thead", {}, h("tr", {}, ["", "first", "last", "best", "range", ""].map((name, i) => h("th", { class: i === 5 ? "spark" : "" }, name)))),
    h("tbody", {}, run.key_numbers.map((row) => h("tr", {},
      h("th", { scope: "row", title: row.metric }, row.label),
      h("td", {}, point(row.first)),
      h("td", { class: "last" }, point(row.last)),
      h("td", {}, row.best ? point(row.best) : h("span", { title: "neither more nor less is better" }, "–")),
      h("td", {}, number(row.span[0], 3), h("small", {}, `to ${number(row.span[1], 3)}`)),
      h("td", { class: "spark" }, sparkline(run.curves[row.metric], run.color))))));
}

function sparkline(curve, color) {
  const { x, y } = curve;
  if (x.length < 2) return null;
  const low = Math.min(...y), high = Math.max(...y), first = x[0], span = x[x.length - 1] - first || 1;
  const points = x.map((step, i) => {
    const height = high > low ? (y[i] - low) / (high - low) : 0.5;
    return `${(2 + 216 * (step - first) / span).toFixed(1)},${(26 - 24 * height).toFixed(1)}`;
  });
  const space = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(space, "svg");
  svg.setAttribute("viewBox", "0 0 220 28");
  svg.setAttribute("aria-hidden", "true");
  const line = document.createElementNS(space, "polyline");
  line.setAttribute("points", points.join(" "));
  line.setAttribute("stroke", color);
  svg.append(line);
  return svg;
}

function findings(run) {
  if (run.findings === null) return note("This could not be checked.");
  if (!run.findings.length) {
    return run.status.state === "empty" ? note("There is nothing to check yet.")
      : h("p", { class: "well" }, "Nothing looks wrong.");
  }
  return h("ul", { class: "findings" }, run.findings.map((finding) => h("li", { class: finding.severity },
    h("strong", {}, finding.title), " ",
    finding.steps.length ? h("small", {}, `step${finding.steps.length > 1 ? "s" : ""} ${stepRange(finding.steps)}`) : null,
    h("p", {}, finding.detail), docsLink(finding.page))));
}

function docsLink(place) {
  if (!place) return null;
  const start = page.live && page.data.docs ? "docs" : page.data.docs;
  const attributes = start ? { href: `${start}/${place}`, target: "_blank", rel: "noopener" } : { class: "path" };
  return h(start ? "a" : "span", attributes, `docs/${place}`);
}

function problems(run) {
  if (!run.problems.length) return null;
  return [h("h3", {}, "Files that could not be read"), h("ul", { class: "findings" },
    run.problems.map((text) => h("li", { class: "warning" }, text)))];
}
