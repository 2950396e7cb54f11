-- Admits a request under its key's limits, or says how long to wait. Requests and tokens are two buckets that hold a
-- minute's worth and fill evenly. A reservation above the whole bucket takes the bucket; settle.lua puts right what
-- was reserved too much or too little, so tokens may go below 0. Running requests are counted by looking at their jobs:
-- a process that dies leaks none.
-- ARGV  1 key id  2 job id  3 requests a minute or ''  4 tokens a minute or ''  5 running at one time or ''
--       6 tokens to reserve
-- Returns {'ok' or what is used up: 'requests', 'tokens', 'concurrent', ms to wait, tokens reserved,
--          requests left, ms until that bucket is full, tokens left, ms until that bucket is full}
local bucket, running, now = P .. 'limit:' .. ARGV[1], P .. 'running:' .. ARGV[1], clock()
local b = R('HMGET', bucket, 'requests', 'tokens', 'at')
local since = math.max(0, now - (tonumber(b[3]) or 0))

local function level(limit, was) -- what a bucket holds now
  if not limit then return 0 end
  return math.min(limit, (tonumber(was) or limit) + since * limit / 60000)
end

local function wait(limit, have, want) -- ms until a bucket holds `want`
  if not limit or have >= want then return 0 end
  return math.ceil((want - have) * 60000 / limit)
end

local requests, tokens, most = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local r, t = level(requests, b[1]), level(tokens, b[2])
local reserved = math.min(tonumber(ARGV[6]), tokens or 0)
local verdict, ms = 'ok', 0
if wait(requests, r, 1) > 0 then
  verdict, ms = 'requests', wait(requests, r, 1)
elseif wait(tokens, t, reserved) > 0 then
  verdict, ms = 'tokens', wait(tokens, t, reserved)
elseif most and R('ZCARD', running) >= most then
  for _, id in ipairs(R('ZRANGE', running, 0, -1)) do
    local j = job(id, 'status', 'terminal')
    -- one that was admitted just now may not be submitted yet
    if j[2] or (not j[1] and now - tonumber(R('ZSCORE', running, id)) > 10000) then R('ZREM', running, id) end
  end
  if R('ZCARD', running) >= most then verdict, ms = 'concurrent', 1000 end
end
if verdict == 'ok' then
  r, t = r - (requests and 1 or 0), t - reserved
  if most then
    R('ZADD', running, now, ARGV[2])
    R('EXPIRE', running, 30 * 86400)
  end
end
local full_r, full_t = wait(requests, r, requests or 0), wait(tokens, t, tokens or 0)
if requests or tokens then
  R('HSET', bucket, 'requests', string.format('%.3f', r), 'tokens', string.format('%.3f', t), 'at', int(now))
  R('PEXPIRE', bucket, int(math.max(full_r, full_t) + 60000))
end
return { verdict, ms, reserved, math.max(0, math.floor(r)), full_r, math.max(0, math.floor(t)), full_t }
