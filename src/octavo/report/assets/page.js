"use strict";
(() => {
  const root = document.documentElement;
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const config = {
    displaylogo: false, responsive: true, displayModeBar: "hover",
    modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d", "zoomIn2d", "zoomOut2d"],
  };

  // Every text "@name" is a colour of the style sheet, so that charts follow light, dark and print.
  function painted(value, palette) {
    if (typeof value === "string") {
      return value[0] === "@" ? palette.getPropertyValue("--" + value.slice(1)).trim() || value : value;
    }
    if (Array.isArray(value)) {
      return typeof value[0] === "number" ? value : value.map((item) => painted(item, palette));
    }
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, painted(item, palette)]));
    }
    return value;
  }

  function chosen(name) {
    const values = {};
    for (const input of document.querySelectorAll(`[data-chart="${name}"]`)) {
      const control = input.dataset.control;
      values[control] = values[control] || [];
      if (input.type !== "checkbox" || input.checked) values[control].push(input.value);
    }
    return values;
  }

  function shown(trace, values) {
    const wanted = (trace.meta && trace.meta.show) || {};
    return Object.entries(wanted).every(([control, allowed]) => allowed.some((value) => (values[control] || []).includes(value)));
  }

  function assign(target, path, value) {
    const keys = path.split(".");
    const last = keys.pop();
    let place = target;
    for (const key of keys) place = place[key] = place[key] || {};
    place[last] = value;
  }

  // Bars carry their figures beside them: the axis ends where the longest of these still fits, however narrow the page.
  // `least` keeps differences that are nothing from filling the page.
  function roomForTexts(bars, width, least) {
    const values = bars.flatMap((bar) => bar.x);
    const [low, high] = [Math.min(0, ...values), Math.max(least, ...values)];
    const letters = Math.max(...bars.flatMap((bar) => bar.text.map((words) => words.length)));
    const names = Math.max(...bars.flatMap((bar) => bar.y.flatMap((words) => words.split("<br>").map((line) => line.length))));
    const sides = low < 0 ? 2 : 1;
    const share = Math.min(0.7 / sides, (6.8 * letters + 14) / Math.max(60, width - 6.8 * names - 40));
    const room = ((high - low || 1) * share) / (1 - sides * share);
    return [low < 0 ? low - room : 0, high + room];
  }

  // A map in a narrow window: headings stand upright on one line, and the figures in the cells replace the scale.
  function narrowed(trace, width) {
    if (trace.type !== "heatmap" || width >= 560) return trace;
    return { ...trace, x: trace.x.map((words) => words.replaceAll("<br>", " ")), showscale: false };
  }

  function draw(name) {
    const width = document.getElementById("chart-" + name).clientWidth;
    const figure = figures[name];
    const values = chosen(name);
    const palette = getComputedStyle(root);
    const drawn = figure.data.filter((trace) => shown(trace, values));
    // One legend entry a group: that of its last trace.
    const last = new Map(drawn.filter((trace) => trace.legendgroup).map((trace) => [trace.legendgroup, trace]));
    const data = drawn.map((trace) => ({ ...narrowed(painted(trace, palette), width), showlegend: last.get(trace.legendgroup) === trace }));
    const layout = painted(figure.layout, palette);
    for (const [control, changes] of Object.entries(figure.layouts)) {
      for (const value of values[control] || []) {
        for (const [path, change] of Object.entries(changes[value] || {})) assign(layout, path, painted(change, palette));
      }
    }
    if (width < 560 && drawn.some((trace) => trace.type === "heatmap")) layout.xaxis.tickangle = -90;
    const bars = drawn.filter((trace) => trace.type === "bar");
    if (bars.length) layout.xaxis.range = roomForTexts(bars, width, (layout.meta && layout.meta.least) || 0);
    if (root.classList.contains("printing")) layout.width = 680; // CSS pixels: A4 between its margins
    layout.uirevision = JSON.stringify(values);
    return Plotly.react("chart-" + name, data, layout, config);
  }

  function drawSome(names) {
    root.dataset.charts = "drawing";
    return Promise.all(names.map(draw)).then(() => { root.dataset.charts = "drawn"; });
  }

  function drawAll() {
    return drawSome(Object.keys(figures));
  }

  drawAll();
  for (const input of document.querySelectorAll("[data-chart]")) {
    input.addEventListener("change", () => drawSome([input.dataset.chart]));
  }
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth !== width) drawAll();
    width = innerWidth;
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  addEventListener("beforeprint", () => { root.classList.add("printing"); drawAll(); });
  addEventListener("afterprint", () => { root.classList.remove("printing"); drawAll(); });
})();
