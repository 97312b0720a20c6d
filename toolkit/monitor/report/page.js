// Draws the page's charts as SVG from the JSON in the page, without libraries or requests; page.css has the colours.
// Charts over the same axis are zoomed together. Dragging zooms, a double click or Escape resets, arrow keys move the
// cursor, and a click on a legend entry hides its line.
"use strict";
(() => {
  const HEIGHT = 250, LEFT = 74, RIGHT = 14, TOP = 12, BOTTOM = 40;
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const zoom = {};     // by x format: [from, to]
  const extent = {};   // by x format: over all charts, so that their axes are aligned
  const views = [];

  // ---- number formats

  const rounded = (value, digits) => String(Number(value.toPrecision(digits)));
  const scaled = (value, units, digits) => {
    const unit = units.find(([size]) => Math.abs(value) >= size) || units[units.length - 1];
    return rounded(value / unit[0], digits) + unit[1];
  };
  const plain = (value, digits) => {
    const size = Math.abs(value);
    if (size >= 1e4) return scaled(value, [[1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]], digits);
    return size < 1e-3 && size > 0 ? Number(value.toPrecision(digits)).toExponential() : rounded(value, Math.max(digits, 4));
  };
  const utc = (seconds, pattern) => {
    const text = new Date(seconds * 1000).toISOString();  // 2026-11-21T20:30:00.000Z
    const [day, time] = [text.slice(0, 10), text.slice(11, 19)];
    return { day: day.slice(5), minute: time.slice(0, 5), second: time, all: `${day} ${time} UTC` }[pattern];
  };
  const formatters = {
    number: plain,
    percent: (value, digits) => `${rounded(value * 100, Math.max(digits, 3))}%`,
    bytes: (value, digits) => (value ? scaled(value, [[1e12, " TB"], [1e9, " GB"], [1e6, " MB"], [1e3, " kB"], [1, " B"]], digits) : "0 B"),
    seconds: (value, digits) => (value ? scaled(value, [[1, " s"], [1e-3, " ms"], [1e-6, " µs"]], digits) : "0 s"),
    step: (value) => (Math.round(value * 10) / 10).toLocaleString("en"),
    ranks: (value) => Math.round(2 ** value).toLocaleString("en"),
    time: (value) => utc(value, "all"),
  };

  const titles = { time: "time (UTC)", step: "step", ranks: "ranks" };

  // ---- ticks

  const nice = (rough) => {
    const power = 10 ** Math.floor(Math.log10(rough));
    return power * [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999);
  };
  const multiples = (low, high, by) => {
    const first = Math.ceil(low / by - 1e-9), last = Math.floor(high / by + 1e-9);
    return Array.from({ length: Math.max(0, last - first + 1) }, (_, index) => (first + index) * by);
  };
  const TIMES = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800, 2592000];

  function ticksOfX(format, [low, high], count) {
    const rough = (high - low) / count;
    if (format === "time") {
      const by = TIMES.find((step) => step >= rough) || 86400 * Math.ceil(rough / 86400);
      const pattern = by >= 86400 ? "day" : by >= 60 ? "minute" : "second";
      return multiples(low, high, by).map((at) => [at, pattern === "minute" && at % 86400 === 0 ? utc(at, "day") : utc(at, pattern)]);
    }
    return multiples(low, high, Math.max(1, nice(rough))).map((at) => [at, format === "step" && at >= 1e6 ? plain(at, 4) : formatters[format](at)]);
  }

  function ticksOfY(format, [low, high], logarithmic) {
    if (logarithmic) {
      const decades = Math.log10(high / low), factors = decades > 3 ? [1] : decades > 1 ? [1, 2, 5] : [1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9];
      const ticks = multiples(Math.floor(Math.log10(low)), Math.ceil(Math.log10(high)), Math.max(1, Math.ceil(decades / 6)))
        .flatMap((power) => factors.map((factor) => factor * 10 ** power)).filter((at) => at >= low && at <= high);
      if (ticks.length > 1) return ticks.map((at) => [at, formatters[format](at, 2)]);
    }
    const by = nice((high - low) / 5);
    return multiples(low, high, by).map((at) => [at, formatters[format](Math.abs(at) < by / 1e6 ? 0 : at, digitsFor(at, by))]);
  }
  const digitsFor = (at, by) => Math.max(2, Math.ceil(Math.log10(Math.max(Math.abs(at), by) / by) + 1e-9) + 1);

  const set = (node, attributes) => Object.entries(attributes).forEach(([name, value]) => node.setAttribute(name, value));

  // ---- one chart

  class View {
    constructor(chart) {
      this.chart = chart;
      this.figure = document.getElementById(`chart-${chart.id}`);
      this.svg = this.figure.querySelector("svg");
      this.reading = this.figure.querySelector(".reading");
      this.hidden = new Set();
      this.logarithmic = false;
      this.figure.querySelectorAll("button.key").forEach((key) => key.addEventListener("click", () => this.toggle(key)));
      this.figure.querySelector("button.log")?.addEventListener("click", (event) => {
        this.logarithmic = !this.logarithmic;
        event.target.setAttribute("aria-pressed", this.logarithmic);
        this.draw();
      });
      this.listen();
    }

    toggle(key) {
      const index = Number(key.dataset.series);
      if (!this.hidden.delete(index)) this.hidden.add(index);
      key.setAttribute("aria-pressed", !this.hidden.has(index));
      this.draw();
    }

    get shown() {
      return this.chart.series.filter((_, index) => !this.hidden.has(index));
    }

    element(name, attributes, parent = this.svg) {
      const node = document.createElementNS(this.svg.namespaceURI, name);
      for (const [key, value] of Object.entries(attributes)) {
        if (key === "colour") node.style.setProperty("--c", `var(--c-${value})`);
        else if (key === "text") node.textContent = value;
        else node.setAttribute(key, value);
      }
      parent.appendChild(node);
      return node;
    }

    draw() {
      const { chart } = this;
      this.width = Math.max(260, Math.round(this.svg.getBoundingClientRect().width) || 560);
      this.domain = zoom[chart.xFormat] || extent[chart.xFormat];
      this.layers = chart.stacked ? this.stack() : this.shown.map((one) => ({ ...one, base: null }));
      this.range = this.rangeOfY();
      this.svg.setAttribute("viewBox", `0 0 ${this.width} ${HEIGHT}`);
      this.svg.replaceChildren();
      // Slightly wider than the plot, so that dots at its edge are complete.
      const clip = this.element("clipPath", { id: `clip-${chart.id}` }, this.element("defs", {}));
      this.element("rect", { x: LEFT - 3, y: TOP - 3, width: this.inner + 6, height: HEIGHT - TOP - BOTTOM + 6 }, clip);
      this.axes();
      const plot = this.element("g", { "clip-path": `url(#clip-${chart.id})` });
      let points = 0;
      for (const layer of this.layers) points += chart.stacked ? this.area(layer, plot) : this.curve(layer, plot);
      this.marks(plot);
      this.svg.dataset.points = points;
      this.cursor = this.element("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
      this.selection = this.element("rect", { class: "selection", y: TOP, height: HEIGHT - TOP - BOTTOM, visibility: "hidden" });
    }

    get inner() { return this.width - LEFT - RIGHT; }
    x(value) { const [low, high] = this.domain; return LEFT + ((value - low) / (high - low)) * this.inner; }
    unx(pixel) { const [low, high] = this.domain; return low + ((pixel - LEFT) / this.inner) * (high - low); }
    y(value) {
      const [low, high] = this.range, of = this.log ? Math.log10 : (value) => value;
      if (this.log && value <= 0) return HEIGHT;
      return HEIGHT - BOTTOM - ((of(value) - of(low)) / (of(high) - of(low))) * (HEIGHT - TOP - BOTTOM);
    }
    get log() { return this.logarithmic && this.range[0] > 0; }

    // Stack the layers; a missing value counts as zero.
    stack() {
      let base = null;
      return this.shown.map((one) => {
        const from = base || one.mid.map(() => 0);
        const to = one.mid.map((value, index) => from[index] + (value || 0));
        base = to;
        return { ...one, base: from, top: to };
      });
    }

    visible(xs) {
      const [low, high] = this.domain;
      let first = xs.findIndex((x) => x >= low), last = xs.findLastIndex((x) => x <= high);
      if (first < 0) first = xs.length;
      return [Math.max(0, first - 1), Math.min(xs.length - 1, last + 1)];
    }

    rangeOfY() {
      const middle = [], around = [];
      for (const layer of this.layers) {
        const [first, last] = this.visible(layer.x);
        for (let index = first; index <= last; index++) {
          for (const [value, into] of [[this.chart.stacked ? layer.top[index] : layer.mid[index], middle],
            [layer.low?.[index], around], [layer.high?.[index], around]]) {
            if (value !== null && value !== undefined && (!this.logarithmic || value > 0)) into.push(value);
          }
        }
      }
      if (!middle.length) return [0, 1];
      const least = (values, start) => values.reduce((a, b) => Math.min(a, b), start);
      const most = (values, start) => values.reduce((a, b) => Math.max(a, b), start);
      if (this.chart.stacked) return [0, Math.max(1e-6, most(middle, 0)) > 0.97 ? 1 : most(middle, 1e-6)];
      let low = least(middle, Infinity), high = most(middle, -Infinity);
      // Bands extend the range only as far as they do not flatten the line; beyond, they are clipped.
      const span = Math.max(high - low, Math.abs(high) / 2) || 1;
      [low, high] = [Math.max(least(around, low), low - 1.5 * span), Math.min(most(around, high), high + 1.5 * span)];
      if (this.logarithmic) return [low > 0 ? low / 1.05 : least(middle, Infinity) / 1.05, high * 1.05];
      if (this.chart.fromZero) low = Math.min(0, low);
      const padding = (high - low || Math.abs(high) * 0.1 || 1) * 0.05;
      return [this.chart.fromZero && low === 0 ? 0 : low - padding, high + padding];
    }

    axes() {
      const { chart } = this, bottom = HEIGHT - BOTTOM;
      for (const [at, label] of ticksOfY(chart.yFormat, this.range, this.log)) {
        const y = this.y(at).toFixed(1);
        this.element("line", { class: "grid", x1: LEFT, x2: this.width - RIGHT, y1: y, y2: y });
        this.element("text", { class: "tick", x: LEFT - 7, y, dy: "0.32em", "text-anchor": "end", text: label });
      }
      for (const [at, label] of ticksOfX(chart.xFormat, this.domain, this.inner / 85)) {
        const x = this.x(at).toFixed(1);
        this.element("line", { class: "notch", x1: x, x2: x, y1: bottom, y2: bottom + 4 });
        const text = this.element("text", { class: "tick", x, y: bottom + 16, "text-anchor": "middle", text: label });
        text.setAttribute("x", Math.min(x, this.width - 1 - text.getComputedTextLength() / 2).toFixed(1));  // keep the last label inside
      }
      this.element("line", { class: "axis", x1: LEFT, x2: this.width - RIGHT, y1: bottom, y2: bottom });
      const middle = { class: "label", "text-anchor": "middle" };
      this.element("text", { ...middle, x: LEFT + this.inner / 2, y: HEIGHT - 6, text: titles[chart.xFormat] });
      this.element("text", { ...middle, transform: `translate(12 ${TOP + (bottom - TOP) / 2}) rotate(-90)`, text: chart.yLabel });
    }

    // Return runs of neighbouring points with values: missing values are gaps in the line.
    runs(layer) {
      const [first, last] = this.visible(layer.x), runs = [];
      let run = [];
      for (let index = first; index <= last; index++) {
        if (layer.mid[index] === null) { if (run.length) runs.push(run); run = []; } else run.push(index);
      }
      if (run.length) runs.push(run);
      return runs;
    }

    point(x, y) { return `${this.x(x).toFixed(1)} ${this.y(y).toFixed(1)}`; }

    path(xs, values, indices) {
      return indices.map((index, nth) => (nth ? "L" : "M") + this.point(xs[index], values[index])).join("");
    }

    between(layer, low, high, indices) {
      const back = [...indices].reverse().map((index) => `L${this.point(layer.x[index], low[index])}`).join("");
      return `${this.path(layer.x, high, indices)}${back}Z`;
    }

    curve(layer, plot) {
      const runs = this.runs(layer), colour = layer.colour, all = (draw) => runs.map(draw).join("");
      const band = layer.low && all((run) => this.between(layer, layer.low, layer.high, run));
      if (band) this.element("path", { class: "band", colour, d: band }, plot);
      const path = this.element("path", { class: "line", colour, d: all((run) => this.path(layer.x, layer.mid, run)) }, plot);
      const points = runs.reduce((sum, run) => sum + run.length, 0);
      path.dataset.series = layer.name;
      path.dataset.points = points;
      for (const run of runs) {
        if (!layer.dots && run.length > 1) continue;  // an isolated point needs a dot to be visible
        for (const index of run) {
          const [cx, cy] = this.point(layer.x[index], layer.mid[index]).split(" ");
          this.element("circle", { class: "dot", colour, cx, cy, r: 2.6 }, plot);
        }
      }
      return points;
    }

    area(layer, plot) {
      const [first, last] = this.visible(layer.x);
      const indices = Array.from({ length: last - first + 1 }, (_, offset) => first + offset);
      // A single step has no width, so it fills the plot.
      const alone = indices.length === 1, twice = (values) => [values[first], values[first]];
      const drawn = alone ? { x: [...this.domain], base: twice(layer.base), top: twice(layer.top) } : layer;
      const d = this.between(drawn, drawn.base, drawn.top, alone ? [0, 1] : indices);
      const path = this.element("path", { class: "area", colour: layer.colour, d }, plot);
      path.dataset.series = layer.name;
      path.dataset.points = indices.length;
      return indices.length;
    }

    marks(plot) {
      let free = LEFT;  // overlapping labels are omitted; the tooltip shows all marks
      for (const mark of [...this.chart.marks].sort((a, b) => a.x - b.x)) {
        const x = this.x(mark.x);
        const ends = { x1: x.toFixed(1), x2: x.toFixed(1), y1: TOP, y2: HEIGHT - BOTTOM };
        const drawn = this.element("line", { class: `mark ${mark.level}`, ...ends }, plot);
        this.element("title", { text: mark.text }, drawn);
        if (x < free || x > this.width - RIGHT) continue;
        const label = this.element("text", { class: `mark-label ${mark.level}`, x: (x + 3).toFixed(1), y: TOP + 9, text: mark.label }, plot);
        const length = label.getComputedTextLength();
        if (x + 3 + length <= this.width - RIGHT) { free = x + 6 + length; continue; }
        if (x - 3 - length < free) { label.remove(); continue; }
        set(label, { x: (x - 3).toFixed(1), "text-anchor": "end" });
        free = x;
      }
    }

    // ---- cursor and zoom

    listen() {
      const pixel = (event) => {
        const box = this.svg.getBoundingClientRect();
        return Math.min(this.width - RIGHT, Math.max(LEFT, (event.clientX - box.left) * (this.width / box.width)));
      };
      let from = null;
      this.svg.addEventListener("pointerdown", (event) => {
        if (event.button !== 0) return;
        from = pixel(event);
        this.svg.setPointerCapture(event.pointerId);
      });
      this.svg.addEventListener("pointermove", (event) => {
        const to = pixel(event);
        this.read(this.unx(to));
        if (from === null) return;
        const [low, high] = [Math.min(from, to), Math.max(from, to)];
        set(this.selection, { x: low, width: high - low, visibility: "visible" });
      });
      this.svg.addEventListener("pointerup", (event) => {
        if (from === null) return;
        const [low, high] = [from, pixel(event)].sort((a, b) => a - b);
        from = null;
        this.selection.setAttribute("visibility", "hidden");
        if (high - low > 6) setZoom(this.chart.xFormat, [this.unx(low), this.unx(high)]);
      });
      this.svg.addEventListener("pointercancel", () => { from = null; this.selection.setAttribute("visibility", "hidden"); });
      this.svg.addEventListener("pointerleave", () => this.clearReading());
      this.svg.addEventListener("blur", () => this.clearReading());
      this.svg.addEventListener("dblclick", () => setZoom(this.chart.xFormat, null));
      this.svg.addEventListener("keydown", (event) => {
        const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
        if (event.key === "Escape") setZoom(this.chart.xFormat, null);
        if (!move) return;
        event.preventDefault();
        const [low, high] = this.domain;
        this.read(Math.min(high, Math.max(low, (this.at ?? (move > 0 ? low : high)) + (move * (high - low)) / 100)));
      });
    }

    read(at) {
      const nearest = (xs) => {
        const after = xs.findIndex((x) => x >= at);
        if (after <= 0) return after < 0 ? xs.length - 1 : 0;
        return xs[after] - at < at - xs[after - 1] ? after : after - 1;
      };
      const { xFormat, yFormat, marks } = this.chart;
      const near = (x) => Math.abs(this.x(x) - this.x(at)) < this.inner / 8;
      const close = this.shown.map((one) => [one, nearest(one.x)]).filter(([one, index]) => index >= 0 && near(one.x[index]));
      this.at = at;
      if (!close.length) return this.clearReading();
      const position = close.map(([one, index]) => one.x[index]).reduce((a, b) => (Math.abs(b - at) < Math.abs(a - at) ? b : a));
      const x = this.x(position);
      set(this.cursor, { x1: x, x2: x, visibility: "visible" });
      const head = document.createElement("b");
      head.textContent = { time: "", step: "step ", ranks: "ranks: " }[xFormat] + formatters[xFormat](position);
      const atOther = (x) => (xFormat === "step" && x !== position ? ` at ${formatters.step(x)}` : "");
      const lines = close.map(([one, index]) => this.readingOf(one, index, atOther(one.x[index]), yFormat));
      if (this.chart.stacked) lines.reverse();  // in stacking order
      for (const mark of marks.filter((one) => Math.abs(this.x(one.x) - x) < 5).slice(0, 4)) {
        const line = document.createElement("div");
        line.className = `event ${mark.level}`;
        line.textContent = mark.text;
        lines.push(line);
      }
      this.reading.replaceChildren(head, ...lines);
      this.reading.hidden = false;
      const share = (x - LEFT) / this.inner;
      this.reading.style.left = share < 0.5 ? `${(x / this.width) * 100}%` : "auto";
      this.reading.style.right = share < 0.5 ? "auto" : `${(1 - x / this.width) * 100}%`;
    }

    readingOf(one, index, position, format) {
      const line = document.createElement("div"), swatch = document.createElement("i"), value = document.createElement("span");
      swatch.style.setProperty("--c", `var(--c-${one.colour})`);
      const [mid, low, high] = [one.mid[index], one.low?.[index], one.high?.[index]], formatValue = formatters[format];
      const band = low !== undefined && low !== high ? ` (${formatValue(low, 4)} to ${formatValue(high, 4)})` : "";
      value.textContent = `${mid === null ? "no value" : formatValue(mid, 5)}${band}${position}`;
      line.append(swatch, `${one.name} `, value);
      return line;
    }

    clearReading() {
      this.reading.hidden = true;
      this.at = undefined;
      this.cursor?.setAttribute("visibility", "hidden");
    }
  }

  function setZoom(format, domain) {
    if (domain) zoom[format] = domain; else delete zoom[format];
    document.getElementById("whole").hidden = Object.keys(zoom).length === 0;
    for (const view of views) if (view.chart.xFormat === format) { view.clearReading(); view.draw(); }
  }

  for (const chart of charts) {
    const xs = chart.series.flatMap((one) => (one.x.length ? [one.x[0], one.x[one.x.length - 1]] : []));
    const [low, high] = extent[chart.xFormat] || [Infinity, -Infinity];
    extent[chart.xFormat] = [Math.min(low, ...xs), Math.max(high, ...xs)];
  }
  for (const format of Object.keys(extent)) {
    const [low, high] = extent[format];
    if (low === high) extent[format] = [low - 0.5, high + 0.5];  // centre a single point
  }
  for (const chart of charts) views.push(new View(chart));
  for (const view of views) view.draw();
  document.getElementById("whole").addEventListener("click", () => Object.keys(zoom).forEach((format) => setZoom(format, null)));

  let pending = 0;
  new ResizeObserver(() => {
    cancelAnimationFrame(pending);
    pending = requestAnimationFrame(() => views.forEach((view) => {
      if (Math.abs(view.svg.getBoundingClientRect().width - view.width) > 1) view.draw();
    }));
  }).observe(document.querySelector("main"));
  document.documentElement.dataset.drawn = views.length;
})();
