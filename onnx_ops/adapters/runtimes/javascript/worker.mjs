// Answers requests, one at a time: JSON lines from standard input, answers to the descriptor that the arguments name.
//
// Arguments: `node` or `browser`, the folder of packages, the descriptor, and for a browser its program.

import fs from "node:fs";
import { Worker } from "node:worker_threads";

import { browserHost } from "./browser.mjs";
import { benchmark, describeError, run, sample, start, under_load } from "./measure.mjs";
import { facts, nodeHost, openOnce, rewritten } from "./node.mjs";

// A separate thread reads the requests. If the input ends, the thread kills this process after 3 s, even if a measurement
// is running. Until then, an idle process closes its browser and exits.
const LISTEN = `
const fs = require("node:fs");
const { parentPort } = require("node:worker_threads");
const piece = Buffer.alloc(1 << 16);
let pending = [];
for (;;) {
  const count = fs.readSync(0, piece);
  if (count === 0) {
    parentPort.postMessage(null);
    Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, 3000);
    process.kill(-process.pid, "SIGKILL");
  }
  let rest = Buffer.from(piece.subarray(0, count));
  for (let end; (end = rest.indexOf(10)) >= 0; rest = rest.subarray(end + 1)) {
    pending.push(rest.subarray(0, end));
    parentPort.postMessage(Buffer.concat(pending).toString("utf8"));
    pending = [];
  }
  pending.push(rest);
}
`;

function inNode(packages) {
  const host = nodeHost(packages);
  const measured = { run, sample, benchmark, under_load, start };
  const work = async (does, request) => {
    if (does === "facts") return facts(host, request, packages);
    if (does === "rewritten") return rewritten(host, request, packages);
    host.prepare(request.target);
    return measured[does](host, request);
  };
  return { work, close: async () => {} };
}

async function main([kind, packages, descriptor, program]) {
  const { work, close } = kind === "browser" ? browserHost(packages, program) : inNode(packages);
  let last = Promise.resolve();
  const answer = async (line) => {
    const { do: does, timeout: _, ...request } = JSON.parse(line);
    let reply;
    try {
      reply = { done: (await work(does, request)) ?? null };
    } catch (error) {
      reply = { error: describeError(error) };
    }
    const bytes = Buffer.from(`${JSON.stringify(reply)}\n`);
    for (let sent = 0; sent < bytes.length; ) sent += fs.writeSync(Number(descriptor), bytes, sent);
  };
  new Worker(LISTEN, { eval: true }).on("message", (line) => {
    if (line === null) close().finally(() => process.exit(0));
    else last = last.then(() => answer(line));
  });
}

if (process.argv[2] === "open") await openOnce(JSON.parse(process.argv[3]));
else await main(process.argv.slice(2));
