-- Puts back what the store has lost of a request that a live worker holds: job, log, idempotency key (unless another
-- request has taken it since), and its end if it had one.
-- ARGV  1 id  2 a  3 worker  4 end frame or ''  5 RQ status of that end  6 n, then n fields and values of the job's hash,
--       then names and entries of the log, oldest first
-- Returns {'ok'}, {'ended'} (also if it had been before, by this worker) or {'fenced'}
local id, A, w, n = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[6])
if R('SISMEMBER', P .. 'workers', w) == 0 then return { 'fenced' } end
local j = named(id, 'a', 'terminal', 'status', 'origin', 'model', 'fp', 'class', 'tenant', 'exec', 'owner')
if j.terminal then return { j.terminal == w and 'ended' or 'fenced' } end
local ta, s = top(id)
if whole(j.a, 0, 0, ATTEMPTS) > tonumber(A) or ta > tonumber(A) then return { 'fenced' } end
if j.status == 'queued' then unqueue(id, j.origin or '', j.model or '', j.fp, j.class, j.tenant) end
if n > 0 and whole(j.a, 0, 0, ATTEMPTS) < tonumber(A) then -- the take is lost too, and what it wrote: the fingerprint above all
  R('HSET', 'rq:job:' .. id, unpack(ARGV, 7, 6 + n))
end
if not j.status then
  local key = job(id, 'idem', 'idem_for')
  claim(key[1], id, key[2] or '')
end
tally('put_backs', known(job(id, 'model')[1]), 1)
drop_execution(id, j.origin or '', j.exec, j.owner) -- of an older attempt, whose end the store has lost too
j = named(id, 'home', 'fanout', 'origin', 'dl', 'log_ttl', 'result_ttl', 'model')
if j.model then pcall(R, 'SADD', at_work(j.model), id) end
local now = clock()
local left = math.max(1, math.ceil((whole(j.dl, now, 0, ATTEMPTS) - now) / 1000))
for i = 7 + n, #ARGV, 2 do
  local ea, es = string.match(ARGV[i], '(%d+)-(%d+)')
  if tonumber(es) > s then
    R('XADD', P .. 'log:' .. id, ARGV[i], 'f', ARGV[i + 1])
    s = tonumber(es)
    tell(id, j.home, j.fanout, tonumber(ea), s, ARGV[i + 1])
  end
end
R('EXPIRE', P .. 'log:' .. id, left + whole(j.log_ttl, 300, 1, YEARS))
R('HSET', 'rq:job:' .. id, 'a', A, 'owner', w, 'status', 'started', 'exec', A, 'worker_name', w)
R('EXPIRE', 'rq:job:' .. id, left + whole(j.result_ttl, 3600, 1, YEARS))
R('HSET', P .. 'lanes:' .. w, id, A)
begin_execution(id, j.origin or '', A, w, now, left)
if ARGV[4] ~= '' then
  finish(id, ARGV[4], w, ARGV[5])
  return { 'ended' }
end
return { 'ok' }
