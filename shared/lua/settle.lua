-- A request is over: it no longer counts as running, and tokens that were reserved and not used go back (or those
-- used beyond are taken). A bucket that ran out of time meanwhile is full: there is nothing to put right but a debt.
-- One that runs on without its client is left as it is.
-- ARGV  1 key id  2 job id  3 tokens a minute or ''  4 tokens reserved  5 tokens used
-- Returns 1, or 0 if it runs on
local j = job(ARGV[2], 'status', 'terminal')
if j[1] and not j[2] then return 0 end
local bucket, now = P .. 'limit:' .. ARGV[1], clock()
R('ZREM', P .. 'running:' .. ARGV[1], ARGV[2])
local limit = tonumber(ARGV[3])
if not limit then return 1 end
local b = R('HMGET', bucket, 'tokens', 'at', 'requests')
local t = (tonumber(b[1]) or limit) + tonumber(ARGV[4]) - tonumber(ARGV[5])
local at = tonumber(b[2]) or now
t = math.min(limit, t) -- the time since `at` is counted when the bucket is next looked at
if not b[1] and t >= limit then return 1 end
R('HSET', bucket, 'tokens', string.format('%.3f', t), 'at', int(at))
R('PEXPIRE', bucket, int(math.ceil(math.max(0, limit - t) * 60000 / limit) + 120000))
return 1
