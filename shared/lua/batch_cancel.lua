-- A batch is to end; its runner does the rest. One that has ended, or has all its results, stays as it is.
-- ARGV  1 id  2 tenant ('*' = any)
-- Returns 1, or 0 if there is none (also: another tenant's)
local key = P .. 'batch:' .. ARGV[1]
local b = R('HMGET', key, 'tenant', 'status')
if not b[2] or (ARGV[2] ~= '*' and b[1] ~= ARGV[2]) then return 0 end
if b[2] == 'validating' or b[2] == 'in_progress' then
  R('HSET', key, 'status', 'cancelling', 'cancelling_at', math.floor(clock() / 1000))
end
return 1
