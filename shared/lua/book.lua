-- A lane is over: the id leaves what its worker runs, unless another attempt is there by now. It stays where the store
-- does not know of an end (it came back with older data): the heartbeat finds it, and the worker puts the end back.
-- ARGV  1 worker  2 id  3 a
local w, id, a = ARGV[1], ARGV[2], ARGV[3]
local j = job(id, 'a', 'owner', 'terminal')
if j[1] == a and j[2] == w and not j[3] then return 0 end
if R('HGET', P .. 'lanes:' .. w, id) == a then R('HDEL', P .. 'lanes:' .. w, id) end
return 1
