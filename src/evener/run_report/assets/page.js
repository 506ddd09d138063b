"use strict";
// Makes the page from the document of a report: answers, tables, charts and timelines. Names,
// messages and numbers are set as text only, never as markup.
const page = (() => {
  const { Chart, SIGNS, View, bytes, count, duration, percent, rankName, slowed, whole } = charts;
  const MOST_CLASSES = 60; // cells of a larger matrix are too small to read
  const MOST_WORDS = 8; // ranks in a matrix of waits whose cells have room for words
  const MOST_ADVICE = 2; // that is open at once
  const MANY_EVALS = 50;
  const MOST_LISTED = 500; // of history.py: a longer list has lost its middle

  // ── values for people ──────────────────────────────────────────────────────────────────────

  const isMissing = (value) => value === null || value === undefined || value === "";
  const dash = (value, form = String) => (isMissing(value) ? "–" : form(value));
  const loss = (value) => `${+value.toPrecision(4)}`;
  const times = (value) => `${value.toFixed(2)}×`;

  // ── elements ───────────────────────────────────────────────────────────────────────────────

  /** An element with attributes and children; texts among these are texts, whatever they hold. */
  function element(tag, attributes = {}, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...children);
    return made;
  }

  const paragraph = (text, look = "") => (text ? [element("p", { class: look }, text)] : []);

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

  /** A cell whose ground is the darker the larger its part of the whole. */
  function heat(text, part, look = "") {
    const made = element("span", { class: `heat ${look}` }, text);
    made.style.setProperty("--part", part);
    return made;
  }

  const key = (look, word) => element("span", { class: `key ${look}` }, word);
  const tag = (rank) => (slowed(rank) ? [" ", element("span", { class: "tag" }, slowed(rank))] : []);
  const tip = () => element("div", { class: "tip", hidden: "" });

  const chart = (kind, title, run) => element(
    "figure", {}, element("figcaption", {}, title),
    element("div", {
      class: "chart", "data-chart": kind, "data-run": run, tabindex: 0, role: "group", "aria-label": `Chart: ${title}`,
    }), tip(),
  );

  // ── what is the same for every document ────────────────────────────────────────────────────

  const CHARTS = [
    ["loss-by-time", "Loss", "loss"],
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

  const PARTS = [["data", "data"], ["compute", "compute"], ["wait", "wait"], ["sync", "exchange"]];
  const FLAGS = [["loss", "lost, left, parked"], ["join", "joined, recalled, resumed"], ["straggler", "slow, refused"],
    ["checkpoint", "checkpoint"]];

  const TIMELINE_HELP = "Drag to pan; zoom with the buttons, the keys plus and minus, two fingers, or Ctrl and the "
    + "wheel. Where a column of pixels holds several windows, its heights are their sums, and the line is the "
    + "largest wait of a single one. A window ends when it was applied, and its parts are drawn one after another up "
    + "to there. The rest is planning, evaluating and saving. The line below a rank is a checkpoint that it writes.";

  function timeline(number) {
    const bar = element(
      "div", { class: "bar" }, ...PARTS.map(([look, word]) => key(look, word)),
      ...FLAGS.map(([kind, words]) => element("span", { class: `flag ${kind}` }, `${SIGNS[kind]} ${words}`)),
      element("span", { class: "buttons" }, ...BUTTONS.map(([what, label, sign]) =>
        element("button", { type: "button", "data-do": what, "aria-label": label }, sign))),
    );
    return element(
      "figure", { class: "timeline", "data-run": number }, bar,
      element("canvas", {
        tabindex: 0, role: "img",
        "aria-label": "Timeline of the ranks; arrows pan, plus and minus zoom, 0 shows the whole run",
      }),
      element("div", { class: "cursor", hidden: "" }), tip(), element("output", { "aria-live": "polite" }),
      element("details", { class: "faint" }, element("summary", {}, "How to read and move it"),
        element("p", {}, TIMELINE_HELP, element("span", { "data-fill": "merged" }))),
    );
  }

  /** What is filled in from the document lies in elements with data-fill. */
  const fill = (name) => element("div", { "data-fill": name });

  function runSection(run, number, isAlone) {
    const heading = (text) => element("h2", {}, `${isAlone ? "" : `${run.name}: `}${text}`);
    const shown = isAlone ? CHARTS : CHARTS.slice(1); // losses of several runs are in one chart
    return element(
      "section", { class: "run", id: `run-${number}` },
      fill("ending"), heading("Ranks"), fill("ranks"), ...(isAlone ? [fill("tiles")] : []), fill("notes"),
      heading("Timeline"), timeline(number),
      heading("Curves"), fill("empty"), element("div", { class: "curves" }, ...shown.map(([kind, title]) => chart(kind, title, number))),
      fill("resolution"),
      heading("Events"), fill("events"), fill("decisions"), fill("checkpoints"), fill("confusion"), fill("versions"),
    );
  }

  // ── the answers ────────────────────────────────────────────────────────────────────────────

  function advice(one) {
    return element(
      "li", {}, one.text, ...(one.key ? [" ", element("code", {}, one.key)] : []),
      ...(one.gain === null ? [] : [` Predicted gain: ${percent(one.gain)}.`]),
    );
  }

  /** Who waits for whom: a cell for each pair of ranks, the darker the longer. */
  function waitsMatrix(run) {
    const { seconds } = run.waits;
    const most = Math.max(0, ...(seconds || []).flat());
    if (!most) return [];
    const names = run.ranks.map((rank) => rankName(run, rank));
    const hasWords = names.length <= MOST_WORDS;
    const size = hasWords ? "" : "small";
    const rows = seconds.map((row, i) => [hasWords ? names[i] : String(run.ranks[i].rank), ...row.map((s, j) => {
      if (i === j) return element("span", { class: `heat self ${size}` }, "");
      const cell = heat(hasWords ? dash(s || null, duration) : "", s / most, `wait ${size}`);
      cell.title = `${names[i]} waited ${duration(s)} for ${names[j]}`;
      return cell;
    })]);
    const head = hasWords ? ["waited for", ...run.ranks.map((rank) => `rank ${rank.rank}`)] : ["", ...names.map(() => "")];
    return [table("Waits", head, rows, hasWords ? "" : "A row for each rank that waited, a column for each it waited for")];
  }

  function verdict(run, isAlone) {
    const { verdict: found, advice: all } = run;
    const answers = found.answers;
    const badges = [found.multiple !== null && found.basis, found.remark].filter(Boolean).map((text) => element("span", { class: "tag" }, text));
    const slow = [...new Set(run.ranks.filter(slowed).map((rank) => `rank ${rank.rank} is ${slowed(rank)} slower`))];
    const emulated = (slow.length > 3 ? [`${slow.length} ranks are emulated slower`] : slow)
      .map((text) => element("span", { class: "tag" }, text));
    const part = (question, ...content) => element("div", {}, element("h2", {}, question), ...content);
    const more = all.slice(MOST_ADVICE);
    return [
      ...(isAlone ? [] : [element("h2", { class: "name" }, run.name)]),
      part("Is the slow device worth it?",
        ...(found.multiple === null ? [] : [element(
          "p", { class: "big" }, times(found.multiple), element("small", {}, found.fastest ? `${found.fastest.name} alone` : ""))]),
        element("p", {}, answers.worth), element("p", { class: "tags" }, ...badges, " ", ...emulated)),
      part("Who waits for whom?", element("p", {}, answers.waits), ...waitsMatrix(run)),
      part("What should I change?",
        ...(all.length ? [element("ol", {}, ...all.slice(0, MOST_ADVICE).map(advice))] : [element("p", {}, answers.change)]),
        ...(more.length ? [element("details", {}, element("summary", {}, `${more.length} more`),
          element("ol", { start: MOST_ADVICE + 1 }, ...more.map(advice)))] : [])),
    ];
  }

  // ── the overview ───────────────────────────────────────────────────────────────────────────

  const OVERVIEW = [
    ["state", "run", "state", String],
    ["policy", "run", "policy", String],
    ["backend", "run", "backend", String],
    ["training time", "run", "elapsed_s", duration],
    ["windows", "run", "windows", whole],
    ["windows redone", "run", "void_windows", whole],
    ["optimizer steps", "run", "steps", whole],
    ["sessions", "run", "sessions", whole],
    ["samples", "team", "samples", whole],
    ["last training loss", "team", "last_loss", loss],
    ["held-out loss", "team", "heldout_loss", loss],
    ["unit of speeds", "run", "unit", (unit) => `${unit}/s`],
    ["speed of the team", "team", "speed", count],
    ["fastest rank alone", "team", "best_alone", count],
    ["all ranks alone (ideal)", "team", "ideal", count],
    ["team / fastest rank", "team", "of_best_alone", times],
    ["team / ideal", "team", "of_ideal", percent],
    ["time computing", "team", "compute_fraction", percent],
    ["time waiting for others", "team", "wait_fraction", percent],
    ["time exchanging", "team", "sync_fraction", percent],
    ["time waiting for data", "team", "data_fraction", percent],
    ["bytes sent", "team", "sent_bytes", bytes],
  ];

  const ALONE = "What a rank does alone is what it did per second of its own compute time.";

  function tiles(run) {
    const facts = OVERVIEW.filter(([, part, name]) => !isMissing(run[part][name]));
    return [element("dl", { class: "tiles", "aria-label": "Overview" }, ...facts.map(([label, part, name, form]) => element(
      "div", {}, element("dt", {}, label), element("dd", {}, form(run[part][name])),
    ))), element("p", { class: "faint" }, ALONE)];
  }

  /** A value beside that of the first run. */
  function compared(value, first, form) {
    if (isMissing(value)) return "–";
    if (typeof value !== "number" || !first || value === first) return form(value);
    if (value >= 3 * first) return `${form(value)} (${times(value / first)})`;
    const change = form === percent ? `${(100 * (value - first)).toFixed(1)} points` : percent(value / first - 1);
    return `${form(value)} (${value > first ? "+" : ""}${change})`.replace("(-", "(−");
  }

  function overview(runs) {
    const rows = OVERVIEW.map(([label, part, name, form]) => [label, runs.map((run) => run[part][name]), form])
      .filter(([, values]) => !values.every(isMissing));
    const isSame = ([, values, form]) => new Set(values.map((value) => dash(value, form))).size === 1;
    const shown = rows.filter((row) => !isSame(row)).map(([label, values, form]) => [
      label, dash(values[0], form), ...values.slice(1).map((value) => compared(value, values[0], form)),
    ]);
    const same = rows.filter(isSame).map(([label, values, form]) => `${label} ${form(values[0])}`);
    return [
      table("Overview", ["", ...runs.map((run) => run.name)], shown, "What differs; in brackets the difference to the first run"),
      element("p", {}, `The same in all: ${same.join(", ") || "nothing"}. ${ALONE}`),
    ];
  }

  function bench(found) {
    if (!found) return [];
    const [unit, speed] = [found.unit, `${found.unit}/s`];
    const head = ["candidate", speed, "spread", `loss after ${duration(found.seconds)}`, `loss after ${count(found.units)} ${unit}`, "held-out loss"];
    const rows = found.candidates.map((one) => [
      one.name === found.recommended ? element("strong", {}, `${one.name} (recommended)`) : one.name, dash(one.speed, count),
      dash(one.spread, percent), dash(one.loss_by_time, loss), dash(one.loss_by_units, loss), dash(one.heldout_loss, loss),
    ]);
    const skipped = Object.entries(found.skipped).map(([name, why]) => element("li", {}, `${name} was skipped: ${why}`));
    return [element("h2", {}, "Which to choose"), table("Candidates", head, rows, found.reason || ""), element("ul", { class: "faint" }, ...skipped)];
  }

  // ── what is filled in ──────────────────────────────────────────────────────────────────────

  /** The time of a rank as a stacked bar. */
  function timeBar(rank) {
    const spent = PARTS.map(([name]) => rank[`${name}_s`] || 0);
    const total = spent.reduce((a, b) => a + b, 0);
    if (!total) return "–";
    const told = PARTS.map(([, word], p) => `${word} ${percent(spent[p] / total)}`).join(", ");
    return element("span", { class: "stack", role: "img", "aria-label": told, title: told }, ...PARTS.map(([name], p) => {
      const part = element("span", { class: name });
      part.style.width = `${(100 * spent[p]) / total}%`;
      return part;
    }));
  }

  function ranks(run) {
    if (!run.ranks.length) return paragraph("No rank has committed a window yet.", "empty");
    const head = ["rank", "share", "wait", "contribution", "state", "its time", `${run.run.unit}/s alone`, "last in windows",
      "waited for", "samples", "device", "member"];
    const rows = run.ranks.map((rank) => [
      element("span", {}, String(rank.rank), ...tag(rank)), dash(rank.share, percent), dash(rank.wait_fraction, percent),
      rank.contribution, element("span", { class: rank.presence, title: rank.why_gone || "" }, rank.presence), timeBar(rank),
      dash(rank.alone, count), whole(rank.windows_last), dash(rank.waited_for_s, duration), dash(rank.samples, whole),
      `${dash(rank.device)}${rank.parked ? ", parked" : ""}`, rank.member,
    ]);
    const keys = element("p", { class: "bar" }, "Time of a rank:", ...PARTS.map(([look, word]) => key(look, word)));
    return [table("Ranks", head, rows), keys];
  }

  /** A caption that says so where a list has lost its middle. */
  const counted = (what, items) => (items.length < MOST_LISTED ? what
    : `${what}: the first and the last ${MOST_LISTED / 2}`);

  /** What has happened, the newest last. */
  function events(run) {
    const evals = run.evals.slice(-MANY_EVALS).map((one) => (
      { ...one, type: "eval", text: `${one.name} loss ${one.loss === null ? "not finite" : loss(one.loss)}` }));
    const lines = [...run.events, ...evals].sort((one, other) => one.t_s - other.t_s);
    if (!lines.length) return paragraph("No rank has joined, left or fallen behind, and nothing was evaluated.", "empty");
    const rows = lines.map((one) => [
      duration(one.t_s), whole(one.window), `${SIGNS[one.kind] || ""} ${(one.kind || one.type).replace("_", " ")}`, dash(one.cost_s, duration), one.text,
    ]);
    return [table("Events", ["at", "window", "event", "cost", "what"], rows, counted("Membership, stragglers, evaluations and the end", run.events))];
  }

  function decisions(run) {
    if (!run.decisions.length) return [];
    const rows = run.decisions.map((one) => [duration(one.t_s), whole(one.window), one.kind.replace("_", " "), one.text]);
    return [table("Decisions", ["at", "window", "decision", "samples by rank, and why"], rows, counted("Decisions of the planner", run.decisions))];
  }

  function checkpoints(run) {
    if (!run.checkpoints.length) return paragraph("No checkpoint was written.", "empty");
    const head = ["at", "after windows", "path", "size", "written in", "training stood still for"];
    const rows = run.checkpoints.map((one) => [
      duration(one.t_s), whole(one.window), one.path, dash(one.num_bytes, bytes), dash(one.write_s, duration),
      dash(one.copy_s, duration),
    ]);
    return [table("Checkpoints", head, rows, counted("Checkpoints", run.checkpoints))];
  }

  function confusion(run) {
    if (!run.confusion) return [];
    const { labels, counts } = run.confusion;
    if (labels.length > MOST_CLASSES) return paragraph(`The matrix of ${whole(labels.length)} classes is in summary.json.`);
    const sum = (values) => values.reduce((a, b) => a + b, 0);
    const rows = counts.map((row, i) => {
      const total = sum(row) || 1;
      const f1 = 2 * row[i] / ((sum(row) + sum(counts.map((other) => other[i]))) || 1);
      return [labels[i], ...row.map((n) => heat(whole(n), n / total)), percent(row[i] / total), f1.toFixed(3)];
    });
    const caption = "Confusion matrix: held-out samples by true class (rows) and predicted class";
    return [table("Confusion matrix", ["true class", ...labels, "found", "F1"], rows, caption)];
  }

  function versions(run) {
    const facts = [
      ...Object.entries(run.versions).map(([name, value]) => `${name} ${value}`),
      ...Object.entries(run.machine).map(([name, value]) => `${name}: ${value}`),
    ];
    if (run.run.backend_reason) facts.push(`backend ${run.run.backend}: ${run.run.backend_reason}`);
    return paragraph(facts.join("; "), "faint");
  }

  function resolution(run) {
    const merged = run.series.windows_per_point;
    return paragraph(merged > 1 && `A point of a curve stands for up to ${+merged.toFixed(1)} windows: the line is their mean, `
      + "the band reaches from the least to the largest value of a single window.", "faint");
  }

  const FILLS = {
    ending: (run) => paragraph(run.run.message && `Ended with: ${run.run.message}`),
    notes: (run) => [element("ul", { class: "faint" }, ...run.notes.map((note) => element("li", {}, note)))],
    empty: (run) => paragraph(!run.series.end_s.length && "There are no curves yet: no window has been committed.", "empty"),
    merged: (run) => (run.timeline.merged > 1 ? [` Up to ${whole(run.timeline.merged)} neighbouring windows are one cell.`] : []),
    ranks, tiles, resolution, events, decisions, checkpoints, confusion, versions,
  };

  /** Put new content in place of the old; what was scrolled or opened stays so. */
  function replace(holder, content) {
    const old = holder.querySelector(".scroll");
    const [top, left, isAtEnd] = old
      ? [old.scrollTop, old.scrollLeft, old.scrollTop + old.clientHeight >= old.scrollHeight - 8] : [0, 0, false];
    const isOpen = Boolean(holder.querySelector("details[open]"));
    holder.replaceChildren(...content);
    const made = holder.querySelector(".scroll");
    if (old && made) made.scrollTo(left, isAtEnd ? made.scrollHeight : top);
    if (isOpen) holder.querySelector("details")?.setAttribute("open", "");
  }

  // ── the page ───────────────────────────────────────────────────────────────────────────────

  const several = (runs) => [
    element("section", { class: "curves" }, element("div", { id: "overview" }, element("h2", {}, "Differences"), fill("overview")),
      chart("loss-by-samples", "Loss by samples", "all"),
      chart("loss-by-time", "Loss by training time", "all"), chart("speeds", "Throughput of the teams", "all")),
  ];

  let shown = "";
  let drawn = [];
  let timelines = [];
  let axes = {};

  function build(runs) {
    const isAlone = runs.length === 1;
    document.querySelector("main").replaceChildren(
      fill("bench"), element("section", { id: "answers" }, ...runs.map(() => element("div", { class: "verdict" }))),
      ...(isAlone ? [] : several(runs)),
      element("div", { class: isAlone ? "" : "runs" }, ...runs.map((run, i) => runSection(run, i, isAlone))),
    );
    axes = { time: new View(), samples: new View() };
    drawn = [...document.querySelectorAll(".chart")].map((holder) =>
      new Chart(holder, holder.dataset.chart === "loss-by-samples" ? axes.samples : axes.time));
    timelines = [...document.querySelectorAll(".timeline")].map((figure) => new Timeline(figure, axes.time));
  }

  /** The end of the time of a run: the last of its windows, evaluations and checkpoints. */
  const endOf = (run) => Math.max(0, run.series.end_s.at(-1) || 0, ...[...run.evals, ...run.flags].map((one) => one.t_s));

  /** Show a document; what the user has zoomed, scrolled or opened stays. */
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
    const isAlone = runs.length === 1;
    const cards = document.querySelectorAll(".verdict");
    runs.forEach((run, i) => replace(cards[i], verdict(run, isAlone)));
    replace(document.querySelector("[data-fill=bench]"), bench(report.bench));
    if (!isAlone) replace(document.querySelector("[data-fill=overview]"), overview(runs));
    runs.forEach((run, i) => {
      const section = document.getElementById(`run-${i}`);
      for (const [name, content] of Object.entries(FILLS)) {
        const holder = section.querySelector(`[data-fill=${name}]`);
        if (holder) replace(holder, content(run));
      }
      for (const [kind, , name] of CHARTS) {
        const holder = section.querySelector(`[data-chart=${kind}]`);
        if (holder) holder.parentElement.hidden = !run.series[name] || !run.series.end_s.length;
      }
    });
    axes.time.extend(Math.max(...runs.map(endOf)));
    axes.samples.extend(Math.max(...runs.map((run) => run.series.samples.at(-1) || 0)));
    for (const one of drawn) {
      const { run } = one.holder.dataset;
      if (!one.holder.parentElement.hidden) one.update(runs[run === "all" ? 0 : run], run === "all" || isAlone ? runs : [runs[run]]);
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
    for (const one of timelines) one.move();
  }).observe(document.body);

  return { show };
})();
