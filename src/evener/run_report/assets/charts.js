"use strict";
// Numbers for people, the views that charts share, and charts of runs.
// Names of runs and ranks are set as text only, never as markup.
const charts = (() => {
  const CHART_HEIGHT = 220;
  const PLOT = { left: 82, right: 24 }; // pixels beside all plots, so that their times are below one another
  const LABEL = 18; // pixels of the unit of an axis
  const ZOOM = 1.6;
  const PAN = 0.2;
  const DAY_S = 86400;

  const ink = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const curveInk = (number) => ink(`curve-${number % 8}`);

  // ── numbers for people ─────────────────────────────────────────────────────────────────────

  /** Seconds in words, such as "2 min 41 s"; a step says how fine they must be. */
  function duration(seconds, step) {
    const size = Math.abs(seconds);
    if (size === 0) return "0 s";
    if (size < 1e-3) return `${(1e6 * seconds).toFixed(0)} µs`;
    if (size < 1) return `${+(1e3 * seconds).toPrecision(3)} ms`;
    if (size < 59.95 && step === undefined) return `${+seconds.toPrecision(3)} s`;
    const finest = step || (size < 3600 ? 1 : size < DAY_S ? 60 : 3600);
    const digits = finest < 1 ? Math.ceil(-Math.log10(finest)) : 0;
    let rest = finest < 1 ? size : Math.round(size / finest) * finest;
    const parts = [];
    for (const [unit, word] of [[DAY_S, "d"], [3600, "h"], [60, "min"]]) {
      const number = Math.floor(rest / unit);
      rest -= number * unit;
      if (number) parts.push(`${number} ${word}`);
    }
    rest = +rest.toFixed(digits);
    if (rest > 0 || !parts.length) parts.push(`${rest} s`);
    return (seconds < 0 ? "−" : "") + parts.join(" ");
  }

  function count(value) {
    const size = Math.abs(value);
    for (const [unit, suffix] of [[1e12, "T"], [1e9, "G"], [1e6, "M"]]) {
      if (size >= unit) return `${+(value / unit).toPrecision(4)}${suffix}`;
    }
    if (size >= 1e5) return `${Math.round(value / 1e3)}k`;
    return size >= 1000 ? Math.round(value).toLocaleString("en") : `${+value.toPrecision(4)}`;
  }

  function bytes(value) {
    for (const [size, unit] of [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) {
      if (value >= size) return `${+(value / size).toPrecision(3)} ${unit}`;
    }
    return `${value} B`;
  }

  const percent = (value) => `${(100 * value).toFixed(1)}%`;
  const wholePercent = (value) => `${+(100 * value).toFixed(1)}%`;

  const slowed = (rank) => (rank.emulated === null ? "" : `emulated ${rank.emulated}×`);

  /** What must be said wherever a rank is: its member if others had that rank, and that it is slowed. */
  function rankFacts(run, rank) {
    const hasOthers = run.ranks.some((one) => one !== rank && one.rank === rank.rank);
    return [hasOthers && rank.member, slowed(rank)].filter(Boolean).join(", ");
  }

  function rankName(run, rank) {
    const facts = rankFacts(run, rank);
    return `rank ${rank.rank}${facts && ` (${facts})`}`;
  }

  const STEPS_S = [
    ...[1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1].flatMap((one) => [one, 2 * one, 5 * one]),
    1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200,
    ...[1, 2, 5, 10, 20, 50, 100, 1000].map((days) => days * DAY_S),
  ];

  /** Round times between two, at most so many apart from the first, and how far they are apart. */
  function timeTicks(from, to, most) {
    const step = STEPS_S.find((one) => (to - from) / one <= most) || STEPS_S.at(-1);
    const first = Math.ceil(from / step - 1e-9);
    const number = Math.max(0, Math.floor(to / step + 1e-9) - first + 1);
    return { step, ticks: Array.from({ length: number }, (_, k) => (first + k) * step) };
  }

  // ── views ──────────────────────────────────────────────────────────────────────────────────

  function within(view, whole) {
    const length = Math.min(view.to - view.from, whole.to - whole.from);
    const from = Math.min(Math.max(view.from, whole.from), whole.to - length);
    return { from, to: from + length };
  }

  /** The part of an axis that all drawings over it show, and the place that the user points at. */
  class View {
    constructor() {
      this.whole = { from: 0, to: 1 };
      this.now = { ...this.whole };
      this.drawings = [];
    }

    /** The axis has another end; a view of a part of it stays. */
    extend(to) {
      const isWhole = this.now.from <= this.whole.from && this.now.to >= this.whole.to;
      this.whole = { from: 0, to: to > 0 ? to : 1 };
      this.now = isWhole ? { ...this.whole } : within(this.now, this.whole);
    }

    show(view) {
      // Not closer than a microsecond a pixel: times are whole microseconds.
      if (view.to - view.from < 1e-3) return;
      this.now = within(view, this.whole);
      for (const one of this.drawings) one.move();
    }

    zoom(factor, at) {
      const { from, to } = this.now;
      this.show({ from: at - (at - from) / factor, to: at + (to - at) / factor });
    }

    pan(by) {
      this.show({ from: this.now.from + by, to: this.now.to + by });
    }

    /** Point all drawings but one at a place, or at none (null). */
    point(at, source) {
      for (const one of this.drawings) if (one !== source) one.point(at);
    }

    /** Do what a key says, and point at the middle; false if it says nothing. */
    press(key) {
      const { from, to } = this.now;
      const middle = (from + to) / 2;
      switch (key) {
        case "ArrowLeft": this.pan(PAN * (from - to)); break;
        case "ArrowRight": this.pan(PAN * (to - from)); break;
        case "+": case "=": this.zoom(ZOOM, middle); break;
        case "-": this.zoom(1 / ZOOM, middle); break;
        case "0": case "Home": this.show(this.whole); break;
        default: return false;
      }
      this.point((this.now.from + this.now.to) / 2);
      return true;
    }
  }

  // ── flags and tips ─────────────────────────────────────────────────────────────────────────

  const SIGNS = {
    loss: "▼", leave: "▼", parked: "▼", join: "▲", recalled: "▲", resume: "▲", straggler: "●", refused: "●",
    checkpoint: "■",
  };

  /** Draw flags: a sign over the plot, and a line through it unless it is a checkpoint. */
  function drawFlags(c, flags, x, { left, right, top, bottom }, ratio) {
    c.save();
    c.font = `${10 * ratio}px system-ui, sans-serif`;
    c.textAlign = "center";
    for (const flag of flags) {
      const at = x(flag.t_s);
      if (at < left || at > right) continue;
      c.fillStyle = ink(flag.kind === "checkpoint" ? "checkpoint" : "event");
      c.fillText(SIGNS[flag.kind] || "●", at, top - 3 * ratio);
      if (flag.kind !== "checkpoint") c.fillRect(at - 0.75 * ratio, top, 1.5 * ratio, bottom - top);
    }
    c.restore();
  }

  const flagsNear = (flags, at, distance) => flags.filter((flag) => Math.abs(flag.t_s - at) <= distance);

  function showTip(tip, text, x, y) {
    tip.hidden = !text;
    if (!text) return;
    tip.textContent = text;
    const room = tip.parentElement.clientWidth - tip.offsetWidth - 4;
    tip.style.left = `${Math.max(0, Math.min(x + 12, room))}px`;
    tip.style.top = `${y + 18}px`;
  }

  // ── curves ─────────────────────────────────────────────────────────────────────────────────

  /** A curve: x, a mean, perhaps the extremes around it. */
  function curve(label, x, values, colour, look = {}) {
    return { label, x, mean: values.mean, low: values.low, high: values.high, colour, ...look };
  }

  /** A constant, which can be read at every x. */
  const level = (label, x, value, colour) => ({ label, x, mean: x.map(() => value), colour, dash: [6, 4] });

  /** Losses of runs: a line for training and marks for held-out samples, in the run's colour. */
  function losses(runs, axis) {
    const prefix = (run) => (runs.length > 1 ? `${run.name}: ` : "");
    return runs.flatMap((run, number) => {
      const x = run.series[axis === "time" ? "end_s" : "samples"];
      const curves = [curve(`${prefix(run)}training loss`, x, run.series.loss, curveInk(number))];
      const evals = run.evals.filter((one) => one.loss !== null);
      if (evals.length) {
        const at = evals.map((one) => (axis === "time" ? one.t_s : one.samples));
        const shown = { mean: evals.map((one) => one.loss) };
        curves.push(curve(`${prefix(run)}held-out loss`, at, shown, curveInk(number), { points: true }));
      }
      return curves;
    });
  }

  const byRank = (run, key) =>
    run.ranks.map((rank, i) => curve(rankName(run, rank), run.series.end_s, run.series[key][i], curveInk(i)));

  function speeds(run) {
    const x = run.series.end_s;
    const alone = run.ranks.map((rank, i) => [rank, i]).filter(([rank]) => rank.alone !== null)
      .map(([rank, i]) => level(`${rankName(run, rank)} alone`, x, rank.alone, curveInk(i)));
    const ideal = run.team.ideal === null ? [] : [level("ideal", x, run.team.ideal, ink("faint"))];
    return [curve("team", x, run.series.speed, ink("ink")), ...alone, ...ideal];
  }

  const whole = (value) => Math.round(value).toLocaleString("en");
  const perSecond = (run) => ({ unit: `${run.run.unit}/s`, y: (v) => `${count(v)} ${run.run.unit}/s`, tick: count, least: 0 });
  const parts = { y: percent, tick: wholePercent, least: 0.02 };

  // Of each chart: curves, the text of a value (y) and of a tick, the unit of the axis.
  const CHARTS = {
    "loss-by-samples": (_, runs) => ({ curves: losses(runs, "samples"), unit: "loss", y: count, samples: true }),
    "loss-by-time": (_, runs) => ({ curves: losses(runs, "time"), unit: "loss", y: count }),
    speeds: (run, runs) => ({
      curves: runs.map((one, i) => curve(one.name, one.series.end_s, one.series.speed, curveInk(i))), ...perSecond(run),
    }),
    speed: (run) => ({ curves: speeds(run), ...perSecond(run) }),
    shares: (run) => ({ curves: byRank(run, "shares"), unit: "of the samples", ...parts }),
    waits: (run) => ({ curves: byRank(run, "waits"), unit: "of its time", ...parts }),
    anchor: (run) => ({
      curves: [curve("anchor", run.series.end_s, run.series.anchor, curveInk(0))], unit: "local steps", y: count, least: 0,
    }),
    sent: (run) => ({
      curves: [curve("sent", run.series.end_s, run.series.sent_bytes, curveInk(0))], unit: "per window", y: bytes, least: 0,
    }),
  };

  /** One table with a common x of several curves: what uPlot takes. */
  function joined(curves) {
    const tables = curves.map((one) =>
      one.low ? [one.x, one.mean, one.low, one.high] : [one.x, one.mean]);
    return tables.length ? uPlot.join(tables) : [[]];
  }

  /** The value of a curve at a point of the common x, or its newest; curves have points of their own. */
  function valueAt(values, index) {
    let i = index === null ? values.length - 1 : index;
    while (i > 0 && values[i] === undefined) i -= 1;
    return values[i];
  }

  function seriesOf(show, at) {
    const series = [{ label: "at", value: (_, v) => (v === null ? "the end" : at(v)) }];
    const bands = [];
    for (const one of show.curves) {
      series.push({
        label: one.label,
        stroke: one.colour,
        width: one.points ? 0 : 1.6,
        dash: one.dash,
        points: {
          // A line has at least two points; one alone would not be seen.
          show: (u, number) => Boolean(one.points) || u.data[number].filter((v) => v !== null && v !== undefined).length === 1,
          size: 8,
          fill: one.colour,
        },
        value: (u, _, number, index) => {
          const found = valueAt(u.data[number], index);
          return found === null || found === undefined ? "–" : show.y(found);
        },
      });
      if (one.low) {
        const extreme = { class: "extreme", stroke: one.colour, width: 0, points: { show: false } };
        series.push({ ...extreme, label: `${one.label}, least` });
        series.push({ ...extreme, label: `${one.label}, largest` });
        bands.push({ series: [series.length - 1, series.length - 2], fill: `${one.colour}33` });
      }
    }
    return { series, bands };
  }

  /** Texts of ticks, of which neighbours that are rounded to the same are shown once. */
  const unlike = (texts) => texts.map((text, i) => (text === texts[i - 1] ? "" : text));

  const fromZero = (least) => (_, low, high) => [0, Math.max(1.05 * high, least) || 1];

  /** A chart in the page. It shares its view with others, and stays as it is when numbers come. */
  class Chart {
    constructor(holder, view) {
      this.holder = holder;
      this.view = view;
      this.tip = holder.parentElement.querySelector(".tip");
      view.drawings.push(this);
      holder.addEventListener("keydown", (event) => {
        if (event.key === "Enter" && event.target !== holder) event.target.click();
        else if (event.target === holder && view.press(event.key)) event.preventDefault();
      });
    }

    /** Show a run; charts of several runs show them all. */
    update(run, runs) {
      this.drawn = [run, runs];
      const show = CHARTS[this.holder.dataset.chart](run, runs);
      this.flags = show.samples || runs.length > 1 && this.holder.dataset.run === "all" ? [] : run.flags;
      const shape = JSON.stringify(show.curves.map((one) => [one.label, Boolean(one.low)]));
      if (this.plot && this.shape === shape) {
        this.plot.setData(joined(show.curves));
        return;
      }
      if (this.plot) this.plot.destroy();
      this.plot = this.make(show);
      this.shape = shape;
    }

    make(show) {
      const axis = { stroke: ink("faint"), grid: { stroke: ink("line"), width: 1 }, ticks: { stroke: ink("line") } };
      const sized = { font: "12px system-ui, sans-serif", labelFont: "12px system-ui, sans-serif" };
      const { view } = this;
      const x = show.samples ? { values: (_, ticks) => ticks.map(count), label: "samples", labelSize: LABEL } : {
        splits: (u) => timeTicks(view.now.from, view.now.to, u.width / 110).ticks,
        values: (u, ticks) => {
          const { step } = timeTicks(view.now.from, view.now.to, u.width / 110);
          return ticks.map((t) => duration(t, step));
        },
      };
      const { series, bands } = seriesOf(show, show.samples ? (v) => `${whole(v)} samples` : (t) => this.at(t));
      const plot = new uPlot(
        {
          width: Math.max(200, this.holder.clientWidth),
          height: CHART_HEIGHT,
          padding: [14, PLOT.right, 0, 0],
          series,
          bands,
          scales: {
            x: { time: false, range: () => [view.now.from, view.now.to] },
            y: { range: show.least === undefined ? undefined : fromZero(show.least) },
          },
          axes: [
            { ...axis, ...sized, ...x },
            { ...axis, ...sized, values: (_, ticks) => unlike(ticks.map(show.tick || show.y)), size: PLOT.left - LABEL, label: show.unit, labelSize: LABEL },
          ],
          cursor: {
            drag: { setScale: false },
            bind: { dblclick: () => () => { view.show(view.whole); return null; } },
          },
          hooks: {
            draw: [(u) => {
              const { left, top, width, height } = u.bbox;
              drawFlags(u.ctx, this.flags, (t) => u.valToPos(t, "x", true),
                { left, right: left + width, top, bottom: top + height }, devicePixelRatio);
            }],
            setSelect: [(u) => {
              const { left, width } = u.select;
              if (width > 2) view.show({ from: u.posToVal(left, "x"), to: u.posToVal(left + width, "x") });
              if (width) u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
            }],
            setSeries: [(u, index, options) => {
              // The extremes of a curve come and go with it.
              if (options.show === undefined || index === null) return;
              for (let i = index + 1; u.series[i] && u.series[i].class === "extreme"; i += 1) {
                if (u.series[i].show !== options.show) u.setSeries(i, { show: options.show });
              }
            }],
          },
        },
        joined(show.curves),
        this.holder,
      );
      plot.over.addEventListener("mousemove", (event) => this.hover(event));
      plot.over.addEventListener("mouseleave", () => this.hover(null));
      for (const label of this.holder.querySelectorAll(".u-legend .u-series:not(:first-child) th")) {
        label.tabIndex = 0;
        label.setAttribute("role", "button");
      }
      return plot;
    }

    /** What a time is called: also by its window and the samples so far, in charts of one run. */
    at(t) {
      const { end_s: ends, window: windows, samples } = this.drawn[0].series;
      const i = ends.findIndex((end) => end >= t);
      if (i < 0 || this.holder.dataset.run === "all") return duration(t);
      return `${duration(t)}, window ${whole(windows[i])}, ${whole(samples[i])} samples`;
    }

    /** The view has changed. */
    move() {
      const { from, to } = this.view.now;
      if (this.plot) this.plot.setScale("x", { min: from, max: to });
    }

    point(at) {
      if (this.plot) this.plot.setCursor({ left: at === null ? -10 : this.plot.valToPos(at, "x"), top: -10 });
    }

    /** Point the other drawings at the place under the mouse, and tell of flags there. */
    hover(event) {
      const { plot, view } = this;
      const at = event && plot.posToVal(event.offsetX, "x");
      view.point(at, this);
      const near = event ? flagsNear(this.flags, at, plot.posToVal(5, "x") - plot.posToVal(0, "x")) : [];
      const { offsetLeft: left, offsetTop: top } = plot.over;
      showTip(this.tip, near.map((flag) => flag.text).join("\n"), left + event?.offsetX, this.holder.offsetTop + top + event?.offsetY);
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

  return {
    Chart, PLOT, SIGNS, View, ZOOM, ink, bytes, count, drawFlags, duration, flagsNear, percent, rankFacts, rankName, showTip, slowed, timeTicks, whole,
  };
})();
