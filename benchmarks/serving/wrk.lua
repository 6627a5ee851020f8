-- One POST, over and over. BODY names a file, HEADERS holds "name: value" lines, KEYS is how many users send.
local file = assert(io.open(os.getenv("BODY"), "rb"))
local body = file:read("*a")
file:close()
local headers = { ["content-type"] = "application/json" }
for name, value in os.getenv("HEADERS"):gmatch("([^:\n]+): ([^\n]*)") do headers[name] = value end
local keys, requests, turn = tonumber(os.getenv("KEYS")), {}, 0

function init(args)
  for number = 1, math.max(keys, 1) do
    if keys > 0 then headers["x-user-key"] = "user-" .. number end
    requests[number] = wrk.format("POST", nil, headers, body)
  end
end

function request()
  turn = turn % #requests + 1
  return requests[turn]
end

function done(summary, latency)
  local e = summary.errors
  io.write(string.format(
    '\n{"requests": %d, "seconds": %f, "failed": %d, "p50_us": %d, "p99_us": %d}\n',
    summary.requests, summary.duration / 1e6, e.connect + e.read + e.write + e.status + e.timeout,
    latency:percentile(50), latency:percentile(99)))
end
