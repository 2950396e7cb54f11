-- What a runner has written of a batch's results counts from now on: each line once.
-- ARGV  1 id  2 fence  3-6 tokens of these lines: input, cached, output, reasoning  7 pieces  then for each piece: 'out' or
--       'err', its description (JSON), bytes; then for each line: its number from 0, 'c' (completed) or 'f' (failed)
-- Returns 'ok', 'lost', or 'twice' if one of the lines had been counted: nothing is written then
local id, key, lines = ARGV[1], P .. 'batch:' .. ARGV[1], P .. 'batch-lines:' .. ARGV[1]
local b = R('HMGET', key, 'fence', 'tenant', 'out', 'err')
if b[1] ~= ARGV[2] then return 'lost' end
local first = 8 + 3 * tonumber(ARGV[7])
for i = first, #ARGV, 2 do
  if R('GETRANGE', lines, ARGV[i], ARGV[i]) ~= '0' then return 'twice' end
end
local done = { c = 0, f = 0 }
for i = first, #ARGV, 2 do
  R('SETRANGE', lines, ARGV[i], ARGV[i + 1])
  done[ARGV[i + 1]] = done[ARGV[i + 1]] + 1
end
R('HINCRBY', key, 'completed', done.c)
R('HINCRBY', key, 'failed', done.f)
for i, name in ipairs({ 'input_tokens', 'cached_tokens', 'output_tokens', 'reasoning_tokens' }) do
  R('HINCRBY', key, name, ARGV[i + 2])
end
for i = 8, first - 1, 3 do -- a file that grows; batch_end.lua lists it
  local kind, file = ARGV[i], ARGV[i] == 'out' and b[3] or b[4]
  R('RPUSH', P .. 'batch-parts:' .. id, ARGV[i + 1])
  R('HSETNX', P .. 'file:' .. file, 'created', math.floor(clock() / 1000))
  R('HSET', P .. 'file:' .. file, 'id', file, 'tenant', b[2], 'batch', id, 'kind', kind, 'purpose', 'batch_output',
    'filename', id .. (kind == 'out' and '_output.jsonl' or '_error.jsonl'), 'status', 'uploaded')
  R('HINCRBY', P .. 'file:' .. file, 'bytes', ARGV[i + 2])
  R('HSET', key, kind .. '_begun', '1')
end
return 'ok'
