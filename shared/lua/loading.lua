-- A worker tells how far it has loaded its model. Who waits for it is told (place.lua); one that says nothing for 15 s counts
-- as dead.
-- ARGV  1 worker  2 model  3 per cent done, 0 to 100, or '' = it loads no longer
local reports = P .. 'loading:' .. ARGV[2]
if ARGV[3] == '' then return R('HDEL', reports, ARGV[1]) end
R('HSET', reports, ARGV[1], ARGV[3] .. ' ' .. int(clock()))
return R('EXPIRE', reports, 60)
