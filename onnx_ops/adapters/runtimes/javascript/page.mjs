// The host in a page: onnxruntime-web with WebAssembly, or with WebGPU.

import { Failure, benchmark, checkProviders, clockStep, describeError, placements, run, sample, sessionOptions, start, under_load } from "./measure.mjs";
import { decoded, encoded } from "./tensors.mjs";

const MEASURED = { sample, benchmark, under_load, start };

// The library keeps the functions of the console that exist when it is loaded. These functions record messages while
// `heard` is a list.
let heard = null;
for (const level of ["debug", "error", "info", "log", "warn"]) {
  const original = console[level].bind(console);
  console[level] = (...said) => (heard === null ? original(...said) : heard.push(said.join(" ")));
}

let ort = null;
let adapter = "";
let software = false;

async function prepare(target) {
  const gpu = target.providers.some((one) => one.name === "webgpu");
  if (ort === null) {
    ort = await import(gpu ? "./ort/ort.webgpu.min.mjs" : "./ort/ort.wasm.min.mjs");
    ort.env.wasm.wasmPaths = new URL("./ort/", import.meta.url).href;
    ort.env.wasm.numThreads = target.session.intra_op_threads || navigator.hardwareConcurrency;
    ort.env.logLevel = "fatal";
  }
  checkProviders(target, gpu ? ["wasm", "webgpu"] : ["wasm"], "onnxruntime-web");
  if (gpu) await lookAtAdapter(target);
}

async function lookAtAdapter(target) {
  const found = await navigator.gpu?.requestAdapter();
  if (!found) {
    throw new Failure("MeasurementError", "the browser finds no WebGPU adapter", {
      where: `target ${target.name}`,
      remedy: "Measure this target on a machine whose GPU the browser can use.",
    });
  }
  const { vendor, architecture, description } = found.info;
  adapter = [vendor, architecture, description].filter(Boolean).join(" ");
  software = found.info.isFallbackAdapter === true || /swiftshader|llvmpipe|lavapipe/i.test(adapter);
}

// On a software adapter, the CPU runs the model, so durations would not be those of a GPU.
function checkTiming(target) {
  if (!software) return;
  throw new Failure("MeasurementError", `WebGPU runs on a software adapter here (${adapter}), which is not timed`, {
    where: `target ${target.name}`,
    remedy: "Use it to compare answers (`onnx-ops judge --only parity`); measure its speed on a machine with a GPU.",
  });
}

async function bytes(file) {
  const answer = await fetch(`./files?path=${encodeURIComponent(file)}`);
  if (!answer.ok) throw new Error(`${file} was not served (${answer.status})`);
  return new Uint8Array(await answer.arrayBuffer());
}

const now = () => performance.now() * 1e6;

const host = {
  library: "onnxruntime-web",
  now,
  tick: clockStep(now),
  preemptions: () => 0,
  collect: () => globalThis.gc?.(),
  async open(model, target, extra = {}) {
    const externalData = [];
    for (const one of model.external) externalData.push({ path: one.name, data: await bytes(one.path) });
    const options = { ...sessionOptions(target), externalData, ...extra };
    return ort.InferenceSession.create(await bytes(model.path), options);
  },
  async tensor({ type, dims, file }) {
    return new ort.Tensor(type, decoded(type, await bytes(file)), dims);
  },
  async keep(tensor, file) {
    if (tensor?.location === "gpu-buffer") await tensor.getData();
    const body = encoded(tensor);
    const shared = body.buffer instanceof SharedArrayBuffer ? body.slice() : body;
    const answer = await fetch(`./files?path=${encodeURIComponent(file)}`, { method: "POST", body: shared });
    if (!answer.ok) throw new Error(`${file} was not taken (${answer.status})`);
    return { type: tensor.type, dims: [...tensor.dims] };
  },
  memory: () => () => -1,
};

async function facts({ model, target }, browser) {
  heard = [];
  let said;
  try {
    const session = await host.open(model, target, { logSeverityLevel: 0 });
    await session.release();
  } catch (error) {
    throw new Failure("MeasurementError", "onnxruntime-web cannot run the model", {
      where: model.path.slice(model.path.lastIndexOf("/") + 1),
      why: String(error?.message ?? error).slice(0, 400),
    });
  } finally {
    said = heard;
    heard = null;
  }
  const nodes = placements(said, "wasm");
  const isolated = crossOriginIsolated ? "isolated" : "not isolated";
  const gpu = adapter ? `, WebGPU adapter ${adapter}${software ? " (software)" : ""}` : "";
  return {
    version: ort.env.versions.web,
    used: [...new Set([...target.providers.map((one) => one.name), ...Object.keys(nodes)])],
    nodes,
    build: `onnxruntime-web in Chromium ${browser}, ${isolated}, ${ort.env.wasm.numThreads} WebAssembly threads${gpu}`,
    clock_resolution_ns: host.tick,
  };
}

export async function answer(does, request, browser) {
  try {
    await prepare(request.target);
    if (does === "facts") return { done: await facts(request, browser) };
    if (does === "run") return { done: await run(host, request) };
    checkTiming(request.target);
    return { done: await MEASURED[does](host, request) };
  } catch (error) {
    return { error: describeError(error) };
  }
}
