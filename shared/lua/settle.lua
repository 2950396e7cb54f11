-- Nobody waits for a request any more that was let in under its key's limits: puts right what was reserved for it. One
-- that runs on without its client goes on counting as running and keeps its reservation: its end puts it right.
-- ARGV  1 key id  2 job id  3 tokens a minute or ''  4 tokens reserved  5 tokens used, as far as its client was told, or ''
-- Returns 1, or 0 if it runs on
local key, id, limit, reserved, used = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local j = named(id, 'status', 'terminal', 'end', 'needs')
if j.status and not j.terminal then
  R('HSET', 'rq:job:' .. id, 'limits', key .. ' ' .. ARGV[3] .. ' ' .. int(reserved))
  return 0
end
local frame = j.terminal and j['end'] or ''
if frame ~= '' and (not used or string.find(frame, '"completion_tokens":', 1, true)) then
  used = tokens_in_all(id, frame, whole(j.needs, 1, 1, 1000000))
end
settle(key, id, limit, reserved, used or 0)
return 1
