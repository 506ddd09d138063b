"use strict";
// Shows a run during and after training. Names, messages and numbers are set as text only, never as markup.
(() => {
  const { CHART_HEIGHT, duration, count, percent, joined, shown, drawChart, obeyKeys } = charts;
  const SILENCE_MS = 40000; // the server says something every 15 s
  const PAUSE_MS = 1000;

  const part = (id) => document.getElementById(id);
  const holders = [...document.querySelectorAll(".chart")];
  const plots = new Map();
  let token = decodeURIComponent(location.hash.slice(1));
  let chosen = new URLSearchParams(location.search).get("run");
  let newest = null;
  let reading = null;

  const path = (name, what) => `runs/${encodeURIComponent(name)}/${what}`;
  const headers = () => (token ? { Authorization: `Bearer ${token}` } : {});
  const pause = (ms) => new Promise((done) => { setTimeout(done, ms); });

  function tell(id, text, look = "") {
    if (part(id).textContent !== text) part(id).textContent = text;
    part(id).className = `state ${look}`;
  }

  /** Ask the server; without the right token, let the user give one. */
  async function ask(url, options = {}) {
    const answer = await fetch(url, { ...options, headers: headers() });
    part("ask").hidden = answer.status !== 401;
    if (!answer.ok) {
      const { error } = await answer.json().catch(() => ({ error: `error ${answer.status}` }));
      throw new Error(error);
    }
    return answer;
  }

  // ── what comes from the server ─────────────────────────────────────────────────────────────

  async function listRuns() {
    const { runs } = await (await ask("runs")).json();
    if (chosen === null) [chosen = null] = runs;
    const names = chosen === null || runs.includes(chosen) ? runs : [chosen, ...runs];
    const select = part("runs");
    if ([...select.options].map((one) => one.value).join("\n") !== names.join("\n")) {
      select.replaceChildren(...names.map((name) => new Option(name, name)));
    }
    select.value = chosen;
  }

  /** Read server-sent events from a response, with the token that EventSource cannot send. */
  async function* messages(answer, controller) {
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const timer = setTimeout(() => controller.abort(), SILENCE_MS);
      const { value, done } = await reader.read().finally(() => clearTimeout(timer));
      if (done) return;
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) if (block.startsWith("data: ")) yield JSON.parse(block.slice(6));
    }
  }

  async function follow() {
    for (;;) {
      reading = new AbortController();
      const own = reading;
      try {
        await listRuns();
        if (chosen === null) throw new Error("there is no run yet");
        const answer = await ask(path(chosen, "events"), { signal: own.signal });
        tell("link", "connected", "good");
        for await (const run of messages(answer, own)) show(run);
        throw new Error("the connection has ended");
      } catch (error) {
        if (reading === own && !own.chosenAnew) tell("link", `${error.message}; trying again`, "bad");
      }
      if (!own.chosenAnew) await pause(PAUSE_MS);
    }
  }

  function readAnew() {
    if (reading) {
      reading.chosenAnew = true;
      reading.abort();
    }
  }

  // ── what is shown ──────────────────────────────────────────────────────────────────────────

  function show(run) {
    if (run.problem) {
      tell("state", run.problem, "bad");
      return;
    }
    newest = run;
    part("title").textContent = run.name;
    document.title = `${run.name}: evener`;
    tell("state", run.run.state, run.is_running ? "good" : "");
    part("line").textContent = run.line;
    part("stop").disabled = !run.is_running;
    part("straggler").hidden = run.straggler.rank === null;
    part("straggler").textContent = run.straggler.text;
    showRanks(run);
    showLines(run);
    for (const holder of holders) showChart(holder, run);
    document.documentElement.dataset.drawn = "yes";
  }

  const dash = (value, form) => (value === null ? "–" : form(value));

  function showRanks(run) {
    const rows = run.ranks.map((rank) => {
      const row = document.createElement("tr");
      const cells = [
        rank.rank, rank.presence, rank.member, rank.device || "–", dash(rank.share, percent),
        dash(rank.wait_fraction, percent), dash(rank.alone, (v) => `${count(v)} ${run.run.unit}/s`),
        dash(rank.samples, count),
      ];
      cells.forEach((text, i) => {
        const cell = row.appendChild(document.createElement(i ? "td" : "th"));
        cell.textContent = text;
        if (i === 1 && rank.why_gone) {
          cell.className = rank.presence;
          cell.title = rank.why_gone;
        }
      });
      return row;
    });
    part("ranks").tBodies[0].replaceChildren(...rows);
  }

  function items(list, texts) {
    list.replaceChildren(...texts.map((text) => {
      const item = document.createElement("li");
      item.textContent = text;
      return item;
    }));
  }

  function showLines(run) {
    const log = part("log");
    const isAtEnd = log.scrollTop + log.clientHeight >= log.scrollHeight - 8;
    items(log, run.log.map((line) => `${duration(line.t_s)}  ${line.text}`));
    if (isAtEnd) log.scrollTop = log.scrollHeight;
    items(part("notes"), run.notes);
  }

  function showChart(holder, run) {
    const kind = holder.dataset.chart;
    if (kind === "anchor") {
      holder.parentElement.hidden = !run.series.anchor;
      if (!run.series.anchor) return;
    }
    const look = shown(kind, run, [run]);
    const shape = JSON.stringify(look.curves.map((one) => [one.label, Boolean(one.low)]));
    const old = plots.get(holder);
    const data = joined(look.curves);
    if (old && old.shape === shape) {
      const { min, max } = old.plot.scales.x;
      const xs = old.plot.data[0];
      const isWhole = !xs.length || (min <= xs[0] && max >= xs[xs.length - 1]);
      old.plot.setData(data, isWhole);
      if (!isWhole) old.plot.setScale("x", { min, max });
      return;
    }
    if (old) old.plot.destroy();
    plots.set(holder, { plot: drawChart(holder, look), shape });
  }

  function drawAnew() {
    for (const { plot } of plots.values()) plot.destroy();
    plots.clear();
    if (newest) for (const holder of holders) showChart(holder, newest);
  }

  // ── what the user does ─────────────────────────────────────────────────────────────────────

  part("runs").addEventListener("change", () => {
    chosen = part("runs").value;
    history.replaceState(null, "", `?run=${encodeURIComponent(chosen)}${location.hash}`);
    part("said").textContent = "";
    readAnew();
  });

  part("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    token = part("token").value.trim();
    part("ask").hidden = true;
    readAnew();
  });

  part("stop").addEventListener("click", async () => {
    if (!newest || !confirm(`Stop ${newest.name}? It saves a checkpoint first.`)) return;
    try {
      const answer = await ask(path(chosen, "stop"), { method: "POST" });
      part("said").textContent = (await answer.json()).said;
    } catch (error) {
      part("said").textContent = error.message;
    }
  });

  for (const holder of holders) obeyKeys(holder, () => plots.get(holder).plot);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAnew);
  let width = document.body.clientWidth;
  new ResizeObserver(() => {
    if (document.body.clientWidth === width) return;
    width = document.body.clientWidth;
    for (const [holder, { plot }] of plots) {
      plot.setSize({ width: Math.max(200, holder.clientWidth), height: CHART_HEIGHT });
    }
  }).observe(document.body);
  follow();
})();
