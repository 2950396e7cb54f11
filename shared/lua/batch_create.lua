-- Makes a batch of an uploaded file, to be taken by a runner. Safe to repeat.
-- ARGV  1 id  2 tenant  3 id of the input file  4 window, s  5 unfinished batches of the tenant, at most; 0 = any
--       6 id of a batch whose lines that did not complete are to be done again, or ''  then fields and values of its hash
-- Returns {'ok'}, {'no file'} (also: another tenant's), {'purpose', what it is for}, {'crowd', unfinished ones},
--         {'memory'} the store is almost full, or {'no lines'}: nothing of the other batch is left to be done
local id, tenant, file = ARGV[1], ARGV[2], P .. 'file:' .. ARGV[3]
local key, open, now = P .. 'batch:' .. id, P .. 'batches-open', clock()
if R('EXISTS', key) == 1 then return { 'ok' } end -- a repetition
local f = R('HMGET', file, 'tenant', 'purpose')
if f[1] ~= tenant then return { 'no file' } end
if f[2] ~= 'batch' then return { 'purpose', f[2] or '' } end
if fullness() > 0.8 then return { 'memory' } end
local most, count = tonumber(ARGV[5]), 0
if most > 0 then
  for _, name in ipairs(R('ZRANGE', open, 0, -1)) do
    if string.sub(name, 1, #tenant + 1) == tenant .. ' ' then count = count + 1 end
  end
  if count >= most then return { 'crowd', count } end
end
if ARGV[6] ~= '' then
  local lines = R('GET', P .. 'batch-lines:' .. ARGV[6])
  if not lines or not string.find(lines, '[0f]') then return { 'no lines' } end
  R('SET', P .. 'batch-lines:' .. id, (string.gsub(string.gsub(lines, 'c', 's'), 'f', '0')))
end
local created = math.floor(now / 1000)
R('HSET', key, 'id', id, 'tenant', tenant, 'input', ARGV[3], 'status', 'validating', 'fence', '0', 'created', created,
  'expires', created + tonumber(ARGV[4]))
for i = 7, #ARGV, 2 do R('HSET', key, ARGV[i], ARGV[i + 1]) end
R('HINCRBY', file, 'uses', 1)
local place = instant()
R('ZADD', P .. 'batches', place, id)
R('ZADD', P .. 'batches:' .. tenant, place, id)
R('ZADD', open, place, tenant .. ' ' .. id)
return { 'ok' }
