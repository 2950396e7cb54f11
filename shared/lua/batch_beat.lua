-- Renews a runner's leases; how its batches stand.
-- ARGV  1 lease, ms (0 = gives them back)  then id and fence of each
-- Returns {now ms, status or 'lost', ...} in that order; lost: another runner has it, or it is gone
local out = { int(clock()) }
for i = 2, #ARGV, 2 do
  local b, lease = R('HMGET', P .. 'batch:' .. ARGV[i], 'fence', 'status'), P .. 'batch-lease:' .. ARGV[i]
  local own = b[1] == ARGV[i + 1]
  if own and ARGV[1] == '0' then
    R('DEL', lease)
  elseif own then
    R('SET', lease, ARGV[i + 1], 'PX', ARGV[1])
  end
  out[#out + 1] = own and b[2] or 'lost'
end
return out
