-- Looks at many requests for whoever sent them: those that have ended, with all that is left of them.
-- ARGV  1 given out, at most  then ids
-- Returns {{id} there is none, or {id, status, data, view, fingerprint, terminal frame, RQ's result ('' = none), log}, ...};
--         of those that have not ended: nothing
local out = {}
for i = 2, #ARGV do
  local id = ARGV[i]
  local j = job(id, 'status', 'terminal', 'data', 'view', 'fp', 'end')
  if not j[1] then
    out[#out + 1] = { id }
  elseif j[2] then
    local result, log = redis.pcall('XREVRANGE', 'rq:results:' .. id, '+', '-', 'COUNT', 1), {}
    local value = ''
    if type(result) == 'table' and result[1] then
      for n = 1, #result[1][2], 2 do
        if result[1][2][n] == 'return_value' then value = result[1][2][n + 1] end
      end
    end
    if value == '' then
      log = redis.pcall('XRANGE', P .. 'log:' .. id, '-', '+')
      if log.err then log = {} end
    end
    out[#out + 1] = { id, j[1], j[3] or '', j[4] or '', j[5] or '', j[6] or '', value, log }
  end
  if #out >= tonumber(ARGV[1]) then break end
end
return out
