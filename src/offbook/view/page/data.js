"use strict";

// Answers: from the server or, in a page that was written as one file, from the file itself.

const POLL_MS = 2000;
const CHUNK = 40; // messages asked for at once; single.py holds them in the same portions
const held = (() => { const block = document.getElementById("held"); return block ? JSON.parse(block.textContent) : null; })();

class Missing extends Error {}

async function get(what, parameters) {
  const query = parameters ? `?${new URLSearchParams(parameters)}` : "";
  if (held) {
    const plain = parameters ? `?${Object.entries(parameters).map((pair) => pair.join("=")).join("&")}` : "";
    const found = held.answers[what + plain];
    if (!found) throw new Missing("This file does not hold it. The run folder does: offbook view RUN shows it.");
    return found;
  }
  let answer;
  try { answer = await fetch(what + query); } catch { throw new Missing("The viewer does not answer. Is offbook view still running?"); }
  const data = await answer.json();
  if (!answer.ok) throw new Missing(data.error);
  return data;
}
// Whether a rollout can be opened: all can where there is a server.
const isHere = (run, row) => !held || `api/run/${run}/rollout?source=${row.source}&number=${row.number}` in held.answers;
const ofRun = (run, what, parameters) => get(`api/run/${run}/${what}`, parameters);

const lists = new Map(); // the list of a run's rollouts, as long as the run does not change
async function rolloutList(run) {
  const version = state.runs[run].version;
  if (lists.get(run)?.version !== version) {
    const { columns, rows } = await ofRun(run, "rollouts");
    lists.set(run, { version, rows: rows.map((row) => Object.fromEntries(columns.map((name, index) => [name, row[index]]))) });
  }
  return lists.get(run).rows;
}

const state = { runs: [], sentence: "", outcome: "" };
async function refreshRuns() {
  const before = state.runs.map((run) => run.version).join();
  Object.assign(state, await get("api/runs"));
  return state.runs.map((run) => run.version).join() !== before;
}
