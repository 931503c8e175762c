// The data of the page, and how it is told: numbers with their units, elements whose text is only ever text.

const ARRAYS = {u1: Uint8Array, i2: Int16Array, i4: Int32Array, u4: Uint32Array, f8: Float64Array};

// A packed column {type, base64}: zlib within base64, as numbers.
async function unpacked({type, base64}) {
  const text = atob(base64), bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new ARRAYS[type](await new Response(stream).arrayBuffer());
}

// All columns; `start` comes as differences and `end` as durations, both nanoseconds from the span's begin.
async function readTrace(found) {
  const names = Object.keys(found.columns), columns = {};
  const arrays = await Promise.all(names.map(name => unpacked(found.columns[name])));
  names.forEach((name, i) => columns[name] = arrays[i]);
  const start = new Float64Array(columns.start.length), end = new Float64Array(start.length);
  let at = 0;
  for (let i = 0; i < start.length; i++) {
    at += columns.start[i];
    start[i] = at;
    end[i] = at + columns.end[i];
  }
  for (const {shares} of found.overview || [])
    for (const kind of Object.keys(shares)) shares[kind] = await unpacked(shares[kind]);
  return {...found, ...columns, start, end, rows: start.length};
}

// An element: attributes by name, "on..." a listener, text as text.
function make(tag, attributes, ...children) {
  const svg = ["svg", "path", "rect", "line", "text", "title", "g"].includes(tag);
  const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, held] of Object.entries(value)) element.style.setProperty(key, held);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.filter(child => child !== null && child !== undefined).map(child => child instanceof Node ? child : String(child)));
  return element;
}

const byId = id => document.getElementById(id);
const known = value => value !== null && value !== undefined && !Number.isNaN(value);
const colour = name => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
const slug = kind => kind.replaceAll(" ", "-");
const sum = values => values.reduce((a, b) => a + b, 0);
const greatest = values => values.reduce((a, b) => Math.max(a, b), 0);

function digits(value, places = 3) {
  if (value === 0) return "0";
  const decimals = Math.max(0, places - 1 - Math.floor(Math.log10(Math.abs(value))));
  return value.toLocaleString("en-US", {maximumFractionDigits: Math.min(decimals, 9)});
}
function withUnit(value, steps) {
  if (!known(value)) return "not known";
  const [size, unit] = steps.find(([least]) => Math.abs(value) >= least) || steps[steps.length - 1];
  return digits(value / size) + "\u202f" + unit;
}
const duration = ns => withUnit(ns, [[1e9, "s"], [1e6, "ms"], [1e3, "µs"], [1, "ns"]]);
const bytes = n => withUnit(n, [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"], [1, "B"]]);
const percent = share => known(share) ? (100 * share).toFixed(1) + "\u202f%" : "not known";
const plain = value => known(value) ? digits(value) : "not known";
// a moment on an axis: as many decimals as `step` needs
function moment(ns, step) {
  const [size, unit] = [[1e9, "s"], [1e6, "ms"], [1e3, "µs"], [1, "ns"]].find(([least]) => greatest([Math.abs(ns), step]) >= least) || [1, "ns"];
  return (ns / size).toFixed(greatest([0, Math.ceil(-Math.log10(step / size) - 1e-9)])) + "\u202f" + unit;
}
// about `count` round steps of 1, 2 or 5
function roundStep(span, count) {
  const raw = span / greatest([count, 1]), power = 10 ** Math.floor(Math.log10(raw || 1));
  return power * ([1, 2, 5, 10].find(k => k * power >= raw) || 10);
}
