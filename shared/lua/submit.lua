-- Puts a request into its queue. Safe to repeat: by job id the second call changes nothing.
-- No allow-oom: a full store refuses new work.
-- ARGV  1 id  2 proc ('' = nobody waits)  3 tenant  4 class  5 model  6 timeout, ms  7 result_ttl, s  8 log_ttl, s
--       9 lanes it needs  10 background ('1' or '')  11 RQ data  12 RQ description
--       13 ahead of the tenant's own ('1' or '')  14 fanout ('1' or '')
-- Returns {'ok', created ms, deadline ms}
local id, proc, tenant, class, model = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local key, now = 'rq:job:' .. id, clock()
local origin = model .. ':' .. class .. ':' .. tenant
local deadline = now + tonumber(ARGV[6])
if R('EXISTS', key) == 0 then
  local when = rq_time(now)
  R('HSET', key, 'v', '1', 'a', '0', 'owner', '', 'exec', '', 'home', proc, 'tenant', tenant, 'class', class, 'model', model,
    'fp', '', 'kills', '0', 'tries', '0', 'queued', int(now), 'dl', int(deadline), 'needs', ARGV[9], 'background', ARGV[10], 'fanout', ARGV[14],
    'log_ttl', ARGV[8], 'result_ttl', ARGV[7], 'failure_ttl', ARGV[7], 'timeout', int(math.ceil(tonumber(ARGV[6]) / 1000)),
    'origin', origin, 'data', ARGV[11], 'description', ARGV[12], 'status', 'queued', 'created_at', when, 'enqueued_at', when)
  R('EXPIRE', key, math.ceil(tonumber(ARGV[6]) / 1000) + tonumber(ARGV[7]))
  R(ARGV[13] == '1' and 'LPUSH' or 'RPUSH', 'rq:queue:' .. origin, id)
  R('SADD', 'rq:queues', 'rq:queue:' .. origin)
  local low = R('ZRANGE', P .. 'ring:' .. model .. ':' .. class, 0, 0, 'WITHSCORES')
  R('ZADD', P .. 'ring:' .. model .. ':' .. class, 'NX', low[2] or '0', tenant)
  R('LPUSH', P .. 'bell:' .. model, '1')
  R('LTRIM', P .. 'bell:' .. model, 0, 63)
end
if proc ~= '' and not job(id, 'terminal')[1] then R('SADD', P .. 'att:' .. proc, id) end
return { 'ok', int(now), int(deadline) }
