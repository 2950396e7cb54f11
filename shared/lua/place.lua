-- Where a request stands in its queue. Over all tenants: those with less tokens served come before, if requests are
-- about equal.
-- ARGV  1 id
-- Returns {position, 1 = next; ms until a lane will have come free for it, -1 = not known; live workers of its model; per cent
--         that the furthest of those which load it have done, -1 = none says so}; {0} it does not wait
local id, now = ARGV[1], clock()
local j = named(id, 'status', 'terminal', 'origin', 'model', 'class', 'tenant', 'fp')
if j.status ~= 'queued' or j.terminal or not j.model then return { 0 } end
local class, before, found = j.class or 'interactive', 0, nil
if class == 'batch' then before = waiting(j.model, 'interactive') end
for _, list in ipairs(lists_before(j.model, class)) do
  local index = not found and R('LPOS', list, id)
  before = before + (index or found and 0 or R('LLEN', list))
  found = found or index
end
if not found and j.tenant then
  local name, ring = 'rq:queue:' .. j.model .. ':' .. class .. ':', P .. 'ring:' .. j.model .. ':' .. class
  local index, score = R('LPOS', name .. j.tenant, id), tonumber(R('ZSCORE', ring, j.tenant) or 0)
  if not index then return { 0 } end
  local mean = whole(figure(j.model, 'tokens'), 1, 1, 1e9)
  local mine, others = score + index * mean, R('ZRANGE', ring, 0, -1, 'WITHSCORES')
  before = before + index
  for i = 1, #others, 2 do
    local tenant = others[i]
    if tenant ~= j.tenant then
      local turns = (mine - tonumber(others[i + 1])) / mean -- of this tenant, before it has as much
      local first = math.floor(turns) + ((turns > math.floor(turns) or tenant < j.tenant) and 1 or 0)
      before = before + math.max(0, math.min(first, R('LLEN', name .. tenant)))
    end
  end
elseif not found then
  return { 0 }
end
local speed, loaded = rate(j.model), -1
local reports = redis.pcall('HGETALL', P .. 'loading:' .. j.model)
for i = 2, #reports, 2 do
  local percent, at = string.match(reports[i], '^(%d+) (%d+)$')
  if percent and now - tonumber(at) < 15000 then loaded = math.max(loaded, tonumber(percent)) end -- else it died
end
return { before + 1, speed and int(math.min((before + 1) / speed, ATTEMPTS)) or '-1', #live_workers(j.model), loaded }
