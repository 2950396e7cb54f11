-- Put before every script by shared/scripts.py. What the scripts share: names, clock, log, and the one end.
local R = redis.call
local P = 'sluice:'

local function clock() -- the store's clock, ms; machines' clocks are never compared
  local t = R('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end

local function int(n) -- attempts are ms: tostring() would round them
  return string.format('%.0f', n)
end

local function job(id, ...)
  return R('HMGET', 'rq:job:' .. id, ...)
end

local function top(id) -- attempt and seq of the log's last frame; 0, 0 without a log
  local r = R('XREVRANGE', P .. 'log:' .. id, '+', '-', 'COUNT', 1)
  if not r[1] then return 0, 0 end
  local a, s = string.match(r[1][1], '(%d+)-(%d+)')
  return tonumber(a), tonumber(s)
end

local function tell(id, home, fanout, a, s, frames) -- the process that has the client, and whoever else listens
  local message = '{"v":1,"' .. id .. '":["' .. int(a) .. '-' .. s .. '",' .. frames .. ']}' -- frames: a JSON array
  if home and home ~= '' then R('PUBLISH', P .. 'node:' .. home, message) end
  if fanout == '1' then R('PUBLISH', P .. 'out:' .. id, message) end
end

local function rq_time(ms) -- as RQ writes dates
  local days = math.floor(ms / 86400000)
  local rest = math.floor(ms / 1000) % 86400
  local z = days + 719468 -- civil date from days since the epoch (H. Hinnant, chrono-compatible algorithms)
  local era = math.floor(z / 146097)
  local doe = z - era * 146097
  local yoe = math.floor((doe - math.floor(doe / 1460) + math.floor(doe / 36524) - math.floor(doe / 146096)) / 365)
  local doy = doe - (365 * yoe + math.floor(yoe / 4) - math.floor(yoe / 100))
  local mp = math.floor((5 * doy + 2) / 153)
  local month = mp < 10 and mp + 3 or mp - 9
  local year = yoe + era * 400 + (month <= 2 and 1 or 0)
  return string.format('%04d-%02d-%02dT%02d:%02d:%02d.%03d000Z', year, month, doy - math.floor((153 * mp + 2) / 5) + 1,
    math.floor(rest / 3600), math.floor(rest / 60) % 60, rest % 60, ms % 1000)
end

local function drop_execution(id, origin, exec, worker) -- RQ's record that `worker` runs the job
  if not exec or exec == '' then return end
  local name = id .. ':' .. exec
  R('ZREM', 'rq:wip:' .. origin, name)
  R('ZREM', 'rq:executions:' .. id, exec)
  R('DEL', 'rq:execution:' .. name)
  if worker and worker ~= '' then R('SREM', 'rq:worker:' .. worker .. ':executions', name) end
end

local function unqueue(id, origin, model, fp, class, tenant) -- out of every waiting list; the ring follows
  R('LREM', 'rq:queue:' .. model, 0, id)
  if fp and fp ~= '' then R('LREM', P .. 'resume:' .. model .. ':' .. fp, 0, id) end
  R('LREM', 'rq:queue:' .. origin, 0, id)
  if class and tenant and R('LLEN', 'rq:queue:' .. origin) == 0 then
    R('ZREM', P .. 'ring:' .. model .. ':' .. class, tenant)
  end
end

-- The one place where a request ends. `frame`: the terminal frame, JSON; `by`: who ended it; `status`: RQ's word for
-- it (finished, failed, canceled, stopped). Every later write of the owner is below the log's top and refused.
local function finish(id, frame, by, status)
  local j = job(id, 'a', 'owner', 'origin', 'model', 'fp', 'class', 'tenant', 'home', 'status', 'exec', 'result_ttl', 'log_ttl', 'fanout')
  local origin, now = j[3] or '', clock()
  local ta, s = top(id)
  local a = math.max(tonumber(j[1]) or 0, ta) + 1
  local log, ttl = P .. 'log:' .. id, tonumber(j[11]) or 3600
  R('XADD', log, int(a) .. '-' .. (s + 1), 'f', '[' .. frame .. ']')
  R('EXPIRE', log, tonumber(j[12]) or 300)
  if j[9] == 'queued' then unqueue(id, origin, j[4] or '', j[5], j[6], j[7]) end
  drop_execution(id, origin, j[10], j[2])
  R('HSET', 'rq:job:' .. id, 'terminal', by, 'status', status, 'a', int(a), 'ended_at', rq_time(now), 'exec', '')
  R('EXPIRE', 'rq:job:' .. id, ttl)
  local registry = status == 'finished' and 'rq:finished:' or status == 'canceled' and 'rq:canceled:' or 'rq:failed:'
  R('ZREMRANGEBYSCORE', registry .. origin, '-inf', math.floor(now / 1000)) -- nothing else may ever trim it
  R('ZADD', registry .. origin, math.floor(now / 1000) + ttl, id)
  if j[8] and j[8] ~= '' then R('SREM', P .. 'att:' .. j[8], id) end
  tell(id, j[8], j[13], a, s + 1, '[' .. frame .. ']')
  if j[2] and j[2] ~= '' and j[2] ~= by then R('PUBLISH', P .. 'ctl:' .. j[2], '["cancel","' .. id .. '"]') end
  return int(a)
end
