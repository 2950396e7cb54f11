-- Adds what a process has counted. What was told before is not added again: the answer to it was lost.
-- ARGV  1 process  2 number of this telling, from 1  3 how many of the pairs are of histograms, which come first
--       4 on: field and amount
-- Returns 1 added, 0 it had been
local key, now = P .. 'counted:' .. ARGV[1], clock()
if tonumber(R('GET', key) or 0) >= tonumber(ARGV[2]) then return 0 end
R('SET', key, ARGV[2], 'EX', 600)
for i = 4, #ARGV, 2 do
  R('HINCRBY', P .. 'counts', ARGV[i], ARGV[i + 1])
  if i < 4 + 2 * tonumber(ARGV[3]) then R('HINCRBY', lately(now), ARGV[i], ARGV[i + 1]) end
end
if tonumber(ARGV[3]) > 0 then R('EXPIRE', lately(now), LATELY) end
return 1
