// The page: the data read, then each part drawn.

async function start() {
  const data = JSON.parse(byId("data").textContent), trace = await readTrace(data.trace), metadata = data.trace.metadata || {};
  const analysis = {...data.analysis, metadata}, measured = analysis.modelled ? "modelled" : "measured";
  const title = `Trace of ${metadata.run || analysis.source || metadata.method || "a run"}`;
  document.title = byId("title").textContent = title;
  const [covered] = list(analysis.devices).map(device => device.covers).filter(Boolean);
  const facts = [known(analysis.method) ? `method ${analysis.method}` : null, known(analysis.backend) ? `backend ${analysis.backend}` : null,
    covered ? `${covered} as one device` : `${trace.devices.length} devices`, `${trace.count.toLocaleString("en-US")} events`, `times ${measured}`];
  byId("subtitle").textContent = facts.filter(Boolean).join(" \u00b7 ") + (analysis.why_modelled ? ` (${analysis.why_modelled})` : "");
  answer(analysis, measured);
  byId("timeline-h").append(" ", badge(measured));
  if (trace.window_ns)
    byId("legend").before(make("p", {class: "note", id: "window"}, `Of ${trace.count.toLocaleString("en-US")} events the page holds ${trace.rows.toLocaleString("en-US")}, from `
      + `${duration(trace.window_ns[0])} to ${duration(trace.window_ns[1])}. Where more of the run is in view, each pixel shows each kind's share of its time.`));
  const timeline = new Timeline(trace, analysis);
  if (trace.window_ns) {
    const go = make("button", {type: "button", id: "zoom-window", onclick: () => timeline.show(...trace.window_ns)}, "Window of events");
    byId("zoom-reset").after(go);
  }
  if (analysis.comparison) section("comparison", "Two runs", measured, make("pre", {}, analysis.comparison));
  criticalPath(analysis, measured);
  devices(analysis, measured);
  waits(analysis, measured);
  memory(analysis, trace, measured);
  traffic(analysis, measured);
  stages(analysis, measured);
  stragglers(analysis, measured);
  counters(trace, measured);
  tracepoints(analysis, measured);
  const notes = [...new Set([...list(analysis.notes), ...list(trace.notes)])];
  if (notes.length) section("notes", "Notes", null, make("ul", {class: "notes"}, ...notes.map(note => make("li", {}, note))));
  for (const heading of document.querySelectorAll("main h2"))
    byId("nav").append(make("a", {href: "#" + heading.parentElement.id}, heading.firstChild.textContent));
  document.documentElement.dataset.ready = "true";
}

start().catch(error => {
  byId("main").prepend(make("p", {class: "note", role: "alert"}, `The page cannot be drawn: ${error.message}`));
  throw error;
});
