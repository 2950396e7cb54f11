-- Gives a runner unfinished batches that no runner has: of the tenants with the fewest that are had, the oldest first.
-- ARGV  1 lease, ms  2 batches wanted  3 of one tenant had at one time, at most
-- Returns {id, fence, id, fence, ...}. Only the holder of the highest fence may write.
local open, wanted, most = P .. 'batches-open', tonumber(ARGV[2]), tonumber(ARGV[3])
local had, free, out = {}, {}, {}
for _, name in ipairs(R('ZRANGE', open, 0, 1999)) do
  local tenant, id = string.match(name, '^(%S+) (%S+)$')
  if not tenant or R('HEXISTS', P .. 'batch:' .. id, 'status') == 0 then
    R('ZREM', open, name)
  elseif R('EXISTS', P .. 'batch-lease:' .. id) == 1 then
    had[tenant] = (had[tenant] or 0) + 1
  else
    free[#free + 1] = { tenant, id }
  end
end
while #out < 2 * wanted do
  local best
  for i, batch in ipairs(free) do
    local count = had[batch[1]] or 0
    if count < most and (not best or count < (had[free[best][1]] or 0)) then best = i end
  end
  if not best then break end
  local tenant, id = unpack(table.remove(free, best))
  had[tenant] = (had[tenant] or 0) + 1
  local fence = R('HINCRBY', P .. 'batch:' .. id, 'fence', 1)
  R('SET', P .. 'batch-lease:' .. id, fence, 'PX', ARGV[1])
  out[#out + 1], out[#out + 2] = id, fence
end
return out
