-- Gives a worker what its free lanes can hold, and the log of each, this take included: nothing has to be read afterwards.
-- Order: handed-over requests of this fingerprint, the model's own RQ queue (jobs that RQ itself enqueued), then the
-- tenants by least tokens served, interactive before batch. What is gone, ended or not queued is dropped; past its
-- deadline: ended. One that carries a higher version than this worker's stays where it is.
-- ARGV  1 worker  2 free lanes  3 all lanes  4 model  5 fingerprint  6 deadline frame  7 default timeout, ms
--       8 frame for a request that cannot be given out  9 version  10 lanes that batch work leaves free, unless none is in use
-- Returns {'retired'}, {'held'}: nothing but batch work waits, and may not have the free lanes, or {'ok', {id, a, s, ms left,
--         log, [field, value, ...] of the job}, ...}; s names the `take` frame
local w, free, all, model, fp = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4], ARGV[5]
if R('SISMEMBER', P .. 'workers', w) == 0 then return { 'retired' } end
local now, out, aside, reserve = clock(), { 'ok' }, {}, tonumber(ARGV[10] or 0)

-- A suspect was without a token when a worker died. Until its first token of this attempt it runs apart from all others
-- that have seen a worker die: if this one dies too, it is known whose fault it is.
local suspect, seen = false, false
for _, id in ipairs(R('HKEYS', P .. 'lanes:' .. w)) do
  local j = job(id, 'kills', 'tries')
  local kills, tries = whole(j[1], 0, 0, 1000000), whole(j[2], 0, 0, 1000000)
  if kills + tries > 0 then
    local last = redis.pcall('XREVRANGE', P .. 'log:' .. id, '+', '-', 'COUNT', 1)
    if last[1] and not string.find(last[1][2][2], '"k":"delta"', 1, true) then
      suspect, seen = suspect or kills > 0, true
    end
  end
end

local function pop() -- the next waiting id, a function that puts it back where it was, lanes it may have, its tenant's score
  for _, class in ipairs({ 'interactive', 'batch' }) do
    local room, ring = free, P .. 'ring:' .. model .. ':' .. class
    if class == 'batch' and free < all then room = free - reserve end
    if room <= 0 then
      if #out == 1 and R('EXISTS', ring, resume_list(model, fp, class)) > 0 then out[1] = 'held' end
      return
    end
    for _, list in ipairs({ resume_list(model, fp, class), class == 'interactive' and 'rq:queue:' .. model or nil }) do
      local id = R('LPOP', list)
      if id then return id, function() R('LPUSH', list, id) end, room end
    end
    while true do
      local tenant = R('ZRANGE', ring, 0, 0)[1]
      if not tenant then break end
      local list = 'rq:queue:' .. model .. ':' .. class .. ':' .. tenant
      local id, score = R('LPOP', list), R('ZSCORE', ring, tenant)
      if R('LLEN', list) == 0 then R('ZREM', ring, tenant) end
      if id then return id, function() R('LPUSH', list, id) R('ZADD', ring, score, tenant) end, room, score end
    end
  end
end

local mean = whole(figure(model, 'tokens'), 1, 1, 1e9) -- what a request is charged until it ends

local function account(id, j, score) -- score: its tenant's, when its turn came
  R('HSET', 'rq:job:' .. id, 'taken', int(now))
  if not (j.class and j.tenant) then return end
  if not j.charged then -- its first take
    observe('queue_time', of_class(j.class, model), math.max(0, now - whole(j.queued, now, 0, now)), now)
    R('HSET', 'rq:job:' .. id, 'charged', mean)
    charge(model, j.class, j.tenant, mean)
  end
  if score then R('HSET', P .. 'pace:' .. model, 'at:' .. j.class, score) end
end

local function give(id, put_back, room, score) -- false: it has to wait for lanes, and everybody behind it
  if not string.match(id, '^[%w_-]+$') then return true end -- an id is RQ's; anybody can push something else
  local j = named(id, 'v', 'a', 'status', 'dl', 'kills', 'needs', 'terminal', 'origin', 'exec', 'owner', 'queued', 'home',
    'log_ttl', 'timeout', 'fanout', 'class', 'tenant', 'charged', 'tries')
  if j.status ~= 'queued' or j.terminal then return true end
  local timeout = whole(j.timeout, nil, -YEARS, YEARS)
  local deadline = whole(j.dl, now + (timeout and timeout * 1000 or tonumber(ARGV[7])), -ATTEMPTS, ATTEMPTS)
  deadline = math.min(deadline, now + 30 * 86400000)
  local needs = math.min(whole(j.needs, 1, 1, 1000000), all)
  local kills, tries = whole(j.kills, 0, 0, 1000000), whole(j.tries, 0, 0, 1000000)
  if deadline < now then
    finish(id, ARGV[6], 'deadline', 'failed')
    return true
  elseif (kills > 0 and seen) or (kills + tries > 0 and suspect) or whole(j.v, 0, 0, ATTEMPTS) > tonumber(ARGV[9]) then
    aside[#aside + 1] = put_back
    return true
  elseif needs > room then -- it waits for lanes at the front, and nobody overtakes it
    put_back()
    return false
  end
  local ta, s = top(id)
  local a = math.max(whole(j.a, 0, 0, ATTEMPTS) + 1, ta + 1, now)
  local A, origin, log = int(a), j.origin or model, P .. 'log:' .. id
  local left = math.max(1, math.ceil((deadline - now) / 1000))
  local entries = s > 0 and R('XRANGE', log, '-', '+') or {}
  local frame = '[{"k":"take","worker":"' .. w .. '","queued_ms":' .. int(now - whole(j.queued, now, 0, now)) .. '}]'
  entries[#entries + 1] = { A .. '-' .. (s + 1), { 'f', frame } }
  R('XADD', log, A .. '-' .. (s + 1), 'f', frame)
  R('EXPIRE', log, left + whole(j.log_ttl, 300, 1, YEARS))
  drop_execution(id, origin, j.exec, j.owner)
  R('HSET', 'rq:job:' .. id, 'a', A, 'owner', w, 'status', 'started', 'exec', A, 'worker_name', w, 'fp', fp, 'model', model,
    'dl', int(deadline), 'origin', origin, 'started_at', rq_time(now), 'last_heartbeat', rq_time(now))
  pcall(account, id, j, score) -- something else may lie where its keys belong
  begin_execution(id, origin, A, w, now, left)
  R('HSET', P .. 'lanes:' .. w, id, A)
  pcall(R, 'SADD', at_work(model), id) -- one that RQ enqueued is not in it yet
  tell(id, j.home, j.fanout, a, s + 1, frame)
  suspect, seen = suspect or kills > 0, seen or kills + tries > 0
  free = free - needs
  out[#out + 1] = { id, A, s + 1, int(deadline - now), entries, R('HGETALL', 'rq:job:' .. id) }
  return true
end

while free > 0 do
  local id, put_back, room, score = pop()
  if not id then break end
  local given, go_on = pcall(give, id, put_back, room, score)
  if not given then -- something else lies where its keys belong: it ends, and what is taken with it is not lost
    pcall(finish, id, ARGV[8], 'take', 'failed')
  elseif not go_on then
    break
  end
end
for i = #aside, 1, -1 do aside[i]() end
return out
