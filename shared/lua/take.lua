-- Gives a worker what its free lanes can hold, and the log of each: nothing has to be read afterwards.
-- Order: handed-over requests of this fingerprint, the model's own RQ queue (jobs that RQ itself enqueued), then the
-- tenants by least requests served, interactive before batch. What is gone, ended or not queued is dropped; past its deadline: ended.
-- ARGV  1 worker  2 free lanes  3 all lanes  4 model  5 fingerprint  6 deadline frame  7 default timeout, ms
-- Returns {'retired'} or {'ok', {id, a, s, RQ data, home, ms left, origin, log, fanout, result_ttl}, ...}; s names the `take` frame
local w, free, all, model, fp = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4], ARGV[5]
if R('SISMEMBER', P .. 'workers', w) == 0 then return { 'retired' } end
local now, out, aside, suspect = clock(), { 'ok' }, {}, false
for _, id in ipairs(R('HKEYS', P .. 'lanes:' .. w)) do -- at most one request that was there when a worker died
  if (tonumber(job(id, 'kills')[1]) or 0) > 0 then suspect = true end
end

local function pop() -- the next waiting id, and a function that puts it back where it was
  local lists = { P .. 'resume:' .. model .. ':' .. fp, 'rq:queue:' .. model }
  for _, list in ipairs(lists) do
    local id = R('LPOP', list)
    if id then return id, function() R('LPUSH', list, id) end end
  end
  for _, class in ipairs({ 'interactive', 'batch' }) do
    local ring = P .. 'ring:' .. model .. ':' .. class
    while true do
      local tenant = R('ZRANGE', ring, 0, 0)[1]
      if not tenant then break end
      local list = 'rq:queue:' .. model .. ':' .. class .. ':' .. tenant
      local id = R('LPOP', list)
      local score = R('ZSCORE', ring, tenant)
      if id then R('ZINCRBY', ring, 1, tenant) end
      if R('LLEN', list) == 0 then R('ZREM', ring, tenant) end
      if id then return id, function() R('LPUSH', list, id) R('ZADD', ring, score, tenant) end end
    end
  end
end

while free > 0 do
  local id, put_back = pop()
  if not id then break end
  local j = job(id, 'a', 'status', 'dl', 'kills', 'needs', 'terminal', 'origin', 'exec', 'owner', 'queued', 'home', 'data', 'log_ttl', 'timeout', 'fanout', 'result_ttl')
  -- an id is RQ's: letters, digits, dash, underscore; anybody can push something else
  if j[2] == 'queued' and not j[6] and string.match(id, '^[%w_-]+$') then
    local deadline = tonumber(j[3]) or now + (tonumber(j[14]) and tonumber(j[14]) * 1000 or tonumber(ARGV[7]))
    deadline = math.min(deadline, now + 30 * 86400000)
    local needs = math.max(1, math.min(tonumber(j[5]) or 1, all))
    if deadline < now then
      finish(id, ARGV[6], 'deadline', 'failed')
    elseif (tonumber(j[4]) or 0) > 0 and suspect then
      aside[#aside + 1] = put_back
    elseif needs > free then -- it waits for lanes at the front, and nobody overtakes it
      put_back()
      break
    else
      local ta, s = top(id)
      local a = math.max((tonumber(j[1]) or 0) + 1, ta + 1, now)
      local A, origin, log = int(a), j[7] or model, P .. 'log:' .. id
      local left = math.max(1, math.ceil((deadline - now) / 1000))
      local frame = '[{"k":"take","worker":"' .. w .. '","queued_ms":' .. int(now - (tonumber(j[10]) or now)) .. '}]'
      R('XADD', log, A .. '-' .. (s + 1), 'f', frame)
      R('EXPIRE', log, left + (tonumber(j[13]) or 300))
      drop_execution(id, origin, j[8], j[9])
      R('HSET', 'rq:job:' .. id, 'a', A, 'owner', w, 'status', 'started', 'exec', A, 'worker_name', w, 'fp', fp, 'model', model,
        'dl', int(deadline), 'origin', origin, 'started_at', rq_time(now), 'last_heartbeat', rq_time(now))
      local name, seconds = id .. ':' .. A, now / 1000
      R('HSET', 'rq:execution:' .. name, 'id', A, 'job_id', id, 'worker_name', w, 'created_at', seconds, 'last_heartbeat', seconds)
      R('EXPIRE', 'rq:execution:' .. name, left + 60)
      R('ZADD', 'rq:executions:' .. id, math.floor(seconds) + left + 60, A)
      R('EXPIRE', 'rq:executions:' .. id, left + 60)
      R('ZADD', 'rq:wip:' .. origin, math.floor(seconds) + left + 60, name)
      R('SADD', 'rq:worker:' .. w .. ':executions', name)
      R('EXPIRE', 'rq:worker:' .. w .. ':executions', 600)
      R('SADD', 'rq:workers:' .. origin, 'rq:worker:' .. w)
      R('HSET', P .. 'lanes:' .. w, id, A)
      tell(id, j[11], j[15], a, s + 1, frame)
      suspect = suspect or (tonumber(j[4]) or 0) > 0
      free = free - needs
      out[#out + 1] = { id, A, s + 1, j[12] or '', j[11] or '', int(deadline - now), origin, s > 0 and R('XRANGE', log, '-', '+') or {}, j[15] or '', tonumber(j[16]) or 3600 }
    end
  end
end
for i = #aside, 1, -1 do aside[i]() end
return out
