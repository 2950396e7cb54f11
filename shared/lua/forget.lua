-- Removes requests that have ended, with their logs and results: what they said is kept elsewhere. One that has no result yet is about
-- to get it from whoever ended it, and would leave it behind.
-- ARGV  1 '1' = also those without a result  then ids
-- Returns the ids of those that stay for now
local left = {}
for i = 2, #ARGV do
  local id = ARGV[i]
  local j = job(id, 'terminal', 'origin')
  if j[1] and ARGV[1] ~= '1' and R('EXISTS', 'rq:results:' .. id) == 0 then
    left[#left + 1] = id
  elseif j[1] then
    for _, registry in ipairs({ 'rq:finished:', 'rq:failed:', 'rq:canceled:' }) do R('ZREM', registry .. (j[2] or ''), id) end
    R('DEL', 'rq:job:' .. id, 'rq:results:' .. id, 'rq:executions:' .. id, P .. 'log:' .. id)
  end
end
return left
