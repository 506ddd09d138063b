"use strict";
// Makes the page from the document of a report: tables, charts and timelines. Names, messages and
// numbers are set as text only, never as markup.
const page = (() => {
  const { Chart, duration, count, percent, fullName } = charts;
  const MOST_CLASSES = 60; // cells of a larger matrix are too small to read

  // ── values for people ──────────────────────────────────────────────────────────────────────

  const dash = (value, form = String) => (value === null || value === undefined || value === "" ? "–" : form(value));
  const whole = (value) => Math.round(value).toLocaleString("en");
  const loss = (value) => `${+value.toPrecision(4)}`;
  const times = (value) => `${value.toFixed(2)}×`;

  function bytes(value) {
    for (const [size, unit] of [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) {
      if (value >= size) return `${(value / size).toFixed(1)} ${unit}`;
    }
    return `${value} B`;
  }

  // ── elements ───────────────────────────────────────────────────────────────────────────────

  /** An element with attributes and children; texts among these are texts, whatever they hold. */
  function element(tag, attributes = {}, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...children);
    return made;
  }

  /** A table; a cell is a text or an element, and the first of each row is its head. */
  function table(label, head, rows, caption = "") {
    const made = element("table");
    if (caption) made.append(element("caption", {}, caption));
    made.append(
      element("thead", {}, element("tr", {}, ...head.map((cell) => element("th", { scope: "col" }, cell)))),
      element("tbody", {}, ...rows.map(([first, ...others]) => element(
        "tr", {}, element("th", { scope: "row" }, first), ...others.map((cell) => element("td", {}, cell)),
      ))),
    );
    return element("div", { class: "scroll", role: "region", "aria-label": label, tabindex: 0 }, made);
  }

  const chart = (kind, title, run) => element(
    "figure", {}, element("figcaption", {}, title),
    element("div", {
      class: "chart", "data-chart": kind, "data-run": run, tabindex: 0, role: "group", "aria-label": `Chart: ${title}`,
    }),
  );

  // ── what is the same for every document ────────────────────────────────────────────────────

  const CHARTS = [
    ["speed", "Throughput of the team, of each rank alone, and of all of them (ideal)", "speed"],
    ["shares", "Share of each rank", "shares"],
    ["waits", "Part of its time that each rank waits for others", "waits"],
    ["anchor", "Anchor: local steps of the slowest rank in a window", "anchor"],
    ["sent", "Bytes sent in a window, by all ranks together", "sent_bytes"],
  ];

  const BUTTONS = [
    ["left", "earlier", "◀"], ["right", "later", "▶"], ["in", "zoom in", "+"], ["out", "zoom out", "−"],
    ["all", "show the whole run", "all"],
  ];

  const KEYS = [
    ["data", "data"], ["compute", "compute"], ["wait", "wait"], ["sync", "exchange"], ["checkpoint", "checkpoint"],
    ["event", "event"],
  ];

  const TIMELINE_HELP = "Drag to pan; zoom with the buttons, the keys plus and minus, two fingers, or Ctrl and the "
    + "wheel. Where a column of pixels holds several windows, its heights are their sums, and the line is the "
    + "largest wait of a single one. Windows end when they were applied; waiting for data, compute, wait and "
    + "exchange are drawn one after another up to there. The rest is planning, evaluating and saving. The line "
    + "below a rank is a checkpoint that it writes while it trains.";

  function timeline(run) {
    const bar = element("div", { class: "bar" }, ...KEYS.map(([key, word]) => element("span", { class: `key ${key}` }, word)));
    bar.append(element("span", { class: "buttons" }, ...BUTTONS.map(([what, label, sign]) =>
      element("button", { type: "button", "data-do": what, "aria-label": label }, sign))));
    return element(
      "figure", { class: "timeline", "data-run": run }, bar,
      element("canvas", {
        tabindex: 0, role: "img",
        "aria-label": "Timeline of the ranks; arrows pan, plus and minus zoom, 0 shows the whole run",
      }),
      element("div", { class: "tip", hidden: "" }), element("output", { "aria-live": "polite" }),
      element("figcaption", {}, TIMELINE_HELP, element("span", { "data-fill": "merged" })),
    );
  }

  /** What is filled in from the document lies in elements with data-fill. */
  const fill = (name, tag = "div") => element(tag, { "data-fill": name });

  function runSection(run, number, isAlone) {
    const name = isAlone ? "" : `${run.name}: `;
    const heading = (text) => element("h2", {}, name + text);
    return element(
      "section", { class: "run", id: `run-${number}` },
      heading("What ran on what"), fill("ending"), fill("notes"), fill("ranks"), fill("straggler"),
      heading("Throughput, shares and waits"), ...CHARTS.map(([kind, title]) => chart(kind, title, number)),
      heading("Timeline"), timeline(number),
      heading("Events"), fill("events"), fill("plans"), fill("checkpoints"), fill("confusion"), fill("versions"),
    );
  }

  // ── what is filled in ──────────────────────────────────────────────────────────────────────

  const OVERVIEW = [
    ["state", "run", "state", String],
    ["policy", "run", "policy", String],
    ["backend", "run", "backend", String],
    ["windows", "run", "windows", whole],
    ["windows redone", "run", "void_windows", whole],
    ["optimizer steps", "run", "steps", whole],
    ["sessions", "run", "sessions", whole],
    ["training time", "run", "elapsed_s", duration],
    ["samples", "team", "samples", whole],
    ["last training loss", "team", "last_loss", loss],
    ["held-out loss", "team", "heldout_loss", loss],
    ["unit of speeds", "run", "unit", (unit) => `${unit} per second`],
    ["speed of the team", "team", "speed", count],
    ["fastest rank alone", "team", "best_alone", count],
    ["all ranks alone, summed (ideal)", "team", "ideal", count],
    ["equal split", "team", "equal_split", count],
    ["team / fastest rank", "team", "of_best_alone", times],
    ["team / ideal", "team", "of_ideal", percent],
    ["no multiple is shown, as", "team", "no_multiple", String],
    ["time computing", "team", "compute_fraction", percent],
    ["time waiting for others", "team", "wait_fraction", percent],
    ["time exchanging", "team", "sync_fraction", percent],
    ["time waiting for data", "team", "data_fraction", percent],
    ["bytes sent", "team", "sent_bytes", bytes],
  ];

  const SOURCES = {
    measured: "was measured by each rank alone",
    "compute time": "is what it did per second of its own compute time",
  };

  function overview(runs) {
    const rows = OVERVIEW
      .filter(([, part, key]) => runs.some((run) => run[part][key] !== null))
      .map(([label, part, key, form]) => [label, ...runs.map((run) => dash(run[part][key], form))]);
    const sources = [...new Set(runs.map((run) => run.team.solo_source))];
    const told = sources.map((one) => `What a rank does alone ${SOURCES[one] || one}.`).join(" ");
    return [table("Overview", ["", ...runs.map((run) => run.name)], rows), element("p", {}, told)];
  }

  function resolution(runs) {
    const merged = Math.max(...runs.map((run) => run.series.windows_per_point));
    if (merged <= 1) return [];
    return [element("p", {}, `A point of a curve stands for up to ${+merged.toFixed(1)} windows: the line is their mean, `
      + "the band reaches from the least to the largest value of a single window.")];
  }

  function ranks(run) {
    const head = ["rank", "state", "member", "host", "device", "share", `${run.run.unit}/s alone`, "samples", "wait",
      "was last in", "waited for"];
    const rows = run.ranks.map((rank) => {
      const state = element("span", { class: rank.presence, title: rank.why_gone || "" }, rank.presence);
      const slowed = rank.emulated === null ? "" : `, emulated ${rank.emulated}× slower`;
      return [
        String(rank.rank), state, rank.member, dash(rank.host), `${dash(rank.device)}${slowed}${rank.parked ? ", parked" : ""}`,
        dash(rank.share, percent), dash(rank.alone, count), dash(rank.samples, whole), dash(rank.wait_fraction, percent),
        whole(rank.windows_last), dash(rank.waited_for_s, duration),
      ];
    });
    return [table("Ranks", head, rows)];
  }

  /** A caption that says so where a list has lost its middle. */
  const counted = (what, items, total) => (items.length === total || total === undefined ? what
    : `${what}: the first and the last ${Math.floor(items.length / 2)} of ${whole(total)}`);

  const EVENTS = ["worker_lost", "worker_left", "worker_joined", "healed", "straggler", "straggler_over",
    "checkpoint_missed", "events_dropped", "run_resumed", "reformed", "run_finished"];
  const MANY_EVALS = 50;

  /** What has happened, the newest last. */
  function events(run) {
    const evals = run.evals.slice(-MANY_EVALS).map((one) => (
      { ...one, type: "eval", text: `${one.name} loss ${one.loss === null ? "not finite" : loss(one.loss)}` }));
    const lines = [...run.events, ...evals].sort((one, other) => one.t_s - other.t_s);
    if (!lines.length) return [element("p", {}, "No rank joined, left or fell behind.")];
    const total = EVENTS.reduce((sum, kind) => sum + (run.counts[kind] || 0), 0);
    const rows = lines.map((one) => [duration(one.t_s), whole(one.window), one.type, one.text]);
    const caption = counted("Membership, stragglers, evaluations and the end", run.events, total);
    return [table("Events", ["at", "window", "event", "what"], rows, caption)];
  }

  function plans(run) {
    if (!run.reasons.length) return [];
    const rows = run.reasons.map((one) => [duration(one.t_s), whole(one.window), one.text]);
    const caption = counted("Changed plans: samples of each rank", run.reasons, run.run.plans);
    return [table("Plans", ["at", "window", "samples by rank, and why"], rows, caption)];
  }

  function checkpoints(run) {
    if (!run.checkpoints.length) return [element("p", {}, "No checkpoint was written.")];
    const head = ["at", "after windows", "path", "size", "written in", "training stood still for"];
    const rows = run.checkpoints.map((one) => [
      duration(one.t_s), whole(one.window), one.path, dash(one.num_bytes, bytes), dash(one.write_s, duration),
      dash(one.copy_s, duration),
    ]);
    return [table("Checkpoints", head, rows, counted("Checkpoints", run.checkpoints, run.counts.checkpoint))];
  }

  function confusion(run) {
    if (!run.confusion) return [];
    const { labels, counts } = run.confusion;
    if (labels.length > MOST_CLASSES) {
      return [element("p", {}, `The matrix of ${whole(labels.length)} classes is in summary.json.`)];
    }
    const rows = counts.map((row, i) => {
      const total = row.reduce((a, b) => a + b, 0) || 1;
      // Classes instead of inline styles, which the security policy forbids.
      const cell = (n) => element("span", { class: `heat heat-${Math.floor((10 * n) / total)}` }, whole(n));
      return [labels[i], ...row.map(cell)];
    });
    const caption = "Confusion matrix: held-out samples by true class (rows) and predicted class";
    return [table("Confusion matrix", ["true class", ...labels], rows, caption)];
  }

  function versions(run) {
    const facts = [
      ...Object.entries(run.versions).map(([name, value]) => `${name} ${value}`),
      ...Object.entries(run.machine).map(([name, value]) => `${name}: ${value}`),
    ];
    if (run.run.backend_reason) facts.push(`backend ${run.run.backend}: ${run.run.backend_reason}`);
    return [element("p", {}, facts.join("; "))];
  }

  const paragraph = (look, text) => (text ? [element("p", { class: look }, text)] : []);

  const FILLS = {
    ending: (run) => paragraph("ending", run.run.message && `Ended with: ${run.run.message}`),
    notes: (run) => [element("ul", { class: "notes" }, ...run.notes.map((note) => element("li", {}, note)))],
    ranks,
    straggler: (run) => paragraph("straggler", run.straggler.text),
    merged: (run) => (run.timeline.merged > 1
      ? [` Up to ${whole(run.timeline.merged)} neighbouring windows are one cell.`] : []),
    events, plans, checkpoints, confusion, versions,
  };

  /** Put new content in place of the old; a region that was scrolled stays where it was. */
  function replace(holder, content) {
    const old = holder.querySelector(".scroll");
    const [top, left, isAtEnd] = old
      ? [old.scrollTop, old.scrollLeft, old.scrollTop + old.clientHeight >= old.scrollHeight - 8] : [0, 0, false];
    holder.replaceChildren(...content);
    const made = holder.querySelector(".scroll");
    if (old && made) made.scrollTo(left, isAtEnd ? made.scrollHeight : top);
  }

  // ── the page ───────────────────────────────────────────────────────────────────────────────

  let shown = "";
  let drawn = [];
  let timelines = [];

  function build(runs) {
    document.body.classList.toggle("several", runs.length > 1);
    document.querySelector("main").replaceChildren(
      element("p", { id: "line", class: "line" }),
      element("section", { id: "overview" }, element("h2", {}, "Overview"), fill("overview")),
      element("section", { id: "loss" }, element("h2", {}, "Loss"), chart("loss-by-samples", "Loss by samples", 0),
        chart("loss-by-time", "Loss by training time", 0), fill("resolution")),
      element("div", { class: "runs" }, ...runs.map((run, i) => runSection(run, i, runs.length === 1))),
    );
    drawn = [...document.querySelectorAll(".chart")].map((holder) => new Chart(holder));
    timelines = [...document.querySelectorAll(".timeline")].map((figure) => new Timeline(figure));
  }

  /** Show a document; what the user has zoomed or scrolled stays. */
  function show(report) {
    const { runs } = report;
    const title = runs.map((run) => run.name).join(" · ");
    if (shown !== title) {
      build(runs);
      shown = title;
    }
    document.title = `${title}: evener`;
    document.getElementById("title").textContent = title;
    document.getElementById("version").textContent = report.version;
    replace(document.querySelector("[data-fill=overview]"), overview(runs));
    replace(document.querySelector("[data-fill=resolution]"), resolution(runs));
    runs.forEach((run, i) => {
      const section = document.getElementById(`run-${i}`);
      for (const [name, content] of Object.entries(FILLS)) {
        replace(section.querySelector(`[data-fill=${name}]`), content(run));
      }
      for (const [kind, , key] of CHARTS) {
        section.querySelector(`[data-chart=${kind}]`).parentElement.hidden = !run.series[key];
      }
    });
    for (const one of drawn) {
      if (!one.holder.parentElement.hidden) one.update(runs[one.holder.dataset.run], runs);
    }
    for (const one of timelines) one.update(runs[one.figure.dataset.run]);
    document.documentElement.dataset.drawn = "yes";
  }

  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    for (const one of drawn) one.redraw();
    for (const one of timelines) one.draw();
  });
  let width = document.body.clientWidth;
  new ResizeObserver(() => {
    if (document.body.clientWidth === width) return;
    width = document.body.clientWidth;
    for (const one of drawn) one.fit();
    for (const one of timelines) one.queue();
  }).observe(document.body);

  return { show };
})();
