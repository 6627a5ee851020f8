-- POSTs of two clients in turn; each request has a different id. Files BODY0, BODY1, … hold BODIES bodies. HEADERS
-- holds "name: value" lines. REQUESTS is the number of requests before the first is repeated, and KEYS that of users.
local clients = {
  { ["user-agent"] = "python-httpx/0.28.1", ["accept"] = "*/*", ["content-type"] = "application/json" },
  { ["User-Agent"] = "Go-http-client/1.1", ["content-type"] = "application/json" },
}
for name, value in os.getenv("HEADERS"):gmatch("([^:\n]+): ([^\n]*)") do
  for _, headers in ipairs(clients) do headers[name] = value end
end
local keys, requests, turn = tonumber(os.getenv("KEYS")), {}, 0

function init(args)
  local bodies = {}
  for number = 1, tonumber(os.getenv("BODIES")) do
    local file = assert(io.open(os.getenv("BODY") .. number - 1, "rb"))
    bodies[number] = file:read("*a")
    file:close()
  end
  for number = 1, tonumber(os.getenv("REQUESTS")) do
    local headers = clients[number % 2 + 1]
    headers["x-request-id"] = string.format("%08x%08x", number * 2654435761 % 4294967296, number * 40503 % 4294967296)
    if keys > 0 then headers["x-user-key"] = "user-" .. number % keys end
    requests[number] = wrk.format("POST", nil, headers, bodies[number % #bodies + 1])
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
