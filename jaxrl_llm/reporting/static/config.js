/* The configs: of one run all keys, of several those that differ. */

const configView = { query: "", all: false };

function drawConfig() {
  const section = byId("config");
  if (!section.firstChild) fill(section, h("div", { class: "controls", id: "config-controls" }), h("div", { id: "config-table" }));
  const several = page.data.runs.length > 1;
  const controls = byId("config-controls");
  if (!controls.firstChild) {
    fill(controls, searchBox("find a key or a value", "algorithm.loss, 1e-6 …", configView.query, (value) => {
      configView.query = value;
      drawConfigTable();
    }), several && check("all keys, not only those that differ", configView.all, (value) => {
      configView.all = value;
      drawConfigTable();
    }));
  }
  drawConfigTable();
}

function drawConfigTable() {
  const shown = shownRuns(), several = shown.length > 1;
  const keys = [...new Set(shown.flatMap((run) => Object.keys(run.config)))];
  if (several) keys.sort();
  const differs = (key) => shown.some((run) => run.config[key] !== shown[0].config[key]);
  const query = configView.query.toLowerCase();
  const found = keys.filter((key) => (!several || configView.all || differs(key))
    && `${key} ${shown.map((run) => run.config[key]).join(" ")}`.toLowerCase().includes(query));
  fill(byId("config-table"),
    several && note(configView.all ? "Keys that differ are marked." : "Keys whose values differ between these runs."),
    found.length ? h("table", { class: "config" },
      h("thead", {}, h("tr", {}, h("th", {}, "key"), shown.map((run) => h("th", {}, several ? run.name : "value")))),
      h("tbody", {}, found.map((key) => h("tr", { class: several && configView.all && differs(key) ? "differs" : "" },
        h("th", { scope: "row" }, key), shown.map((run) => h("td", {}, run.config[key] ?? "–"))))))
      : note(several && !query ? "The configs are the same." : "No key or value has this text."));
}
