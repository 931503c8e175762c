// The timeline: a row a device with passes and waits, under it a thinner one of communication.

const AXIS = 24, LEFT = 84, LEAST_SPAN = 20; // pixels, pixels, nanoseconds

class Timeline {
  constructor(trace, analysis) {
    Object.assign(this, {trace, canvas: byId("canvas"), view: byId("view"), tip: byId("tip"), hidden: new Set()});
    this.measured = analysis.modelled ? "modelled" : "measured";
    this.covers = {...Object.fromEntries(list(analysis.devices).map(device => [device.index, device.covers])), ...trace.device_names};
    this.path = list((analysis.critical_path || {}).pieces);
    this.from = 0;
    this.to = greatest([trace.span_ns, 1]);
    this.found = null; // the microbatch searched for
    this.chosen = null; // an event: its place in the columns
    this.lit = null; // the row that keys move in
    this.byDevice();
    this.legend();
    this.listen();
    new ResizeObserver(() => this.draw()).observe(this.view);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
    this.draw();
  }

  // Of each device two lanes, each with its events in order of start and with how far those up to each one reach.
  byDevice() {
    const {trace} = this, talks = new Set(trace.communication.map(kind => trace.kinds.indexOf(kind)));
    const lanes = new Map(trace.devices.map(device => [device, [[], []]])), stages = new Map(trace.devices.map(device => [device, new Set()]));
    for (let i = 0; i < trace.rows; i++) if (trace.stage[i] >= 0) stages.get(trace.device[i]).add(trace.stage[i]);
    this.shared = new Map([...stages].filter(([, of]) => of.size > 1)); // labels name the stage where a device has several
    for (let i = 0; i < trace.rows; i++) lanes.get(trace.device[i])[talks.has(trace.kind[i]) ? 1 : 0].push(i);
    const made = list => {
      const events = Int32Array.from(list), reach = new Float64Array(list.length);
      let far = -Infinity;
      events.forEach((event, k) => reach[k] = far = Math.max(far, trace.end[event]));
      return {events, reach};
    };
    this.devices = trace.devices.map(device => ({device, lanes: lanes.get(device).map(made)}));
    const talking = this.devices.some(({lanes}) => lanes[1].events.length);
    const tall = this.devices.length <= 16 ? 26 : this.devices.length <= 64 ? 16 : 10;
    this.heights = [tall, talking ? Math.round(tall / 2.6) : 0];
    this.rowHeight = this.heights[0] + this.heights[1] + (this.devices.length <= 64 ? 8 : 3);
    this.height = AXIS + this.devices.length * this.rowHeight + 4;
  }

  legend() {
    const {trace} = this, seen = new Set(trace.kind);
    if (trace.overview) Object.keys(trace.overview[0].shares).forEach(kind => seen.add(trace.kinds.indexOf(kind)));
    for (const code of [...seen].sort((a, b) => a - b)) {
      const kind = trace.kinds[code];
      const swatch = make("i", {class: "swatch" + (kind === "wait" ? " hatched" : ""), style: {"background-color": `var(--${slug(kind)})`}});
      byId("legend").append(make("button", {
        type: "button", "aria-pressed": "true", "data-kind": kind,
        onclick: event => {
          const shown = this.hidden.delete(code) || (this.hidden.add(code), false);
          event.currentTarget.setAttribute("aria-pressed", String(shown));
          this.draw();
        },
      }, swatch, kind));
    }
  }

  x(ns) { return LEFT + (ns - this.from) / (this.to - this.from) * (this.width - LEFT); }
  ns(x) { return this.from + (x - LEFT) / (this.width - LEFT) * (this.to - this.from); }

  // Show a stretch of time, within the run and not shorter than can be told apart.
  show(from, to) {
    const whole = greatest([this.trace.span_ns, 1]);
    const span = Math.min(whole, Math.max(LEAST_SPAN, to - from));
    this.from = Math.max(0, Math.min(whole - span, from + (to - from - span) / 2));
    this.to = this.from + span;
    this.draw();
  }
  zoom(factor, at) {
    const about = at === undefined ? (this.from + this.to) / 2 : at;
    this.show(about - (about - this.from) * factor, about + (this.to - about) * factor);
  }
  pan(share) {
    const by = share * (this.to - this.from);
    this.show(this.from + by, this.to + by);
  }

  draw() {
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => { this.waiting = false; this.paint(); });
  }

  paint() {
    const {canvas, trace} = this, scale = window.devicePixelRatio || 1;
    this.width = this.view.clientWidth;
    canvas.width = Math.round(this.width * scale);
    canvas.height = Math.round(this.height * scale);
    canvas.style.height = this.height + "px";
    const pen = this.pen = canvas.getContext("2d");
    pen.scale(scale, scale);
    pen.font = '11px system-ui, "DejaVu Sans", sans-serif';
    pen.textBaseline = "middle";
    this.colours = trace.kinds.map(kind => colour(slug(kind)));
    this.inks = this.colours.map(inkOn);
    this.hatch = hatched(pen, colour("wait"), colour("wait-line"));
    this.axis();
    this.devices.forEach((row, number) => this.paintRow(row, number));
    this.paintPath();
    pen.strokeStyle = colour("line");
    pen.beginPath(); pen.moveTo(LEFT + .5, 0); pen.lineTo(LEFT + .5, this.height); pen.stroke();
    canvas.setAttribute("aria-label", `Timeline of ${this.devices.length} devices, ${duration(this.from)} to ${duration(this.to)}, ${this.measured} times`);
    canvas.dataset.from = this.from;
    canvas.dataset.to = this.to;
    if (byId("in-view").open) this.fillTable();
  }

  axis() {
    const {pen} = this, step = roundStep(this.to - this.from, (this.width - LEFT) / 110);
    for (let at = Math.ceil(this.from / step) * step; at <= this.to; at += step) {
      const x = Math.round(this.x(at)) + .5;
      pen.strokeStyle = colour("line");
      pen.beginPath(); pen.moveTo(x, 0); pen.lineTo(x, this.height); pen.stroke();
      pen.fillStyle = colour("soft");
      pen.fillText(moment(at, step), x + 4, AXIS / 2);
    }
  }

  paintRow(row, number) {
    const {pen} = this, top = this.top(number);
    pen.fillStyle = colour("row");
    pen.fillRect(LEFT, top, this.width - LEFT, this.rowHeight - (this.devices.length <= 64 ? 8 : 3));
    if (this.inWindow()) row.lanes.forEach((lane, which) => this.paintLane(lane, which, top));
    else this.paintOverview(this.trace.overview[number], top);
    pen.fillStyle = colour("card");
    pen.fillRect(0, top - 3, LEFT, this.rowHeight);
    pen.fillStyle = colour(this.lit === number ? "accent" : "ink");
    if (this.heights[0] >= 10) pen.fillText(this.covers[row.device] || `device ${row.device}`, 8, top + this.heights[0] / 2);
    if (this.heights[0] < 20 || !this.shared.has(row.device)) return;
    pen.fillStyle = colour("soft");
    pen.fillText(`stages ${[...this.shared.get(row.device)].sort((a, b) => a - b).join(", ")}`, 8, top + this.heights[0] + 3, LEFT - 10);
  }

  // The critical path: a line above what decides the span, and from row to row where a message does.
  paintPath() {
    const {pen} = this, numbers = new Map(this.devices.map((row, number) => [row.device, number]));
    pen.strokeStyle = colour("mark");
    pen.lineWidth = 2;
    pen.beginPath();
    let last = null;
    for (const piece of this.path) {
      const end = piece.start_ns + piece.duration_ns;
      if (end < this.from || piece.start_ns > this.to || !numbers.has(piece.device)) { last = null; continue; }
      const y = this.top(numbers.get(piece.device)) - 1, left = Math.max(LEFT, this.x(piece.start_ns)), right = Math.min(this.width, this.x(end));
      if (last === null) pen.moveTo(left, y); else pen.lineTo(left, y);
      pen.lineTo(right, y);
      last = y;
    }
    pen.stroke();
    pen.lineWidth = 1;
  }

  top(number) { return AXIS + number * this.rowHeight; }
  // of a longer run only a window's events are here
  inWindow() {
    const held = this.trace.window_ns;
    return !held || (this.from >= held[0] && this.to <= held[1]);
  }

  paintOverview({shares}, top) {
    const {pen, trace, heights: [tall, thin]} = this, codes = Object.keys(shares).map(kind => trace.kinds.indexOf(kind));
    const bins = Object.values(shares)[0].length;
    for (let x = LEFT; x < this.width; x++) {
      const bin = Math.min(bins - 1, Math.floor(this.ns(x) / trace.span_ns * bins));
      let base = top + tall;
      Object.values(shares).forEach((share, k) => {
        if (this.hidden.has(codes[k])) return;
        const talks = trace.communication.includes(trace.kinds[codes[k]]);
        const part = share[bin] / 255 * (talks ? thin : tall);
        pen.fillStyle = this.colours[codes[k]];
        if (talks) pen.fillRect(x, top + tall + 1 + thin - part, 1, part);
        else pen.fillRect(x, base -= part, 1, part);
      });
    }
  }

  // The first event of a lane that reaches beyond a moment.
  first(lane, from) {
    let low = 0, high = lane.events.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (lane.reach[middle] > from) high = middle; else low = middle + 1;
    }
    return low;
  }

  paintLane(lane, which, top) {
    const {pen, trace} = this, y = top + (which ? this.heights[0] + 1 : 0), tall = this.heights[which];
    const pixels = new Float32Array(Math.ceil(this.width) * trace.kinds.length), kinds = trace.kinds.length;
    const wait = trace.kinds.indexOf("wait"), marks = [];
    let narrow = false;
    for (let k = this.first(lane, this.from); k < lane.events.length; k++) {
      const event = lane.events[k], kind = trace.kind[event];
      if (trace.start[event] >= this.to) break;
      if (this.hidden.has(kind)) continue;
      const left = Math.max(this.x(trace.start[event]), LEFT), right = Math.min(this.x(trace.end[event]), this.width);
      if (right - left < 1.5) { // too narrow to be seen alone: each pixel's share of each kind is drawn
        narrow = true;
        if (event === this.chosen || (this.found !== null && this.isFound(event))) marks.push(left);
        for (let pixel = Math.floor(left); pixel < Math.max(right, left + .01) && pixel < Math.floor(this.width); pixel++)
          pixels[pixel * kinds + kind] += Math.max(Math.min(right, pixel + 1) - Math.max(left, pixel), .1);
        continue;
      }
      const gap = right - left > 4 ? .6 : 0, dim = this.found !== null && !this.isFound(event);
      pen.globalAlpha = dim ? .22 : 1;
      pen.fillStyle = kind === wait ? this.hatch : this.colours[kind];
      pen.fillRect(left, y, right - left - gap, tall);
      if (!which && right - left > 26 && tall >= 14 && kind !== wait) this.label(event, kind, left, right - gap, y + tall / 2);
      if (event === this.chosen || (this.found !== null && !dim)) {
        pen.strokeStyle = colour("mark");
        pen.lineWidth = event === this.chosen ? 2.5 : 1.5;
        pen.strokeRect(left + 1, y + 1, Math.max(right - left - gap - 2, .5), tall - 2);
        pen.lineWidth = 1;
      }
    }
    pen.globalAlpha = this.found !== null ? .35 : 1;
    for (let pixel = LEFT; narrow && pixel < this.width; pixel++) {
      let base = y + tall, all = 0;
      for (let kind = 0; kind < kinds; kind++) all += pixels[pixel * kinds + kind];
      for (let kind = 0; all && kind < kinds; kind++) {
        const part = pixels[pixel * kinds + kind] / Math.max(all, 1) * tall;
        if (!part) continue;
        pen.fillStyle = this.colours[kind];
        pen.fillRect(pixel, base -= part, 1, part);
      }
    }
    pen.globalAlpha = 1;
    pen.fillStyle = colour("mark");
    for (const left of marks) pen.fillRect(left - .5, y, 2, tall);
  }

  label(event, kind, left, right, y) {
    const {pen, trace} = this, number = trace.microbatch[event];
    const letter = {forward: "F", recompute: "R", backward: "B", "input gradient": "I", "weight gradient": "W", update: "U"}[trace.kinds[kind]];
    const text = (letter || trace.kinds[kind] + " ") + (number >= 0 ? number : "") + (this.shared.has(trace.device[event]) ? `@${trace.stage[event]}` : "");
    if (pen.measureText(text).width > right - left - 6) return;
    pen.fillStyle = this.inks[kind];
    pen.fillText(text, left + 4, y + .5);
  }

  isFound(event) {
    const kind = this.trace.kinds[this.trace.kind[event]];
    return this.trace.microbatch[event] === this.found && kind !== "update" && kind !== "average";
  }

  // The event at a point of the canvas; null where there is none.
  at(x, y) {
    const number = Math.floor((y - AXIS) / this.rowHeight), row = this.devices[number];
    if (!row || x < LEFT || !this.inWindow()) return null;
    const within = y - this.top(number), lane = row.lanes[within > this.heights[0] ? 1 : 0];
    const near = 2 * (this.to - this.from) / this.width, time = this.ns(x);
    let best = null, away = near;
    for (let k = this.first(lane, time - near); k < lane.events.length; k++) {
      const event = lane.events[k];
      if (this.trace.start[event] > time + near) break;
      if (this.hidden.has(this.trace.kind[event])) continue;
      const distance = Math.max(this.trace.start[event] - time, time - this.trace.end[event], 0);
      if (distance < away || distance === 0) [best, away] = [event, distance];
    }
    return best;
  }

  // What is known of an event, as lines of text.
  words(event) {
    const {trace} = this, kind = trace.kinds[trace.kind[event]], number = trace.microbatch[event];
    const carries = trace.carried[trace.carries[event]], peer = trace.peer[event], version = trace.version[event];
    const of = number < 0 ? "" : kind === "update" || kind === "average" ? ` ${number}` : ` of microbatch ${number}`;
    const lines = [kind + of];
    const where = trace.stage[event] >= 0 ? `stage ${trace.stage[event]}, ` : "";
    lines.push(`${where}device ${(trace.device_names || {})[trace.device[event]] || trace.device[event]}`);
    const took = trace.end[event] - trace.start[event];
    lines.push(`${duration(took)} from ${moment(trace.start[event], greatest([took / 10, 1]))} (${this.measured})`);
    if (kind === "wait") lines.push(`waits for ${carries || "something"}${peer >= 0 ? ` from device ${peer}` : ""}`);
    else if (carries || peer >= 0) lines.push(`${carries || "message"}${peer >= 0 ? ` ${kind === "recv" ? "from" : "to"} device ${peer}` : ""}`);
    if (version >= 0) lines.push(kind === "update" ? `makes weights' version ${version}` : `reads weights' version ${version}`);
    if (trace.bytes[event] >= 0) lines.push(bytes(trace.bytes[event]) + (trace.communication.includes(kind) ? "" : " handed on"));
    return lines;
  }

  showTip(event, x, y) {
    const {tip} = this;
    tip.hidden = event === null;
    if (event === null) return;
    const [head, ...rest] = this.words(event);
    tip.replaceChildren(make("b", {}, head), ...rest.map(line => make("div", {}, line)));
    tip.style.left = Math.max(4, Math.min(x + 14, innerWidth - tip.offsetWidth - 8)) + "px";
    tip.style.top = (y + 18 + tip.offsetHeight > innerHeight ? y - tip.offsetHeight - 10 : y + 18) + "px";
  }

  say(text) { byId("status").value = text; }

  // Search a microbatch: bring its passes into view; a wait until its buffer is free again may come long after them.
  search(text) {
    const number = /^\s*\d+\s*$/.test(text) ? Number(text) : null;
    this.found = null;
    let from = Infinity, to = -Infinity, found = [];
    if (number !== null) {
      this.found = number;
      for (let i = 0; i < this.trace.rows; i++) if (this.isFound(i)) found.push(i);
      const passes = found.filter(i => !["wait", ...this.trace.communication].includes(this.trace.kinds[this.trace.kind[i]]));
      for (const i of passes.length ? passes : found) {
        from = Math.min(from, this.trace.start[i]);
        to = Math.max(to, this.trace.end[i]);
      }
    }
    const count = found.length;
    if (count) {
      this.say(`microbatch ${number}: ${count} events, passes from ${moment(from, (to - from) / 100)} to ${moment(to, (to - from) / 100)}`);
      const edge = greatest([(to - from) * .06, LEAST_SPAN]);
      this.show(from - edge, to + edge);
    } else {
      this.found = null;
      this.say(text.trim() ? `no events of microbatch ${text.trim()}` + (this.trace.window_ns ? " in the window" : "") : "");
      this.draw();
    }
  }

  // With keys: to the next or previous event of the row that is lit.
  step(by) {
    if (!this.devices.length) return;
    if (this.lit === null) this.lit = 0;
    const lane = this.devices[this.lit].lanes[0], {trace} = this;
    let k = this.chosen === null ? -1 : lane.events.indexOf(this.chosen);
    if (k < 0) k = this.first(lane, this.from) - (by > 0 ? 1 : 0);
    do k += by; while (lane.events[k] !== undefined && this.hidden.has(trace.kind[lane.events[k]]));
    const event = lane.events[k];
    if (event === undefined) return;
    this.chosen = event;
    if (trace.start[event] < this.from || trace.end[event] > this.to) {
      const half = greatest([this.to - this.from, 1.5 * (trace.end[event] - trace.start[event])]) / 2, middle = (trace.start[event] + trace.end[event]) / 2;
      this.show(middle - half, middle + half);
    }
    this.draw();
    const box = this.canvas.getBoundingClientRect();
    this.showTip(event, box.left + Math.max(this.x(trace.start[event]), LEFT), box.top + this.top(this.lit) + this.rowHeight - 14);
    this.say(this.words(event).join("; "));
  }

  fillTable() {
    const {trace} = this, rows = [], most = 200;
    for (let i = 0; i < trace.rows && rows.length < most; i++) {
      if (trace.end[i] <= this.from || trace.start[i] >= this.to || this.hidden.has(trace.kind[i])) continue;
      rows.push([trace.device[i], ...this.words(i).slice(0, 1), moment(trace.start[i], (this.to - this.from) / 1000), duration(trace.end[i] - trace.start[i]), this.words(i).slice(3).join("; ")]);
    }
    byId("in-view").querySelector(".scroll").replaceChildren(table(
      `The first ${rows.length} events in view, ${this.measured} times`, ["Device", "Event", "Begins", "Takes", "More"], rows, {text: [1, 4]}));
  }

  listen() {
    const {canvas} = this, place = event => [event.offsetX, event.offsetY];
    canvas.addEventListener("wheel", event => {
      if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) this.pan(event.deltaX / 1000);
      else this.zoom(Math.exp(Math.max(-300, Math.min(300, event.deltaY)) * .0018), this.ns(Math.max(event.offsetX, LEFT)));
      event.preventDefault();
    }, {passive: false});
    let grabbed = null;
    canvas.addEventListener("pointerdown", event => {
      if (event.button) return;
      grabbed = {x: event.offsetX, from: this.from, to: this.to};
      canvas.setPointerCapture(event.pointerId);
      canvas.classList.add("dragging");
      canvas.focus({preventScroll: true});
    });
    const released = () => { grabbed = null; canvas.classList.remove("dragging"); };
    canvas.addEventListener("pointerup", released);
    canvas.addEventListener("pointercancel", released);
    canvas.addEventListener("pointermove", event => {
      if (grabbed) {
        const by = (grabbed.x - event.offsetX) / (this.width - LEFT) * (grabbed.to - grabbed.from);
        this.tip.hidden = true;
        this.show(grabbed.from + by, grabbed.to + by);
      } else this.showTip(this.at(...place(event)), event.clientX, event.clientY);
    });
    canvas.addEventListener("pointerleave", () => this.tip.hidden = true);
    canvas.addEventListener("blur", () => this.tip.hidden = true);
    canvas.addEventListener("dblclick", () => this.show(0, this.trace.span_ns));
    const letGo = () => { this.chosen = this.found = this.lit = null; this.tip.hidden = true; this.say(""); this.draw(); };
    const rows = by => {
      this.lit = Math.max(0, Math.min(this.devices.length - 1, this.lit === null ? 0 : this.lit + by));
      this.chosen = null;
      this.say(`device ${this.devices[this.lit].device}`);
      this.draw();
    };
    const keys = {
      ArrowLeft: () => this.pan(-.15), ArrowRight: () => this.pan(.15), ArrowUp: () => rows(-1), ArrowDown: () => rows(1),
      "+": () => this.zoom(.6), "=": () => this.zoom(.6), "-": () => this.zoom(1 / .6), 0: () => this.show(0, this.trace.span_ns),
      Home: () => this.show(0, this.trace.span_ns), n: () => this.step(1), p: () => this.step(-1), Escape: letGo,
    };
    canvas.addEventListener("keydown", event => {
      if (!Object.hasOwn(keys, event.key) || event.ctrlKey || event.metaKey || event.altKey) return;
      keys[event.key]();
      event.preventDefault();
    });
    byId("zoom-in").addEventListener("click", () => this.zoom(.5));
    byId("zoom-out").addEventListener("click", () => this.zoom(2));
    byId("zoom-reset").addEventListener("click", () => this.show(0, this.trace.span_ns));
    byId("search").addEventListener("submit", event => { event.preventDefault(); this.search(byId("microbatch").value); });
    byId("in-view").addEventListener("toggle", () => this.draw());
  }
}

function hatched(pen, ground, line) {
  const tile = document.createElement("canvas"), size = 6;
  tile.width = tile.height = size;
  const brush = tile.getContext("2d");
  brush.fillStyle = ground;
  brush.fillRect(0, 0, size, size);
  brush.strokeStyle = line;
  brush.beginPath();
  for (const shift of [-size, 0, size]) { brush.moveTo(shift - 1, size + 1); brush.lineTo(shift + size + 1, -1); }
  brush.stroke();
  return pen.createPattern(tile, "repeat");
}

// Black or white, whichever reads better on a colour #rrggbb.
function inkOn(hex) {
  const [r, g, b] = [1, 3, 5].map(i => parseInt(hex.slice(i, i + 2), 16) / 255).map(v => v <= .04 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
  return .2126 * r + .7152 * g + .0722 * b > .18 ? "#111111" : "#ffffff";
}
