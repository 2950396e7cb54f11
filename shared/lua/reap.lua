-- A worker is dead: what it ran goes back to the front, for workers with the same numbers. Its old attempt may still
-- write until the next take; what it logs until then is valid and kept.
-- ARGV  1 worker  2 why, for the crash report  3 '1' = its death is proven: the lease does not count
--       4 deadline frame  5 frame for a request that killed workers  6 frame for one that was tried too often
--       7 kills allowed  8 tries allowed
-- Returns {'alive'} or {'reaped', given back, [ended id, ...]}
local w, now = ARGV[1], clock()
if ARGV[3] ~= '1' and R('EXISTS', P .. 'lease:' .. w) == 1 then return { 'alive' } end
local lanes, back, ended = R('HGETALL', P .. 'lanes:' .. w), 0, {}
if R('SISMEMBER', P .. 'workers', w) == 1 then tally('workers_lost', known(redis.pcall('HGET', P .. 'stat:' .. w, 'model')), 1) end
forget_worker(w)

local function told(id, a) -- a token was logged by that attempt: the request is not what killed the worker
  for _, entry in ipairs(redis.pcall('XRANGE', P .. 'log:' .. id, a .. '-0', a .. '-18446744073709551615')) do
    if string.find(entry[2][2], '"k":"delta"', 1, true) then return true end
  end
  return false
end

local suspected = false -- one that was without a token when a worker died before is so again: then it is nobody else
for i = 1, #lanes, 2 do
  local _, again = pcall(function()
    return whole(job(lanes[i], 'kills')[1], 0, 0, 1000000) > 0 and not told(lanes[i], lanes[i + 1])
  end)
  suspected = suspected or again == true
end

local function bury(id, a)
  local j = named(id, 'a', 'owner', 'terminal', 'status', 'dl', 'kills', 'tries', 'model', 'fp', 'class', 'origin', 'exec', 'crash')
  local spoilt = not whole(j.a, nil, 0, ATTEMPTS) -- somebody wrote over it: nobody else would ever end it
  if j.status == 'started' and not j.terminal and j.owner == w and (j.a == a or spoilt) then
    local kills = whole(j.kills, 0, 0, 1000000)
    if not told(id, a) and (kills > 0 or not suspected) then kills = kills + 1 end
    local tries = whole(j.tries, 0, 0, 1000000) + 1
    local crash = (j.crash and j.crash .. '; ' or '') .. rq_time(now) .. ' ' .. w .. ': ' .. ARGV[2]
    R('HSET', 'rq:job:' .. id, 'kills', kills, 'tries', tries, 'crash', crash)
    local frame = (whole(j.dl, now, -ATTEMPTS, ATTEMPTS) < now) and ARGV[4] or kills >= tonumber(ARGV[7]) and ARGV[5]
      or tries >= tonumber(ARGV[8]) and ARGV[6]
    if frame then
      finish(id, frame, 'reaper', 'failed')
      ended[#ended + 1] = id
    else
      give_back(id, j, w)
      tally('failovers', known(j.model), 1)
      back = back + 1
    end
  end
end

for i = #lanes - 1, 1, -2 do -- each goes to the front: the last one ends up behind the others
  pcall(bury, lanes[i], lanes[i + 1]) -- something else may lie where its keys belong
end
R('DEL', P .. 'lanes:' .. w)
return { 'reaped', back, ended }
