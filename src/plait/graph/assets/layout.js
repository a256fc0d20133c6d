"use strict";
// From the rows of the page's data to boxes with places. In: which modules are open, whether views are shown.
// Out: {boxes, frames, edges, lanes}. Touches no element of the page.

const BOX = { width: 176, module: 46, op: 30, gap: 8 };
const SPACE = { x: 22, y: 30, frame: 12, title: 24, lane: 96 };

function readGraph(data) {
  const text = index => data.strings[index];
  const ops = data.ops.map((row, index) => ({
    index, name: row[0], target: text(row[1]), family: text(row[2]), phase: row[3], module: text(row[4]),
    origin: text(row[5]), source: text(row[6]), shapes: text(row[7]), flops: row[8], bytes: row[9],
    inputs: row[10], holds: row[11].map(text), users: [], result: data.results[index] || "",
  }));
  for (const op of ops) for (const input of op.inputs) ops[input].users.push(op.index);
  const root = { path: "", name: "", children: new Map(), units: [], parent: null, depth: 0 };
  const units = new Map();
  for (const op of ops) {
    const key = op.origin || `${op.module} ${op.name}`;
    let unit = units.get(key);
    if (!unit) {
      unit = { key, module: moduleAt(root, op.module), ops: [], order: op.index };
      units.set(key, unit);
      unit.module.units.push(unit);
    }
    unit.ops.push(op);
    op.unit = unit;
  }
  addCosts(root);
  return { ops, root, units: [...units.values()] };
}

function moduleAt(root, path) {
  let module = root;
  for (const name of path ? path.split(".") : []) {
    if (!module.children.has(name)) {
      const child = { path: module.path ? `${module.path}.${name}` : name, name, children: new Map(), units: [], parent: module, depth: module.depth + 1 };
      module.children.set(name, child);
    }
    module = module.children.get(name);
  }
  return module;
}

function addCosts(module) {
  module.count = [0, 0, 0]; module.flops = [0, 0, 0]; module.bytes = [0, 0, 0]; module.order = Infinity;
  for (const unit of module.units) {
    module.order = Math.min(module.order, unit.order);
    for (const op of unit.ops) { module.count[op.phase]++; module.flops[op.phase] += op.flops; module.bytes[op.phase] += op.bytes; }
  }
  for (const child of module.children.values()) {
    addCosts(child);
    module.order = Math.min(module.order, child.order);
    for (let phase = 0; phase < 3; phase++) {
      module.count[phase] += child.count[phase]; module.flops[phase] += child.flops[phase]; module.bytes[phase] += child.bytes[phase];
    }
  }
  const numbered = [...module.children.keys()].filter(name => /^\d+$/.test(name)).length;
  module.repeats = numbered > 1 && numbered === module.children.size ? numbered : 0;
}

// Everything at once: which items are seen, where they stand, what runs between them.
function layoutGraph(graph, open, showViews) {
  const seen = op => showViews || op.family !== "view";
  const source = new Array(graph.ops.length);
  for (const op of graph.ops) source[op.index] = seen(op) ? op.index : (op.inputs.length ? source[op.inputs[0]] : -1);
  const itemOf = new Map();
  const rootItem = makeFrame(graph.root, open, seen, null, itemOf);
  connectItems(graph, itemOf, seen);
  placeFrame(rootItem);
  return collect(graph, rootItem, itemOf, source, seen);
}

function makeFrame(module, open, seen, parent, itemOf) {
  const frame = { kind: "frame", module, parent, items: [], order: module.order, next: new Set() };
  for (const unit of module.units) {
    const shown = unit.ops.filter(seen);
    if (!shown.length) continue;
    const item = { kind: "unit", unit, parent: frame, order: unit.order, next: new Set(), ops: [0, 1, 2].map(p => shown.filter(op => op.phase === p)) };
    frame.items.push(item);
    itemOf.set(unit, item);
  }
  for (const child of module.children.values()) {
    if (open.has(child.path)) { frame.items.push(makeFrame(child, open, seen, frame, itemOf)); continue; }
    const item = { kind: "module", module: child, parent: frame, order: child.order, next: new Set() };
    frame.items.push(item);
    const stack = [child];
    while (stack.length) {
      const inside = stack.pop();
      for (const unit of inside.units) itemOf.set(unit, item);
      stack.push(...inside.children.values());
    }
  }
  frame.items = frame.items.filter(item => item.kind !== "frame" || item.items.length);
  frame.items.sort((a, b) => a.order - b.order);
  return frame;
}

// Forward edges, lifted to the two siblings under the frame that holds both ends.
function connectItems(graph, itemOf, seen) {
  const depth = item => { let steps = 0; for (let at = item; at.parent; at = at.parent) steps++; return steps; };
  // A hidden view still has a place where its backward is seen.
  const standsFor = new Array(graph.ops.length);
  for (const op of graph.ops) standsFor[op.index] = seen(op) || itemOf.has(op.unit) ? op : op.inputs.length ? standsFor[op.inputs[0]] : null;
  for (const op of graph.ops) {
    if (op.phase !== 0 || standsFor[op.index] !== op) continue;
    for (const input of op.inputs) {
      if (!standsFor[input]) continue;
      let from = itemOf.get(standsFor[input].unit), to = itemOf.get(op.unit);
      if (!from || !to || from === to) continue;
      let up = depth(from), down = depth(to);
      while (up > down) { from = from.parent; up--; }
      while (down > up) { to = to.parent; down--; }
      while (from.parent !== to.parent) { from = from.parent; to = to.parent; }
      if (from !== to && from.order < to.order) from.next.add(to);
    }
  }
}

// Layers by longest path; sources move down to their first reader; order within a layer by the mean place of what feeds it.
function placeFrame(frame) {
  const items = frame.items, feeds = new Map(items.map(item => [item, []]));
  for (const item of items) { item.layer = 0; if (item.kind === "frame") placeFrame(item); else sizeItem(item); }
  for (const item of items) for (const next of item.next) { next.layer = Math.max(next.layer, item.layer + 1); feeds.get(next).push(item); }
  for (const item of [...items].reverse()) {
    if (!feeds.get(item).length && item.next.size) item.layer = Math.max(item.layer, Math.min(...[...item.next].map(next => next.layer)) - 1);
  }
  const isLoose = item => !feeds.get(item).length && !item.next.size;
  const last = Math.max(0, ...items.map(item => item.layer));
  const layers = Array.from({ length: last + 1 }, () => []);
  for (const item of items) layers[isLoose(item) && items.length > 1 ? (item.layer = layerInOrder(items, item)) : item.layer].push(item);
  for (const layer of layers) {
    for (const item of layer) {
      const before = feeds.get(item).map(feed => feed.rank);
      item.pull = before.length ? before.reduce((a, b) => a + b, 0) / before.length : item.rank ?? 0;
    }
    layer.sort((a, b) => a.pull - b.pull || a.order - b.order);
    layer.forEach((item, index) => { item.rank = layer.length > 1 ? index / (layer.length - 1) - 0.5 : 0; });
  }
  const pad = frame.parent ? SPACE.frame : 0;
  const widths = layers.map(layer => layer.reduce((sum, item) => sum + item.width, 0) + SPACE.x * Math.max(0, layer.length - 1));
  const title = frame.parent ? Math.min(420, 40 + 7.5 * (frame.module.name.length + 14)) : 0;
  const inner = Math.max(BOX.width, title, ...widths);
  let y = frame.parent ? SPACE.title + 6 : 0;
  layers.forEach((layer, index) => {
    if (!layer.length) return;
    const height = Math.max(...layer.map(item => item.height));
    let x = pad + (inner - widths[index]) / 2;
    for (const item of layer) { item.x = x; item.y = y + (height - item.height) / 2; x += item.width + SPACE.x; }
    y += height + SPACE.y;
  });
  frame.width = inner + 2 * pad;
  frame.height = y - SPACE.y + (frame.parent ? SPACE.frame : 0);
}

function layerInOrder(items, item) {
  const before = items.slice(0, items.indexOf(item)).map(other => other.layer);
  return before.length ? before[before.length - 1] : 0;
}

function sizeItem(item) {
  item.width = BOX.width;
  if (item.kind === "module") { item.height = BOX.module; return; }
  const most = Math.max(item.ops[0].length, item.ops[1].length, 1);
  item.height = most * BOX.op + (most - 1) * BOX.gap;
}

function collect(graph, rootItem, itemOf, source, seen) {
  const boxes = new Map(), frames = [], width = rootItem.width;
  const lanes = [0, width + SPACE.lane, 2 * (width + SPACE.lane)];
  const columns = new Map();
  const walk = (item, x, y) => {
    const left = x + (item.x || 0), top = y + (item.y || 0);
    if (item.kind === "frame") {
      if (item.parent) for (const phase of [0, 1]) if (item.module.count[phase]) {
        frames.push({ module: item.module, phase, x: lanes[phase] + left, y: top, width: item.width, height: item.height });
      }
      item.items.forEach(inner => walk(inner, left, top));
      return;
    }
    const middle = top + item.height / 2;
    for (const phase of [0, 1, 2]) {
      const list = item.kind === "module" ? (item.module.count[phase] ? [item.module] : []) : item.ops[phase];
      const height = item.kind === "module" ? BOX.module : BOX.op;
      const all = list.length * height + (list.length - 1) * BOX.gap;
      list.forEach((what, index) => {
        // The backward runs upward, so its first op stands lowest.
        const slot = phase === 1 ? list.length - 1 - index : index;
        let boxX = lanes[phase] + left;
        const boxY = middle - all / 2 + slot * (height + BOX.gap);
        if (phase === 2) {
          const row = Math.round(boxY / 24), column = columns.get(row) || 0;
          columns.set(row, column + 1);
          boxX = lanes[2] + column * (BOX.width + SPACE.x);
        }
        const box = { phase, x: boxX, y: boxY, width: BOX.width, height, out: new Map(), ins: [] };
        if (item.kind === "module") { box.module = what; box.id = `m:${phase}:${what.path}`; } else { box.op = what; box.id = `o:${what.index}`; }
        boxes.set(box.id, box);
      });
    }
  };
  walk(rootItem, 0, 0);
  const boxOf = op => {
    const item = itemOf.get(op.unit);
    return item && boxes.get(item.kind === "module" ? `m:${op.phase}:${item.module.path}` : `o:${op.index}`);
  };
  const edges = [];
  for (const op of graph.ops) {
    if (!seen(op)) continue;
    const to = boxOf(op);
    for (const input of op.inputs) {
      if (source[input] < 0) continue;
      const giver = graph.ops[source[input]], from = boxOf(giver);
      if (!from || !to || from === to) continue;
      let edge = from.out.get(to.id);
      if (!edge) { edge = { from, to, tensors: new Map() }; from.out.set(to.id, edge); to.ins.push(edge); edges.push(edge); }
      edge.tensors.set(giver.index, giver);
    }
  }
  if (boxes.size < 1500) for (const edge of edges) edge.blocked = isBlocked(edge, boxes);
  const right = Math.max(lanes[2] + BOX.width, ...[...boxes.values()].map(box => box.x + box.width));
  return { boxes, frames, edges, lanes, width: right, height: rootItem.height, lane: width };
}

// Whether the straight way between two boxes of a lane runs through a third one.
function isBlocked({ from, to }, boxes) {
  if (from.phase !== to.phase || from.phase > 1) return false;
  const top = Math.min(from.y + from.height, to.y + to.height) + 1, bottom = Math.max(from.y, to.y) - 1;
  const x1 = from.x + from.width / 2, x2 = to.x + to.width / 2, y1 = from.y + from.height / 2, y2 = to.y + to.height / 2;
  for (const box of boxes.values()) {
    if (box.phase !== from.phase || box.y > bottom || box.y + box.height < top) continue;
    const x = x1 + ((x2 - x1) * (box.y + box.height / 2 - y1)) / (y2 - y1 || 1);
    if (x > box.x - 4 && x < box.x + box.width + 4) return true;
  }
  return false;
}
