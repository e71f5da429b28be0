// Curves with uPlot: hover reads all charts at one step, arrow keys move the cursor, "Table" shows the numbers.

const CHART_HEIGHT = 190;
const number = (value) => {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size !== 0 && size < 1e-3) return value.toExponential(1).replace("e-", "e−").replace(/^-/, "−");
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(4))).replace("-", "−");
};
const FORMATS = {
  share: (v) => (v === null || v === undefined ? "–" : `${Number((100 * v).toFixed(1))} %`),
  seconds: (v) => (v === null || v === undefined ? "–" : `${number(v)} s`),
};
const format = (unit, value) => (FORMATS[unit] || number)(value);

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const colour = (index) => css(`--s${index % 8}`);

const newest = (column) => column.findLast((v) => v !== null); // what the legend shows without a cursor

function stacked(columns) {
  const sums = [];
  let below = null;
  for (const column of columns) {
    below = column.map((v, i) => (v ?? 0) + (below ? below[i] : 0));
    sums.push(below);
  }
  return sums;
}

function intervals(chart, columns) {
  return (u) => {
    const { ctx } = u;
    chart.series.forEach((series, place) => {
      if (!series.low || !columns[series.low]) return;
      ctx.save();
      ctx.strokeStyle = colour(place);
      ctx.lineWidth = devicePixelRatio;
      ctx.beginPath();
      columns.step.forEach((step, i) => {
        const low = columns[series.low][i], high = columns[series.high][i];
        if (low === null || high === null) return;
        const x = Math.round(u.valToPos(step, "x", true));
        ctx.moveTo(x, u.valToPos(low, "y", true));
        ctx.lineTo(x, u.valToPos(high, "y", true));
      });
      ctx.stroke();
      ctx.restore();
    });
  };
}

function seriesOptions(chart, raw) {
  return chart.series.map((series, place) => {
    const sparse = raw[place].filter((v) => v !== null).length < raw[place].length / 2;
    const few = raw[place].length < 3;
    return {
      label: series.label, stroke: colour(place), width: chart.kind === "stack" ? 1 : 1.6, spanGaps: true,
      points: { show: sparse || few, size: 5, fill: css("--surface") },
      value: (_, __, ___, i) => format(chart.unit, i === null ? newest(raw[place]) : raw[place][i]),
      fill: chart.kind === "stack" ? colour(place) + "59" : undefined,
    };
  });
}

function chartOptions(chart, columns, raw, width) {
  const axis = { stroke: css("--muted"), grid: { stroke: css("--line"), width: 1 }, ticks: { show: false },
    font: "12px system-ui, sans-serif" };
  const stack = chart.kind === "stack";
  const order = chart.series.map((_, i) => i + 1);
  return {
    width, height: CHART_HEIGHT,
    scales: { x: { time: false }, y: scaleOf(chart, raw) },
    axes: [{ ...axis, size: 28, grid: { show: false }, values: (_, ticks) => ticks.map((t) => (t % 1 ? "" : t)) },
      { ...axis, size: 58, values: (_, ticks) => ticks.map((t) => (t === null ? "" : format(chart.unit, t))) }],
    series: [{ label: "step", value: (_, v) => v ?? newest(columns.step) }, ...seriesOptions(chart, raw)],
    bands: stack ? order.slice(1).map((i) => ({ series: [i, i - 1] })) : [],
    cursor: { y: false, sync: { key: "steps", setSeries: false }, points: { size: 7, fill: (_, i) => colour(i - 1) }, drag: { x: true, y: false } },
    hooks: { draw: [intervals(chart, columns)] },
  };
}

function scaleOf(chart, raw) {
  if (chart.log) return { distr: 3 };
  if (chart.unit === "share") {
    const top = Math.max(...raw.flat().filter((v) => v !== null));
    return { range: [0, top > 0.5 ? 1 : Math.max(top * 1.15, 0.01)] };
  }
  return { range: (_, low, high) => uPlot.rangeNum(chart.kind === "stack" ? 0 : low, high || 1, 0.08, true) };
}

function summary(chart, columns) {
  return chart.series.map((series) => {
    const values = columns[series.column].filter((v) => v !== null);
    const [first, last] = [values[0], values[values.length - 1]];
    const [low, high] = [Math.min(...values), Math.max(...values)];
    return `${series.label}: from ${format(chart.unit, first)} to ${format(chart.unit, last)}, ` +
      `lowest ${format(chart.unit, low)}, highest ${format(chart.unit, high)}`;
  }).join("; ");
}

function dataTable(chart, columns) {
  const head = make("tr", {}, ...["step", ...chart.series.map((s) => s.label)].map((t) => make("th", { text: t, scope: "col" })));
  const rows = columns.step.map((step, i) => make("tr", {}, make("td", { text: step }),
    ...chart.series.map((s) => make("td", { text: format(chart.unit, columns[s.column][i]) }))));
  const table = make("table", { class: "data" }, make("caption", { class: "hidden", text: chart.title }),
    make("thead", {}, head), make("tbody", {}, ...rows));
  return make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `${chart.title}, numbers` }, table);
}

function moveCursor(u, columns, live, chart, by) {
  const last = columns.step.length - 1;
  const at = Math.min(Math.max((u.cursor.idx ?? (by > 0 ? -1 : last + 1)) + by, 0), last);
  u.setCursor({ left: u.valToPos(columns.step[at], "x"), top: CHART_HEIGHT / 2 });
  live.textContent = `step ${columns.step[at]}: ` +
    chart.series.map((s) => `${s.label} ${format(chart.unit, columns[s.column][at])}`).join(", ");
}

function drawChart(chart, columns) {
  const plot = make("div", { class: "plot", tabindex: "0", role: "img", "aria-label": `${chart.title}. ${summary(chart, columns)}` });
  const live = make("div", { class: "hidden", "aria-live": "polite" });
  const button = make("button", { class: "quiet", text: "Table", "aria-pressed": "false", "aria-label": `${chart.title} as a table` });
  const figure = make("figure", { class: "chart" },
    make("figcaption", {}, make("h3", { text: chart.title }), button),
    make("p", { class: "note", text: chart.note }), plot, live);
  const raw = chart.series.map((s) => columns[s.column]);
  const data = [columns.step, ...(chart.kind === "stack" ? stacked(raw) : raw)];
  let u = null, table = null;
  const draw = () => {
    if (u) u.destroy();
    u = new uPlot(chartOptions(chart, columns, raw, Math.max(plot.clientWidth, 200)), data, plot);
  };
  button.addEventListener("click", () => {
    const shown = button.getAttribute("aria-pressed") === "true";
    button.setAttribute("aria-pressed", String(!shown));
    button.textContent = shown ? "Table" : "Curve";
    if (!table) plot.after((table = dataTable(chart, columns)));
    table.hidden = shown;
    plot.hidden = !shown;
  });
  plot.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by) return;
    event.preventDefault();
    moveCursor(u, columns, live, chart, by);
  });
  themeListeners.push(draw);
  new ResizeObserver(() => {
    if (!u) draw();
    else if (plot.clientWidth) u.setSize({ width: plot.clientWidth, height: CHART_HEIGHT });
  }).observe(plot);
  return figure;
}

async function drawCharts() {
  const { groups, columns } = await unpackJson("blob-charts");
  for (const group of groups) {
    const home = document.querySelector(`[data-charts="${CSS.escape(group.title)}"]`);
    home.append(...group.charts.map((chart) => drawChart(chart, columns)));
  }
}
const chartsDrawn = drawCharts();
