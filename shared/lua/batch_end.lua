-- A batch has all its results, or none are to come: its files are being put together, or it is over.
-- ARGV  1 id  2 fence  3 'expiring': its time is over; 'finalizing': all results are there; or how it ends: 'completed' or 'failed'
--       (one that is being cancelled: 'cancelled', one that was told to expire: 'expired')  4 how long it is kept, s  5 how long its files are, s  6 errors, JSON, or ''
--       then for each file: 'out' or 'err', path, bytes
-- Returns 'ok' or 'lost'. Safe to repeat.
local id, key, now = ARGV[1], P .. 'batch:' .. ARGV[1], math.floor(clock() / 1000)
local b = R('HMGET', key, 'fence', 'status', 'tenant', 'input', 'out', 'err', 'failed', 'ending', 'hook')
if b[1] ~= ARGV[2] then return 'lost' end
if b[2] == 'completed' or b[2] == 'expired' or b[2] == 'failed' or b[2] == 'cancelled' then return 'ok' end -- a repetition
if ARGV[3] == 'expiring' then
  R('HSET', key, 'ending', 'expired')
  return 'ok'
elseif ARGV[3] == 'finalizing' then
  if b[2] == 'in_progress' then R('HSET', key, 'status', 'finalizing', 'finalizing_at', now) end
  return 'ok'
end
local status = b[2] == 'cancelling' and 'cancelled' or b[8] or ARGV[3]
R('HSET', key, 'status', status, status .. '_at', now)
if ARGV[6] ~= '' then R('HSET', key, 'errors', ARGV[6]) end
for i = 7, #ARGV, 3 do
  local kind = ARGV[i]
  local file = kind == 'out' and b[5] or b[6]
  R('HSET', P .. 'file:' .. file, 'path', ARGV[i + 1], 'bytes', ARGV[i + 2], 'status', 'processed', 'expires', now + ARGV[5])
  R('HSET', key, kind .. '_file', file)
  local created = instant()
  R('ZADD', P .. 'files', created, file)
  R('ZADD', P .. 'files:' .. b[3], created, file)
  R('ZADD', P .. 'files-expire', now + ARGV[5], file)
end
if b[9] and b[9] ~= '' then announce(b[9], 'batch.' .. status, id, clock()) end
R('ZREM', P .. 'batches-open', b[3] .. ' ' .. id)
if R('EXISTS', P .. 'file:' .. b[4]) == 1 then R('HINCRBY', P .. 'file:' .. b[4], 'uses', -1) end
R('DEL', P .. 'batch-lease:' .. id, P .. 'batch-parts:' .. id)
R('EXPIRE', key, ARGV[4])
if whole(b[7], 0, 0, 1e9) > 0 then
  R('EXPIRE', P .. 'batch-lines:' .. id, ARGV[4]) -- what did not complete may be done again
else
  R('DEL', P .. 'batch-lines:' .. id)
end
return 'ok'
