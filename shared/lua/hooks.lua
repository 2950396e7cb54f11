-- Webhooks that are due, for a courier; they are due again after a while, should it die.
-- ARGV  1 at most  2 until they are due again, ms
-- Returns {{event id, url, kind, id of what ended, when it ended (s), tries with this one}, ...}
local out, now = {}, clock()
for _, event in ipairs(R('ZRANGEBYSCORE', P .. 'hooks', '-inf', now, 'LIMIT', 0, ARGV[1])) do
  local h = R('HMGET', P .. 'hook:' .. event, 'url', 'kind', 'about', 'created')
  if h[1] then
    R('ZADD', P .. 'hooks', int(now + ARGV[2]), event)
    out[#out + 1] = { event, h[1], h[2], h[3], h[4], R('HINCRBY', P .. 'hook:' .. event, 'tries', 1) }
  else
    R('ZREM', P .. 'hooks', event) -- its days are over
  end
end
return out
