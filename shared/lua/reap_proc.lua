-- An API process is dead: its clients have had their time to come back elsewhere. What nobody else follows is cancelled.
-- ARGV  1 proc  2 cancelled frame
-- Returns {'alive'} or {'reaped', [ended id, ...]}
local proc, ended = ARGV[1], {}
if R('EXISTS', P .. 'alive:' .. proc) == 1 then return { 'alive' } end
R('SREM', P .. 'procs', proc)
for _, id in ipairs(R('SMEMBERS', P .. 'att:' .. proc)) do
  local done, how = pcall(let_go, id, proc, ARGV[2]) -- something else may lie where its keys belong
  if done and how == 'cancelled' then ended[#ended + 1] = id end
end
R('DEL', P .. 'att:' .. proc)
return { 'reaped', ended }
