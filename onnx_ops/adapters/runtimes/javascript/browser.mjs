// Host of a page: serves the page on loopback, opens it in a headless Chromium, and forwards requests to it.

import { randomBytes } from "node:crypto";
import fs from "node:fs";
import http from "node:http";
import { createRequire } from "node:module";
import path from "node:path";
import { fileURLToPath } from "node:url";

import { Failure } from "./measure.mjs";

const OWN = path.dirname(fileURLToPath(import.meta.url));
const WEBGPU = ["--enable-unsafe-webgpu", "--enable-features=Vulkan", "--ignore-gpu-blocklist"];
const SOFTWARE = "--use-webgpu-adapter=swiftshader";
const TYPES = { ".html": "text/html", ".mjs": "text/javascript", ".wasm": "application/wasm" };

const START_MS = 120_000;
const WATCH_MS = 500;

// These headers give a page threads and the finest resolution of its clock.
const ISOLATED = {
  "Cross-Origin-Embedder-Policy": "require-corp",
  "Cross-Origin-Opener-Policy": "same-origin",
  "Cross-Origin-Resource-Policy": "same-origin",
};

export function browserHost(packages, program) {
  let page = null;
  const work = async (does, request) => {
    if (does === "rewritten") {
      throw new Failure("MeasurementError", "onnxruntime-web cannot write the graph that it runs");
    }
    page ??= await opened(packages, program, request.target);
    try {
      return await page.ask(does, request);
    } catch (error) {
      if (page.ended()) page = null; // the next request opens a new page
      throw error;
    }
  };
  return { work, close: async () => page?.close() };
}

// Return the value of a promise; throw the error of `late` if the promise takes longer than START_MS.
async function inTime(promise, late) {
  let timer;
  const over = new Promise((_, reject) => {
    timer = setTimeout(() => reject(late()), START_MS);
  });
  try {
    return await Promise.race([promise, over]);
  } finally {
    clearTimeout(timer);
  }
}

async function opened(packages, program, target) {
  const server = await serving(packages);
  const gpu = target.providers.some((one) => one.name === "webgpu");
  const flags = gpu ? [WEBGPU, [...WEBGPU, SOFTWARE]] : [[]];
  for (const [number, some] of flags.entries()) {
    const page = await launched(packages, program, server, ["--js-flags=--expose-gc", ...some]);
    const last = number === flags.length - 1;
    if (last || (await page.evaluate("navigator.gpu?.requestAdapter().then(found => found !== null)"))) return page;
    await page.close();
  }
  throw new Error("unreachable: the last flags are taken");
}

async function launched(packages, program, server, flags) {
  const { chromium } = createRequire(path.join(packages, "package.json"))("playwright-core");
  const late = (what) => new Failure("StageError", `${what} within ${START_MS / 1000} s`, { where: program });
  let browser;
  try {
    const starting = chromium.launch({ executablePath: program, headless: true, args: flags });
    browser = await inTime(starting, () => late("the browser does not start"));
  } catch (error) {
    if (error instanceof Failure) throw error;
    const why = String(error?.message ?? error).split("\n").slice(0, 15).join("\n");
    throw new Failure("StageError", "the browser does not start", { where: program, why });
  }
  let how = "";
  let end;
  const ending = new Promise((resolve) => {
    end = (said) => {
      how ||= said;
      clearInterval(watch);
      resolve();
    };
  });
  // If the browser is killed while it opens a page, that promise never settles. The event `disconnected` can also be
  // sent before its listener is added. So the connection is also polled.
  const watch = setInterval(() => browser.isConnected() || end("the browser ended"), WATCH_MS);
  watch.unref();
  browser.on("disconnected", () => end("the browser ended"));
  const open = async () => {
    const made = await browser.newPage();
    made.on("crash", () => end("the page crashed"));
    made.on("pageerror", (error) => console.error(error));
    await made.goto(server.address);
    return made;
  };
  const ended = () => new Failure("StageError", "the browser ended before it opened a page", { where: program });
  const opening = open();
  opening.catch(() => {}); // if the browser ends, `ending` reports it
  let page;
  try {
    const first = Promise.race([opening, ending.then(() => Promise.reject(ended()))]);
    page = await inTime(first, () => late("the browser opens no page"));
  } catch (error) {
    browser.close().catch(() => {});
    if (!(error instanceof Failure) && !browser.isConnected()) throw ended();
    throw error;
  }

  const ask = async (does, request) => {
    server.allow(request);
    const answer = page.evaluate(
      ([module, ...asked]) => import(module).then((found) => found.answer(...asked)),
      ["./page.mjs", does, request, browser.version()],
    );
    answer.catch(() => {}); // if the browser ends, `ending` reports it
    const reply = await Promise.race([answer.catch((error) => ({ thrown: error })), ending.then(() => null)]);
    if (reply === null || reply.thrown) {
      await Promise.race([ending, new Promise((resolve) => setTimeout(resolve, reply === null ? 0 : 1000))]);
      if (!how) throw reply.thrown;
      browser.close().catch(() => {});
      const remedy = "Run the command again. If this happens again, use a smaller model: a page has only a few GB.";
      throw new Failure("StageError", `${how} before it could ${does}`, { where: `target ${request.target.name}`, remedy });
    }
    if (reply.error) throw Object.assign(new Failure(), { document: reply.error });
    return reply.done;
  };
  return { ask, ended: () => how !== "", evaluate: (text) => page.evaluate(text), close: () => browser.close() };
}

// Serve the page, the library and the files of the current request, below an address with a secret.
async function serving(packages) {
  const secret = randomBytes(16).toString("hex");
  const library = path.join(packages, "node_modules", "onnxruntime-web", "dist");
  let readable = new Set();
  let answers = [];

  const file = (name) => {
    if (name === "") return null;
    if (name === "files") return undefined;
    const folder = name.startsWith("ort/") ? library : OWN;
    return path.join(folder, path.basename(name));
  };
  const server = http.createServer((request, response) => {
    const url = new URL(request.url, "http://loopback");
    const [, key, ...rest] = url.pathname.split("/");
    const asked = url.searchParams.get("path") ?? "";
    const send = (code, type, body) => response.writeHead(code, { ...ISOLATED, "Content-Type": type }).end(body);
    if (key !== secret) return send(404, "text/plain", "");
    const found = file(rest.join("/"));
    if (found === null) return send(200, TYPES[".html"], "<!doctype html><title>onnx-ops</title>");
    if (request.method === "POST") {
      const [, prefix] = /^(.*)-\d+$/.exec(asked) ?? [];
      if (!answers.includes(prefix)) return send(403, "text/plain", "");
      return request.pipe(fs.createWriteStream(asked)).on("close", () => send(200, "text/plain", ""));
    }
    const place = found === undefined ? (readable.has(asked) ? asked : null) : found;
    if (place === null || !fs.existsSync(place)) return send(404, "text/plain", "");
    response.writeHead(200, { ...ISOLATED, "Content-Type": TYPES[path.extname(place)] ?? "application/octet-stream" });
    return fs.createReadStream(place).pipe(response);
  });
  await new Promise((resolve) => server.listen(0, "127.0.0.1", resolve));
  server.unref();
  return {
    address: `http://127.0.0.1:${server.address().port}/${secret}/`,
    allow(request) {
      const models = request.models ?? [request.model];
      const batches = request.batches ?? [];
      const feeds = [...(request.feed ?? []), ...batches.flatMap((batch) => batch.feed)];
      const files = [...models.flatMap((one) => [one.path, ...one.external.map((two) => two.path)])];
      readable = new Set([...files, ...feeds.map((one) => one.file)]);
      answers = batches.map((batch) => batch.answer);
    },
  };
}
