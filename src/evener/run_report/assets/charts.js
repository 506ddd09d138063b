"use strict";
// Numbers for people, and charts of runs.
// Names of runs and ranks are set as text only, never as markup.
const charts = (() => {
  const CHART_HEIGHT = 240;
  const ZOOM = 1.6;
  const PAN = 0.2;

  const ink = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const curveInk = (number) => ink(`curve-${number % 8}`);

  // ── numbers for people ─────────────────────────────────────────────────────────────────────

  function duration(seconds) {
    const size = Math.abs(seconds);
    if (size === 0) return "0 s";
    if (size < 1e-3) return `${(1e6 * seconds).toFixed(0)} µs`;
    if (size < 1) return `${+(1e3 * seconds).toPrecision(3)} ms`;
    if (size < 120) return `${+seconds.toPrecision(4)} s`;
    const minutes = Math.round(seconds / 60);
    if (minutes < 120) return `${minutes} min`;
    return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  }

  function count(value) {
    const size = Math.abs(value);
    for (const [unit, suffix] of [[1e12, "T"], [1e9, "G"], [1e6, "M"]]) {
      if (size >= unit) return `${+(value / unit).toPrecision(4)}${suffix}`;
    }
    if (size >= 1e5) return `${Math.round(value / 1e3)}k`;
    return size >= 1000 ? Math.round(value).toLocaleString("en") : `${+value.toPrecision(4)}`;
  }

  const percent = (value) => `${(100 * value).toFixed(1)}%`;
  const rankName = (rank) => `rank ${rank.rank}`;

  /** With the member where several had the same rank, one after another. */
  function fullName(run, rank) {
    const others = run.ranks.filter((one) => one.rank === rank.rank);
    return others.length > 1 ? `${rankName(rank)} (${rank.member})` : rankName(rank);
  }

  // ── curves ─────────────────────────────────────────────────────────────────────────────────

  /** A curve: x, a mean, perhaps the extremes around it. */
  function curve(label, x, values, colour, look = {}) {
    return { label, x, mean: values.mean, low: values.low, high: values.high, colour, ...look };
  }

  function level(label, x, value, colour) {
    const ends = x.length ? [x[0], x[x.length - 1]] : [];
    return { label, x: ends, mean: ends.map(() => value), colour, dash: [6, 4] };
  }

  function losses(runs, axis) {
    const curves = [];
    runs.forEach((run, number) => {
      const prefix = runs.length > 1 ? `${run.name}: ` : "";
      const x = run.series[axis === "time" ? "end_s" : "samples"];
      curves.push(curve(`${prefix}training loss`, x, run.series.loss, curveInk(number)));
      const evals = run.evals.filter((one) => one.loss !== null);
      if (evals.length) {
        const at = evals.map((one) => (axis === "time" ? one.t_s : one.samples));
        const shown = { mean: evals.map((one) => one.loss) };
        const colour = curveInk(runs.length + number);
        curves.push(curve(`${prefix}held-out loss`, at, shown, colour, { points: true }));
      }
    });
    return curves;
  }

  const byRank = (run, key) =>
    run.ranks.map((rank, i) => curve(fullName(run, rank), run.series.end_s, run.series[key][i], curveInk(i)));

  const CHARTS = {
    "loss-by-samples": (_, runs) => ({ curves: losses(runs, "samples"), x: count, y: count }),
    "loss-by-time": (_, runs) => ({ curves: losses(runs, "time"), x: duration, y: count }),
    speed: (run) => {
      const x = run.series.end_s;
      const curves = [curve("team", x, run.series.speed, ink("ink"))];
      run.ranks.forEach((rank, i) => {
        if (rank.alone !== null) curves.push(level(`${fullName(run, rank)} alone`, x, rank.alone, curveInk(i)));
      });
      if (run.team.ideal !== null) curves.push(level("ideal", x, run.team.ideal, ink("faint")));
      return { curves, x: duration, y: (v) => `${count(v)} ${run.run.unit}/s`, tick: count, zero: true };
    },
    shares: (run) => ({ curves: byRank(run, "shares"), x: duration, y: percent, zero: true }),
    waits: (run) => ({ curves: byRank(run, "waits"), x: duration, y: percent, zero: true }),
    anchor: (run) => ({
      curves: [curve("anchor", run.series.end_s, run.series.anchor, curveInk(0))], x: duration, y: count,
    }),
    sent: (run) => ({
      curves: [curve("bytes", run.series.end_s, run.series.sent_bytes, curveInk(0))], x: duration, y: count, zero: true,
    }),
  };

  /** One table with a common x of several curves: what uPlot takes. */
  function joined(curves) {
    const tables = curves.map((one) =>
      one.low ? [one.x, one.mean, one.low, one.high] : [one.x, one.mean]);
    return tables.length ? uPlot.join(tables) : [[]];
  }

  function seriesOf(curves, show) {
    const series = [{ label: "at", value: (_, v) => (v === null ? "–" : show.x(v)) }];
    const bands = [];
    for (const one of curves) {
      series.push({
        label: one.label,
        stroke: one.colour,
        width: one.points ? 0 : 1.6,
        dash: one.dash,
        spanGaps: true,
        points: { show: Boolean(one.points), size: 7, fill: one.colour },
        value: (_, v) => (v === null || v === undefined ? "–" : show.y(v)),
      });
      if (one.low) {
        const extreme = { class: "extreme", stroke: one.colour, width: 0, spanGaps: true, points: { show: false } };
        series.push({ ...extreme, label: `${one.label}, least` });
        series.push({ ...extreme, label: `${one.label}, largest` });
        bands.push({ series: [series.length - 1, series.length - 2], fill: `${one.colour}33` });
      }
    }
    return { series, bands };
  }

  function drawChart(holder, show) {
    const axis = { stroke: ink("faint"), grid: { stroke: ink("line"), width: 1 }, ticks: { stroke: ink("line") } };
    const { series, bands } = seriesOf(show.curves, show);
    const data = joined(show.curves);
    const plot = new uPlot(
      {
        width: Math.max(200, holder.clientWidth),
        height: CHART_HEIGHT,
        series,
        bands,
        scales: { x: { time: false }, y: { range: show.zero ? fromZero : undefined } },
        axes: [
          { ...axis, values: (_, ticks) => ticks.map(show.x), space: 80 },
          { ...axis, values: (_, ticks) => ticks.map(show.tick || show.y), size: 64 },
        ],
        hooks: {
          setSeries: [(u, index, options) => {
            // The extremes of a curve come and go with it.
            if (options.show === undefined || index === null) return;
            for (let i = index + 1; u.series[i] && u.series[i].class === "extreme"; i += 1) {
              if (u.series[i].show !== options.show) u.setSeries(i, { show: options.show });
            }
          }],
        },
      },
      data,
      holder,
    );
    for (const label of holder.querySelectorAll(".u-legend .u-series:not(:first-child) th")) {
      label.tabIndex = 0;
      label.setAttribute("role", "button");
    }
    return plot;
  }

  const fromZero = (_, low, high) => [0, high > 0 ? 1.05 * high : 1];

  function moveChart(plot, key) {
    const xs = plot.data[0];
    if (!xs.length) return false;
    const [first, last] = [xs[0], xs[xs.length - 1]];
    const { min, max } = plot.scales.x;
    const view = moved(key, { from: min, to: max }, { from: first, to: last });
    if (view) plot.setScale("x", { min: view.from, max: view.to });
    return Boolean(view);
  }

  /** The view after a key, within the whole; null for keys that do nothing. */
  function moved(key, view, whole) {
    const length = view.to - view.from;
    const middle = (view.from + view.to) / 2;
    const centred = (at, size) => ({ from: at - size / 2, to: at + size / 2 });
    switch (key) {
      case "ArrowLeft": return within(centred(middle - PAN * length, length), whole);
      case "ArrowRight": return within(centred(middle + PAN * length, length), whole);
      case "+": case "=": return within(centred(middle, length / ZOOM), whole);
      case "-": return within(centred(middle, length * ZOOM), whole);
      case "0": case "Home": return { ...whole };
      default: return null;
    }
  }

  function within(view, whole) {
    const length = Math.min(view.to - view.from, whole.to - whole.from);
    const from = Math.min(Math.max(view.from, whole.from), whole.to - length);
    return { from, to: from + length };
  }

  /** A chart in the page: drawn, and updated so that a zoom stays. */
  class Chart {
    constructor(holder) {
      this.holder = holder;
      holder.addEventListener("keydown", (event) => {
        if (event.key === "Enter" && event.target !== holder) event.target.click();
        else if (event.target === holder && moveChart(this.plot, event.key)) event.preventDefault();
      });
    }

    /** Show a run; charts of losses show all runs. */
    update(run, runs) {
      this.drawn = [run, runs];
      const show = CHARTS[this.holder.dataset.chart](run, runs);
      const shape = JSON.stringify(show.curves.map((one) => [one.label, Boolean(one.low)]));
      if (this.plot && this.shape === shape) {
        const { min, max } = this.plot.scales.x;
        const xs = this.plot.data[0];
        const isWhole = !xs.length || (min <= xs[0] && max >= xs[xs.length - 1]);
        this.plot.setData(joined(show.curves), isWhole);
        if (!isWhole) this.plot.setScale("x", { min, max });
        return;
      }
      if (this.plot) this.plot.destroy();
      this.plot = drawChart(this.holder, show);
      this.shape = shape;
    }

    /** Draw it again in other colours. */
    redraw() {
      if (this.plot) this.plot.destroy();
      this.plot = null;
      if (this.drawn) this.update(...this.drawn);
    }

    fit() {
      if (this.plot) this.plot.setSize({ width: Math.max(200, this.holder.clientWidth), height: CHART_HEIGHT });
    }
  }

  return { Chart, ZOOM, ink, duration, count, percent, rankName, fullName, moved, within };
})();
