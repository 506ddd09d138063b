"use strict";
// The timeline of a run: data, compute, wait and exchange of each rank, on a canvas. Names of runs
// and ranks are set as text only, never as markup.
const Timeline = (() => {
  const { PLOT, ZOOM, drawFlags, duration, flagsNear, ink, percent, rankFacts, rankName, showTip, timeTicks, whole } = charts;
  const PARTS = ["data", "compute", "wait", "sync"];
  const WORDS = ["data", "compute", "wait", "exchange"];
  const WAIT = PARTS.indexOf("wait");
  const TOP = 14; // for the signs of flags
  const GAP = 3; // between two ranks
  const KEYS = { left: "ArrowLeft", right: "ArrowRight", in: "+", out: "-", all: "0" };
  const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);

  /** The parts of a window in words; waiting for data is told where there is any. */
  const told = (spent, form) => WORDS.map((word, p) => `${word} ${form(spent[p])}`)
    .filter((_, p) => p > 0 || spent[0] > 0).join(", ");

  class Timeline {
    constructor(figure, view) {
      this.figure = figure;
      this.view = view;
      this.canvas = figure.querySelector("canvas");
      this.tip = figure.querySelector(".tip");
      this.output = figure.querySelector("output");
      this.cursor = figure.querySelector(".cursor");
      view.drawings.push(this);
      this.listen();
    }

    /** Take the numbers of a run. */
    update(run) {
      this.run = run;
      const { gap_us: gaps, length_us: lengths } = run.timeline;
      this.begin = new Float64Array(gaps.length);
      this.end = new Float64Array(gaps.length);
      let now = 0;
      gaps.forEach((gap, i) => {
        this.begin[i] = (now + gap) / 1e6;
        now += gap + lengths[i];
        this.end[i] = now / 1e6;
      });
      this.draw();
    }

    /** The first cell that ends after a time. */
    cellAt(t) {
      let low = 0, high = this.end.length;
      while (low < high) {
        const middle = (low + high) >> 1;
        if (this.end[middle] > t) high = middle; else low = middle + 1;
      }
      return low;
    }

    /** Cells that lie at least partly in the view, as [first, one past the last]. */
    visible() {
      const first = this.cellAt(this.view.now.from);
      let last = first;
      while (last < this.end.length && this.begin[last] < this.view.now.to) last += 1;
      return [first, last];
    }

    draw() {
      const ratio = window.devicePixelRatio || 1;
      const width = Math.max(200, this.canvas.clientWidth);
      const { ranks } = this.run;
      this.row = Math.max(12, Math.min(36, Math.floor(480 / Math.max(1, ranks.length))));
      this.left = PLOT.left;
      this.right = width - PLOT.right;
      this.bottom = TOP + ranks.length * this.row;
      const height = this.bottom + 22;
      this.canvas.style.height = `${height}px`;
      this.canvas.width = Math.round(width * ratio);
      this.canvas.height = Math.round(height * ratio);
      this.width = width;
      const c = this.canvas.getContext("2d");
      c.scale(ratio, ratio);
      c.font = "12px system-ui, sans-serif";
      const colours = Object.fromEntries([...PARTS, "checkpoint", "idle", "ink", "faint"].map((n) => [n, ink(n)]));
      const [first, last] = this.visible();
      const columns = this.right - this.left;
      const single = last - first <= columns / 3;
      ranks.forEach((rank, i) => {
        const top = TOP + i * this.row;
        this.drawName(c, rank, top, colours);
        c.fillStyle = colours.idle;
        c.fillRect(this.left, top, columns, this.row - GAP);
        if (single) this.drawCells(c, i, top, first, last, colours);
        else this.drawColumns(c, i, top, first, last, colours);
      });
      this.drawCheckpoints(c, colours);
      const plot = { left: this.left, right: this.right, top: TOP, bottom: this.bottom };
      drawFlags(c, this.run.flags, (t) => this.x(t), plot, 1);
      this.drawTicks(c, colours);
      this.tell(first, last);
      this.point(null);
    }

    /** The rank, and what must be said of it: below, or beside it in a low row. */
    drawName(c, rank, top, colours) {
      const facts = rankFacts(this.run, rank);
      const isBelow = facts && this.row >= 28;
      c.fillStyle = colours.ink;
      c.fillText(`rank ${rank.rank}${isBelow ? "" : ` ${facts}`}`, 0, top + (isBelow ? 12 : this.row / 2 + 3), this.left - 4);
      c.fillStyle = colours.faint;
      if (isBelow) c.fillText(facts, 0, top + 26, this.left - 4);
    }

    x(t) {
      const { from, to } = this.view.now;
      return this.left + ((t - from) / (to - from)) * (this.right - this.left);
    }

    t(x) {
      const { from, to } = this.view.now;
      return from + ((x - this.left) / (this.right - this.left)) * (to - from);
    }

    /** Seconds that a rank spent on each part in a cell. */
    spent(lane, i) {
      const rank = this.run.timeline.ranks[lane];
      return PARTS.map((part) => (rank[`${part}_us`] ? rank[`${part}_us`][i] / 1e6 : 0));
    }

    drawCells(c, lane, top, first, last, colours) {
      for (let i = first; i < last; i += 1) {
        const spent = this.spent(lane, i);
        const total = sum(spent);
        const scale = total > 0 ? Math.min(1, (this.end[i] - this.begin[i]) / total) : 0;
        let at = this.end[i] - total * scale;
        spent.forEach((length, part) => {
          const from = Math.max(this.left, this.x(at));
          at += length * scale;
          const to = Math.min(this.right, this.x(at));
          c.fillStyle = colours[PARTS[part]];
          if (to > from) c.fillRect(from, top, Math.max(to - from, 0.5), this.row - GAP);
        });
      }
    }

    drawColumns(c, lane, top, first, last, colours) {
      const columns = Math.ceil(this.right - this.left);
      const sums = PARTS.map(() => new Float64Array(columns));
      const most = new Float64Array(columns);
      const worst = this.run.timeline.ranks[lane].most_wait;
      const { from: start, to: stop } = this.view.now;
      const perColumn = (stop - start) / columns;
      for (let i = first; i < last; i += 1) {
        const spent = this.spent(lane, i);
        const total = sum(spent);
        const length = Math.max(this.end[i] - this.begin[i], 1e-6);
        const scale = total > length ? length / total : 1;
        const from = Math.max(0, Math.floor((this.begin[i] - start) / perColumn));
        const to = Math.min(columns - 1, Math.floor((this.end[i] - start) / perColumn));
        const wait = worst ? worst[i] / 1000 : total > 0 ? spent[WAIT] / total : 0;
        for (let k = from; k <= to; k += 1) {
          const begin = start + k * perColumn;
          const overlap = Math.min(this.end[i], begin + perColumn) - Math.max(this.begin[i], begin);
          const part = Math.max(0, overlap) / length;
          for (let p = 0; p < PARTS.length; p += 1) sums[p][k] += spent[p] * scale * part;
          most[k] = Math.max(most[k], wait);
        }
      }
      const height = this.row - GAP;
      for (let k = 0; k < columns; k += 1) {
        let bottom = top + height;
        for (let p = 0; p < PARTS.length; p += 1) {
          const size = Math.min(1, sums[p][k] / perColumn) * height;
          c.fillStyle = colours[PARTS[p]];
          c.fillRect(this.left + k, bottom - size, 1, size);
          bottom -= size;
        }
        if (most[k] > 0.02) {
          c.fillStyle = colours.ink;
          c.fillRect(this.left + k, top + height * (1 - most[k]), 1, 1.5);
        }
      }
    }

    /** A line below the rank that writes. */
    drawCheckpoints(c, colours) {
      c.fillStyle = colours.checkpoint;
      for (const one of this.run.checkpoints) {
        const lane = this.run.ranks.findIndex((rank) => rank.rank === one.rank);
        const from = Math.max(this.left, this.x(one.t_s - one.write_s - one.copy_s));
        const to = Math.min(this.right, this.x(one.t_s));
        if (lane >= 0 && to >= from) c.fillRect(from, TOP + (lane + 1) * this.row - GAP, Math.max(to - from, 1), 2);
      }
    }

    drawTicks(c, colours) {
      const { from, to } = this.view.now;
      const { step, ticks } = timeTicks(from, to, (this.right - this.left) / 110);
      c.fillStyle = colours.faint;
      for (const t of ticks) {
        const text = duration(t, step);
        const half = c.measureText(text).width / 2;
        c.fillRect(this.x(t), this.bottom - GAP, 1, 5);
        c.fillText(text, Math.min(Math.max(this.x(t) - half, this.left), this.width - 2 * half), this.bottom + 16);
      }
    }

    /** Say what is in view: also for those who do not see the canvas. */
    tell(first, last) {
      const { window: numbers } = this.run.timeline;
      const range = `${duration(this.view.now.from)} to ${duration(this.view.now.to)}`;
      if (last <= first) {
        this.output.textContent = `${range}: no window`;
        return;
      }
      const length = this.end[last - 1] - this.begin[first] || 1;
      const parts = this.run.ranks.slice(0, 8).map((rank, lane) => {
        const sums = PARTS.map(() => 0);
        for (let i = first; i < last; i += 1) this.spent(lane, i).forEach((s, p) => { sums[p] += s; });
        return `${rankName(this.run, rank)}: ${told(sums, (s) => percent(s / length))}`;
      });
      const newest = this.run.series.window.at(-1);
      const until = last < numbers.length ? numbers[last] - 1 : newest;
      const windows = `windows ${whole(numbers[first])} to ${whole(until)}`;
      this.output.textContent = [`${range}, ${windows}`, ...parts].join(" · ");
    }

    /** The view has changed, or the width. */
    move() {
      if (this.queued) return;
      this.queued = true;
      requestAnimationFrame(() => { this.queued = false; this.draw(); });
    }

    /** Mark a time; null marks none. */
    point(at) {
      const { from, to } = this.view.now;
      this.cursor.hidden = at === null || at < from || at > to;
      if (this.cursor.hidden) return;
      this.cursor.style.left = `${this.x(at)}px`;
      this.cursor.style.top = `${this.canvas.offsetTop + TOP}px`;
      this.cursor.style.height = `${this.bottom - TOP}px`;
    }

    listen() {
      const { canvas, view } = this;
      for (const button of this.figure.querySelectorAll("button")) {
        button.addEventListener("click", () => view.press(KEYS[button.dataset.do]));
      }
      const fingers = new Map();
      canvas.addEventListener("keydown", (event) => { if (view.press(event.key)) event.preventDefault(); });
      canvas.addEventListener("wheel", (event) => {
        if (!event.ctrlKey && !event.metaKey) return; // the page scrolls
        event.preventDefault();
        view.zoom(event.deltaY < 0 ? ZOOM : 1 / ZOOM, this.t(event.offsetX));
      }, { passive: false });
      canvas.addEventListener("pointerdown", (event) => {
        fingers.set(event.pointerId, event.offsetX);
        canvas.setPointerCapture(event.pointerId);
      });
      for (const kind of ["pointerup", "pointercancel"]) {
        canvas.addEventListener(kind, (event) => fingers.delete(event.pointerId));
      }
      canvas.addEventListener("pointerleave", () => {
        this.tip.hidden = true;
        view.point(null);
      });
      canvas.addEventListener("pointermove", (event) => {
        if (!fingers.has(event.pointerId)) { this.hover(event); return; }
        const before = [...fingers.values()];
        const earlier = fingers.get(event.pointerId);
        fingers.set(event.pointerId, event.offsetX);
        const now = [...fingers.values()];
        if (now.length === 2 && Math.abs(before[0] - before[1]) > 8) {
          const factor = Math.abs(now[0] - now[1]) / Math.abs(before[0] - before[1]);
          if (factor > 0) view.zoom(factor, this.t((now[0] + now[1]) / 2));
        } else if (now.length === 1) {
          view.pan(this.t(earlier) - this.t(event.offsetX));
        }
      });
    }

    /** Show what happened under the pointer, here and in the charts. */
    hover(event) {
      const t = this.t(event.offsetX);
      const isInside = event.offsetX >= this.left && event.offsetX <= this.right;
      this.view.point(isInside ? t : null);
      const lines = isInside ? flagsNear(this.run.flags, t, this.t(5) - this.t(0)).map((flag) => flag.text) : [];
      const lane = Math.floor((event.offsetY - TOP) / this.row);
      const rank = this.run.ranks[lane];
      const i = this.cellAt(t);
      if (isInside && rank && i < this.end.length && this.begin[i] <= t) {
        const numbers = this.run.timeline.window;
        const until = i + 1 < numbers.length ? numbers[i + 1] - 1 : this.run.series.window.at(-1);
        const windows = until > numbers[i] ? `windows ${whole(numbers[i])} to ${whole(until)}` : `window ${whole(numbers[i])}`;
        lines.unshift(`${rankName(this.run, rank)}, ${rank.member}, ${windows}`, told(this.spent(lane, i), duration));
      }
      showTip(this.tip, lines.join("\n"), event.offsetX, this.canvas.offsetTop + event.offsetY);
    }
  }

  return Timeline;
})();
