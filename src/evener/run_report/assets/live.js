"use strict";
// A report shows the document in its page. The dashboard polls its server for that of the chosen
// run; the server shows by the ETag that nothing has changed.
(() => {
  const PAUSE_MS = 1000;
  const part = (id) => document.getElementById(id);
  const report = JSON.parse(part("numbers").textContent);
  if (report !== null) {
    page.show(report);
    return;
  }

  let token = decodeURIComponent(location.hash.slice(1));
  let chosen = new URLSearchParams(location.search).get("run");
  let newest = null;
  let tag = "";
  let wake = () => {};

  const path = (name) => `runs/${encodeURIComponent(name)}`;
  const pause = (ms) => new Promise((done) => { wake = done; setTimeout(done, ms); });

  function tell(id, text, look = "") {
    if (part(id).textContent !== text) part(id).textContent = text;
    part(id).className = `state ${look}`;
  }

  /** Ask the server; without the right token, let the user give one. */
  async function ask(url, method = "GET", headers = {}) {
    if (token) headers.Authorization = `Bearer ${token}`;
    const answer = await fetch(url, { method, headers });
    part("ask").hidden = answer.status !== 401;
    if (!answer.ok && answer.status !== 304) {
      const { error } = await answer.json().catch(() => ({ error: `error ${answer.status}` }));
      throw new Error(error);
    }
    return answer;
  }

  async function listRuns() {
    const { runs } = await (await ask("runs")).json();
    if (chosen === null) [chosen = null] = runs;
    if (chosen === null) throw new Error("there is no run yet");
    const names = runs.includes(chosen) ? runs : [chosen, ...runs];
    const select = part("choice");
    if ([...select.options].map((one) => one.value).join("\n") !== names.join("\n")) {
      select.replaceChildren(...names.map((name) => new Option(name, name)));
    }
    select.value = chosen;
  }

  async function look() {
    await listRuns();
    const name = chosen;
    const answer = await ask(path(name), "GET", { "If-None-Match": tag });
    if (answer.status === 200 && name === chosen) {
      tag = answer.headers.get("ETag");
      show(await answer.json());
    }
    tell("link", "connected", "good");
  }

  function show(found) {
    if (found.problem) {
      tell("state", found.problem, "bad");
      return;
    }
    page.show(found);
    [newest] = found.runs;
    tell("state", newest.run.state, newest.is_running ? "good" : "");
    part("line").textContent = newest.line;
    part("stop").disabled = !newest.is_running;
  }

  async function follow() {
    for (;;) {
      try {
        await look();
      } catch (error) {
        tell("link", `${error.message}; trying again`, "bad");
      }
      await pause(PAUSE_MS);
    }
  }

  part("choice").addEventListener("change", () => {
    chosen = part("choice").value;
    tag = "";
    history.replaceState(null, "", `?run=${encodeURIComponent(chosen)}${location.hash}`);
    part("message").textContent = "";
    wake();
  });

  part("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    token = part("token").value.trim();
    part("ask").hidden = true;
    wake();
  });

  part("stop").addEventListener("click", async () => {
    if (!newest || !confirm(`Stop ${newest.name}? It saves a checkpoint first.`)) return;
    try {
      const answer = await ask(`${path(chosen)}/stop`, "POST");
      part("message").textContent = (await answer.json()).message;
    } catch (error) {
      part("message").textContent = error.message;
    }
  });

  part("live").hidden = part("now").hidden = false;
  follow();
})();
