/* The curves of all metrics, in groups. A plot is drawn when it comes into view. */

const curveView = { query: "", smoothing: 0, log: false, axis: "step" };
const AXES = { step: "step", seconds: "time", tokens: "tokens" };
const STATISTICS = ["mean", "max", "min"];
const FEW = 24; // points, which are shown as such and not smoothed
let curveObserver = null;

function drawCurves() {
  const section = byId("curves");
  if (!section.firstChild) {
    fill(section, curveControls(), h("p", { class: "note", id: "curve-note" }), h("div", { id: "curve-groups" }));
  }
  layCurves();
}

function curveControls() {
  const slider = h("input", {
    type: "range", min: 0, max: 0.99, step: 0.01, value: curveView.smoothing, id: "smoothing", "aria-label": "smoothing",
    oninput: (event) => {
      curveView.smoothing = Number(event.target.value);
      byId("smoothing-value").textContent = curveView.smoothing.toFixed(2);
      noteCurves();
      redrawCurves();
    },
  });
  return h("div", { class: "controls" },
    searchBox("find a metric", "score, entropy, timing_s …", curveView.query, (value) => {
      curveView.query = value;
      layCurves();
    }),
    h("label", { class: "field", title: "Exponential moving average: the share of the past in each point" },
      h("span", {}, "smoothing ", h("b", { id: "smoothing-value" }, curveView.smoothing.toFixed(2))), slider),
    segments("x axis", Object.entries(AXES), curveView.axis, (value) => {
      curveView.axis = value;
      redrawCurves();
    }),
    segments("y axis", [["linear", "linear"], ["log", "log"]], curveView.log ? "log" : "linear", (value) => {
      curveView.log = value === "log";
      redrawCurves();
    }));
}

function families() {
  /* Metrics with /mean, /max and /min share a plot. Returns [{name, group, meaning, metrics}]. */
  const known = page.data.metrics, found = new Map();
  for (const metric of Object.keys(known)) {
    const cut = metric.lastIndexOf("/"), start = metric.slice(0, cut);
    const together = STATISTICS.includes(metric.slice(cut + 1)) && STATISTICS.every((s) => `${start}/${s}` in known);
    const name = together ? start : metric;
    if (!found.has(name)) {
      const [group, meaning] = known[metric];
      const metrics = together ? STATISTICS.map((s) => `${start}/${s}`) : [metric];
      found.set(name, { name, group, meaning, metrics });
    }
  }
  return [...found.values()];
}

function layCurves() {
  const words = curveView.query.toLowerCase().split(/\s+/).filter(Boolean);
  const present = new Set(shownRuns().flatMap((run) => Object.keys(run.curves)));
  const shown = families().filter((family) => family.metrics.some((metric) => present.has(metric))
    && words.every((word) => `${family.metrics.join(" ")} ${family.meaning} ${family.group}`.toLowerCase().includes(word)));
  const wanted = shown.map((family) => family.name).join("\n");
  const holder = byId("curve-groups");
  if (holder.dataset.names !== wanted) {
    holder.dataset.names = wanted;
    curveObserver?.disconnect();
    curveObserver = new IntersectionObserver(seePlots, { rootMargin: "300px" });
    fill(holder, page.data.groups.map((group) => groupSection(group, shown.filter((f) => f.group === group))));
    if (!shown.length) fill(holder, note(present.size ? "No metric has these words in its name or meaning." : "The run has not written a step yet."));
    for (const plot of holder.querySelectorAll(".plot")) curveObserver.observe(plot);
  }
  noteCurves();
  redrawCurves();
}

function groupSection(group, members) {
  if (!members.length) return null;
  return h("details", { class: "group", open: true },
    h("summary", {}, h("h2", {}, group), h("small", {}, plural(members.length, "plot"))),
    h("div", { class: "plots" }, members.map((family) => {
      const plot = h("div", { class: "plot", "data-family": family.name });
      plot.family = family;
      return h("figure", { class: "card" },
        h("figcaption", {}, h("code", {}, family.name), h("span", {}, family.meaning + (family.metrics.length > 1 ? " (mean; dotted: highest and lowest)" : ""))),
        plot);
    })));
}

function noteCurves() {
  const parts = [];
  if (curveView.smoothing > 0) parts.push(`Curves of up to ${FEW} points are not smoothed.`);
  const long = Math.max(0, ...shownRuns().flatMap((run) => Object.values(run.curves).map((c) => c.per_part || 0)));
  if (long) {
    parts.push(`Long curves show the lowest and the highest point of every ${long} steps, so no peak is lost; smoothing starts from the means of these steps.`);
  }
  if (shownRuns().some((run) => Object.values(run.curves).some((curve) => curve.gaps))) {
    parts.push("A red cross on the axis marks a step whose value was not finite (NaN or infinite).");
  }
  fill(byId("curve-note"), parts.join(" "));
}

function seePlots(entries) {
  for (const entry of entries) {
    entry.target.seen = entry.isIntersecting;
    if (entry.isIntersecting && entry.target.stale !== false) drawCurve(entry.target);
  }
}

function redrawCurves() {
  for (const plot of document.querySelectorAll("#curve-groups .plot")) {
    plot.stale = true;
    if (plot.seen) drawCurve(plot);
  }
}

function drawCurve(plot) {
  plot.stale = false;
  const traces = shownRuns().flatMap((run) => plot.family.metrics.flatMap((metric, i) => tracesOf(run, metric, i > 0)));
  const unit = axisUnit();
  return drawPlot(plot, traces, {
    height: 220,
    xaxis: { title: { text: unit.title }, rangemode: "tozero", hoverformat: unit.hover },
    yaxis: { type: curveView.log ? "log" : "linear", hoverformat: ".4g" },
    uirevision: `${curveView.axis} ${curveView.log}`,
  });
}

function axisUnit() {
  if (curveView.axis === "step") return { title: "step", scale: 1, hover: "d" };
  if (curveView.axis === "tokens") return { title: "tokens trained on", scale: 1, hover: ".4s" };
  const longest = Math.max(0, ...shownRuns().map((run) => run.axes.seconds[run.axes.seconds.length - 1] || 0));
  const [title, scale] = longest > 7200 ? ["hours of steps", 3600] : longest > 180 ? ["minutes of steps", 60] : ["seconds of steps", 1];
  return { title, scale, hover: ".4g" };
}

function positions(run, steps) {
  /* The places of steps on the chosen axis; between those that are known they lie on a line. */
  if (curveView.axis === "step") return steps;
  const known = run.axes.step, values = run.axes[curveView.axis], { scale } = axisUnit();
  let at = 0;
  return steps.map((step) => {
    while (at < known.length - 1 && known[at + 1] <= step) at += 1;
    const next = Math.min(at + 1, known.length - 1);
    const share = known[next] > known[at] ? (step - known[at]) / (known[next] - known[at]) : 0;
    return (values[at] + share * (values[next] - values[at])) / scale;
  });
}

function tracesOf(run, metric, dotted) {
  const curve = run.curves[metric];
  if (!curve) return [];
  const statistic = metric.slice(metric.lastIndexOf("/") + 1);
  const several = shownRuns().length > 1, label = STATISTICS.includes(statistic) ? statistic : metric.split("/").pop();
  const name = several ? `${run.name} ${STATISTICS.includes(statistic) ? statistic : ""}`.trim() : label;
  const base = { type: "scatter", name: plain(name), mode: curve.x.length > FEW ? "lines" : "lines+markers", connectgaps: false };
  const smooth = curveView.smoothing > 0 && curve.x.length > FEW;
  const raw = withGaps(run, curve);
  const traces = [{
    ...base, ...raw, meta: "raw", hoverinfo: smooth ? "skip" : undefined,
    line: { color: smooth || dotted ? fade(run.color, smooth ? 0.25 : 0.55) : run.color, width: dotted ? 1.2 : smooth ? 1 : 1.8, dash: dotted ? "dot" : "solid" },
    marker: { color: dotted ? fade(run.color, 0.55) : run.color, size: dotted ? 3 : 5 },
  }];
  if (smooth) {
    const x = curve.mean_x || curve.x, y = movingAverage(curve.mean_y || curve.y, curveView.smoothing);
    traces.push({
      ...base, x: positions(run, x), y, meta: "smooth", mode: "lines",
      line: { color: dotted ? fade(run.color, 0.6) : run.color, width: dotted ? 1.2 : 2, dash: dotted ? "dot" : "solid" },
    });
  }
  if (curve.gaps) traces.push(gapMarks(run, curve));
  return traces;
}

function withGaps(run, curve) {
  if (!curve.gaps) return { x: positions(run, curve.x), y: curve.y };
  const points = [...curve.x.map((x, i) => [x, curve.y[i]]), ...curve.gaps.map((x) => [x, null])];
  points.sort((a, b) => a[0] - b[0]);
  return { x: positions(run, points.map((p) => p[0])), y: points.map((p) => p[1]) };
}

function gapMarks(run, curve) {
  const finite = curve.y.filter((y) => !curveView.log || y > 0);
  const low = finite.length ? Math.min(...finite) : 1;
  return {
    type: "scatter", mode: "markers", name: "not finite", meta: "gaps", hovertemplate: "not finite<extra></extra>",
    x: positions(run, curve.gaps), y: curve.gaps.map(() => low),
    marker: { symbol: "x", color: style("--bad"), size: 7 },
  };
}

function movingAverage(values, weight) {
  /* Exponential, and as if nothing came before the first value. */
  let sum = 0, norm = 0;
  return values.map((value) => {
    sum = weight * sum + (1 - weight) * value;
    norm = weight * norm + (1 - weight);
    return sum / norm;
  });
}
