"use strict";
// The timeline of a run: compute, wait and exchange of each rank, on a canvas. Names of runs and
// ranks are set as text only, never as markup.
const Timeline = (() => {
  const { ZOOM, ink, duration, percent, rankName, fullName, moved, within } = charts;
  const PARTS = ["data", "compute", "wait", "sync"];
  const WORDS = ["data", "compute", "wait", "exchange"];
  const WAIT = PARTS.indexOf("wait");
  const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);

  /** The parts of a window in words; waiting for data is told where there is any. */
  const told = (spent, form) => WORDS.map((word, p) => `${word} ${form(spent[p])}`)
    .filter((_, p) => p > 0 || spent[0] > 0).join(", ");

  class Timeline {
    constructor(figure) {
      this.figure = figure;
      this.canvas = figure.querySelector("canvas");
      this.tip = figure.querySelector(".tip");
      this.output = figure.querySelector("output");
      this.whole = this.view = { from: 0, to: 1 };
      this.listen();
    }

    /** Take the numbers of a run; a view of a part of it stays. */
    update(run) {
      const isWhole = this.view.from <= this.whole.from && this.view.to >= this.whole.to;
      this.run = run;
      const { gap_us: gaps, length_us: lengths } = run.timeline;
      this.begin = new Float64Array(gaps.length);
      this.end = new Float64Array(gaps.length);
      let now = 0;
      gaps.forEach((gap, i) => {
        this.begin[i] = now + gap;
        now = this.end[i] = this.begin[i] + lengths[i];
      });
      this.whole = { from: 0, to: Math.max(now, 1) };
      if (isWhole) this.view = { ...this.whole };
      this.draw();
    }

    /** Cells that lie at least partly in the view, as [first, one past the last]. */
    visible() {
      const count = this.end.length;
      let low = 0, high = count;
      while (low < high) {
        const middle = (low + high) >> 1;
        if (this.end[middle] > this.view.from) high = middle; else low = middle + 1;
      }
      let last = low;
      while (last < count && this.begin[last] < this.view.to) last += 1;
      return [low, last];
    }

    draw() {
      const ratio = window.devicePixelRatio || 1;
      const width = Math.max(200, this.canvas.clientWidth);
      const rows = Math.max(1, this.run.ranks.length);
      this.row = Math.max(12, Math.min(34, Math.floor(480 / rows)));
      this.left = width < 500 ? 52 : 64;
      const height = rows * this.row + 24;
      this.canvas.style.height = `${height}px`;
      this.canvas.width = Math.round(width * ratio);
      this.canvas.height = Math.round(height * ratio);
      this.width = width;
      const c = this.canvas.getContext("2d");
      c.scale(ratio, ratio);
      c.clearRect(0, 0, width, height);
      c.font = "12px system-ui, sans-serif";
      const colours = Object.fromEntries([...PARTS, "checkpoint", "idle", "event", "ink", "faint"].map((n) => [n, ink(n)]));
      const [first, last] = this.visible();
      const columns = width - this.left;
      const single = last - first <= columns / 3;
      this.run.ranks.forEach((rank, i) => {
        const top = i * this.row;
        c.fillStyle = colours.ink;
        c.fillText(rankName(rank), 0, top + this.row / 2 + 4);
        c.fillStyle = colours.idle;
        c.fillRect(this.left, top, columns, this.row - 3);
        if (single) this.drawCells(c, i, top, first, last, colours);
        else this.drawColumns(c, i, top, first, last, colours);
      });
      this.drawCheckpoints(c, colours);
      this.drawMarks(c, rows * this.row, colours);
      this.tell(first, last);
    }

    x(t) {
      const length = this.view.to - this.view.from;
      return this.left + ((t - this.view.from) / length) * (this.width - this.left);
    }

    t(x) {
      const length = this.view.to - this.view.from;
      return this.view.from + ((x - this.left) / (this.width - this.left)) * length;
    }

    spent(lane, i) {
      const rank = this.run.timeline.ranks[lane];
      return PARTS.map((part) => (rank[`${part}_us`] ? rank[`${part}_us`][i] : 0));
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
          const to = Math.min(this.width, this.x(at));
          c.fillStyle = colours[PARTS[part]];
          if (to > from) c.fillRect(from, top, Math.max(to - from, 0.5), this.row - 3);
        });
      }
    }

    drawColumns(c, lane, top, first, last, colours) {
      const columns = Math.ceil(this.width - this.left);
      const sums = PARTS.map(() => new Float64Array(columns));
      const most = new Float64Array(columns);
      const worst = this.run.timeline.ranks[lane].most_wait;
      const perColumn = (this.view.to - this.view.from) / columns;
      for (let i = first; i < last; i += 1) {
        const spent = this.spent(lane, i);
        const total = sum(spent);
        const length = Math.max(this.end[i] - this.begin[i], 1);
        const scale = total > length ? length / total : 1;
        const from = Math.max(0, Math.floor((this.begin[i] - this.view.from) / perColumn));
        const to = Math.min(columns - 1, Math.floor((this.end[i] - this.view.from) / perColumn));
        const wait = worst ? worst[i] / 1000 : total > 0 ? spent[WAIT] / total : 0;
        for (let k = from; k <= to; k += 1) {
          const begin = this.view.from + k * perColumn;
          const overlap = Math.min(this.end[i], begin + perColumn) - Math.max(this.begin[i], begin);
          const part = Math.max(0, overlap) / length;
          for (let p = 0; p < PARTS.length; p += 1) sums[p][k] += spent[p] * scale * part;
          most[k] = Math.max(most[k], wait);
        }
      }
      const height = this.row - 3;
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
        const from = Math.max(this.left, this.x(1e6 * (one.t_s - one.write_s - one.copy_s)));
        const to = Math.min(this.width, this.x(1e6 * one.t_s));
        if (lane >= 0 && to >= from) c.fillRect(from, (lane + 1) * this.row - 3, Math.max(to - from, 1), 2);
      }
    }

    drawMarks(c, bottom, colours) {
      c.fillStyle = colours.event;
      for (const mark of this.run.events) {
        const x = this.x(1e6 * mark.t_s);
        if (x >= this.left && x <= this.width) c.fillRect(x - 1, 0, 2, bottom + 4);
      }
      c.fillStyle = colours.faint;
      const ticks = Math.max(2, Math.floor((this.width - this.left) / 120));
      for (let k = 0; k <= ticks; k += 1) {
        const x = this.left + ((this.width - this.left) * k) / ticks;
        c.textAlign = k === 0 ? "left" : k === ticks ? "right" : "center";
        c.fillText(duration(this.t(x) / 1e6), x, bottom + 18);
      }
      c.textAlign = "left";
    }

    /** Say what is in view: also for those who do not see the canvas. */
    tell(first, last) {
      const { window: numbers } = this.run.timeline;
      const range = `${duration(this.view.from / 1e6)} to ${duration(this.view.to / 1e6)}`;
      if (last <= first) {
        this.output.textContent = `${range}: no window`;
        return;
      }
      const length = this.end[last - 1] - this.begin[first] || 1;
      const parts = this.run.ranks.slice(0, 8).map((rank, lane) => {
        const sums = PARTS.map(() => 0);
        for (let i = first; i < last; i += 1) this.spent(lane, i).forEach((us, p) => { sums[p] += us; });
        return `${fullName(this.run, rank)}: ${told(sums, (us) => percent(us / length))}`;
      });
      const newest = this.run.series.window.at(-1);
      const until = last < numbers.length ? numbers[last] - 1 : newest;
      const windows = `windows ${numbers[first]} to ${until}`;
      this.output.textContent = [`${range}, ${windows}`, ...parts].join(" · ");
    }

    show(view) {
      // Not closer than a microsecond a pixel: times are whole microseconds.
      if (view.to - view.from < 1000) return;
      this.view = within(view, this.whole);
      this.queue();
    }

    queue() {
      if (this.queued) return;
      this.queued = true;
      requestAnimationFrame(() => { this.queued = false; this.draw(); });
    }

    zoom(factor, at) {
      const { from, to } = this.view;
      this.show({ from: at - (at - from) / factor, to: at + (to - at) / factor });
    }

    press(key) {
      const view = moved(key, this.view, this.whole);
      if (view) this.show(view);
      return Boolean(view);
    }

    listen() {
      const keys = { left: "ArrowLeft", right: "ArrowRight", in: "+", out: "-", all: "0" };
      for (const button of this.figure.querySelectorAll("button")) {
        button.addEventListener("click", () => this.press(keys[button.dataset.do]));
      }
      const { canvas } = this;
      const fingers = new Map();
      canvas.addEventListener("keydown", (event) => { if (this.press(event.key)) event.preventDefault(); });
      canvas.addEventListener("wheel", (event) => {
        if (!event.ctrlKey && !event.metaKey) return; // the page scrolls
        event.preventDefault();
        this.zoom(event.deltaY < 0 ? ZOOM : 1 / ZOOM, this.t(event.offsetX));
      }, { passive: false });
      canvas.addEventListener("pointerdown", (event) => {
        fingers.set(event.pointerId, event.offsetX);
        canvas.setPointerCapture(event.pointerId);
      });
      for (const kind of ["pointerup", "pointercancel"]) {
        canvas.addEventListener(kind, (event) => fingers.delete(event.pointerId));
      }
      canvas.addEventListener("pointerleave", () => { this.tip.hidden = true; });
      canvas.addEventListener("pointermove", (event) => {
        if (!fingers.has(event.pointerId)) { this.point(event); return; }
        const before = [...fingers.values()];
        const earlier = fingers.get(event.pointerId);
        fingers.set(event.pointerId, event.offsetX);
        const now = [...fingers.values()];
        if (now.length === 2 && Math.abs(before[0] - before[1]) > 8) {
          const factor = Math.abs(now[0] - now[1]) / Math.abs(before[0] - before[1]);
          if (factor > 0) this.zoom(factor, this.t((now[0] + now[1]) / 2));
        } else if (now.length === 1) {
          const shift = this.t(earlier) - this.t(event.offsetX);
          this.show({ from: this.view.from + shift, to: this.view.to + shift });
        }
      });
    }

    /** Show what happened under the pointer. */
    point(event) {
      const lane = Math.floor(event.offsetY / this.row);
      const t = this.t(event.offsetX);
      const [first, last] = this.visible();
      const rank = this.run.ranks[lane];
      let i = first;
      while (i < last && this.end[i] < t) i += 1;
      this.tip.hidden = !rank || event.offsetX < this.left || i >= last || this.begin[i] > t;
      if (this.tip.hidden) return;
      const numbers = this.run.timeline.window;
      const until = i + 1 < numbers.length ? numbers[i + 1] - 1 : this.run.series.window.at(-1);
      const name = until > numbers[i] ? `windows ${numbers[i]} to ${until}` : `window ${numbers[i]}`;
      const near = this.run.events.filter((mark) => Math.abs(this.x(1e6 * mark.t_s) - event.offsetX) < 4);
      this.tip.textContent = [
        `${rankName(rank)} (${rank.member}), ${name}`,
        told(this.spent(lane, i), (us) => duration(us / 1e6)),
        ...near.map((mark) => mark.text),
      ].join("\n");
      const room = this.figure.clientWidth - this.tip.offsetWidth - 4;
      this.tip.style.left = `${Math.max(0, Math.min(event.offsetX + 12, room))}px`;
      this.tip.style.top = `${this.canvas.offsetTop + event.offsetY + 18}px`;
    }
  }

  return Timeline;
})();
