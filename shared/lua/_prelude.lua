-- Put before every script by shared/scripts.py. What the scripts share: names, clock, log, and the one end.
local R = redis.call
local P = 'sluice:'

local function clock() -- the store's clock, ms; machines' clocks are never compared
  local t = R('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end

local function instant() -- the same in microseconds: the place in a list of what was made one after the other
  local t = R('TIME')
  return string.format('%.0f', t[1] * 1000000 + t[2])
end

local function int(n) -- attempts are ms: tostring() would round them
  return string.format('%.0f', n)
end

local function job(id, ...) -- its fields; what is no hash is no job
  local fields = redis.pcall('HMGET', 'rq:job:' .. id, ...)
  if not fields.err then return fields end
  if string.find(fields.err, 'WRONGTYPE') then return {} end
  error(fields.err)
end

local function whole(field, default, low, high) -- a number that anybody may have written: NaN and 1e300 break commands
  local n = tonumber(field)
  if not n or not (n >= low and n <= high) then return default end
  return math.floor(n)
end

local ATTEMPTS, YEARS = 2 ^ 52, 10 * 365 * 86400

local function top(id) -- attempt and seq of the log's last frame; 0, 0 without a log
  local r = redis.pcall('XREVRANGE', P .. 'log:' .. id, '+', '-', 'COUNT', 1)
  if r.err then -- what is no log is none: its request could neither go on nor end
    if not string.find(r.err, 'WRONGTYPE') then error(r.err) end
    R('DEL', P .. 'log:' .. id)
    return 0, 0
  end
  if not r[1] then return 0, 0 end
  local a, s = string.match(r[1][1], '(%d+)-(%d+)')
  a, s = tonumber(a), tonumber(s)
  if a > ATTEMPTS or s > ATTEMPTS then -- names that no frame has: nothing, not even an end, could be written behind them
    R('DEL', P .. 'log:' .. id)
    return 0, 0
  end
  return a, s
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

local function begin_execution(id, origin, A, worker, now, left) -- the same record, for the attempt A; left: s
  local name, seconds = id .. ':' .. A, now / 1000
  local score = math.floor(seconds) + left + 60
  R('HSET', 'rq:execution:' .. name, 'id', A, 'job_id', id, 'worker_name', worker, 'created_at', seconds, 'last_heartbeat', seconds)
  R('EXPIRE', 'rq:execution:' .. name, left + 60)
  R('ZADD', 'rq:executions:' .. id, score, A)
  R('EXPIRE', 'rq:executions:' .. id, left + 60)
  R('ZADD', 'rq:wip:' .. origin, score, name)
  R('SADD', 'rq:worker:' .. worker .. ':executions', name)
  R('EXPIRE', 'rq:worker:' .. worker .. ':executions', 600)
  R('SADD', 'rq:workers:' .. origin, 'rq:worker:' .. worker)
  R('SADD', 'rq:queues', 'rq:queue:' .. origin) -- while a request waited in a resume list, sweep.lua may have taken it off
end

local function resume_list(model, fp, class) -- what was begun, for workers with the same numbers; batch has its own
  return P .. 'resume:' .. model .. ':' .. fp .. (class == 'batch' and ':batch' or '')
end

local function ring_bell(model)
  R('LPUSH', P .. 'bell:' .. model, '1')
  R('LTRIM', P .. 'bell:' .. model, 0, 63)
end

local KEYED = P .. 'idem:'
local KEY_TTL = 86400 -- s; a key counts for as long as its request is known

local function has_key(idem) -- whether this names an idempotency key: anybody may have written another name there
  return idem and string.sub(idem, 1, #KEYED) == KEYED
end

local function claim(idem, id, stands_for) -- the idempotency key is this request's, if it is nobody's
  if has_key(idem) then R('SET', idem, id .. ' ' .. stands_for, 'EX', KEY_TTL, 'NX') end
end

local function free_key(idem, id) -- the same key may try again
  if has_key(idem) and string.sub(R('GET', idem) or '', 1, #id + 1) == id .. ' ' then R('DEL', idem) end
end

-- What is counted for the metrics: the hash `counts`, with fields as shared/measures.py names them, and lately:{minute}, the
-- same of histograms. SECONDS: the bounds of their buckets, as they stand there.
local SECONDS = { 0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.15, 0.25, 0.4, 0.6, 1.0, 1.5, 2.5, 4.0, 6.0, 10.0, 20.0, 30.0,
  60.0, 120.0, 300.0, 600.0, 1800.0 }
local LATELY = 600 -- s
local OUTCOMES = { deadline_exceeded = 1, engine_overloaded = 1, internal_error = 1, log_lost = 1, no_worker = 1,
  poison_request = 1, store_unavailable = 1, structured_output_failed = 1, worker_lost = 1, worker_shutdown = 1 }

local function lately(now)
  return P .. 'lately:' .. math.floor(now / 60000)
end

local function known(model) -- a label has few values: models that have a card
  return type(model) == 'string' and redis.pcall('SISMEMBER', P .. 'cards', model) == 1 and model or 'other'
end

local function of_class(class, model)
  return (class == 'batch' and 'batch' or 'interactive') .. '|' .. known(model)
end

local function tally(measure, labels, by)
  pcall(R, 'HINCRBY', P .. 'counts', measure .. '|' .. labels, int(by)) -- whatever lies there: what happens, happens
end

local function observe(measure, labels, ms, now)
  local bucket = #SECONDS
  for i, bound in ipairs(SECONDS) do
    if ms <= bound * 1000 then
      bucket = i - 1
      break
    end
  end
  local minute = lately(now)
  for _, hash in ipairs({ P .. 'counts', minute }) do
    pcall(R, 'HINCRBY', hash, measure .. '|' .. bucket .. '|' .. labels, 1)
    pcall(R, 'HINCRBY', hash, measure .. '|us|' .. labels, int(ms * 1000))
  end
  R('EXPIRE', minute, LATELY)
end

-- Whoever takes this request next goes on from its log. j: fields of its hash by name
local function give_back(id, j, worker)
  local now = clock()
  drop_execution(id, j.origin or '', j.exec, worker)
  local ran = job(id, 'spent', 'taken')
  R('HSET', 'rq:job:' .. id, 'owner', '', 'exec', '', 'worker_name', '', 'status', 'queued', 'queued', int(now),
    'spent', int(whole(ran[1], 0, 0, ATTEMPTS) + now - whole(ran[2], now, 0, now)))
  local list = resume_list(j.model, j.fp, j.class)
  R('LPUSH', list, id)
  R('SADD', P .. 'resumes', list)
  ring_bell(j.model)
end

local function named(id, ...) -- fields of a job's hash, by name
  local names, values, j = { ... }, job(id, ...), {}
  for i, name in ipairs(names) do
    if values[i] then j[name] = values[i] end -- what is missing is false
  end
  return j
end

local function forget_worker(worker) -- its name, lease and figures, here and in RQ
  R('SREM', P .. 'workers', worker)
  R('DEL', P .. 'lease:' .. worker, P .. 'stat:' .. worker)
  for _, key in ipairs(R('SMEMBERS', 'rq:queues')) do -- RQ takes it off its own queue only
    R('SREM', 'rq:workers:' .. string.sub(key, #'rq:queue:' + 1), 'rq:worker:' .. worker)
  end
  R('SREM', 'rq:workers', 'rq:worker:' .. worker)
  R('EXPIRE', 'rq:worker:' .. worker, 60)
end

local function unqueue(id, origin, model, fp, class, tenant) -- out of every waiting list; the ring follows
  R('LREM', 'rq:queue:' .. model, 0, id)
  if fp and fp ~= '' then R('LREM', resume_list(model, fp, class), 0, id) end
  R('LREM', 'rq:queue:' .. origin, 0, id)
  if class and tenant and R('LLEN', 'rq:queue:' .. origin) == 0 then
    R('ZREM', P .. 'ring:' .. model .. ':' .. class, tenant)
  end
end

-- What is known of a model's speed, and how fair it has been. pace:{model} is a hash: of the last requests that ended,
-- `lane_ms` is what one of them took (ms, times the lanes it had) and `tokens` what it was served, both as means that
-- decay over MEMORY of them; `seen`: how many there were, up to MEMORY. `at:{class}`: the score of the tenant that was
-- last served. served:{model}:{class} is a zset: tokens that each tenant was served; ring:{model}:{class} has the same
-- scores of those that wait.
local MEMORY = 64

local function figure(model, field) -- out of pace:{model}; nil: not known yet, or something else lies there
  local value = redis.pcall('HGET', P .. 'pace:' .. model, field)
  return type(value) == 'string' and tonumber(value) or nil
end

local function enter(model, class, tenant) -- a tenant has work: from where it left off, or level with the least served
  local ring, served = P .. 'ring:' .. model .. ':' .. class, P .. 'served:' .. model .. ':' .. class
  if R('ZSCORE', ring, tenant) then return end
  local level = tonumber(R('ZRANGE', ring, 0, 0, 'WITHSCORES')[2] or figure(model, 'at:' .. class) or 0)
  local score = int(math.max(level, tonumber(R('ZSCORE', served, tenant) or 0)))
  R('ZADD', served, score, tenant)
  R('EXPIRE', served, 86400)
  R('ZADD', ring, score, tenant)
end

local function charge(model, class, tenant, tokens) -- tokens < 0: it had been charged too many
  local served = P .. 'served:' .. model .. ':' .. class
  local score = R('ZINCRBY', served, int(tokens), tenant)
  R('EXPIRE', served, 86400)
  R('ZADD', P .. 'ring:' .. model .. ':' .. class, 'XX', score, tenant)
end

local function tokens_of(id, frame, needs) -- of the prompt and sampled, of a request that ends with `frame`; without usage: about
  local prompt, completion = string.match(frame, '"prompt_tokens":(%d+)'), string.match(frame, '"completion_tokens":(%d+)')
  local log, written = P .. 'log:' .. id, 0
  if not completion then -- an entry is a step: a token of each choice
    for _, entry in ipairs(R('XRANGE', log, '-', '+', 'COUNT', 8)) do
      prompt = prompt or string.match(entry[2][2], '"prompt_tokens":(%d+)')
    end
    written = math.max(0, R('XLEN', log) - 3) * needs -- but for take, start and end
  end
  return whole(prompt, 0, 0, 1e9), whole(completion, written, 0, 1e9)
end

local function tokens_in_all(id, frame, needs)
  local prompt, completion = tokens_of(id, frame, needs)
  return prompt + completion
end

local function keep_pace(id, frame, now) -- a request ends: what it took and was served, if a worker has had it
  local j = named(id, 'model', 'class', 'tenant', 'status', 'needs', 'taken', 'spent', 'charged')
  if not j.taken or not j.model then return end
  local needs = whole(j.needs, 1, 1, 1000000)
  local ran = whole(j.spent, 0, 0, ATTEMPTS) + (j.status == 'started' and math.max(0, now - whole(j.taken, now, 0, now)) or 0)
  local prompt, completion = tokens_of(id, frame, needs)
  tally('prompt_tokens', of_class(j.class, j.model), prompt)
  tally('completion_tokens', of_class(j.class, j.model), completion)
  local tokens, pace = prompt + completion, P .. 'pace:' .. j.model
  local known = R('HMGET', pace, 'seen', 'lane_ms', 'tokens')
  local seen = math.min(MEMORY, whole(known[1], 0, 0, MEMORY) + 1)
  local lane_ms, mean = tonumber(known[2] or 0) or 0, tonumber(known[3] or 0) or 0
  R('HSET', pace, 'seen', seen, 'lane_ms', string.format('%.3f', lane_ms + (ran * needs - lane_ms) / seen),
    'tokens', string.format('%.3f', mean + (tokens - mean) / seen))
  if j.tenant and j.class then charge(j.model, j.class, j.tenant, tokens - whole(j.charged, 0, 0, 1e9)) end
end

-- A request that was let in under its key's limits (admit.lua) is over: it no longer counts as running, and tokens that
-- were reserved and not used go back (or those used beyond are taken). A bucket that ran out of time meanwhile is full:
-- there is nothing to put right but a debt. limit: tokens a minute, nil = none
local function settle(key, id, limit, reserved, used)
  local bucket, now = P .. 'limit:' .. key, clock()
  R('ZREM', P .. 'running:' .. key, id)
  if not limit then return end
  local b = R('HMGET', bucket, 'tokens', 'at')
  local t = math.min(limit, (tonumber(b[1]) or limit) + reserved - used) -- the time since `at` is counted at the next look
  if not b[1] and t >= limit then return end
  R('HSET', bucket, 'tokens', string.format('%.3f', t), 'at', int(tonumber(b[2]) or now))
  R('PEXPIRE', bucket, int(math.ceil(math.max(0, limit - t) * 60000 / limit) + 120000))
end

local function settle_left(id, frame, needs, left) -- what settle.lua has left to the end; left: out of the job's hash
  local key, limit, reserved = string.match(left or '', '^(%S+) (%d*) (%d+)$')
  if key then settle(key, id, tonumber(limit), tonumber(reserved), tokens_in_all(id, frame, whole(needs, 1, 1, 1000000))) end
end

local function live_workers(model) -- their figures: lanes, free lanes, name; one that drains takes nothing
  local found = {}
  for _, w in ipairs(R('SMEMBERS', P .. 'workers')) do
    local stat = R('HMGET', P .. 'stat:' .. w, 'model', 'lanes', 'free', 'draining')
    if stat[1] == model and stat[4] ~= '1' and R('EXISTS', P .. 'lease:' .. w) == 1 then
      found[#found + 1] = { whole(stat[2], 0, 0, 1000000), whole(stat[3], 0, 0, 1000000), w }
    end
  end
  return found
end

local function rate(model) -- requests that its workers get done in a ms, with all lanes busy; nil: not known
  local known, lanes = figure(model, 'lane_ms'), 0
  if not known then return nil end
  for _, worker in ipairs(live_workers(model)) do lanes = lanes + worker[1] end
  return lanes > 0 and lanes / math.max(known, 0.1) or nil
end

local function lists_before(model, class) -- waiting lists that come before the tenants' of this class
  local found = {}
  for _, list in ipairs(R('SMEMBERS', P .. 'resumes')) do -- of any worker's numbers
    if string.sub(list, 1, #P + 8 + #model) == P .. 'resume:' .. model .. ':' and (string.sub(list, -6) == ':batch') == (class == 'batch') then
      found[#found + 1] = list
    end
  end
  if class == 'interactive' then found[#found + 1] = 'rq:queue:' .. model end
  return found
end

local function waiting(model, class) -- requests of this class, over all tenants
  local count = 0
  for _, list in ipairs(lists_before(model, class)) do count = count + R('LLEN', list) end
  for _, tenant in ipairs(R('ZRANGE', P .. 'ring:' .. model .. ':' .. class, 0, -1)) do
    count = count + R('LLEN', 'rq:queue:' .. model .. ':' .. class .. ':' .. tenant)
  end
  return count
end

local function fullness() -- the used part of the store's memory, 0 to 1; 0 = no limit, or it does not say. Asked once a second
  local known = tonumber(R('GET', P .. 'full') or nil)
  if known then return known end
  local info, share = redis.pcall('INFO', 'memory'), 0
  if type(info) == 'string' then
    local used, most = string.match(info, 'used_memory:(%d+)'), string.match(info, 'maxmemory:(%d+)')
    if used and tonumber(most or 0) > 0 then share = math.min(9, used / most) end
  end
  R('SET', P .. 'full', string.format('%.3f', share), 'PX', 1000)
  return share
end

local function at_work(model) -- set of the requests of a model that wait or run: its size is what scales workers (docs/scaling.md)
  return P .. 'work:' .. model
end

local function announce(url, kind, about, now) -- a webhook, to be sent by a courier within three days
  local event = 'evt_' .. redis.sha1hex(about .. kind)
  R('HSET', P .. 'hook:' .. event, 'url', url, 'kind', kind, 'about', about, 'created', math.floor(now / 1000))
  R('EXPIRE', P .. 'hook:' .. event, 3 * 86400)
  R('ZADD', P .. 'hooks', int(now), event)
end

local function count_end(id, frame, status, now) -- for the metrics
  local j = named(id, 'model', 'class', 'born')
  local code = string.match(frame, '"code":"([a-z_]+)"') or ''
  local outcome = status == 'finished' and 'completed' or status == 'failed' and (OUTCOMES[code] and code or 'failed') or 'cancelled'
  tally('requests', outcome .. '|' .. of_class(j.class, j.model), 1)
  if j.born then observe('request_duration', of_class(j.class, j.model), math.max(0, now - whole(j.born, now, 0, now)), now) end
end

local KINDS = { finished = 'response.completed', canceled = 'response.cancelled', stopped = 'response.cancelled' }

local function enter_registry(id, origin, status, now, ttl) -- RQ's, of those that ended so
  local registry = status == 'finished' and 'rq:finished:' or status == 'canceled' and 'rq:canceled:' or 'rq:failed:'
  R('ZREMRANGEBYSCORE', registry .. origin, '-inf', math.floor(now / 1000)) -- nothing else may ever trim it
  R('ZADD', registry .. origin, math.floor(now / 1000) + ttl, id)
end

-- The one place where a request ends. `frame`: the terminal frame, JSON; `by`: who ended it; `status`: RQ's word for
-- it (finished, failed, canceled, stopped). Every later write of the owner is below the log's top and refused.
-- Whoever is answered that it won folds the log into the result (shared/results.py); if it cannot, sweep.lua finds the
-- request in unkept, a zset of ids by the time of their ends.
local function finish(id, frame, by, status)
  local j = job(id, 'a', 'owner', 'origin', 'model', 'fp', 'class', 'tenant', 'home', 'status', 'exec', 'result_ttl', 'log_ttl', 'fanout', 'idem', 'hook', 'needs', 'limits')
  local origin, now = j[3] or '', clock()
  local ta, s = top(id)
  local a = math.max(whole(j[1], 0, 0, ATTEMPTS), ta) + 1
  local log, ttl = P .. 'log:' .. id, whole(j[11], 3600, 1, YEARS)
  R('XADD', log, int(a) .. '-' .. (s + 1), 'f', '[' .. frame .. ']')
  R('EXPIRE', log, math.min(whole(j[12], 300, 1, YEARS), fullness() > 0.6 and 60 or YEARS))
  -- Where its other keys belong something else may lie: it ends all the same.
  if j[4] then pcall(R, 'SREM', at_work(j[4]), id) end
  if j[9] == 'queued' then pcall(unqueue, id, origin, j[4] or '', j[5], j[6], j[7]) end
  pcall(keep_pace, id, frame, now)
  pcall(settle_left, id, frame, j[16], j[17])
  pcall(count_end, id, frame, status, now)
  pcall(drop_execution, id, origin, j[10], j[2])
  R('HSET', 'rq:job:' .. id, 'terminal', by, 'status', status, 'a', int(a), 'ended_at', rq_time(now), 'exec', '', 'end', frame)
  R('EXPIRE', 'rq:job:' .. id, ttl)
  R('ZADD', P .. 'unkept', int(now), id)
  pcall(enter_registry, id, origin, status, now, ttl)
  if status == 'canceled' or status == 'stopped' or string.find(frame, '"retryable":true', 1, true) then pcall(free_key, j[14], id) end
  if j[15] and j[15] ~= '' then pcall(announce, j[15], KINDS[status] or 'response.failed', id, now) end
  if j[8] and j[8] ~= '' then R('SREM', P .. 'att:' .. j[8], id) end
  tell(id, j[8], j[13], a, s + 1, '[' .. frame .. ']')
  if j[2] and j[2] ~= '' and j[2] ~= by then R('PUBLISH', P .. 'ctl:' .. j[2], '["cancel","' .. id .. '"]') end
  return int(a)
end

local function let_go(id, proc, frame) -- `proc` no longer follows the request; `frame` ends it if nobody does
  R('SREM', P .. 'att:' .. proc, id)
  local j = named(id, 'status', 'terminal', 'background')
  if not j.status then return 'missing' end
  if j.terminal then return 'ended' end
  if j.background == '1' then return 'background' end
  for _, p in ipairs(R('SMEMBERS', P .. 'procs')) do
    if R('SISMEMBER', P .. 'att:' .. p, id) == 1 then return 'followed' end
  end
  finish(id, frame, 'client', 'canceled')
  return 'cancelled'
end
