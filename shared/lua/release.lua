-- Gives a running request back, for whoever takes it next; no kill is counted. What is ended or not this worker's
-- is only booked out.
-- ARGV  1 worker  2 id  3 a
-- Returns 1 given back, 0 booked out
local w, id = ARGV[1], ARGV[2]
if R('HGET', P .. 'lanes:' .. w, id) == ARGV[3] then R('HDEL', P .. 'lanes:' .. w, id) end
local j = named(id, 'a', 'owner', 'terminal', 'status', 'model', 'fp', 'class', 'origin', 'exec')
if j.terminal or j.a ~= ARGV[3] or j.owner ~= w or j.status ~= 'started' then return 0 end
give_back(id, j, w)
tally('handovers', known(j.model), 1)
return 1
