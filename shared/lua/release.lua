-- Gives a running request back, for whoever takes it next; no kill is counted. What is ended or not this worker's
-- is only booked out.
-- ARGV  1 worker  2 id  3 a
-- Returns 1 given back, 0 booked out
local w, id = ARGV[1], ARGV[2]
if R('HGET', P .. 'lanes:' .. w, id) == ARGV[3] then R('HDEL', P .. 'lanes:' .. w, id) end
local j = job(id, 'a', 'owner', 'terminal', 'status', 'model', 'fp', 'origin', 'exec')
if j[3] or j[1] ~= ARGV[3] or j[2] ~= w or j[4] ~= 'started' then return 0 end
drop_execution(id, j[7], j[8], w)
R('HSET', 'rq:job:' .. id, 'owner', '', 'exec', '', 'worker_name', '', 'status', 'queued', 'queued', int(clock()))
R('LPUSH', P .. 'resume:' .. j[5] .. ':' .. j[6], id)
R('LPUSH', P .. 'bell:' .. j[5], '1')
R('LTRIM', P .. 'bell:' .. j[5], 0, 63)
return 1
