"use strict";
// Draws the timeline from the JSON beside it and shows hover texts. All strings go in as text nodes.
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const tip = document.getElementById("tip");

  function make(name, attributes, text) {
    const element = document.createElementNS(SVG, name);
    for (const key in attributes) element.setAttribute(key, attributes[key]);
    if (text !== undefined) element.textContent = text;
    return element;
  }
  function say(text, event) {
    tip.textContent = text;
    tip.hidden = false;
    const x = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8);
    const below = event.clientY + 18;
    tip.style.left = Math.max(8, x) + "px";
    tip.style.top = (below + tip.offsetHeight > innerHeight ? event.clientY - tip.offsetHeight - 10 : below) + "px";
  }
  const hush = () => { tip.hidden = true; };

  function duration(us) {
    const shown = (value, unit) => Number(value.toPrecision(3)) + " " + unit;
    if (us >= 1e6) return shown(us / 1e6, "s");
    if (us >= 1e3) return shown(us / 1e3, "ms");
    return us >= 1 || us === 0 ? shown(us, "us") : shown(us * 1e3, "ns");
  }

  // Charts: the nearest point to the pointer, or the next one with the arrow keys.
  for (const chart of document.querySelectorAll("svg.chart")) {
    const points = JSON.parse(chart.dataset.points).sort((a, b) => a[0] - b[0]);
    const [line, dot] = chart.querySelectorAll(".cursor");
    let at = -1;
    const mark = (index) => {
      at = index;
      for (const part of [line, dot]) part.classList.toggle("on", index >= 0);
      if (index < 0) return;
      const [x, y] = points[index];
      line.setAttribute("x1", x); line.setAttribute("x2", x);
      dot.setAttribute("cx", x); dot.setAttribute("cy", y);
    };
    const leave = () => { mark(-1); hush(); };
    chart.addEventListener("pointermove", (event) => {
      const box = chart.getBoundingClientRect();
      const scale = 640 / box.width;
      const x = (event.clientX - box.left) * scale, y = (event.clientY - box.top) * scale;
      let best = 0, least = Infinity;
      points.forEach((point, index) => {
        const distance = Math.abs(point[0] - x) + 0.2 * Math.abs(point[1] - y);
        if (distance < least) { least = distance; best = index; }
      });
      mark(best);
      say(points[best][2], event);
    });
    chart.addEventListener("pointerleave", leave);
    chart.addEventListener("blur", leave);
    chart.addEventListener("keydown", (event) => {
      const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!move) return;
      event.preventDefault();
      mark(Math.max(0, Math.min(points.length - 1, at + move)));
      const box = chart.getBoundingClientRect(), scale = box.width / 640;
      say(points[at][2], { clientX: box.left + points[at][0] * scale, clientY: box.top + points[at][1] * scale });
    });
  }

  for (const bar of document.querySelectorAll("svg.bar rect")) {
    bar.querySelector("title").remove(); // the browser's own tooltip would cover ours
    bar.addEventListener("pointermove", (event) => say(bar.dataset.tip, event));
    bar.addEventListener("pointerleave", hush);
  }

  const source = document.getElementById("spans");
  if (!source) return;
  const data = JSON.parse(source.textContent);
  const home = document.getElementById("timeline");
  const select = document.getElementById("step");
  const LABEL = 150, AXIS = 24, LANE = 20, GAP = 8;
  let from = 0, to = 1, dragged = null;

  const shownStep = () => data.steps[select.value];

  function clamp() {
    const whole = shownStep().us || 1;
    const width = Math.max(Math.min(to - from, whole), Math.min(whole, 0.05));
    from = Math.max(0, Math.min(from, whole - width));
    to = from + width;
  }
  function zoom(factor, share) {
    const width = (to - from) * factor, centre = from + (to - from) * share;
    from = centre - width * share;
    to = from + width;
    draw();
  }
  function move(share) {
    const shift = (to - from) * share;
    from += shift; to += shift;
    draw();
  }
  function whole() { from = 0; to = shownStep().us; draw(); }

  function axis(svg, plot, height) {
    const raw = (to - from) / Math.max(2, plot / 110);
    const power = Math.pow(10, Math.floor(Math.log10(raw)));
    const gap = [1, 2, 5, 10].find((factor) => factor * power >= raw) * power;
    for (let at = Math.ceil(from / gap) * gap; at <= to; at += gap) {
      const x = LABEL + (at - from) / (to - from) * plot;
      svg.append(make("line", { class: "grid", x1: x, x2: x, y1: AXIS - 4, y2: height }));
      if (x < LABEL + plot - 24) svg.append(make("text", { class: "tick", x: x + 3, y: 13 }, duration(at)));
    }
  }
  function about(row, span) {
    const [start, length, kind, name, instruction, microBatch, stage, bytes] = span;
    const lines = [data.names[name], `${data.kinds[kind]}, ${duration(length)}, from ${duration(start)}`,
      `rank ${row.rank}, instruction ${instruction}`];
    if (microBatch !== null) lines.push(`micro-batch ${microBatch}`);
    if (stage !== null) lines.push(`stage ${stage}`);
    if (bytes !== null) lines.push(length > 0 ? `${bytes} moved` : bytes);
    return lines.join("\n");
  }
  function drawRow(svg, row, y, plot) {
    const scale = plot / (to - from);
    let drawnTo = -1;
    for (const span of row.spans) {
      const left = Math.max(0, (span[0] - from) * scale);
      const right = Math.min(plot, (span[0] + span[1] - from) * scale);
      if (right < 0 || left > plot || right < left) continue;
      if (right - left < 0.5 && right < drawnTo + 0.5) continue; // cannot be told from its neighbour
      drawnTo = right;
      const width = Math.max(0.7, right - left - (right - left > 3 ? 1 : 0));
      const rect = make("rect",
        { class: "kind-" + data.kinds[span[2]], x: LABEL + left, y: y + 1, width, height: LANE - 3, rx: width > 6 ? 2 : 0 });
      rect.about = () => about(row, span);
      svg.append(rect);
      const name = data.names[span[3]];
      if (width > 44) {
        const fit = Math.floor((width - 8) / 6.3);
        svg.append(make("text", { class: "inside", x: LABEL + left + 4, y: y + 14 },
          name.length > fit ? name.slice(0, Math.max(1, fit - 1)) + "…" : name));
      }
    }
  }
  function draw() {
    clamp();
    const { rows } = shownStep();
    const width = Math.max(LABEL + 90, home.clientWidth);
    const plot = width - LABEL - 4;
    const ranks = new Set(rows.map((row) => row.rank)).size;
    const height = AXIS + rows.length * LANE + ranks * GAP;
    const had = document.activeElement && document.activeElement.parentNode === home;
    const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, height, preserveAspectRatio: "xMinYMin", tabindex: 0, role: "img",
      "aria-label": `Timeline of step ${select.value}: ${rows.length} lanes, ${duration(shownStep().us)}` });
    let y = AXIS, rank = null;
    const places = [];
    for (const row of rows) {
      if (row.rank !== rank) {
        y += rank === null ? 0 : GAP;
        svg.append(make("text", { class: "name", x: 0, y: y + 14 }, `rank ${row.rank}`));
        rank = row.rank;
      }
      svg.append(make("text", { class: "lane", x: LABEL - 8, y: y + 14, "text-anchor": "end" }, row.lane));
      svg.append(make("rect", { class: "track", x: LABEL, y: y + 1, width: plot, height: LANE - 3 }));
      places.push([row, y]);
      y += LANE;
    }
    axis(svg, plot, height);
    for (const [row, top] of places) drawRow(svg, row, top, plot);
    home.replaceChildren(svg);
    if (had) svg.focus({ preventScroll: true });
  }

  const shareOf = (event) => {
    const box = home.getBoundingClientRect();
    return Math.max(0, Math.min(1, (event.clientX - box.left - LABEL) / (home.clientWidth - LABEL)));
  };
  home.addEventListener("wheel", (event) => {
    const out = event.deltaY > 0;
    if (out && to - from >= shownStep().us) return; // nothing left to zoom out: the page scrolls
    event.preventDefault();
    hush();
    zoom(out ? 1.25 : 0.8, shareOf(event));
  }, { passive: false });
  home.addEventListener("pointerdown", (event) => { dragged = { x: event.clientX }; });
  addEventListener("pointerup", () => { dragged = null; });
  home.addEventListener("pointermove", (event) => {
    if (dragged) {
      hush();
      const share = (dragged.x - event.clientX) / (home.clientWidth - LABEL);
      dragged.x = event.clientX;
      move(share);
    } else if (event.target.about) say(event.target.about(), event);
    else hush();
  });
  home.addEventListener("pointerleave", hush);
  home.addEventListener("dblclick", whole);
  home.addEventListener("keydown", (event) => {
    const act = { "+": () => zoom(0.7, 0.5), "=": () => zoom(0.7, 0.5), "-": () => zoom(1.4, 0.5), 0: whole,
      ArrowLeft: () => move(-0.15), ArrowRight: () => move(0.15) }[event.key];
    if (act) { event.preventDefault(); act(); }
  });
  document.getElementById("closer").addEventListener("click", () => zoom(0.7, 0.5));
  document.getElementById("wider").addEventListener("click", () => zoom(1.4, 0.5));
  document.getElementById("whole").addEventListener("click", whole);
  select.addEventListener("change", whole);
  addEventListener("resize", draw);
  whole();
})();
