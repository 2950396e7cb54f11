-- A page of a request's log: its entries from a frame on, that one included.
-- ARGV  1 id  2 name of the frame  3 entries at most  4 bytes after which there is no further one, but two in any case
-- Returns {1 = the log has more, [[name, [field, value, ...]], ...]}
local STEP = 16
local log, from, most, room = P .. 'log:' .. ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local out = {}
while true do
  local entries = R('XRANGE', log, from, '+', 'COUNT', STEP)
  for _, entry in ipairs(entries) do
    if #out >= most or (#out >= 2 and room <= 0) then return { 1, out } end
    out[#out + 1] = entry
    for _, part in ipairs(entry[2]) do room = room - #part end
  end
  if #entries < STEP then return { 0, out } end
  from = '(' .. entries[STEP][1]
end
