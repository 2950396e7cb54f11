-- How many lanes with batch work this worker shall give up now, for interactive requests that wait without a free lane.
-- ARGV  1 worker  2 model  3 fingerprint  4 lanes free here  5 lanes with batch work here, not yet being given up
--       6 lanes being given up here  7 all lanes here  8 version
-- Returns lanes
local w, model, fp = ARGV[1], ARGV[2], ARGV[3]
local free, batch, yielding, all = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
local now, promises = clock(), P .. 'yield:' .. model
local ring, lists = P .. 'ring:' .. model .. ':interactive', { resume_list(model, fp), 'rq:queue:' .. model }
for _, tenant in ipairs(R('ZRANGE', ring, 0, batch)) do lists[#lists + 1] = 'rq:queue:' .. model .. ':interactive:' .. tenant end

local wants = {} -- lanes that each waiting request needs which a lane would be given
for _, list in ipairs(lists) do
  for _, id in ipairs(R('LRANGE', list, 0, batch)) do
    local j = string.match(id, '^[%w_-]+$') and named(id, 'v', 'status', 'terminal', 'dl', 'kills', 'needs') or {}
    if j.status == 'queued' and not j.terminal and whole(j.kills, 0, 0, 1000000) == 0 -- one that was there when a worker died waits
      and whole(j.v, 0, 0, ATTEMPTS) <= tonumber(ARGV[8]) and whole(j.dl, now, -ATTEMPTS, ATTEMPTS) >= now then
      wants[#wants + 1] = math.min(whole(j.needs, 1, 1, 1000000), all)
    end
  end
end
if #wants == 0 then return 0 end

local elsewhere = 0 -- lanes that are free in other workers, or will be
for _, worker in ipairs(live_workers(model)) do
  if worker[3] ~= w then elsewhere = elsewhere + worker[2] end
end
local said = R('HGETALL', promises)
for i = 1, #said, 2 do
  local lanes, at = string.match(said[i + 1], '^(%d+) (%d+)$')
  if said[i] ~= w and lanes and now - tonumber(at) < 1000 then elsewhere = elsewhere + tonumber(lanes) end
end
local spare, sum = free + yielding + elsewhere, 0
for _, lanes in ipairs(wants) do
  if sum + lanes > spare + batch then break end -- not even all of it would do: work on until it does
  sum = sum + lanes
end
local give_up = math.max(0, sum - spare)
if give_up > 0 then
  R('HSET', promises, w, (yielding + give_up) .. ' ' .. int(now))
  R('EXPIRE', promises, 10)
end
return give_up
