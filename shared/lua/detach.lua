-- An API process no longer follows a request. If none does and it is not a background one, it is cancelled.
-- ARGV  1 id  2 proc  3 cancelled frame
-- Returns 'cancelled', 'ended', 'followed', 'background' or 'missing'
local id = ARGV[1]
R('SREM', P .. 'att:' .. ARGV[2], id)
local j = job(id, 'status', 'terminal', 'background')
if not j[1] then return 'missing' end
if j[2] then return 'ended' end
if j[3] == '1' then return 'background' end
for _, p in ipairs(R('SMEMBERS', P .. 'procs')) do
  if R('SISMEMBER', P .. 'att:' .. p, id) == 1 then return 'followed' end
end
finish(id, ARGV[3], 'client', 'canceled')
return 'cancelled'
