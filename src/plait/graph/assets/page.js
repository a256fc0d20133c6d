"use strict";
// The page around the layout: draws what is in sight, folds, searches, explains. Text enters the page as text only.

const PHASES = ["forward", "backward", "update"];
const SVG = "http://www.w3.org/2000/svg";
const FEW_BOXES = 42;      // modules are opened at the start while no more boxes than this are seen
const DRAW_ALL = 2200;     // above this many boxes and edges only what is in sight is drawn
const byId = id => document.getElementById(id);
const stage = byId("stage"), world = byId("world"), svg = byId("graph"), tip = byId("tip"), details = byId("details");
const graph = readGraph(JSON.parse(byId("data").textContent));
const state = { open: new Set(), views: false, chosen: null, layout: null, x: 0, y: 0, scale: 1, drawn: null, near: null };
const paths = new Map();

function scaled(value, base, units) {
  let index = 0;
  while (Math.abs(value) >= base && index < units.length - 1) { value /= base; index++; }
  return `${index === 0 || value >= 100 ? value.toFixed(0) : value.toFixed(1)} ${units[index]}`;
}
const asBytes = value => scaled(value, 1024, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]);
const asFlops = value => scaled(value, 1000, ["FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP"]);
const shortName = op => op.target.replace(/^(aten|plait|prims)\./, "").replace(/\.(default|Tensor|Scalar|int|dim_IntList|dim|self)$/, "");

function make(tag, attributes, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}
function html(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name === "onclick") element.addEventListener("click", value); else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}
function fitText(text, width, size) {
  const most = Math.floor(width / (size * 0.61));
  return text.length <= most ? text : `${text.slice(0, Math.ceil(most / 2) - 1)}…${text.slice(-(Math.floor(most / 2) - 1))}`;
}

// ---- what is open ------------------------------------------------------------------------------------------

function* modulesAtDepth(depth) {
  const stack = [graph.root];
  while (stack.length) {
    const module = stack.pop();
    if (module.depth === depth && module.path) yield module;
    if (module.depth < depth) stack.push(...module.children.values());
  }
}
const isFoldable = module => module.children.size > 0 || module.units.length > 0;
function openAtStart() {
  state.layout = layoutGraph(graph, state.open, state.views);
  for (let depth = 1; depth < 8; depth++) {
    const candidates = [...modulesAtDepth(depth)].filter(m => m.count[0] && (depth === 1 || state.open.has(m.parent.path)));
    for (const module of candidates.sort((a, b) => a.children.size - b.children.size)) {
      if (depth > 1 && !module.children.size) continue;
      if (!module.children.size && graph.ops.length > 400) continue;
      state.open.add(module.path);
      const tried = layoutGraph(graph, state.open, state.views);
      if (countForward(tried) > FEW_BOXES) state.open.delete(module.path); else state.layout = tried;
    }
  }
}
const countForward = layout => [...layout.boxes.values()].filter(box => box.phase === 0).length;

function toggle(module, anchor) {
  const before = anchor && { x: anchor.x * state.scale + state.x, y: anchor.y * state.scale + state.y };
  if (state.open.has(module.path)) {
    for (const path of [...state.open]) if (path === module.path || path.startsWith(`${module.path}.`)) state.open.delete(path);
  } else state.open.add(module.path);
  relayout();
  const phase = anchor ? anchor.phase : 0;
  const after = state.layout.frames.find(frame => frame.module === module && frame.phase === phase) || state.layout.boxes.get(`m:${phase}:${module.path}`);
  if (before && after) { state.x = before.x - after.x * state.scale; state.y = before.y - after.y * state.scale; }
  draw(true);
}
function relayout() { state.layout = layoutGraph(graph, state.open, state.views); state.drawn = null; }
function changeLevel(by) {
  const depths = [...state.open].map(path => path.split(".").length);
  const deepest = depths.length ? Math.max(...depths) : 0;
  if (by < 0) for (const path of [...state.open]) { if (path.split(".").length === deepest) state.open.delete(path); }
  else {
    const shown = [...state.layout.boxes.values()].filter(box => box.module && box.phase === 0).map(box => box.module);
    const top = Math.min(...shown.map(module => module.depth));
    for (const module of shown) if (module.depth === top) state.open.add(module.path);
  }
  relayout(); fit();
}

// ---- drawing -----------------------------------------------------------------------------------------------

function edgePath(edge) {
  const { from, to } = edge;
  if (from.phase === to.phase && from.phase < 2) {
    const down = from.phase === 0, x1 = from.x + from.width / 2, x2 = to.x + to.width / 2;
    const y1 = down ? from.y + from.height : from.y, y2 = down ? to.y : to.y + to.height;
    const span = Math.abs(y2 - y1), forwards = down ? y2 >= y1 : y2 <= y1, bend = (down ? 1 : -1) * Math.min(60, Math.max(14, span / 2));
    if (!forwards) return sidePath(from, to, -1);
    if (edge.blocked ?? span > 3 * (BOX.module + SPACE.y)) return sidePath(from, to, -1);
    return `M${x1},${y1}C${x1},${y1 + bend} ${x2},${y2 - bend} ${x2},${y2}`;
  }
  const toRight = to.x > from.x, x1 = toRight ? from.x + from.width : from.x, x2 = toRight ? to.x : to.x + to.width;
  const y1 = from.y + from.height / 2, y2 = to.y + to.height / 2, bend = (toRight ? 1 : -1) * Math.max(30, Math.abs(x2 - x1) / 2.5);
  return `M${x1},${y1}C${x1 + bend},${y1} ${x2 - bend},${y2} ${x2},${y2}`;
}
function sidePath(from, to, side) {
  const y1 = from.y + from.height / 2, y2 = to.y + to.height / 2, x1 = side < 0 ? from.x : from.x + from.width, x2 = side < 0 ? to.x : to.x + to.width;
  const out = side * Math.min(90, 24 + Math.abs(y2 - y1) / 14), reach = (side < 0 ? Math.min(x1, x2) : Math.max(x1, x2)) + out;
  return `M${x1},${y1}C${reach},${y1} ${reach},${y2} ${x2},${y2}`;
}
function edgeClass(edge) {
  if (edge.from.phase === edge.to.phase) return PHASES[edge.from.phase];
  return edge.to.phase === 2 ? "gradient update" : "kept backward";
}
function inSight(view, x, y, width, height) { return x < view.right && x + width > view.left && y < view.bottom && y + height > view.top; }
function sight(margin) {
  const width = stage.clientWidth / state.scale, height = stage.clientHeight / state.scale;
  const left = -state.x / state.scale, top = -state.y / state.scale;
  return { left: left - margin * width, top: top - margin * height, right: left + width * (1 + margin), bottom: top + height * (1 + margin) };
}

function draw(force) {
  world.setAttribute("transform", `translate(${state.x},${state.y}) scale(${state.scale})`);
  const lanes = [...document.querySelectorAll(".lane")];
  lanes.forEach((lane, phase) => { lane.style.transform = `translateX(${Math.max(4, state.x + (state.layout.lanes[phase] + 4) * state.scale)}px)`; });
  const now = sight(0), drawn = state.drawn;
  const covered = drawn && now.left >= drawn.left && now.top >= drawn.top && now.right <= drawn.right && now.bottom <= drawn.bottom;
  if (!force && covered && (state.scale < 0.28) === drawn.far) return;
  const { boxes, frames, edges, lanes: places, lane, height } = state.layout;
  const few = boxes.size + edges.length <= DRAW_ALL;
  const view = few ? { left: -1e9, top: -1e9, right: 1e9, bottom: 1e9 } : sight(0.6);
  view.far = state.scale < 0.28;
  state.drawn = view;
  paths.clear();
  const parts = [];
  for (const phase of [0, 1, 2]) {
    const width = phase < 2 ? lane : Math.max(BOX.width, state.layout.width - places[2]);
    parts.push(make("rect", { class: `band ${PHASES[phase]}`, x: places[phase] - 24, y: -40, width: width + 48, height: height + 70, rx: 14 }));
  }
  for (const frame of frames) if (inSight(view, frame.x, frame.y, frame.width, frame.height)) parts.push(drawFrame(frame));
  const lines = make("g", { id: "edges" }), touches = make("g", {});
  if (few || !view.far) for (const edge of edges) {
    const { from, to } = edge, left = Math.min(from.x, to.x) - 90, top = Math.min(from.y, to.y);
    if (!inSight(view, left, top, Math.max(from.x, to.x) + BOX.width - left, Math.max(from.y, to.y) + BOX.module - top)) continue;
    const shape = edgePath(edge), line = make("path", { class: `edge ${edgeClass(edge)}`, d: shape }), touch = make("path", { class: "touch", d: shape });
    touch.edge = edge;
    paths.set(edge, line);
    lines.append(line); touches.append(touch);
  }
  parts.push(lines, touches);
  const most = Math.max(1, ...[...boxes.values()].map(box => costOf(box)));
  for (const box of boxes.values()) if (inSight(view, box.x, box.y, box.width, box.height)) parts.push(drawBox(box, most, view.far && !few));
  world.replaceChildren(...parts);
  highlight(state.chosen && boxes.get(state.chosen));
}
const costOf = box => (box.module ? box.module.flops[box.phase] : box.op.flops);

function drawFrame(frame) {
  const { module, phase } = frame, group = make("g", { class: `frame ${PHASES[phase]}` });
  const title = make("rect", { class: "title", x: frame.x, y: frame.y, width: frame.width, height: SPACE.title, rx: 8 });
  title.module = module; title.anchor = frame;
  const text = make("text", { x: frame.x + 10, y: frame.y + 16 }, `▾ ${fitText(module.name, frame.width - 90, 12)} `);
  text.append(make("tspan", { class: "about" }, module.flops[phase] ? asFlops(module.flops[phase]) : ""));
  group.append(make("rect", { x: frame.x, y: frame.y, width: frame.width, height: frame.height, rx: 10 }), title, text);
  return group;
}

function drawBox(box, most, plain) {
  const { x, y, width, height } = box, op = box.op;
  const group = make("g", { class: `box ${box.module ? "module" : "op"} ${op && op.family === "input" ? "input" : PHASES[box.phase]}`, "data-id": box.id });
  group.box = box;
  if (box.module && box.module.repeats) {
    for (const shift of [6, 3]) group.append(make("rect", { class: "behind", x: x + shift, y: y + shift, width, height, rx: 7 }));
  }
  group.append(make("rect", { class: "body", x, y, width, height, rx: 7 }));
  if (plain) return group;
  const share = costOf(box) / most;
  if (share > 0) group.append(make("rect", { class: "bar", x: x + 8, y: y + height - 5, width: Math.max(2, (width - 16) * share), height: 2.5, rx: 1.2 }));
  const [name, about] = labels(box);
  group.append(make("text", { class: "name", x: x + 10, y: y + (about ? 18 : height / 2 + 4) }, fitText(name, width - 18, 12)));
  if (about) group.append(make("text", { class: "about", x: x + 10, y: y + 34 }, fitText(about, width - 20, 11)));
  return group;
}
function labels(box) {
  const { module, op, phase } = box;
  if (module) {
    const count = module.count[phase], noun = phase === 2 ? "parameter" : "op", name = module.repeats ? `${module.name} ×${module.repeats}` : module.name;
    const cost = phase === 2 ? asBytes(module.bytes[2]) : module.flops[phase] ? asFlops(module.flops[phase]) : asBytes(module.bytes[phase]);
    return [`▸ ${name}`, `${count} ${noun}${count === 1 ? "" : "s"} · ${cost}`];
  }
  if (phase === 2) return [op.holds[0].split(".").slice(-2).join("."), ""];
  return [op.family === "input" ? op.name : shortName(op), ""];
}

// ---- moving ------------------------------------------------------------------------------------------------

function zoom(factor, atX = stage.clientWidth / 2, atY = stage.clientHeight / 2) {
  const scale = Math.min(3, Math.max(0.02, state.scale * factor));
  state.x = atX - (atX - state.x) * (scale / state.scale);
  state.y = atY - (atY - state.y) * (scale / state.scale);
  state.scale = scale;
  draw(false);
}
function fit() {
  const { width, height } = state.layout, room = { x: stage.clientWidth - 60, y: stage.clientHeight - 90 };
  const whole = Math.min(1.25, room.x / width, room.y / height);
  state.scale = Math.max(Math.min(1, room.x / width), whole) < 0.05 ? 0.05 : whole < 0.55 ? Math.min(0.9, room.x / width) : whole;
  state.x = Math.max(30, (stage.clientWidth - width * state.scale) / 2);
  state.y = Math.max(50, (stage.clientHeight - height * state.scale) / 2);
  draw(true);
}
function reveal(op) {
  for (let module = op.unit.module; module && module.path; module = module.parent) state.open.add(module.path);
  if (op.family === "view" && !state.views) { state.views = true; byId("views").checked = true; }
  relayout();
  const box = state.layout.boxes.get(`o:${op.index}`);
  if (box) focusOn(box);
}
function revealModule(module) {
  for (let above = module.parent; above && above.path; above = above.parent) state.open.add(above.path);
  relayout();
  const box = state.layout.boxes.get(`m:0:${module.path}`) || state.layout.frames.find(frame => frame.module === module);
  if (box) focusOn(box); else draw(true);
  explainModule(module, 0);
}
function focusOn(box) {
  state.scale = Math.max(state.scale, 0.8);
  state.x = stage.clientWidth / 2 - (box.x + box.width / 2) * state.scale;
  state.y = stage.clientHeight / 2 - (box.y + Math.min(box.height, 200) / 2) * state.scale;
  state.chosen = box.id || null;
  draw(true);
  if (box.op) explainOp(box.op);
}

// ---- explaining --------------------------------------------------------------------------------------------

function highlight(box) {
  for (const element of world.querySelectorAll(".box.chosen")) element.classList.remove("chosen");
  for (const line of paths.values()) line.classList.remove("near");
  byId("edges").classList.toggle("dim", Boolean(box));
  if (!box) return;
  const element = world.querySelector(`[data-id="${CSS.escape(box.id)}"]`);
  if (element) element.classList.add("chosen");
  for (const edge of [...box.ins, ...box.out.values()]) paths.get(edge)?.classList.add("near");
}
function facts(pairs) {
  const list = html("dl");
  for (const [name, value] of pairs) if (value) list.append(html("dt", {}, name), html("dd", {}, value));
  return list;
}
function link(op) {
  const name = op.phase === 2 ? `update ${op.holds[0]}` : op.name;
  return html("li", {}, html("a", { class: "link", onclick: () => reveal(op) }, name), html("small", {}, op.phase === 2 ? op.shapes : `${shortName(op)} · ${op.shapes}`));
}
function listOf(title, ops) {
  if (!ops.length) return [];
  const most = 12, list = html("ul", {}, ...ops.slice(0, most).map(link));
  if (ops.length > most) list.append(html("li", {}, html("small", {}, `and ${ops.length - most} more`)));
  return [html("h3", {}, title), list];
}
function explainOp(op) {
  const input = op.family === "input";
  details.replaceChildren(
    html("h2", {}, op.phase === 2 ? op.holds[0] : op.name),
    html("span", { class: `phase ${input ? "input" : PHASES[op.phase]}` }, input ? "batch" : PHASES[op.phase]),
    facts([
      ["op", op.phase === 2 ? "the optimizer's update" : input ? "" : op.target], ["kind", op.phase === 2 ? "" : op.family],
      ["module", op.module || (input ? "" : "outside of the model's modules")], ["result", op.shapes],
      ["is", op.result], ["FLOPs", op.flops ? `${asFlops(op.flops)} (${op.flops.toLocaleString("en")})` : ""],
      [op.phase === 2 ? "memory" : "bytes", op.bytes ? asBytes(op.bytes) + (op.phase === 2 ? " with its gradient, optimizer state not counted" : "") : op.family === "view" ? "none (a view)" : ""],
      ["reads", op.phase === 2 ? "" : op.holds.join(", ")], ["source", op.source],
    ]),
    ...listOf("From", op.inputs.map(index => graph.ops[index])),
    ...listOf("To", op.users.map(index => graph.ops[index])),
  );
}
function explainModule(module, phase) {
  const table = html("table", {}, html("tr", {}, ...["", "ops", "FLOPs", "written"].map(name => html("th", {}, name))));
  PHASES.forEach((name, index) => {
    if (module.count[index]) table.append(html("tr", {}, html("td", {}, name), html("td", {}, module.count[index].toLocaleString("en")),
      html("td", {}, module.flops[index] ? asFlops(module.flops[index]) : "–"), html("td", {}, asBytes(module.bytes[index]))));
  });
  const inside = [];
  const stack = [module];
  while (stack.length) { const at = stack.pop(); for (const unit of at.units) inside.push(...unit.ops); stack.push(...at.children.values()); }
  const costly = inside.filter(op => op.phase < 2 && op.flops).sort((a, b) => b.flops - a.flops);
  const large = inside.filter(op => op.phase === 0 && op.bytes && op.family !== "input").sort((a, b) => b.bytes - a.bytes);
  const isOpen = state.open.has(module.path);
  details.replaceChildren(
    html("h2", {}, module.path || "the whole step"), html("p", {}, module.repeats ? `${module.repeats} numbered modules inside` : ""), table,
    ...(module.path && isFoldable(module) ? [html("p", {}, html("button", { type: "button", onclick: () => { toggle(module); explainModule(module, phase); } }, isOpen ? "Fold" : "Unfold"))] : []),
    ...listOf("Most FLOPs", costly.slice(0, 8)), ...listOf("Largest forward results", large.slice(0, 6)),
  );
}
function welcome() {
  explainModule(graph.root, 0);
  const help = html("p", {}, "Click a module to unfold it, its title to fold it. Drag to move, scroll to zoom. ", html("kbd", {}, "/"), " finds, ", html("kbd", {}, "f"), " fits. Bars show FLOPs.");
  details.prepend(help);
  const notes = byId("notes");
  if (notes) details.append(html("h3", {}, "Notices"), html("ul", { class: "notes" }, ...[...notes.children].map(note => html("li", {}, note.textContent))));
}
function showTip(text, event) {
  tip.hidden = !text;
  if (!text) return;
  tip.textContent = text;
  tip.style.left = `${Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)}px`;
  tip.style.top = `${Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8)}px`;
}
function edgeText(edge) {
  const tensors = [...edge.tensors.values()], total = tensors.reduce((sum, op) => sum + op.bytes, 0);
  const name = box => (box.module ? box.module.path : box.phase === 2 ? box.op.holds[0] : box.op.name);
  const kind = edge.from.phase === edge.to.phase ? "" : edge.to.phase === 2 ? "\ngradient" : "\nkept for the backward";
  const lines = tensors.slice(0, 6).map(op => `${op.name}: ${op.shapes}`);
  if (tensors.length > 6) lines.push(`and ${tensors.length - 6} more`);
  return `${name(edge.from)} → ${name(edge.to)}${kind}\n${lines.join("\n")}\n${asBytes(total)}`;
}
function boxText(box) {
  if (box.module) return `${box.module.path} (${PHASES[box.phase]})\nclick to unfold`;
  const op = box.op;
  return [op.phase === 2 ? op.holds[0] : op.name, op.shapes, op.flops ? asFlops(op.flops) : "", op.bytes ? asBytes(op.bytes) : ""].filter(Boolean).join("\n");
}

// ---- events ------------------------------------------------------------------------------------------------

let grabbed = null;
svg.addEventListener("pointerdown", event => { grabbed = { x: event.clientX, y: event.clientY, moved: false, target: event.target }; svg.setPointerCapture(event.pointerId); });
svg.addEventListener("pointermove", event => {
  if (grabbed) {
    const dx = event.clientX - grabbed.x, dy = event.clientY - grabbed.y;
    if (!grabbed.moved && Math.hypot(dx, dy) < 4) return;
    grabbed.moved = true; grabbed.x = event.clientX; grabbed.y = event.clientY;
    svg.classList.add("moving"); state.x += dx; state.y += dy; showTip("", event); draw(false);
    return;
  }
  const box = event.target.closest?.(".box")?.box, edge = event.target.edge;
  if (state.near && state.near !== edge && !(state.chosen && touches(state.near))) paths.get(state.near)?.classList.remove("near");
  state.near = edge || null;
  if (edge) paths.get(edge)?.classList.add("near");
  showTip(box ? boxText(box) : edge ? edgeText(edge) : event.target.module ? `${event.target.module.path}\nclick to fold` : "", event);
});
const touches = edge => edge.from.id === state.chosen || edge.to.id === state.chosen;
svg.addEventListener("pointerup", () => {
  const { moved, target } = grabbed || { moved: true };
  grabbed = null; svg.classList.remove("moving");
  if (moved) return;
  const box = target.closest?.(".box")?.box;
  if (target.module) { toggle(target.module, target.anchor); explainModule(target.module, 0); }
  else if (box?.module) { state.chosen = null; toggle(box.module, box); explainModule(box.module, box.phase); }
  else if (box) { state.chosen = box.id; highlight(box); explainOp(box.op); }
  else if (!target.edge) { state.chosen = null; highlight(null); welcome(); }
});
svg.addEventListener("pointerleave", event => showTip("", event));
svg.addEventListener("wheel", event => { event.preventDefault(); zoom(Math.exp(-event.deltaY * 0.0015), event.offsetX, event.offsetY); }, { passive: false });
byId("in").addEventListener("click", () => zoom(1.3));
byId("out").addEventListener("click", () => zoom(1 / 1.3));
byId("fit").addEventListener("click", fit);
byId("fold").addEventListener("click", () => changeLevel(-1));
byId("unfold").addEventListener("click", () => changeLevel(1));
byId("views").addEventListener("change", event => { state.views = event.target.checked; relayout(); draw(true); });
addEventListener("resize", () => draw(true));
addEventListener("keydown", event => {
  if (event.target.tagName === "INPUT") { if (event.key === "Escape") event.target.blur(); return; }
  if (event.key === "/") { event.preventDefault(); byId("search").focus(); }
  if (event.key === "f") fit();
  if (event.key === "+") zoom(1.3);
  if (event.key === "-") zoom(1 / 1.3);
  if (event.key === "Escape") { state.chosen = null; highlight(null); welcome(); }
});

const search = byId("search"), found = byId("found");
function find(text) {
  const wanted = text.trim().toLowerCase(), results = [];
  if (!wanted) return results;
  const stack = [...graph.root.children.values()].reverse();
  while (stack.length && results.length < 12) {
    const module = stack.pop();
    if (module.path.toLowerCase().includes(wanted)) results.push({ name: module.path, about: `module · ${module.count[0]} + ${module.count[1]} ops`, go: () => revealModule(module) });
    stack.push(...[...module.children.values()].reverse());
  }
  for (const op of graph.ops) {
    if (results.length >= 40) break;
    if ([op.name, op.target, ...op.holds].some(word => word.toLowerCase().includes(wanted))) {
      results.push({ name: op.phase === 2 ? op.holds[0] : op.name, about: `${PHASES[op.phase]} · ${op.phase === 2 ? "parameter" : shortName(op)} · ${op.module || "no module"} · ${op.shapes}`, go: () => reveal(op) });
    }
  }
  return results;
}
function showFound() {
  const results = find(search.value);
  found.hidden = !search.value.trim();
  found.replaceChildren(...(results.length ? results.map((result, index) => html("li", { class: index ? "" : "first", onclick: () => { found.hidden = true; result.go(); } }, result.name, html("small", {}, result.about))) : [html("li", {}, "Nothing is called that.")]));
  return results;
}
search.addEventListener("input", showFound);
search.addEventListener("focus", showFound);
search.addEventListener("keydown", event => { if (event.key === "Enter") { const first = showFound()[0]; if (first) { found.hidden = true; search.blur(); first.go(); } } });
document.addEventListener("pointerdown", event => { if (!event.target.closest(".search")) found.hidden = true; });

openAtStart();
welcome();
fit();
