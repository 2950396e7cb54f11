-- Adds a lane's entry and tells its home, only if the log's top is exactly what the lane last wrote.
-- The first write on a new connection, any write after an error or refusal, any write to a full store.
-- ARGV  1 id  2 a  3 s of the entry's last frame  4 a of the lane's last frame  5 s of it  6 entry  7 home  8 fanout ('1' or '')
-- Returns {'ok'} (also when the entry is already there: a lost reply) or {'off', top a, top s}
local id = ARGV[1]
local ta, s = top(id)
if int(ta) == ARGV[2] and int(s) == ARGV[3] then -- told once more: the connection broke, maybe before the publish
  tell(id, ARGV[7], ARGV[8], ta, ARGV[3], ARGV[6])
  return { 'ok' }
end
if int(ta) ~= ARGV[4] or int(s) ~= ARGV[5] then return { 'off', int(ta), int(s) } end
R('XADD', P .. 'log:' .. id, ARGV[2] .. '-' .. ARGV[3], 'f', ARGV[6])
tell(id, ARGV[7], ARGV[8], tonumber(ARGV[2]), ARGV[3], ARGV[6])
return { 'ok' }
