/* The views, and following runs that are training. */

const VIEWS = {
  overview: ["Overview", drawOverview], curves: ["Curves", drawCurves], answers: ["Answers", drawAnswers],
  time: ["Time", drawTime], config: ["Config", drawConfig],
};

function currentView() {
  const name = location.hash.replace("#show-", ""); // no element's, or the page would scroll to it
  return Object.hasOwn(VIEWS, name) ? name : "overview";
}

function drawTabs() {
  fill(byId("tabs"), Object.entries(VIEWS).map(([name, [title]]) => h("a", {
    href: `#show-${name}`, id: `tab-${name}`, role: "tab", "aria-selected": String(name === currentView()),
  }, title)));
}

async function drawView() {
  const name = currentView();
  for (const view of Object.keys(VIEWS)) byId(view).hidden = view !== name;
  drawTabs();
  await VIEWS[name][1]();
}

function drawHead() {
  const names = page.data.runs.map((run) => run.name);
  byId("title").textContent = names.length === 1 ? names[0] : `${names.length} runs`;
  document.title = `${names.join(", ")} – jaxrl_llm`;
  const time = new Date(page.data.made).toLocaleString("sv").slice(0, 16);
  fill(byId("made"), page.live ? [h("i", { class: "live" }), `follows the run, read ${time.slice(11)}`] : `as of ${time}`);
  drawLegend();
}

async function poll() {
  try {
    const query = new URLSearchParams(page.live);
    const answer = await fetch(`data?${query}`, { cache: "no-store" });
    if (!answer.ok) throw new Error(String(answer.status));
    const { versions, metrics, answers } = await answer.json();
    page.live = versions;
    if (metrics) page.data = metrics;
    if (answers) page.answers = answers;
    const wasLost = document.body.classList.contains("lost");
    document.body.classList.remove("lost");
    if (metrics || answers || wasLost) drawHead();
    if (answers || (metrics && currentView() !== "answers")) await drawView();
  } catch (error) {
    document.body.classList.add("lost");
    fill(byId("made"), h("i", { class: "live" }), `no answer from the server (${error.message}); trying again`);
  }
  setTimeout(poll, page.pollMs);
}

async function start() {
  const { live, ...data } = JSON.parse(await unpack("data-metrics"));
  page.data = data;
  page.live = live;
  window.addEventListener("hashchange", drawView);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawView);
  drawHead();
  await drawView();
  document.body.dataset.ready = Math.round(performance.now()); // in ms, for who measures it
  if (page.live) setTimeout(poll, page.pollMs);
}

start();
