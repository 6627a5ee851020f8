// Measurements that Node and a page share. `run`, `sample`, `benchmark`, `under_load` and `start` answer one request on
// a host.
//
// A host has: `library` (its name), `open(model, target, extra?)` -> session, `tensor(entry)` and `keep(tensor, file)`
// (arrays in files), `now()` (nanoseconds), `tick` (the clock's step in nanoseconds), `preemptions()` (their number so
// far; 0 if unknown), `collect()` (collects garbage if the engine permits it) and `memory()` (starts to measure the
// peak memory; returns a function that ends the measurement).

const TICKS_OF_A_SAMPLE = 20;
const COARSE_NS = 500;
const PROBE_LOOPS = 1500;
const MOST_CALLS = 1000;

export class Failure extends Error {
  constructor(kind, what, { where = "", why = "", remedy = "" } = {}) {
    super(what);
    this.document = { error: kind, what, where, why, remedy, exit_code: 4 };
  }
}

export function describeError(error) {
  if (error instanceof Failure) return error.document;
  const lines = String(error?.stack ?? error).split("\n").slice(0, 15);
  return { error: "StageError", what: lines[0].slice(0, 300), where: "benchmark", why: lines.join("\n"), remedy: "" };
}

async function failures(host, model, work) {
  try {
    return await work();
  } catch (error) {
    if (error instanceof Failure) throw error;
    const why = String(error?.message ?? error).trim().split("\n").slice(0, 3).join(" ").slice(0, 400);
    throw new Failure("MeasurementError", `${host.library} cannot run the model`, { where: basename(model.path), why });
  }
}

const basename = (path) => path.slice(path.lastIndexOf("/") + 1);

// Build a session; an error names the model.
async function opened(host, model, target) {
  return failures(host, model, () => host.open(model, target));
}

async function fed(host, feed) {
  const pairs = [];
  for (const entry of feed) pairs.push([entry.name, await host.tensor(entry)]);
  return Object.fromEntries(pairs);
}

async function released(sessions) {
  for (const session of sessions) await session.release();
}

export async function run(host, { model, target, batches }) {
  const session = await opened(host, model, target);
  const answers = [];
  for (const batch of batches) {
    const feed = await fed(host, batch.feed);
    const found = await failures(host, model, () => session.run(feed));
    const answer = [];
    for (const [number, name] of session.outputNames.entries()) {
      const file = `${batch.answer}-${number}`;
      answer.push({ name, ...(await failures(host, model, () => host.keep(found[name], file))), file });
    }
    answers.push(answer);
  }
  await released([session]);
  return answers;
}

async function warmed(host, model, target, feed, warmup) {
  const session = await opened(host, model, target);
  const spent = [];
  await failures(host, model, async () => {
    for (let i = 0; i < warmup; i++) {
      const begun = host.now();
      await session.run(feed);
      spent.push(host.now() - begun);
    }
  });
  return [session, spent];
}

export async function sample(host, { model, target, feed: stored, runs, warmup }) {
  const feed = await fed(host, stored);
  const [session] = await warmed(host, model, target, feed, warmup);
  host.collect();
  const nanoseconds = [];
  const preempted = [];
  await failures(host, model, async () => {
    for (let i = 0; i < runs; i++) {
      const [spent, lost] = await timed(host, session, feed, 1);
      nanoseconds.push(spent);
      preempted.push(lost);
    }
  });
  await released([session]);
  return { nanoseconds, preempted };
}

// Return the nanoseconds of one run, as the mean of `calls` runs, and whether the process was preempted. If the runs
// together are shorter than the clock's step, they count as one step.
async function timed(host, session, feed, calls) {
  const before = host.preemptions();
  const begun = host.now();
  for (let i = 0; i < calls; i++) await session.run(feed);
  const spent = Math.max(host.now() - begun, host.tick);
  return [Math.max(1, Math.round(spent / calls)), host.preemptions() !== before];
}

let sink = 1;

function probe(host) {
  const begun = host.now();
  let value = sink;
  for (let i = 0; i < PROBE_LOOPS; i++) value = (Math.imul(value, 1664525) + 1013904223) | 0;
  sink = value;
  return host.now() - begun;
}

// Return the number of calls in a sample, so that the clock's step is at most a twentieth of the sample. The number is
// at most MOST_CALLS. `spent` are the durations of warm-up runs.
function callsNeeded(host, spent) {
  const half = spent.slice(spent.length >> 1).sort((a, b) => a - b);
  const mean = half.reduce((sum, ns) => sum + ns, 0) / Math.max(1, half.length);
  const typical = half[half.length >> 1] || mean; // the mean if the median is 0
  return Math.min(MOST_CALLS, Math.max(1, Math.ceil((TICKS_OF_A_SAMPLE * host.tick) / Math.max(typical, host.tick / 20))));
}

// `rounds` contains, for each round, the order in which sessions are built, and for each block the order of the models.
export async function benchmark(host, { models, target, feed: stored, rounds, runs, warmup }) {
  const feed = await fed(host, stored);
  const probing = host.tick <= COARSE_NS;
  const found = { nanoseconds: [], preempted: [], probe: probing ? [] : null };
  let calls = 0;
  for (const round_number of rounds) {
    const sessions = [];
    let most = 1;
    for (const turn of round_number.build) {
      const [session, spent] = await warmed(host, models[turn], target, feed, Math.max(1, warmup));
      sessions[turn] = session;
      most = Math.max(most, callsNeeded(host, spent));
    }
    calls ||= most; // the same number for all models and rounds, since samples are compared
    host.collect();
    for (const order of round_number.blocks) {
      const rows = models.map(() => null);
      for (const turn of order) {
        rows[turn] = await failures(host, models[turn], () => block(host, sessions[turn], feed, runs, calls, probing));
      }
      for (const row of rows) {
        found.nanoseconds.push(...row.nanoseconds);
        found.preempted.push(...row.preempted);
        if (probing) found.probe.push(...row.probe);
      }
    }
    await released(sessions);
  }
  return { ...found, calls };
}

async function block(host, session, feed, runs, calls, probing) {
  const row = { nanoseconds: [], preempted: [], probe: [] };
  let before = probing ? probe(host) : 0;
  for (let i = 0; i < runs; i++) {
    const [spent, lost] = await timed(host, session, feed, calls);
    row.nanoseconds.push(spent);
    row.preempted.push(lost);
    if (probing) {
      const after = probe(host);
      row.probe.push(Math.max(before, after));
      before = after;
    }
  }
  return row;
}

export async function under_load(host, { models, target, feed: stored, rounds, concurrency, requests }) {
  const feed = await fed(host, stored);
  const nanoseconds = [];
  for (const round_number of rounds) {
    const sessions = [];
    for (const turn of round_number.build) sessions[turn] = await opened(host, models[turn], target);
    host.collect();
    for (const [number, order] of round_number.blocks.entries()) {
      const row = models.map(() => 0);
      for (const turn of order) {
        const call = () => sessions[turn].run(feed);
        row[turn] = await failures(host, models[turn], () => window(host, call, concurrency, requests));
      }
      if (number > 0) nanoseconds.push(...row); // the first window of each session is a warm-up
    }
    await released(sessions);
  }
  return { nanoseconds };
}

async function window(host, call, concurrency, requests) {
  let waiting = requests;
  const work = async () => {
    while (waiting > 0) {
      waiting -= 1;
      await call();
    }
  };
  const begun = host.now();
  await Promise.all(Array.from({ length: concurrency }, work));
  return Math.max(1, Math.round(Math.max(host.now() - begun, host.tick)));
}

// Measure a cold start in a fresh process, which has loaded the library and no model.
export async function start(host, { model, target, feed: stored, requests }) {
  const feed = await fed(host, stored);
  const memory = host.memory();
  const begun = host.now();
  const session = await opened(host, model, target);
  const loaded = host.now();
  return failures(host, model, async () => {
    const asked = host.now();
    await session.run(feed);
    const answered = host.now();
    for (let i = 1; i < requests; i++) await session.run(feed);
    return {
      load_ns: Math.max(1, Math.round(Math.max(loaded - begun, host.tick))),
      first_ns: Math.max(1, Math.round(Math.max(answered - asked, host.tick))),
      peak_bytes: memory(),
    };
  });
}

// Return the smallest step of a clock, in the clock's unit.
export function clockStep(now, tries = 200) {
  let step = Infinity;
  for (let i = 0; i < tries; i++) {
    const first = now();
    let second = now();
    while (second === first) second = now();
    step = Math.min(step, second - first);
  }
  return step;
}

// Return the options of a session. Spinning concerns threads of one session, which do not exist in WebAssembly.
export function sessionOptions(target) {
  const { session, providers } = target;
  const spinning = session.spinning ? "1" : "0";
  return {
    executionProviders: providers.map(({ name, options }) => (Object.keys(options).length ? { name, ...options } : name)),
    graphOptimizationLevel: session.graph_level,
    logSeverityLevel: 4,
    ...(session.intra_op_threads ? { intraOpNumThreads: session.intra_op_threads } : {}),
    ...(session.inter_op_threads ? { interOpNumThreads: session.inter_op_threads } : {}),
    extra: {
      "session.intra_op.allow_spinning": spinning,
      "session.inter_op.allow_spinning": spinning,
      ...session.config,
    },
  };
}

export function checkProviders(target, known, library) {
  for (const { name } of target.providers) {
    if (known.includes(name)) continue;
    throw new Failure("MeasurementError", `execution provider ${name} is not in ${library}`, {
      where: `target ${target.name}`,
      why: `it has ${known.join(", ")}`,
      remedy: "Measure this target on a machine where its provider is installed.",
    });
  }
}

const NAMES = { CPU: "cpu", CUDA: "cuda", CoreML: "coreml", Dml: "dml", JS: "webgpu", Js: "webgpu", Tensorrt: "tensorrt", WebGpu: "webgpu", WebNN: "webnn" };

// Return the number of nodes of each provider, from the log of a session at level 0 (verbose).
export function placements(lines, cpu) {
  const nodes = {};
  for (const line of lines) {
    const found = /placed on \[(\w+)ExecutionProvider\]\. Number of nodes: (\d+)/.exec(line);
    if (!found) continue;
    const name = found[1] === "CPU" ? cpu : (NAMES[found[1]] ?? found[1]);
    nodes[name] = (nodes[name] ?? 0) + Number(found[2]);
  }
  return nodes;
}
