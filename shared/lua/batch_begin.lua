-- The lines of a batch have been checked; its requests may be sent.
-- ARGV  1 id  2 fence  3 lines  4 model
-- Returns 'ok' or 'lost'
local id, key, lines = ARGV[1], P .. 'batch:' .. ARGV[1], P .. 'batch-lines:' .. ARGV[1]
local b = R('HMGET', key, 'fence', 'status', 'checked')
if b[1] ~= ARGV[2] then return 'lost' end
if b[3] then return 'ok' end
if R('STRLEN', lines) ~= tonumber(ARGV[3]) then R('SET', lines, string.rep('0', tonumber(ARGV[3]))) end -- a replay has them
local _, total = string.gsub(R('GET', lines), '0', '')
R('HSET', key, 'checked', '1', 'total', total, 'model', ARGV[4])
if b[2] == 'validating' then R('HSET', key, 'status', 'in_progress', 'in_progress_at', math.floor(clock() / 1000)) end
return 'ok'
