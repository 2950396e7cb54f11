-- Puts a request into its queue. Safe to repeat: by job id the second call changes nothing.
-- No allow-oom: a full store refuses new work.
-- ARGV  1 id  2 proc ('' = nobody waits)  3 tenant  4 class  5 model  6 timeout, ms  7 result_ttl, s  8 log_ttl, s
--       9 lanes it needs  10 background ('1' or '')  11 RQ data  12 RQ description
--       13 ahead of the tenant's own ('1' or '')  14 fanout ('1' or '')  15 view (how its client sees it; opaque)
--       16 grace after a hang-up, s  17 idempotency key ('' = none)  18 what the key stands for
--       19 version: workers of lower ones leave it alone  20 webhook ('' = none), if there are more than 20
--       the last one: limits, three numbers with blanks between them: waiting requests of the model and class; longest
--       wait, ms; waiting and running requests of the tenant, of this model. 0 = none
-- Returns {'ok', created ms, deadline ms}, {'same', id} an earlier request has this key and is this request: the process
--         follows that one; {'conflict'} it has the key and is another request;
--         or why there is no room: {'full', waiting, ms until these will have been taken, 0 = not known}, {'crowd', waiting
--         and running} the tenant has its share, {'memory'} the store is almost full

local function no_room(tenant, class, model, limits)
  if fullness() > 0.8 then return { 'memory' } end
  local most, longest, own = string.match(limits, '^(%d+) (%d+) (%d+)$')
  most, longest, own = tonumber(most), tonumber(longest), tonumber(own)
  if own > 0 then
    local count = 0
    for _, class in ipairs({ 'interactive', 'batch' }) do
      local origin = model .. ':' .. class .. ':' .. tenant
      count = count + R('LLEN', 'rq:queue:' .. origin) + R('ZCARD', 'rq:wip:' .. origin)
    end
    if count >= own then return { 'crowd', count } end
  end
  local count = waiting(model, 'interactive') + (class == 'batch' and waiting(model, 'batch') or 0)
  if count == 0 then return end
  local speed = rate(model)
  local wait = speed and math.ceil(count / speed) or 0
  if (most > 0 and count >= most) or (longest > 0 and wait > longest) then return { 'full', count, int(math.min(wait, ATTEMPTS)) } end
end

local id, proc, tenant, class, model = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local key, now = 'rq:job:' .. id, clock()
local origin = model .. ':' .. class .. ':' .. tenant
local deadline = now + tonumber(ARGV[6])
local idem = ARGV[17] ~= '' and KEYED .. tenant .. ':' .. ARGV[17] or ''
if R('EXISTS', key) == 0 then
  if idem ~= '' then
    local earlier, stands_for = string.match(R('GET', idem) or '', '^(%S+) (.*)$')
    local known = earlier and job(earlier, 'idem', 'terminal') or {}
    if known[1] == idem then -- a job that is gone, or lost the key, leaves it free
      if stands_for ~= ARGV[18] then return { 'conflict' } end
      if proc ~= '' and not known[2] then R('SADD', P .. 'att:' .. proc, earlier) end
      return { 'same', earlier }
    end
    R('DEL', idem)
  end
  local refused = no_room(tenant, class, model, ARGV[#ARGV])
  if refused then return refused end
  claim(idem, id, ARGV[18])
  local when = rq_time(now)
  R('HSET', key, 'v', ARGV[19], 'a', '0', 'owner', '', 'exec', '', 'home', proc, 'tenant', tenant, 'class', class, 'model', model,
    'fp', '', 'kills', '0', 'tries', '0', 'queued', int(now), 'born', int(now), 'dl', int(deadline), 'needs', ARGV[9], 'background', ARGV[10], 'fanout', ARGV[14],
    'view', ARGV[15], 'grace', ARGV[16], 'idem', idem, 'idem_for', ARGV[18], 'hook', #ARGV > 20 and ARGV[20] or '',
    'log_ttl', ARGV[8], 'result_ttl', ARGV[7], 'failure_ttl', ARGV[7], 'timeout', int(math.ceil(tonumber(ARGV[6]) / 1000)),
    'origin', origin, 'data', ARGV[11], 'description', ARGV[12], 'status', 'queued', 'created_at', when, 'enqueued_at', when)
  R('EXPIRE', key, math.ceil(tonumber(ARGV[6]) / 1000) + tonumber(ARGV[7]))
  R(ARGV[13] == '1' and 'LPUSH' or 'RPUSH', 'rq:queue:' .. origin, id)
  R('SADD', 'rq:queues', 'rq:queue:' .. origin)
  enter(model, class, tenant)
  pcall(R, 'SADD', at_work(model), id)
  ring_bell(model)
end
if proc ~= '' and not job(id, 'terminal')[1] then R('SADD', P .. 'att:' .. proc, id) end
return { 'ok', int(now), int(deadline) }
