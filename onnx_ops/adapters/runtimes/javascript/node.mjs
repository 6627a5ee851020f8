// The host in Node: onnxruntime-node runs natively, onnxruntime-web as WebAssembly (provider `wasm`).

import { spawnSync } from "node:child_process";
import fs from "node:fs";
import { createRequire } from "node:module";
import os from "node:os";
import path from "node:path";
import { fileURLToPath } from "node:url";

import { Failure, checkProviders, clockStep, placements, sessionOptions } from "./measure.mjs";
import { decoded, encoded } from "./tensors.mjs";

const WASM = "wasm";

export function nodeHost(packages) {
  const require = createRequire(path.join(packages, "package.json"));
  const wanted = (target) => (target.providers[0].name === WASM ? "onnxruntime-web" : "onnxruntime-node");
  let loaded = null;

  const library = (target) => {
    const name = wanted(target);
    if (loaded === null) {
      // The module is resolved below `packages`, which contains exactly the packages of the target.
      const ort = require(name === "onnxruntime-web" ? "onnxruntime-web/wasm" : name);
      if (name === "onnxruntime-web") {
        ort.env.wasm.numThreads = target.session.intra_op_threads || os.availableParallelism();
        ort.env.logLevel = "fatal";
      }
      loaded = { name, ort };
    }
    const known = name === "onnxruntime-web" ? [WASM] : loaded.ort.listSupportedBackends().map((one) => one.name);
    checkProviders(target, known, name);
    return loaded.ort;
  };

  const now = () => Number(process.hrtime.bigint() - epoch);
  const epoch = process.hrtime.bigint();

  const host = {
    get library() {
      return loaded?.name ?? "onnxruntime";
    },
    now,
    tick: clockStep(now),
    preemptions: () => process.resourceUsage().involuntaryContextSwitches,
    collect: () => globalThis.gc?.(),
    prepare: library,
    open(model, target, extra = {}) {
      const ort = library(target);
      const options = { ...sessionOptions(target), ...extra };
      if (loaded.name === "onnxruntime-node") return ort.InferenceSession.create(model.path, options);
      const externalData = model.external.map((one) => ({ path: one.name, data: fs.readFileSync(one.path) }));
      return ort.InferenceSession.create(fs.readFileSync(model.path), { ...options, externalData });
    },
    tensor(entry) {
      const { type, dims } = entry;
      return new loaded.ort.Tensor(type, decoded(type, fs.readFileSync(entry.file)), dims);
    },
    keep(tensor, file) {
      fs.writeFileSync(file, encoded(tensor));
      return { type: tensor.type, dims: [...tensor.dims] };
    },
    memory: memoryMark,
  };
  return host;
}

// Facts and rewritten graphs come from a separate process. The facts are read from its log.
export async function facts(host, { model, target }, packages) {
  const ort = host.prepare(target);
  const asked = target.providers.map((one) => one.name);
  const said = inAnother(packages, model, target, { logSeverityLevel: 0 });
  const nodes = placements(said.split("\n"), asked[0] === WASM ? WASM : "cpu");
  return {
    version: ort.env.versions.node ?? ort.env.versions.web,
    used: [...new Set([...asked, ...Object.keys(nodes)])],
    nodes,
    build: `${host.library} in Node ${process.versions.node}, V8 ${process.versions.v8}`,
    clock_resolution_ns: host.tick,
  };
}

export async function rewritten(host, { model, target, copy }, packages) {
  host.prepare(target);
  if (host.library !== "onnxruntime-node") {
    throw new Failure("MeasurementError", `${host.library} cannot write the graph that it runs`);
  }
  inAnother(packages, model, target, { optimizedModelFilePath: copy });
}

function inAnother(packages, model, target, extra) {
  const worker = fileURLToPath(new URL("./worker.mjs", import.meta.url));
  const request = JSON.stringify({ packages, model, target, extra });
  const done = spawnSync(process.execPath, [worker, "open", request], { encoding: "utf8", maxBuffer: 1 << 28 });
  const said = `${done.stdout ?? ""}\n${done.stderr ?? ""}`;
  if (done.status === 0) return said;
  const where = path.basename(model.path);
  const told = /^failure: (.*)$/m.exec(said);
  if (told) throw new Failure("MeasurementError", "ONNX Runtime cannot run the model", { where, why: told[1].slice(0, 400) });
  const how = done.signal ? `signal ${done.signal}` : `exit code ${done.status}`;
  const why = done.error?.message ?? said.trim().split("\n").slice(-15).join("\n").slice(-2000);
  throw new Failure("StageError", `the process that builds the session ended with ${how}`, { where, why });
}

// Build one session, in the process that `inAnother` starts.
export async function openOnce({ packages, model, target, extra }) {
  try {
    await nodeHost(packages).open(model, target, extra);
  } catch (error) {
    console.error(`failure: ${String(error?.message ?? error).trim().split("\n").slice(0, 3).join(" ")}`);
    process.exit(1);
  }
  process.exit(0);
}

// Return a function that returns by how many bytes the peak exceeds the memory that is resident now; -1 if unknown.
function memoryMark() {
  try {
    fs.writeFileSync("/proc/self/clear_refs", "5"); // resets the peak
  } catch {
    // If the reset is not permitted, `mark` is the earlier peak, and only a higher peak is that of the model.
  }
  const { VmRSS: resident = 0, VmHWM: mark = Infinity } = status();
  return () => {
    const { VmHWM: highest = 0 } = status();
    return highest > mark ? highest - resident : -1;
  };
}

function status() {
  try {
    const lines = fs.readFileSync("/proc/self/status", "ascii").matchAll(/^(\w+):\s+(\d+) kB$/gm);
    return Object.fromEntries([...lines].map(([, name, kilobytes]) => [name, 1024 * Number(kilobytes)]));
  } catch {
    return {};
  }
}
