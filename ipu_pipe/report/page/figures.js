// The figures of the analysis: each says whether it was measured, modelled or planned; what is missing is said to be.

const PARTS = [ // of a device's span, as they add up
  ["busy_ns", "busy", "forward"], ["communication_ns", "communication", "send"], ["wait_ns", "waiting", "wait"],
  ["ramp_up_ns", "ramp-up", "ramp"], ["ramp_down_ns", "ramp-down", "ramp"], ["idle_ns", "idle", "idle"],
];
const MEMORY = { // counters of memory: how they are called here, and their colour
  "weights (bytes)": ["weights", "forward"], "versions (bytes)": ["extra versions", "recompute"], "gradients (bytes)": ["gradients", "backward"],
  "optimizer (bytes)": ["optimizer state", "update"], "activations (bytes)": ["stashed activations", "send"], "buffers (bytes)": ["buffers in flight", "input-gradient"],
};
const INKS = Object.fromEntries(Object.values(MEMORY));

const badge = origin => make("span", {class: "origin " + origin}, origin);
const capital = text => text.charAt(0).toUpperCase() + text.slice(1);
const list = value => Array.isArray(value) ? value : [];
const stageName = (analysis, index) => {
  const names = [...new Set(list((analysis.metadata || {}).units).filter(unit => unit.stage === index).map(unit => unit.name))];
  return `stage ${index}` + (names.length ? ` (from ${names[0]})` : "");
};

// A device's name, with what it covers where that is more than one device.
const deviceName = device => `device ${device.index}` + (device.covers ? ` (${device.covers})` : "");

// A table without the columns of which nothing is known; `text`: which columns hold words, to the left.
function table(caption, heads, rows, {text = [0], wide = true} = {}) {
  const says = heads.map((_, k) => !k || rows.some(row => row[k] !== "not known")), places = heads.map((_, k) => k).filter(k => says[k]);
  const left = place => text.includes(places[place]) ? "text" : null, choose = cells => cells.filter((_, k) => says[k]);
  [heads, rows] = [choose(heads), rows.map(choose)];
  return make("table", {class: wide ? "wide" : null}, make("caption", {}, caption),
    make("thead", {}, make("tr", {}, ...heads.map((head, k) => make("th", {scope: "col", class: left(k)}, head)))),
    make("tbody", {}, ...rows.map(row => make("tr", {}, ...row.map((cell, k) => cell instanceof HTMLTableCellElement ? cell
      : make(k ? "td" : "th", {class: left(k), scope: k ? null : "row"}, cell))))));
}

function section(id, title, origin, ...children) {
  const heading = make("h2", {id: id + "-h"}, title, ...(origin ? [" ", badge(origin)] : []));
  const made = make("section", {id, "aria-labelledby": id + "-h"}, heading, ...children);
  byId("main").append(made);
  return made;
}

function answer(analysis, measured) {
  const at = byId("answer"), worst = analysis.bottleneck;
  if (worst) {
    const onDevice = known(worst.device) ? ` on device ${worst.device}` : "";
    const where = worst.what === "link" ? `the link from device ${worst.device}` : worst.what === "communication" ? "communication"
      : worst.what === "data" || worst.what === "host" ? `the ${worst.what} of device ${worst.device}`
      : worst.what === "outside" ? "evaluation, checkpoints and pauses"
      : known(worst.stage) ? stageName(analysis, worst.stage) + onDevice : known(worst.device) ? `device ${worst.device}` : "not known";
    at.append(make("p", {class: "lead", id: "bottleneck"}, make("b", {}, capital(where)), worst.why ? `: ${worst.why}` : "", " ", badge(measured)));
    if (worst.do) at.append(make("p", {class: "lead"}, capital(worst.do)));
    if (worst.why_no_gain) at.append(make("p", {class: "hint"}, `What moving boundaries would gain is not known: ${worst.why_no_gain}`));
    const move = worst.move;
    if (move) at.append(make("details", {}, make("summary", {}, "Boundaries now and then"), make("div", {class: "scroll"}, table(
      "Where stages begin and what each computes for a microbatch (measured now, predicted then)", ["Stage", "begins now", "busy now", "begins then", "busy then"],
      list(move.begins_now).map((name, s) => [s, name, duration(list(move.busy_now_ns)[s]), list(move.begins_then)[s] || "", duration(list(move.busy_then_ns)[s])]),
      {text: [0, 1, 3]}))));
  } else at.append(make("p", {class: "lead", id: "bottleneck"}, "The trace does not say enough to name a bottleneck."));
  const planned = (analysis.metadata || {}).planned_utilization, missing = analysis.planned_bubble_fraction;
  const overlap = analysis.overlap || {}, peak = list(analysis.memory).reduce((a, b) => !a || b.peak_bytes > a.peak_bytes ? b : a, null);
  const tiles = [
    ["Utilization of devices", percent(analysis.utilization), measured],
    ["Utilization of the schedule", percent(known(planned) ? planned : known(missing) ? 1 - missing : null), "planned"],
    ["Bubble: time not computing", percent(analysis.bubble_fraction), measured],
    ["Span", duration(analysis.span_ns), measured],
    ...(known(analysis.spread) ? [["Spread of the stages' times", percent(analysis.spread), measured]] : []),
    ["Gain by moving boundaries", worst && known(worst.gain) ? "+" + percent(worst.gain) : "not known", "predicted"],
    ["Gain if stages were equal", worst && known(worst.gain_if_balanced) ? "+" + percent(worst.gain_if_balanced) : "not known", "predicted"],
    ["Imbalance of devices", percent(analysis.imbalance), measured],
    ["Communication under compute", percent(overlap.share), measured],
    ["Greatest memory" + (peak ? `, device ${peak.device}` : ""), peak ? bytes(peak.peak_bytes) : "not known", measured],
  ];
  at.append(make("div", {class: "tiles"}, ...tiles.filter(([, value]) => value !== "not known").map(([what, value, origin]) =>
    make("div", {class: "tile"}, make("span", {class: "what"}, what), make("b", {}, value), badge(origin)))));
}

// The chain that decides the span: a strip with its pieces, and what shorter passes would save.
function criticalPath(analysis, measured) {
  const path = analysis.critical_path;
  // where several stages are as slow within the spread, another one would be on the path by chance
  if (!path || !list(path.pieces).length || list((analysis.bottleneck || {}).within_spread).length) return;
  const ink = kind => ["recv", "message"].includes(kind) ? "send" : kind === "host" || kind === "compute" ? "idle" : slug(kind), span = analysis.span_ns || 1;
  const strip = make("div", {class: "stacked", id: "path", role: "img", "aria-label": list(path.stages).map(row => `stage ${row.stage} ${percent(row.share)}`).join(", ")},
    ...path.pieces.map(piece => make("i", {style: {width: 100 * piece.duration_ns / span + "%", "background-color": `var(--${ink(piece.kind)})`},
      title: `${piece.kind}${known(piece.microbatch) ? " " + piece.microbatch : ""} on device ${piece.device}: ${duration(piece.duration_ns)} at ${duration(piece.start_ns)}`})));
  const shares = [...list(path.stages).map(row => [`stage ${row.stage}`, row]), ...list(path.links).map(row => [`link ${row.src} \u2192 ${row.dst}`, row]),
    ...list(path.kinds).map(row => [row.kind, row])];
  const saves = list(path.what_if).slice(0, 8).map(row => [`${row.kind} of stage ${row.stage}`, percent(row.shorter), duration(row.saves_ns), percent(row.share)]);
  section("critical-path", "Critical path", measured, make("p", {class: "hint"}, "The chain of passes and messages that decides the span: shortening anything else saves nothing. In the timeline a line runs along it." + (path.count > path.pieces.length ? ` The picture has the first ${path.pieces.length.toLocaleString("en-US")} of its ${path.count.toLocaleString("en-US")} pieces, the table all.` : "")), strip,
    make("div", {class: "scroll"}, table("Its time by stage, link and kind", ["Part", "time", "share of the span"], shares.map(([name, row]) => [name, duration(row.ns), percent(row.share)]))),
    saves.length ? make("div", {class: "scroll"}, table("What shorter passes would save (predicted)", ["Passes", "shorter by", "saves", "of the span"], saves)) : null);
}

// What the hosts of IPUs recorded beside our updates.
function tracepoints(analysis, measured) {
  const rows = list(analysis.tracepoints);
  if (rows.length) section("tracepoints", "Tracepoints of the host", measured, make("div", {class: "scroll"}, table("By channel and label; inner ones are within outer ones",
    ["Channel", "label", "count", "total", "longest"], rows.map(row => [row.channel, row.label, row.count, duration(row.total_ns), duration(row.longest_ns)]), {text: [0, 1]})));
}

const partKey = entries => make("div", {class: "legend"}, ...entries.map(([name, ink]) => make("span", {class: "key"},
  make("i", {class: "swatch" + (ink === "wait" ? " hatched" : ""), style: {"background-color": `var(--${ink})`}}), name)));

function devices(analysis, measured) {
  const rows = list(analysis.devices).map(device => {
    const span = analysis.span_ns || sum(PARTS.map(([key]) => device[key] || 0)) || 1;
    const bar = make("div", {class: "stacked", role: "img", "aria-label": PARTS.map(([key, name]) => `${name} ${percent((device[key] || 0) / span)}`).join(", ")},
      ...PARTS.filter(([key]) => device[key] > 0).map(([key, name, ink]) => make("i", {
        class: ink === "wait" ? "hatched" : null, title: `${name}: ${duration(device[key])}`,
        style: {width: 100 * device[key] / span + "%", "background-color": `var(--${ink})`},
      })));
    const parts = Object.entries(device.busy_ns_by_stage || {}).map(([stage, ns]) => `${stage} (${duration(ns)})`);
    return [deviceName(device), (parts.length > 1 ? parts : list(device.stages)).join(", "), make("td", {class: "stack"}, bar), ...PARTS.map(([key]) => duration(device[key])), percent(device.utilization)];
  });
  section("devices", "What each device did", measured, partKey([...PARTS.slice(0, 3), ["", "ramp-up and ramp-down", "ramp"], PARTS[5]].map(([, name, ink]) => [name, ink])),
    rows.length ? make("div", {class: "scroll"}, table(`Parts of the span of ${duration(analysis.span_ns)}`,
      ["Device", "Stages", "", ...PARTS.map(([, name]) => name), "utilization"], rows)) : make("p", {class: "note"}, "Not known."));
}

// A matrix with cells as dark as their share of the greatest.
function matrix(caption, corner, names, columns, value, told) {
  const most = greatest(names.flatMap(a => columns.map(b => value(a, b) || 0))) || 1;
  return make("div", {class: "scroll"}, table(caption, [corner, ...columns], names.map(a => [a, ...columns.map(b => {
    const found = value(a, b), share = (found || 0) / most;
    return make("td", {class: String(a) === String(b) ? "self" : null, style: found ? {"background-color": `rgba(var(--heat), ${.08 + .5 * share})`} : {}}, found ? told(found) : "\u00b7");
  })]), {wide: false}));
}

function waits(analysis, measured) {
  const found = list(analysis.devices), indices = found.map(device => String(device.index));
  const others = [...new Set(found.flatMap(device => Object.keys(device.waits_for || {})))].filter(name => !indices.includes(name));
  const of = Object.fromEntries(found.map(device => [device.index, device.waits_for || {}]));
  const any = found.some(device => Object.values(device.waits_for || {}).some(ns => ns > 0));
  section("waits", "Who waits for whom", measured, any
    ? matrix("Time that the row's device waits for the column's device", "waits \u2193  for \u2192", indices, [...indices, ...others], (a, b) => of[a][b], duration)
    : make("p", {class: "note"}, "No waits are recorded."));
}

// A chart of curves over time, stacked where there are several.
function chart(curve, spanNs, top, told, inks, mark) {
  const width = 640, height = 150, left = 62, bottom = 18, names = Object.keys(curve.values);
  const x = ns => left + Math.max(0, ns) / (spanNs || 1) * (width - left - 6), y = v => 8 + (1 - v / (top || 1)) * (height - bottom - 8);
  const base = new Array(curve.times.length).fill(0), shapes = [];
  for (const name of names) {
    const low = base.slice();
    curve.values[name].forEach((v, i) => base[i] += v || 0);
    const steps = heights => curve.times.map((t, i) => `${x(t).toFixed(1)} ${y(heights[i]).toFixed(1)}H${x(i + 1 < curve.times.length ? curve.times[i + 1] : spanNs).toFixed(1)}`);
    const back = curve.times.map((t, i) => [x(i + 1 < curve.times.length ? curve.times[i + 1] : spanNs), x(t), y(low[i])]).reverse();
    if (curve.times.length) shapes.push(make("path", {
      d: "M" + steps(base).join("L") + back.map(([right, t, v]) => `L${right.toFixed(1)} ${v.toFixed(1)}H${t.toFixed(1)}`).join("") + "Z",
      fill: `var(--${inks[name] || "forward"})`, "fill-opacity": names.length > 1 ? .9 : .55,
    }, make("title", {}, name)));
  }
  const ticks = [0, .5, 1].map(share => make("g", {}, make("line", {x1: left, x2: width - 6, y1: y(share * top), y2: y(share * top), stroke: "var(--line)"}),
    make("text", {x: left - 6, y: y(share * top) + 4, "text-anchor": "end"}, told(share * top))));
  const step = roundStep(spanNs || 1, 5), times = [];
  for (let at = 0; at < spanNs - step / 3; at += step) times.push(make("text", {x: x(at), y: height - 3}, moment(at, step)));
  const marks = mark ? [make("line", {x1: x(mark.at), x2: x(mark.at), y1: 4, y2: height - bottom, stroke: "var(--mark)", "stroke-width": 1.5, "stroke-dasharray": "4 3"}),
    make("text", {x: Math.min(x(mark.at) + 4, width - 90), y: 14, style: {fill: "var(--mark)"}}, "peak")] : [];
  return make("svg", {viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": mark ? mark.text : curve.name}, ...ticks, ...shapes, ...times, ...marks);
}

const whole = curve => curve.times.map((_, i) => sum(Object.values(curve.values).map(values => values[i] || 0)));

function memory(analysis, trace, measured) {
  const called = values => Object.fromEntries(Object.entries(values).map(([name, held]) => [(MEMORY[name] || [name])[0], held]));
  let curves = trace.curves.filter(curve => curve.name === "memory").map(curve => ({...curve, values: called(curve.values)}));
  const peaks = list(analysis.memory);
  if (!curves.length) // no counters here, but the analysis has their sum
    curves = peaks.filter(peak => list(peak.over_time).length).map(peak => ({name: "memory", device: peak.device, times: peak.over_time.map(point => point[0]), values: {all: peak.over_time.map(point => point[1])}}));
  if (!curves.length) return void section("memory", "Memory over time", null, make("p", {class: "note"}, "No memory was recorded."));
  const most = 16, tallest = greatest(curves.map(curve => greatest(whole(curve))));
  const shown = curves.length > most ? [...curves].sort((a, b) => greatest(whole(b)) - greatest(whole(a))).slice(0, most) : curves;
  const names = [...new Set(curves.flatMap(curve => Object.keys(curve.values)))];
  const figures = shown.map(curve => {
    const peak = peaks.find(one => one.device === curve.device), sums = whole(curve);
    const highest = peak ? peak.peak_bytes : greatest(sums), at = peak ? peak.at_ns : curve.times[sums.indexOf(highest)];
    const held = Object.entries((peak || {}).categories || {}).filter(([, size]) => size).map(([name, size]) => `${name} ${bytes(size)}`);
    const alive = peak ? list(peak.microbatches) : [];
    const text = `device ${curve.device}: peak ${bytes(highest)} at ${duration(at)}`;
    const more = [held.length ? `made of ${held.join(", ")}` : null, alive.length ? `microbatches under way: ${alive.slice(0, 24).join(", ")}${alive.length > 24 ? ", …" : ""}` : null];
    return make("figure", {"data-device": curve.device}, make("figcaption", {}, make("b", {}, text)), chart(curve, analysis.span_ns || trace.span_ns, tallest, bytes, INKS, {at, text}),
      ...more.filter(Boolean).map(line => make("p", {class: "hint"}, line)));
  });
  section("memory", "Memory over time", measured, partKey(names.map(name => [name, INKS[name] || "forward"])),
    shown.length < curves.length ? make("p", {class: "note"}, `The ${most} devices that hold most, of ${curves.length}.`) : null, make("div", {class: "charts"}, ...figures),
    peaks.length ? make("details", {}, make("summary", {}, "Peaks as a table"), make("div", {class: "scroll"}, table("What each device held at its peak", ["Device", "peak", "at", ...names],
      peaks.map(peak => [`device ${peak.device}`, bytes(peak.peak_bytes), duration(peak.at_ns), ...names.map(name => bytes((peak.categories || {})[name]))])))) : null);
}

function traffic(analysis, measured) {
  const links = list(analysis.links);
  if (!links.length) return void section("traffic", "Traffic", null, make("p", {class: "note"}, "No messages are recorded."));
  const names = [...new Set(links.flatMap(link => [link.src, link.dst]))].sort((a, b) => a - b), total = {};
  for (const link of links) total[[link.src, link.dst]] = (total[[link.src, link.dst]] || 0) + (link.bytes || 0);
  const rows = links.map(link => [`${link.src} \u2192 ${link.dst}`, link.carries || "", plain(link.messages), bytes(link.bytes), bytes(link.bytes_per_microbatch), duration(link.busy_ns),
    link.latency_ns ? `${duration(link.latency_ns.median)} (least ${duration(link.latency_ns.min)})` : "not known", link.counted || ""]);
  section("traffic", "Traffic", measured, matrix("Bytes from the row's device to the column's device", "from \u2193  to \u2192", names, names, (a, b) => total[[a, b]], bytes),
    make("h3", {}, "Links"), make("div", {class: "scroll"}, table("By direction and by what is carried; latency from the send's begin to the end of the wait for it, median",
      ["Link", "carries", "messages", "bytes", "a microbatch", "busy", "latency", "counted by"], rows, {text: [0, 1, 7]})));
}

const meter = (value, most, ink) => make("td", {class: "stack"}, make("i", {class: "meter", style: {width: 100 * (value || 0) / (most || 1) + "%", background: `var(--${ink})`}}));

function stages(analysis, measured) {
  const found = list(analysis.stages), stale = list(analysis.staleness);
  const most = greatest(found.map(stage => stage.busy_ns_per_microbatch || 0)), worst = (analysis.bottleneck || {}).what === "stage" ? analysis.bottleneck.stage : null;
  const halves = [["input gradient", "input_gradient_ns"], ["weight gradient", "weight_gradient_ns"]].filter(([, key]) => found.some(stage => known(stage[key])));
  const spreads = found.some(stage => known(stage.spread)) ? ["spread"] : [];
  section("stages", "Imbalance of the stages", measured, found.length ? make("div", {class: "scroll"}, table("What each stage computes for a microbatch; passes and updates: medians",
    ["Stage", "devices", "", "a microbatch", "of the greatest", ...spreads, "forward", "backward", ...halves.map(([name]) => name), "update", "FLOP/s"], found.map(stage => [
      stageName(analysis, stage.index), list(stage.devices).join(", "), meter(stage.busy_ns_per_microbatch, most, stage.index === worst ? "mark" : "forward"), duration(stage.busy_ns_per_microbatch),
      percent(stage.of_greatest), ...spreads.map(() => percent(stage.spread)), duration(stage.forward_ns), duration(stage.backward_ns), ...halves.map(([, key]) => duration(stage[key])), duration(stage.update_ns),
      known(stage.flops_per_second) ? withUnit(stage.flops_per_second, [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1, ""]]) : "not known",
    ]))) : make("p", {class: "note"}, "Not known."));
  const versions = one => one ? `${plain(one.mean)} (at most ${plain(one.greatest)})` : "not known";
  const old = greatest(stale.map(one => (one.forward_versions || {}).mean || 0));
  const isKnown = stale.some(one => one.forward_versions || one.backward_versions || one.time_ns);
  section("staleness", "Staleness", measured, isKnown ? make("div", {class: "scroll"}, table(
    "How many updates older than the newest the weights are that passes read, when their gradient is applied: mean; time from the forward to the end of that update",
    ["Stage", "", "forward reads", "backward reads", "time, median", "time, greatest"], stale.map(one => [
      stageName(analysis, one.stage), meter((one.forward_versions || {}).mean, old, "update"), versions(one.forward_versions), versions(one.backward_versions),
      duration((one.time_ns || {}).median), duration((one.time_ns || {}).greatest),
    ]))) : make("p", {class: "note"}, "Not known."));
}

function stragglers(analysis, measured) {
  const found = list(analysis.stragglers);
  if (!found.length) return;
  section("stragglers", "Stragglers", measured, make("div", {class: "scroll"}, table("Passes that take more than three times the median of their kind on their stage",
    ["Stage", "kind", "count", "lost", "median", "longest"], found.map(one => [stageName(analysis, one.stage), one.kind, plain(one.count), duration(one.lost_ns), duration(one.median_ns),
      list(one.longest).slice(0, 3).map(pass => `${duration(pass.duration_ns)}${known(pass.microbatch) ? ` (microbatch ${pass.microbatch})` : ""}`).join(", ")]), {text: [0, 1, 5]})));
}

function counters(trace, measured) {
  const curves = trace.curves.filter(curve => curve.name !== "memory").slice(0, 12);
  if (!curves.length) return;
  const tops = {};
  for (const curve of curves) tops[curve.name] = greatest([tops[curve.name] || 0, ...whole(curve)]);
  const left = trace.curves.filter(curve => curve.name !== "memory").length - curves.length;
  section("counters", "Other counters", measured, left ? make("p", {class: "note"}, `The first ${curves.length} of ${curves.length + left}.`) : null, make("div", {class: "charts"}, ...curves.map(curve => make("figure", {},
    make("figcaption", {}, `device ${curve.device}: ${curve.name}`), chart(curve, trace.span_ns, tops[curve.name], plain, {}, null)))));
}
