-- A heartbeat: renews the lease and returns what the store thinks this process has.
-- ARGV  1 'worker' or 'proc'  2 name  3 lease, ms  4 '1' = register
-- Returns {'retired'} (the name was reaped) or {'ok', [id, a, ...] of a worker, or [id, ...] of an API process}
local worker = ARGV[1] == 'worker'
local set = P .. (worker and 'workers' or 'procs')
if ARGV[4] == '1' then
  R('SADD', set, ARGV[2])
elseif R('SISMEMBER', set, ARGV[2]) == 0 then
  return { 'retired' }
end
local lease = P .. (worker and 'lease:' or 'alive:') .. ARGV[2]
if R('PEXPIRE', lease, ARGV[3]) == 0 then R('SET', lease, '1', 'PX', ARGV[3]) end
if worker then return { 'ok', R('HGETALL', P .. 'lanes:' .. ARGV[2]) } end
return { 'ok', R('SMEMBERS', P .. 'att:' .. ARGV[2]) }
