-- Ends what nobody will take: what waited past its deadline, or for too long without a live worker that could take it, or
-- for workers that fail to load.
-- Takes what does not wait any more out of the lists, and empty lists off the books. So with what RQ lists as running long
-- past its deadline: somebody wrote over it, or took it from its worker by hand. Finds what ended a while ago without
-- that its result was kept: whoever ended it died, or could not be told that it did. Puts right the sets of what is at work.
-- ARGV  1 longest wait without a worker, ms  2 deadline frame  3 frame for one that no worker came for
--       4 frame for one whose worker is gone  5 looked at in each list, at most
--       6 age at which batch work becomes interactive, ms
--       7 age at which an end is old, ms
--       8 frame for one that waits for workers which fail to load the model
-- Returns {looked at, [ended id, ...], [id of an old end without a result, ...]}; {0, {}, {}} if another process has just
-- done it
if not R('SET', P .. 'sweep', '1', 'NX', 'PX', 1500) then return { 0, {}, {} } end
local now, most, looked, ended = clock(), tonumber(ARGV[5]) - 1, 0, {}
local live = {} -- models, and lists of what was begun with the same numbers
for _, w in ipairs(R('SMEMBERS', P .. 'workers')) do
  if R('EXISTS', P .. 'lease:' .. w) == 1 then
    local stat = R('HMGET', P .. 'stat:' .. w, 'model', 'fp')
    if stat[1] then live[stat[1]] = true end
    if stat[1] and stat[2] then live[resume_list(stat[1], stat[2])] = true end
  end
end

local alone = {} -- model -> since when it has no live worker (by these sweeps)
for _, model in ipairs(redis.pcall('SMEMBERS', P .. 'cards')) do
  if live[model] then
    R('DEL', P .. 'alone:' .. model)
  else
    R('SET', P .. 'alone:' .. model, int(now), 'NX')
    alone[model] = tonumber(redis.pcall('GET', P .. 'alone:' .. model) or nil)
  end
  for _, id in ipairs(redis.pcall('SRANDMEMBER', at_work(model), 100)) do
    local j = named(id, 'status', 'terminal')
    if j.terminal or (j.status ~= 'queued' and j.status ~= 'started') then R('SREM', at_work(model), id) end
  end
end

local function look(id, list, served, lost) -- served: by the list's own name; nil: it is the job's model that counts
  looked = looked + 1
  local j = string.match(id, '^[%w_-]+$') and named(id, 'status', 'terminal', 'dl', 'queued', 'model') or {}
  if j.terminal or j.status ~= 'queued' then
    R('LREM', list, 0, id)
    return
  end
  local late, since = whole(j.dl, now, -ATTEMPTS, ATTEMPTS) < now, whole(j.queued, now, 0, now)
  local model = j.model or string.sub(list, #'rq:queue:' + 1) -- RQ's own list has the model's name
  if redis.pcall('SISMEMBER', P .. 'cards', model) == 1 then pcall(R, 'SADD', at_work(model), id) end
  if served == nil then
    served = live[model]
    since = math.max(since, alone[model] or 0)
  end
  local starter = not live[model] and redis.pcall('GET', P .. 'starter:' .. model)
  local failing = type(starter) == 'string' and string.find(starter, '^failed') ~= nil
  if late or failing or (not served and now - since > tonumber(ARGV[1])) then
    finish(id, late and ARGV[2] or failing and ARGV[8] or lost, late and 'deadline' or 'sweep', 'failed')
    ended[#ended + 1] = id
  end
end

local function empties(list, served, lost) -- whether nothing waits in it any more
  for _, id in ipairs(R('LRANGE', list, 0, most)) do
    pcall(look, id, list, served, lost) -- something else may lie where its keys belong
  end
  return R('EXISTS', list) == 0
end

local function age(list, resumed) -- the first of a list of batch work, if it is old: one at a time, and not a flood
  local id = R('LINDEX', list, 0)
  local j = id and named(id, 'born', 'class', 'model', 'tenant', 'fp', 'status') or {}
  if j.class ~= 'batch' or j.status ~= 'queued' or not j.tenant or now - whole(j.born, now, 0, now) < tonumber(ARGV[6]) then return end
  local origin = j.model .. ':interactive:' .. j.tenant
  R('LREM', list, 1, id)
  R('HSET', 'rq:job:' .. id, 'class', 'interactive', 'origin', origin)
  if resumed then
    local own = resume_list(j.model, j.fp, 'interactive')
    R('RPUSH', own, id)
    R('SADD', P .. 'resumes', own)
  else
    R('RPUSH', 'rq:queue:' .. origin, id)
    R('SADD', 'rq:queues', 'rq:queue:' .. origin)
    enter(j.model, 'interactive', j.tenant)
    if R('EXISTS', list) == 0 then R('ZREM', P .. 'ring:' .. j.model .. ':batch', j.tenant) end
  end
  ring_bell(j.model)
end

local function overdue(entry, origin) -- of rq:wip; its score is a minute behind the deadline
  local id, exec = string.match(entry, '^([%w_-]+):(%d+)$')
  if not id then return end -- not one of ours
  looked = looked + 1
  R('ZREM', 'rq:wip:' .. origin, entry)
  local j = named(id, 'status', 'terminal', 'exec')
  if j.status == 'started' and not j.terminal and j.exec == exec then
    finish(id, ARGV[2], 'deadline', 'failed')
    ended[#ended + 1] = id
  end
end

for _, list in ipairs(R('SMEMBERS', 'rq:queues')) do
  local name = string.sub(list, #'rq:queue:' + 1)
  if string.find(name, ':batch:', 1, true) then pcall(age, list, false) end
  local late = redis.pcall('ZRANGEBYSCORE', 'rq:wip:' .. name, '-inf', math.floor(now / 1000), 'LIMIT', 0, most)
  for _, entry in ipairs(late) do pcall(overdue, entry, name) end
  if R('TYPE', list).ok ~= 'string' and empties(list, nil, ARGV[3]) and (string.find(name, ':interactive:', 1, true)
    or string.find(name, ':batch:', 1, true)) and R('EXISTS', 'rq:wip:' .. name) == 0 then
    R('SREM', 'rq:queues', list) -- a tenant's; submit.lua puts it back
    R('DEL', 'rq:workers:' .. name) -- who took from it; a worker's death is told to listed queues only
  end
end
for _, list in ipairs(R('SMEMBERS', P .. 'resumes')) do
  local own = string.gsub(list, ':batch$', '')
  if own ~= list then pcall(age, list, true) end
  if empties(list, live[own] or false, ARGV[4]) then R('SREM', P .. 'resumes', list) end
end
return { looked, ended, R('ZRANGEBYSCORE', P .. 'unkept', '-inf', int(now - ARGV[7]), 'LIMIT', 0, most) }
