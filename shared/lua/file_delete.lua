-- Forgets a file, if nobody uses it; whoever is answered removes its bytes.
-- ARGV  1 id  2 tenant ('*' = any)
-- Returns {'missing'} (also: another tenant's), {'used'} by an unfinished batch, or {'ok', path}
local id, key = ARGV[1], P .. 'file:' .. ARGV[1]
local f = R('HMGET', key, 'tenant', 'path', 'uses', 'batch')
if not f[1] or (ARGV[2] ~= '*' and f[1] ~= ARGV[2]) then
  if not f[1] then R('ZREM', P .. 'files-expire', id) end
  return { 'missing' }
end
if whole(f[3], 0, 0, 1000000) > 0 or (f[4] and not f[2]) then return { 'used' } end
R('DEL', key)
for _, index in ipairs({ 'files', 'files:' .. f[1], 'files-expire' }) do R('ZREM', P .. index, id) end
return { 'ok', f[2] or '' }
