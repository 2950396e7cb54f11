-- Looks at a request for whoever comes back to it; with a process, that one follows it from now on, unless it has ended.
-- ARGV  1 id  2 proc ('' = only look)  3 tenant ('*' = it was asked before)
-- Returns {'missing'} (also: another tenant's) or {'ok', status, terminal, home, RQ data, view, fingerprint, grace, s,
--         background, the terminal frame, '1' if the log is there}; '' for what there is not
local id, proc = ARGV[1], ARGV[2]
local j = job(id, 'status', 'terminal', 'home', 'data', 'view', 'fp', 'grace', 'background', 'end', 'tenant')
if not j[1] or (ARGV[3] ~= '*' and (j[10] or 'default') ~= ARGV[3]) then return { 'missing' } end
if proc ~= '' and not j[2] then R('SADD', P .. 'att:' .. proc, id) end
local out = { 'ok' }
for i = 1, 9 do out[i + 1] = j[i] or '' end
out[11] = R('EXISTS', P .. 'log:' .. id) == 1 and '1' or ''
return out
