/* Plotly, which is unpacked when the first plot is drawn, and how all plots look. */

let plotlyReady = null;

function plotly() {
  plotlyReady ??= unpack("data-plotly").then((code) => {
    const script = document.createElement("script");
    script.nonce = document.querySelector("script[nonce]").nonce;
    script.textContent = code;
    document.head.append(script);
    return window.Plotly;
  });
  return plotlyReady;
}

function style(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function layoutOf(extra) {
  const { xaxis, yaxis, ...others } = extra;
  const axis = {
    gridcolor: style("--grid"), linecolor: style("--line"), zerolinecolor: style("--line"),
    tickfont: { size: 11 }, automargin: true, exponentformat: "power",
  };
  return {
    font: { family: style("--font"), size: 12, color: style("--text") },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    margin: { l: 48, r: 12, t: 8, b: 36 }, showlegend: false, hovermode: "x unified", uirevision: "kept",
    hoverlabel: { bgcolor: style("--card"), bordercolor: style("--line"), font: { size: 12, color: style("--text") } },
    xaxis: { ...axis, showgrid: false, ...xaxis, title: { font: { size: 11, color: style("--soft") }, standoff: 6, ...xaxis?.title } },
    yaxis: { ...axis, ...yaxis, title: { font: { size: 11, color: style("--soft") }, standoff: 6, ...yaxis?.title } },
    ...others,
  };
}

async function drawPlot(element, traces, layout) {
  const Plotly = await plotly();
  if (!element.isConnected) return;
  await Plotly.react(element, traces, layoutOf(layout), {
    responsive: true, displaylogo: false, modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"],
  });
}

function plain(text) {
  /* Plotly reads some tags in names; here all of a name is text. */
  return text.replaceAll("&", "&amp;").replaceAll("<", "&lt;");
}

function fade(color, share) {
  /* "#rrggbb" with an opacity */
  return color + Math.round(share * 255).toString(16).padStart(2, "0");
}
